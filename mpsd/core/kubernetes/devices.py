"""The devices that a node offers to Kubernetes, and the threads and memory that a set of them stands for. Pure.

A device is the smallest unit of a request, and its id names its GPU. A set of ids thus states an amount of one GPU; the
individual numbers have no other meaning, except that no two containers have the same one.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias, cast

from mpsd.core.containers.cdi import WITHOUT_SHARED_FILES
from mpsd.core.errors import ConfigurationError, DoesNotFitError, InvalidRequestError, MpsdError
from mpsd.core.kubernetes.settings import MOST_DEVICES, Offer, Settings, When

_ID: Final = re.compile(r"([A-Za-z0-9-]{1,80})::([0-9]{1,4})")

_FILE: Final = re.compile(r"nvidia[0-9]")
"""The beginning of a name after a GPU's device file: `nvidia0/vgpu1`."""

_WHOLE: Final = 1000
"""All threads of a GPU, in tenths of a percent."""


class Kind(StrEnum):
    """The unit of a resource."""

    SLICE = "slice"
    CORE = "core"
    MEMORY = "memory"


KINDS: Final = {
    Offer.SLICES: (Kind.SLICE,),
    Offer.MEMORY: (Kind.MEMORY,),
    Offer.THREADS_AND_MEMORY: (Kind.CORE, Kind.MEMORY),
    Offer.DRA: (),
}


class Part(NamedTuple):
    tenths: int
    mebibytes: int

    @property
    def percent(self) -> float:
        """Its threads, in percent."""
        return self.tenths / 10


Numbers = frozenset[int]
"""Devices of one kind on one GPU."""


Counts: TypeAlias = Mapping[tuple[Kind, int], int]
"""Numbers of devices, by kind and by position in the setting `processes`."""


class Gpu(NamedTuple):
    """A GPU that is offered."""

    uuid: str
    mebibytes: int
    """The total memory that mpsd grants of it."""
    pipe_directory: str
    driver: int | None
    """The branch of its driver."""
    because: str = ""
    """Why no new work may start on it; empty where it may."""
    position: int = 0
    """Its index in mpsd."""
    model: str = ""
    version: str = ""
    """The version of its driver."""
    tenths: int = _WHOLE
    """The threads that mpsd grants of it in sum, in tenths of a percent: more than all where it oversubscribes them."""
    hardware: Mapping[str, object] | None = None
    """What it is, as mpsd answers it; None where mpsd does not tell."""
    kind: str = ""
    """The kind of the reason in `because`: a kind of mpsd's (`health.Kind`), or one of this program's."""
    impaired: str = ""
    """Why pods that run on it may not be served; empty where they are."""
    is_known: bool = True
    """Whether it can be read: otherwise `impaired` is a doubt."""
    counts: Counts = MappingProxyType({})
    """The devices that Kubernetes can count on (`capacity.counted`); all where a resource is missing."""
    numbers: Mapping[Kind, Numbers] = MappingProxyType({})
    """The devices for which pods have leases."""


def resource_name(kind: Kind, settings: Settings, variant: int = 0) -> str:
    """Return the name of the resource in a pod's request; `variant` is a position in `processes`."""
    names = {
        Kind.SLICE: settings.slice_resource,
        Kind.CORE: settings.core_resource,
        Kind.MEMORY: settings.memory_resource,
    }
    return f"{names[kind]}.processes-{settings.processes[variant]}" if variant else names[kind]


