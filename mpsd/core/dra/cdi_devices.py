"""The CDI devices of a prepared claim: one file with a device for each share. A name outlives the share's leases. Pure.

kubelet requests the names once, when it prepares the claim, and passes them to the container runtime at each start of a
container. A lease that has ended is replaced under the same name.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from mpsd.core.containers import cdi

KIND: Final = "mpsd/share"

_PREFIX: Final = "mpsd-share_"
"""The specification's form for devices that come and go: VENDOR-CLASS_NAME."""


def file_name(claim: str) -> str:
    return f"{_PREFIX}{claim}.json"


def claim_of(name: str) -> str:
    """Return the claim that such a file is named after."""
    return name.removeprefix(_PREFIX).removesuffix(".json")


def device_id(claim: str, number: int) -> str:
    """Return the name of a share for a container runtime."""
    return f"{KIND}={_name(claim, number)}"


def encoded(
    claim: str,
    environments: Sequence[Mapping[str, str]],
    *,
    shared_memory: Sequence[bool],
    more: Sequence[Mapping[str, str]],
    socket: str,
    hook: str,
) -> bytes:
    """Return the file of a claim, whose shares have their lease's environment and the variables of `more`.

    `hook` is the path of mpsctl for the container runtime on the node; if empty, the lease is taken without a hook.
    """
    devices = dict[str, object]()
    for number, variables in enumerate(environments):
        lease = variables["MPSD_LEASE"]
        call = cdi.hook_of(cdi.Device(lease, socket), variables, [hook], "--pod") if hook else None
        found = cdi.edits({**variables, **more[number]}, hook=call, shared_memory=shared_memory[number])
        devices[_name(claim, number)] = found
    return cdi.encode(cdi.of_devices(KIND, devices))


def _name(claim: str, number: int) -> str:
    return f"{claim}-{number}"
