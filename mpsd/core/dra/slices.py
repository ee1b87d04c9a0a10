"""The ResourceSlice of a node: its GPUs, each of which can be allocated in shares of threads and memory. Pure.

A node has one pool, and the pool has one slice: a slice has space for 128 devices, and its reader sees a consistent
state.

A GPU that cannot start new work (held, draining, not healthy) has a taint, which keeps claims from it and tells the
reason. The effect NoExecute would end running pods, which mpsd never does. Where DRADeviceTaints is off, the API server
drops taints silently, and pods would still be placed there: the GPU is then left out. That takes it from no claim:
allocated claims stay allocated, and count again when the GPU is back.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from mpsd.core.dra import allocation
from mpsd.core.dra.allocation import MEMORY, NVIDIA, THREADS, UUID_ATTRIBUTE, device_name
from mpsd.core.kubernetes import devices
from mpsd.core.kubernetes.devices import Gpu, Kind

API_VERSION: Final = "resource.k8s.io/v1"
"""The first version with consumable capacity that is not an alpha: Kubernetes 1.34."""

_STANDARD: Final = "resource.kubernetes.io"
"""Source: k8s.io/dynamic-resource-allocation/deviceattribute."""

_VERSION: Final = re.compile(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?(?:\.([0-9]{1,9}))?", re.ASCII)

_ADDED: Final = "timeAdded"

_LONGEST_TEXT: Final = 64
"""Maximum characters of a text attribute. Source: resource.k8s.io/v1."""


class Steps(NamedTuple):
    """The step sizes: requests are multiples of these."""

    percent: int
    mebibytes: int
    slices: int
    """A request without an amount gets one of so many parts of a GPU, as each of an extended resource does."""


class Node(NamedTuple):
    """The node's part of a slice."""

    name: str
    uid: str
    """The uid of the Node object, which owns the slice; empty where it is unknown."""
    driver: str
    attach: str
    """mpsd's strictness, as a value of `enforcement.attach`."""


def slice_name(node: str, driver: str) -> str:
    """Return the name of a node's only slice."""
    return f"{node}-{driver}"


def document(
    node: Node, gpus: Iterable[Gpu], steps: Steps, found: Mapping[str, object] | None = None, *, taints: bool
) -> dict[str, object]:
    """Return the slice of a node, as the next version of the published one.

    `taints` tells whether GPUs without new work are tainted; otherwise they are left out.
    """
    metadata: dict[str, object] = {"name": slice_name(node.name, node.driver)}
    match found:
        case {"metadata": {"resourceVersion": str(version)}}:
            metadata["resourceVersion"] = version
    if node.uid:
        metadata["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.uid, "controller": True}
        ]
    since = {(each.get("name"), taint.get("value")): taint for each in _devices(found or {}) for taint in _taints(each)}
    offered = sorted((each for each in gpus if taints or not each.because), key=lambda each: each.uuid)
    return {
        "apiVersion": API_VERSION,
        "kind": "ResourceSlice",
        "metadata": metadata,
        "spec": {
            "driver": node.driver,
            "nodeName": node.name,
            "pool": {"name": node.name, "generation": generation_of(found) + 1, "resourceSliceCount": 1},
            "devices": [device for each in offered if (device := _device(each, node, steps, since)) is not None],
        },
    }


def has_taints(published: Mapping[str, object]) -> bool:
    """Tell whether any device of a slice has a taint."""
    return any(each.get("taints") for each in _devices(published))


def probe_of(document: Mapping[str, object]) -> dict[str, object]:
    """Return a slice of another name for the question what the API server would keep of this one.

    It keeps a field of a feature that is off where the object that it replaces has it already.
    """
    metadata = document["metadata"]
    name = metadata["name"] if isinstance(metadata, dict) else ""
    return {**document, "metadata": {"name": f"{name}-probe"}}


def is_shared(published: Mapping[str, object]) -> bool:
    """Tell whether the API server accepted the devices of a slice as allocatable in shares.

    It drops fields of a feature that is off; each claim would then get a whole GPU.
    """
    return all(each.get("allowMultipleAllocations") for each in _devices(published))


def same(one: Mapping[str, object] | None, other: Mapping[str, object]) -> bool:
    """Tell whether two slices have the same content, regardless of generation and of additions by the API server."""
    return one is not None and _content(one) == _content(other)


def generation_of(published: Mapping[str, object] | None) -> int:
    """Return the generation of a slice; 0 where there is none."""
    match published:
        case {"spec": {"pool": {"generation": int(number)}}}:
            return number
        case _:
            return 0