def variant_of(numbers: Iterable[Numbers], settings: Settings) -> int:
    """Return the position in `processes` of a container's devices, by their numbers. Raises InvalidRequestError."""
    found = {number // settings.most_devices for each in numbers for number in each}
    if len(found) == 1 and max(found) < len(settings.processes):
        return max(found)
    raise InvalidRequestError(
        "the container asks for resources of different numbers of processes, and it gets one share",
        hint="ask for one of them; if it does, delete the pod and create it again",
        limit="resources",
    )


def check_node(gpus: Collection[Gpu], settings: Settings) -> None:
    """Refuse units of which a GPU has none, or too many. Raises ConfigurationError."""
    for gpu in gpus:
        if Kind.CORE in KINDS[settings.resources] and count(Kind.CORE, gpu, settings) > settings.most_devices:
            raise ConfigurationError(
                f"mpsd grants {gpu.tenths / 10:g} % of the threads of GPU {gpu.uuid}, which is more than"
                f" {settings.most_devices}"
                f" units of {settings.core_unit} %",
                hint="set a larger core_unit",
                limit="core_unit",
            )
        if (
            Kind.MEMORY in KINDS[settings.resources]
            and not 0 < gpu.mebibytes // settings.memory_unit.mebibytes <= settings.most_devices
        ):
            raise ConfigurationError(
                f"mpsd grants {gpu.mebibytes} MiB of GPU {gpu.uuid}, which is not 1 to {settings.most_devices} units of"
                f" {settings.memory_unit.mebibytes} MiB",
                hint="set another memory_unit",
                limit="memory_unit",
            )


def count(kind: Kind, gpu: Gpu, settings: Settings) -> int:
    """Return how many devices of a kind a GPU has; each variant has as many, which share the GPU."""
    match kind:
        case Kind.SLICE:
            return settings.slices
        case Kind.CORE:
            return gpu.tenths // (settings.core_unit * 10)
        case Kind.MEMORY:
            return gpu.mebibytes // settings.memory_unit.mebibytes


def steps_of(gpu: Gpu, percent: int, mebibytes: int) -> dict[Kind, int]:
    """Return how many steps of these sizes a GPU has, for the driver."""
    return {Kind.CORE: gpu.tenths // (percent * 10), Kind.MEMORY: gpu.mebibytes // mebibytes}


def device_id(gpu: str, number: int) -> str:
    return f"{gpu}::{number}"


def by_gpu(ids: Iterable[str]) -> dict[str, Numbers]:
    """Return the devices that ids name, by GPU. Raises InvalidRequestError for a text that is not an id."""
    found = dict[str, set[int]]()
    for each in ids:
        match = _ID.fullmatch(each)
        if match is None or int(match[2]) >= MOST_DEVICES:
            raise InvalidRequestError(
                f"{each!r} is not a device of this node", hint="delete the pod and create it again"
            )
        found.setdefault(match[1], set()).add(int(match[2]))
    return {gpu: frozenset(numbers) for gpu, numbers in found.items()}


def on_one_gpu(ids: Collection[str], kind: Kind, settings: Settings) -> tuple[str, Numbers]:
    """Return the GPU and the devices of an allocation. Raises DoesNotFitError where they are on several GPUs."""
    found = by_gpu(ids)
    if len(found) == 1:
        ((gpu, numbers),) = found.items()
        return gpu, numbers
    name = resource_name(kind, settings, variant_of(found.values(), settings))
    parts = ", ".join(f"{len(numbers)} on {gpu}" for gpu, numbers in sorted(found.items()))
    raise DoesNotFitError(
        f"no GPU of this node has {len(ids)} of {name} left, though all GPUs together have"
        f" ({parts}), and a container gets one GPU",
        hint="request less, use another node, or wait until other pods of this node have ended",
        limit="fragmentation",
    )


def part_of(counts: Mapping[Kind, int], gpu: Gpu, settings: Settings, variant: int = 0) -> Part:
    """Return the threads and memory of a number of devices, rounded down so that all parts of a GPU fit on it together.

    No part has more than all threads: where mpsd oversubscribes them, large parts have the same ones.

    Raises InvalidRequestError for threads without memory and, where both are offered, memory without threads.
    """
    if Kind.SLICE in counts:
        return _checked(sum_of(Kind.SLICE, counts[Kind.SLICE], gpu, settings))
    missing = [kind for kind in KINDS[settings.resources] if not counts.get(kind)]
    if missing:
        given = ", ".join(resource_name(kind, settings, variant) for kind in counts)
        lacking = ", ".join(resource_name(kind, settings, variant) for kind in missing)
        raise InvalidRequestError(
            f"the container asks for {given} and not for {lacking}, and mpsd grants neither without the other",
            hint=f"add {lacking} to the container's resources",
            limit="resources",
        )
    memory = sum_of(Kind.MEMORY, counts[Kind.MEMORY], gpu, settings)
    if settings.resources is Offer.MEMORY:
        return _checked(memory)
    return _checked(Part(sum_of(Kind.CORE, counts[Kind.CORE], gpu, settings).tenths, memory.mebibytes))


def numbers(kind: Kind, variant: int, gpu: Gpu, settings: Settings) -> range:
    """Return the numbers of the devices of a resource on a GPU."""
    first = variant * settings.most_devices
    return range(first, first + count(kind, gpu, settings))


def sum_of(kind: Kind, number: int, gpu: Gpu, settings: Settings) -> Part:
    """Return the threads and memory of this many devices in sum, however many containers share them."""
    match kind:
        case Kind.SLICE:
            return Part(number * gpu.tenths // settings.slices, number * gpu.mebibytes // settings.slices)
        case Kind.CORE:
            return Part(number * settings.core_unit * 10, 0)
        case Kind.MEMORY:
            is_all = settings.resources is Offer.MEMORY
            tenths = number * gpu.tenths // count(Kind.MEMORY, gpu, settings) if is_all else 0
            return Part(tenths, number * settings.memory_unit.mebibytes)


def _checked(part: Part) -> Part:
    if part.tenths > 0 and part.mebibytes > 0:
        return part._replace(tenths=min(part.tenths, _WHOLE))
    raise InvalidRequestError(
        f"{part.percent:g} % of the threads and {part.mebibytes} MiB are less than MPS can limit a client to",
        hint="request more of the resource",
        limit="resources",
    )


def preferred(available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
    """Return the devices that kubelet should take: all on the fullest GPU on which they fit; empty where none fits."""
    free = by_gpu([*available, *must])
    needed = by_gpu(must)
    if len(needed) > 1:
        return []
    fitting = [
        (len(numbers), gpu) for gpu, numbers in free.items() if len(numbers) >= size and (not needed or gpu in needed)
    ]
    if not fitting:
        return []
    _, gpu = min(fitting)
    first = sorted(needed.get(gpu, frozenset()))
    rest = [number for number in sorted(free[gpu]) if number not in first]
    return [device_id(gpu, number) for number in [*first, *rest][:size]]


def shares_memory(gpu: Gpu, settings: Settings) -> bool:
    """Tell whether a container gets the machine's /dev/shm."""
    if settings.shared_memory is When.AUTO:
        return gpu.driver is None or gpu.driver < WITHOUT_SHARED_FILES
    return settings.shared_memory is When.ALWAYS


# -- the GPUs to offer -------------------------------------------------------------------------------------------------


def offered(seen: Iterable[Gpu], before: Mapping[str, Gpu]) -> dict[str, Gpu]:
    """Return the GPUs to offer: those that mpsd reports now and, as unhealthy, those that it reported before."""
    now = {each.uuid: each for each in seen}
    said = "mpsd does not show it any more"
    gone = {
        uuid: gpu._replace(because=said, kind="gone", impaired=said) for uuid, gpu in before.items() if uuid not in now
    }
    return {**gone, **now}


def of_one_gpu(gpus: Mapping[str, Gpu], settings: Settings) -> dict[str, Gpu]:
    """Return the GPUs to offer, of which only one has new work where two resources are offered: the first that may.

    The resources are totals of a node: Kubernetes would pair threads of one GPU with memory of another.
    """
    if settings.resources is not Offer.THREADS_AND_MEMORY or not gpus:
        return {**gpus}
    first, *others = sorted(gpus.values(), key=lambda gpu: (bool(gpu.because), gpu.position, gpu.uuid))
    names = f"{settings.core_resource} and {settings.memory_resource}"
    because = f"{names} are offered of one GPU of a node, here of GPU {first.position}"
    return {gpu.uuid: gpu._replace(because=gpu.because or because) for gpu in others} | {first.uuid: first}


def unreachable(before: Mapping[str, Gpu], because: str) -> dict[str, Gpu]:
    """Return the GPUs of an mpsd that has not answered for too long, as unhealthy: a claim on them would fail."""
    said = f"mpsd does not answer: {because}"
    return {
        uuid: gpu._replace(because=said, kind="unreachable", impaired=said, is_known=False)
        for uuid, gpu in before.items()
    }


# -- encoding in the label of a lease ----------------------------------------------------------------------------------


def encode(numbers: Collection[int]) -> str:
    """Encode devices as a text of at most 128 characters, with four devices per digit."""
    return f"{sum(1 << number for number in numbers):x}"


def decode(text: str) -> Numbers | None:
    """Decode such a text; None for any other text."""
    if not re.fullmatch(r"[0-9a-f]{1,128}", text):
        return None
    bits = int(text, 16)
    return frozenset(number for number in range(bits.bit_length()) if bits >> number & 1)


# -- kubelet's record of them ------------------------------------------------------------------------------------------
#
# kubelet's own record of each container's devices. The file belongs to root, and is the only place that has a pod's uid
# with its devices. kubelet writes it after it has allocated all resources of a container, before the container is
# created. Its format is not documented and has changed once: until 1.19 a list of ids, since 1.20 lists by NUMA node.

CHECKPOINT = "device-plugins/kubelet_internal_checkpoint"
"""Its path below kubelet's root directory."""


class Container(NamedTuple):
    """The devices of a container in kubelet's record."""

    pod: str
    """The uid of its pod."""
    name: str
    gpu: str
    numbers: Mapping[Kind, Numbers]
    answers: Mapping[Kind, str]
    """The answer to kubelet's allocation: an encoded ContainerAllocateResponse, in base64."""

    def __str__(self) -> str:
        """Name the container so that a user can find it."""
        return f"container {self.name} of pod {self.pod}"


def own_resources(settings: Settings) -> dict[str, Kind]:
    """Return the kinds of all resources that this node offers, by their names."""
    variants = range(len(settings.processes))
    return {resource_name(kind, settings, each): kind for kind in KINDS[settings.resources] for each in variants}


def parse_checkpoint(raw: bytes, settings: Settings) -> list[Container]:
    """Return the containers that have devices of these resources. Raises ValueError for a file of another form."""
    kinds = own_resources(settings)
    found = dict[tuple[str, str], dict[Kind, tuple[list[str], str]]]()
    try:
        for entry in _entries(raw):
            kind = kinds.get(_text(entry["ResourceName"]))
            if kind is not None:
                key = _text(entry["PodUID"]), _text(entry["ContainerName"])
                answer, had = entry.get("AllocResp"), found.setdefault(key, {})
                ids = [*had.get(kind, ([], ""))[0], *_ids(entry["DeviceIDs"])]
                had[kind] = ids, answer if isinstance(answer, str) else ""
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"kubelet's checkpoint has another form: {error!r}") from None
    containers = []
    for (pod, name), had in found.items():
        try:
            gpus = {kind: by_gpu(ids) for kind, (ids, _) in had.items()}
        except MpsdError:
            continue  # devices of another plugin that had this resource name
        names = {gpu for each in gpus.values() for gpu in each}
        if len(names) == 1:
            (gpu,) = names
            numbers = {kind: each[gpu] for kind, each in gpus.items()}
            containers.append(Container(pod, name, gpu, numbers, {kind: answer for kind, (_, answer) in had.items()}))
    return containers


def parse_registered(raw: bytes) -> dict[str, list[str]]:
    """Return the devices of all plugins, by resource, of the same record; none for a record of another form."""
    try:
        found = json.loads(raw)["Data"]["RegisteredDevices"] or {}
        return {_text(name): _ids(ids or []) for name, ids in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def others(registered: Mapping[str, Sequence[str]], gpus: Collection[str], settings: Settings) -> dict[str, str]:
    """Return the resources under which another plugin offers these GPUs to kubelet, each with one of its devices.

    Plugins of NVIDIA, of HAMi and of gpushare have the UUID of the GPU in the name of a device. GKE's has the name of a
    device file instead, which may be of any GPU. Of a resource that this node is to offer, every device with another
    name than this program gives is another plugin's; a replica of NVIDIA's plugin has the same.
    """
    own = own_resources(settings)
    found = {}
    for name, ids in registered.items():
        if name in own:
            foreign = [each for each in ids if not _ID.fullmatch(each)]
        else:
            foreign = [each for each in ids if _FILE.match(each) or any(gpu in each for gpu in gpus)]
        if foreign:
            found[name] = min(foreign)
    return found


def with_devices(
    containers: Sequence[Container], kind: Kind, gpu: str, numbers: Numbers, settings: Settings
) -> Container:
    """Return the container that has these devices, all of one variant.

    Raises InvalidRequestError where kubelet's record has none, or one with devices of other variants.
    """
    variants = {number // settings.most_devices for number in numbers}
    for each in containers:
        own = each.numbers.get(kind, frozenset()) if each.gpu == gpu else frozenset[int]()
        if numbers == {number for number in own if number // settings.most_devices in variants}:
            variant_of(each.numbers.values(), settings)
            return each
    raise InvalidRequestError(
        f"kubelet starts a container with {len(numbers)} devices of GPU {gpu}, and its checkpoint lists them for none",
        hint="kubelet tries again; if it stays so, delete the pod, and see kubelet_dir and kubelet's log",
        limit="checkpoint",
    )


def _entries(raw: bytes) -> Sequence[Mapping[str, object]]:
    document = cast("Mapping[str, Mapping[str, object]]", json.loads(raw))
    entries = document["Data"]["PodDeviceEntries"]
    return cast("Sequence[Mapping[str, object]]", entries or [])


def _ids(value: object) -> list[str]:
    lists = value.values() if isinstance(value, dict) else [value]
    return [_text(each) for one in lists for each in cast("Sequence[object]", one)]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
