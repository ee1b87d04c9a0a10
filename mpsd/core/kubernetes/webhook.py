"""What the webhook does to a pod at its admission: a container that names a share in a variable gets it. Pure.

A percentage of threads in the `env` of a container is only a wish: without a resource in its limits,
Kubernetes counts nothing, and its program runs outside MPS. The webhook adds the resource, and removes nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from mpsd.core.errors import ConfigurationError
from mpsd.core.kubernetes.devices import Kind, resource_name
from mpsd.core.kubernetes.settings import Offer, Settings
from mpsd.core.mps.limits import (
    ACTIVE_THREAD_PERCENTAGE,
    PINNED_DEVICE_MEM_LIMIT,
    parse_foreign_mem_limit,
    parse_foreign_percentage,
)
from mpsd.core.sanitize import plain
from mpsd.core.units import briefly

# -- the review --------------------------------------------------------------------------------------------------------
#
# The fields that are read of what the API server sends. Source: `admission.k8s.io/v1`, and `v1` of Pod.


class Variable(Struct, rename="camel"):
    name: str
    value: str = ""
    value_from: object = None


class Resources(Struct, rename="camel"):
    limits: dict[str, object] | None = None
    requests: dict[str, object] | None = None
    claims: list[object] | None = None


class Container(Struct, rename="camel"):
    name: str = ""
    env: list[Variable] | None = None
    resources: Resources | None = None


class Specification(Struct, rename="camel"):
    containers: list[Container]
    init_containers: list[Container] | None = None


class Metadata(Struct, rename="camel"):
    name: str = ""
    generate_name: str = ""
    annotations: dict[str, str] | None = None


class Pod(Struct, rename="camel"):
    spec: Specification
    metadata: Metadata


class Request(Struct, rename="camel"):
    uid: str
    object: Pod
    namespace: str = ""


class Review(Struct, rename="camel"):
    request: Request


# -- the answer --------------------------------------------------------------------------------------------------------

Operation = Mapping[str, object]
"""One of a JSON patch (RFC 6902)."""


class Answer(NamedTuple):
    patch: Sequence[Operation]
    given: Sequence[str]
    """A sentence for each container that gets a share."""
    warnings: Sequence[str]
    """A sentence for each container whose wish is not met as written, for whoever creates the pod."""


_PIPE_DIRECTORY: Final = "CUDA_MPS_PIPE_DIRECTORY"
_CHOOSES_GPU: Final = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_MIRROR: Final = "kubernetes.io/config.mirror"
"""The annotation of a static pod's copy: kubelet runs the file, whatever the copy says."""

_LONGEST: Final = 1000
"""Maximum characters of the annotation."""


def check(settings: Settings) -> None:
    """Refuse settings by which a percentage of threads is no number of a resource. Raises ConfigurationError."""
    if settings.resources not in {Offer.SLICES, Offer.THREADS_AND_MEMORY}:
        raise ConfigurationError(
            f'resources = "{settings.resources}": a pod that names a percentage of threads names no amount of that',
            hint=f'offer slices (resources = "{Offer.SLICES}"), or do without the webhook',
            limit="resources",
        )


def answer(pod: Pod, settings: Settings) -> Answer:
    """Return what to add to a pod, and what to say."""
    metadata, patch, given, warnings = pod.metadata, list[Operation](), list[str](), list[str]()
    if _MIRROR in (metadata.annotations or {}):
        return Answer((), (), ())
    for kind, containers in (("initContainers", pod.spec.init_containers), ("containers", pod.spec.containers)):
        for index, container in enumerate(containers or ()):
            amounts, said = _share(container, settings)
            name = f"container {briefly(plain(container.name))}: "
            warnings += [name + each for each in said]
            if amounts:
                shares = " and ".join(f"{each}: {amount}" for each, amount in amounts.items())
                given.append(f"{name}{ACTIVE_THREAD_PERCENTAGE.variable} becomes {shares}")
                patch += _added(f"/spec/{kind}/{index}/resources", container.resources, amounts)
    if given or warnings:
        text = "; ".join((*given, *warnings))[:_LONGEST]
        patch += _merged("/metadata/annotations", metadata.annotations, {f"{settings.domain}/webhook": text})
    return Answer(patch, given, warnings)