def _content(document: Mapping[str, object]) -> object:
    spec = document.get("spec")
    if not isinstance(spec, dict):
        return None
    pool = spec.get("pool")
    # The API server omits an empty list, and adds a time to each taint.
    return {
        **spec,
        "devices": [
            {**each, "taints": [{**taint, _ADDED: None} for taint in _taints(each)]} for each in _devices(document)
        ],
        "pool": {**pool, "generation": 0} if isinstance(pool, dict) else None,
    }


def _devices(document: Mapping[str, object]) -> list[Mapping[str, object]]:
    spec = document.get("spec")
    found = spec.get("devices") if isinstance(spec, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _taints(device: Mapping[str, object]) -> list[Mapping[str, object]]:
    found = device.get("taints")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _device(
    gpu: Gpu, node: Node, steps: Steps, tainted: Mapping[tuple[object, object], Mapping[str, object]]
) -> dict[str, object] | None:
    """Return a GPU as a device, with the capacity that Kubernetes can count on; None where that is too little.

    Kubernetes accepts no range of a single step, and a share that names no amount is no smaller than otherwise.
    `tainted` are the published taints, by device and value: a taint keeps the time since which it is there.
    """
    most = devices.steps_of(gpu, steps.percent, steps.mebibytes)
    counts = {kind: gpu.counts.get((kind, 0), number) for kind, number in most.items()}
    defaults = {kind: max(number // steps.slices, 1) for kind, number in most.items()}
    if any(number < max(defaults[kind], 2) for kind, number in counts.items()):
        return None
    name = device_name(gpu.uuid)
    return {
        "name": name,
        "allowMultipleAllocations": True,
        "attributes": _attributes(gpu, node),
        "capacity": {
            THREADS: _capacity(counts[Kind.CORE], defaults[Kind.CORE], steps.percent, str, most=100),
            MEMORY: _capacity(counts[Kind.MEMORY], defaults[Kind.MEMORY], steps.mebibytes, allocation.quantity_of),
        },
        **({"taints": [tainted.get((name, gpu.kind), _taint(gpu, node))]} if gpu.because else {}),
    }


def _taint(gpu: Gpu, node: Node) -> Mapping[str, object]:
    """Return the taint of a GPU without new work: its value is the kind of the reason, since sentences change often."""
    return {"key": f"{node.driver}/refused", "value": gpu.kind, "effect": "NoSchedule"}


def _attributes(gpu: Gpu, node: Node) -> dict[str, object]:
    """Return the attributes of a GPU, without those whose values are unknown."""
    known = {name: each for name, each in (gpu.hardware or {}).items() if isinstance(each, str)}
    texts = {
        f"{NVIDIA}/type": "gpu",
        UUID_ATTRIBUTE: gpu.uuid,
        f"{NVIDIA}/productName": gpu.model,
        f"{NVIDIA}/brand": known.get("brand"),
        f"{NVIDIA}/architecture": known.get("architecture"),
        f"{_STANDARD}/pciBusID": known.get("pci_bus_id"),
        f"{_STANDARD}/pcieRoot": known.get("pcie_root"),
        "attach": node.attach,
    }
    versions = {
        f"{NVIDIA}/cudaComputeCapability": known.get("compute_capability"),
        f"{NVIDIA}/driverVersion": gpu.version,
        f"{NVIDIA}/cudaDriverVersion": known.get("cuda_version"),
    }
    found: dict[str, object] = {"index": {"int": gpu.position}}
    found |= {name: {"string": text[:_LONGEST_TEXT]} for name, text in texts.items() if text}
    found |= {name: {"version": text} for name, each in versions.items() if (text := _semantic(each or ""))}
    return found


def _semantic(version: str) -> str | None:
    """Return a version in the form that CEL's semver() compares: 555.58.02 is 555.58.2, and 9.0 is 9.0.0."""
    match = _VERSION.fullmatch(version)
    return None if match is None else ".".join(f"{int(each or 0)}" for each in match.groups())


def _capacity(
    count: int, default: int, step: int, write: Callable[[int], str], most: int | None = None
) -> dict[str, object]:
    """Return an amount of this many steps, and the steps of a share that names none; a share has `most` at most.

    mpsd may grant more threads in sum than a GPU has.
    """
    highest = count if most is None else min(count, most // step)
    return {
        "value": write(count * step),
        "requestPolicy": {
            "default": write(min(default, highest) * step),
            "validRange": {"min": write(step), "max": write(highest * step), "step": write(step)},
        },
    }
