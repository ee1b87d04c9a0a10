"""The hook of the containers of a device plugin: its CDI device, and the variables that a pod must not override. Pure.

kubelet tells a device plugin no user, and lets the own `env` of a pod win over the plugin's variables. The container
runtime has both before the container's program starts: it calls the hook, which opens the lease to that user, or
refuses the container.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from mpsd.core.containers import cdi
from mpsd.core.containers.cdi import PIPE_DIRECTORY, Program
from mpsd.core.errors import NotPermittedError
from mpsd.core.mps.limits import EVERYTHING, LIMITS, PINNED_DEVICE_MEM_LIMIT, Limit, invisible_entry, wider
from mpsd.core.mps_facts import CLIENT_PRIORITY, DEFAULT_CONNECTIONS, MAX_CONNECTIONS, UNASKED, connections
from mpsd.core.roles import RESERVED
from mpsd.core.units import briefly

ALLOCATION: Final = "MPSD_ALLOCATION"
"""The variable that distinguishes the processes of a container from those of other containers of its pod."""

LABEL: Final = f"{RESERVED}allocation"
"""The label of a lease with the value of that variable."""

VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
"""The variable by which NVIDIA's container runtime gives a container the device files of its GPUs."""

_LEASE: Final = "MPSD_LEASE"
_CUDA_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
_NAME: Final = "lease"

FILE: Final = "mpsd-container.json"


def device(domain: str) -> str:
    """Return the device by which a runtime calls the hook; it is the same for all containers of a node."""
    return f"{_kind(domain)}={_NAME}"


def _kind(domain: str) -> str:
    return f"{domain}/container"


def document(program: Program, socket: str, root: Path, deadline: float, *, domain: str, by_environment: bool) -> bytes:
    """Return the file of the device.

    `root` is kubelet's cgroupRoot, `deadline` that of a claim in seconds. `by_environment` tells whether a variable
    gives containers their GPU.
    """
    options = ["--pod", str(root), "--deadline", f"{deadline:g}", *(["--by-environment"] if by_environment else [])]
    edits = {"hooks": [cdi.hook(program, socket, *options)]}
    return cdi.encode(cdi.of_devices(_kind(domain), {_NAME: edits}))


def visible(gpu: str, node: Collection[str | None]) -> set[str]:
    """Return the names of a GPU in NVIDIA_VISIBLE_DEVICES; the node's only one is also number 0, and all of them."""
    return {gpu, "0", "all"} if [*node] == [gpu] else {gpu}


def check(
    own: Mapping[str, str], lease: Mapping[str, str], gpu: str, others: Collection[str], visible: Collection[str]
) -> None:
    """Refuse a container whose variables are not those of its lease: a smaller share alone is its own decision.

    `gpu` is the UUID of its GPU, and `others` are the other leases that live. A lease that replaces an earlier one has
    another id than kubelet gave to the container. `visible` are the names of its GPU in NVIDIA_VISIBLE_DEVICES; none
    where that variable gives it no device files. Raises NotPermittedError, in words for the author of the pod.
    """
    for name, because in _overridden(own, lease, gpu, others, visible):
        raise NotPermittedError(
            f"the container has another {name} than its share: {because}",
            hint=f"remove {name} from the env of the container in its pod's manifest; for a larger share, request more"
            " of the resource",
            limit=name,
        )
    check_connections(own, lease)


def check_connections(own: Mapping[str, str], lease: Mapping[str, str]) -> None:
    """Refuse a container whose processes would take more client places of the GPU than its lease has for them.

    Raises NotPermittedError.
    """
    has, may = (connections(each.get(MAX_CONNECTIONS, "")) or DEFAULT_CONNECTIONS for each in (own, lease))
    if has > max(may, DEFAULT_CONNECTIONS):
        raise NotPermittedError(
            f"the container has {MAX_CONNECTIONS}={has}, so that each of its processes would take several client places"
            " of the GPU",
            hint=f"remove {MAX_CONNECTIONS} from the env of the container in its pod's manifest, and from its image; a"
            " claim may request them: `connections`",
            limit=MAX_CONNECTIONS,
        )


def _overridden(
    own: Mapping[str, str], lease: Mapping[str, str], gpu: str, others: Collection[str], visible: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield each variable that a container must not have like this, and why."""
    # 1. What decides which control daemon it uses, which GPU, and as which lease: it has the lease's.
    # 2. Of MPS's other variables it has none, or the neutral value; a lower priority is its own decision.
    # 3. The limits: a lower one is its own decision.
    same = {name: lease.get(name, "") for name in (PIPE_DIRECTORY, _CUDA_DEVICES)}
    same |= {_LEASE: lease[_LEASE]} if own.get(_LEASE) in others else {}
    same |= {VISIBLE_DEVICES: gpu} if visible and own.get(VISIBLE_DEVICES, "") not in visible else {}
    same |= {name: lease.get(name, value) for name, value in UNASKED.items() if name in own and name != CLIENT_PRIORITY}
    for name, value in same.items():
        if own.get(name, "") != value:
            yield name, f"it is {briefly(own.get(name, ''))}, and not {value!r}"
    for limit in LIMITS:
        because = excess(limit, own.get(limit.variable, ""), lease.get(limit.variable, ""), gpu)
        if because:
            yield limit.variable, because


def excess(limit: Limit, own: str, part: str, gpu: str) -> str:
    """Say how a variable of a limit gives more than another one would; empty where it does not."""
    if limit is PINNED_DEVICE_MEM_LIMIT and (entry := invisible_entry(own, gpu)) is not None:
        return f"its entry {briefly(entry)} names no GPU that the container sees, and MPS then drops every memory limit"
    has, may = (limit.lowered(limit.found(EVERYTHING), text, gpu) for text in (own, part))
    if may is None or wider(has, may) == may:
        return ""
    return f"it is {briefly(own)}, and the share has {part}; a lower value is allowed"