def _share(container: Container, settings: Settings) -> tuple[Mapping[str, str], Sequence[str]]:
    """Return the resources to add to a container, and the warnings about it.

    A container that asks for a GPU itself, by a resource or perhaps by a claim, is left alone.
    """
    own = {each.name: each for each in container.env or ()}  # of two with one name, kubelet takes the last
    wish, memory = own.get(ACTIVE_THREAD_PERCENTAGE.variable), own.get(PINNED_DEVICE_MEM_LIMIT.variable)
    if wish is None or _asks_for_gpu(container.resources or Resources(), settings):
        return {}, ()
    tenths, mebibytes = parse_foreign_percentage(wish.value) or 0, _mebibytes(memory)
    processes = settings.processes[0] if isinstance(settings.processes[0], int) else 1
    number = slices(tenths * processes, settings.slices)
    because = ""
    if wish.value_from is not None:
        because = "its value is not in the pod; write the number, or request the resource"
    elif not tenths:
        because = f"{briefly(plain(wish.value))} is not a number above 0, up to 100"
    elif number is None:
        because = f"a container's {processes} processes would have more than a GPU together"
    elif _PIPE_DIRECTORY in own:
        because = f"{_PIPE_DIRECTORY} leads to another control daemon than mpsd's; remove that variable"
    elif settings.resources is Offer.THREADS_AND_MEMORY and not mebibytes:
        because = f"{PINNED_DEVICE_MEM_LIMIT.variable} must state the memory too, such as 0=8G"
    if because:
        return {}, [f"no share for {wish.name}: {because}"]
    warnings = [
        f"{each} may name another GPU than that of the share; remove it" for each in _CHOOSES_GPU if each in own
    ]
    if settings.resources is Offer.SLICES:
        if memory is not None:
            warnings.append(f"{memory.name} adds nothing to the share, {number}/{settings.slices} of a GPU's memory")
        return {settings.slice_resource: f"{number}"}, warnings
    cores = -(-tenths * processes // (settings.core_unit * 10))
    units = -(-mebibytes * processes // settings.memory_unit.mebibytes)
    return {settings.core_resource: f"{cores}", settings.memory_resource: f"{units}"}, warnings


def slices(tenths: int, number: int) -> int | None:
    """Return the fewest slices, of this number on a GPU, whose threads are not less than these, in tenths of a percent.

    The threads of slices are rounded down (`devices.part_of`): the container's own variable never exceeds its share.
    """
    return next((each for each in range(1, number + 1) if each * 1000 // number >= tenths), None)


def _mebibytes(memory: Variable | None) -> int:
    """Return the memory that a variable states for a GPU; 0 where it states none."""
    entries = [] if memory is None or memory.value_from is not None else memory.value.split(",")
    sizes = [parse_foreign_mem_limit(entry.partition("=")[2]) or 0 for entry in entries if entry]
    return max(sizes, default=0) >> 20 if all(sizes) else 0


def _asks_for_gpu(resources: Resources, settings: Settings) -> bool:
    """Tell whether a container asks for a GPU: by a resource of mpsd, or by one of another component."""
    variants = range(len(settings.processes))
    ours = {resource_name(kind, settings, each) for kind in Kind for each in variants}
    asked = {*(resources.limits or ()), *(resources.requests or ())}
    return bool(resources.claims) or any(
        each in ours or "gpu" in each.lower() or each.startswith("nvidia.com/mig-") for each in asked
    )


def _added(path: str, resources: Resources | None, amounts: Mapping[str, str]) -> list[Operation]:
    """Return the operations that add limits to a container; the API server completes the requests."""
    if resources is None:
        return [{"op": "add", "path": path, "value": {"limits": dict(amounts)}}]
    return _merged(f"{path}/limits", resources.limits, amounts)


def _merged(path: str, before: Mapping[str, object] | None, values: Mapping[str, str]) -> list[Operation]:
    """Return the operations that add members to an object that may be missing."""
    if before is None:
        return [{"op": "add", "path": path, "value": dict(values)}]
    escaped = {name.replace("~", "~0").replace("/", "~1"): value for name, value in values.items()}
    return [{"op": "add", "path": f"{path}/{name}", "value": value} for name, value in escaped.items()]
