"""The requirements of an allocated claim on this node: a share of one GPU for each allocated device. Pure.

The claim comes from the API server, and has opaque options of its author, and quantities in the notation of Kubernetes.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Final, NamedTuple

from msgspec import Struct, field, structs

from mpsd.core.dra.prepared import PreparedPod, PreparedShare
from mpsd.core.errors import DaemonNotReadyError, DoesNotFitError, InvalidRequestError, NotFoundError
from mpsd.core.kubernetes.settings import parse_processes, parse_uid
from mpsd.core.model import Stop, Visible
from mpsd.core.mps_facts import MOST_CONNECTIONS
from mpsd.core.setting_parsers import choice, whole
from mpsd.core.settings import Attach
from mpsd.core.units import MIB, briefly

# -- the claim ---------------------------------------------------------------------------------------------------------
#
# The fields of a ResourceClaim that the driver reads. Source: `resource.k8s.io/v1`, Kubernetes 1.34. Fields that are
# not named here are ignored: later releases add some.


class OwnerReference(Struct, rename="camel"):
    kind: str


class Metadata(Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    owner_references: list[OwnerReference] | None = None


class Consumer(Struct, rename="camel"):
    """An object that a claim is reserved for, usually a pod."""

    resource: str
    name: str
    uid: str


class Opaque(Struct, rename="camel"):
    """Parameters for one driver, whose content the API server does not check."""

    driver: str
    parameters: object = None


class Configuration(Struct, rename="camel"):
    """Parameters of a class or a claim, for some of its requests; for all where it names none."""

    requests: list[str] | None = None
    opaque: Opaque | None = None


class Result(Struct, rename="camel"):
    """A device that was allocated for a request, or a share of one."""

    request: str
    driver: str
    pool: str
    device: str
    share_id: str | None = field(default=None, name="shareID")
    consumed_capacity: Mapping[str, str | int | float] | None = None
    admin_access: bool | None = None


class Devices(Struct, rename="camel"):
    """All devices of an allocation. The configurations of its classes come before those of the claim."""

    results: list[Result] | None = None
    config: list[Configuration] | None = None


class Allocation(Struct, rename="camel"):
    devices: Devices | None = None


class Status(Struct, rename="camel"):
    allocation: Allocation | None = None
    reserved_for: list[Consumer] | None = None


class ResourceClaim(Struct, rename="camel"):
    """A claim in its current state."""

    metadata: Metadata
    status: Status | None = None


# -- its options -------------------------------------------------------------------------------------------------------
#
# The opaque configuration of a claim or a device class: its author's options beside threads and memory. The API server
# accepts any content, so this is the first to read it. Unknown content is refused: an author who misspells `strictness`
# must not get less than requested.

_KIND: Final = "Share"

_PRIORITIES: Final = {"normal": 0, "below-normal": 1}
"""The number that MPS has for each."""


class Options(NamedTuple):
    """The options of a share; None where the author set none."""

    strictness: Attach | None = None
    """The minimum strictness of the node, as a value of `enforcement.attach`."""
    priority: int | None = None
    """The MPS priority of its clients."""
    processes: int | str | None = None
    """The maximum number of its client processes, or `any`."""
    stop: str | None = None
    """How its clients are ended."""
    connections: int | None = None
    """CUDA_DEVICE_MAX_CONNECTIONS of its clients."""
    visible: str | None = None
    """What CUDA_VISIBLE_DEVICES has."""
    user: int | None = None
    """The uid of its containers' programs, which gets access to the lease before they start."""


def options_for(given: Iterable[Configuration], request: str, driver: str) -> Options:
    """Return the options of a request: for each setting, a later entry overrides an earlier one.

    Raises InvalidRequestError with the name of a wrong setting and its valid values.
    """
    found = dict[str, object]()
    main = request.partition("/")[0]
    for each in given:
        is_for_it = not each.requests or request in each.requests or main in each.requests
        if each.opaque is not None and each.opaque.driver == driver and is_for_it:
            found |= _parsed(each.opaque.parameters, f"{driver}/v1")
    return Options(**found)  # type: ignore[arg-type]  # each is what its parser returns


def check_strict(attach: str) -> None:
    """Refuse a share that requires a strict node on another one. Raises InvalidRequestError."""
    if attach != Attach.STRICT:
        raise InvalidRequestError(
            f"the claim asks for strictness 'strict', and mpsd runs here with enforcement.attach = {attach!r}",
            hint="select nodes that have it, by the attribute `attach`, or set attach = 'strict' in mpsd.toml",
            limit="strictness",
        )


def _parsed(parameters: object, api_version: str) -> dict[str, object]:
    if not isinstance(parameters, Mapping):
        raise InvalidRequestError(
            f"parameters: {briefly(parameters)} is not an object", hint="write an object", limit="parameters"
        )
    version, kind = parameters.get("apiVersion"), parameters.get("kind")
    if (version, kind) != (api_version, _KIND):
        raise InvalidRequestError(
            f"the parameters have apiVersion {briefly(version)} and kind {briefly(kind)}",
            hint=f"write apiVersion: {api_version} and kind: {_KIND}",
            limit="apiVersion",
        )
    found = dict[str, object]()
    for name, value in parameters.items():
        if name in {"apiVersion", "kind"}:
            continue
        if name not in _PARSERS:
            near = difflib.get_close_matches(str(name), _PARSERS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_PARSERS)}"
            raise InvalidRequestError(f"there is no parameter {briefly(name)}", hint=hint, limit="parameters")
        try:
            found[name] = _PARSERS[name](value)
        except ValueError as error:
            raise InvalidRequestError(
                f"{name} = {briefly(value)}: {error}", hint="correct it in the claim, or in its class", limit=name
            ) from None
    return found


def _priority(value: object) -> int:
    if not isinstance(value, str) or value not in _PRIORITIES:
        raise ValueError("it is not one of " + ", ".join(f'"{each}"' for each in _PRIORITIES))
    return _PRIORITIES[value]


_PARSERS: Final[Mapping[str, Callable[[object], object]]] = {
    "strictness": choice(Attach),
    "priority": _priority,
    "processes": parse_processes,
    "stop": choice(Stop),
    "connections": whole(1, MOST_CONNECTIONS),
    "visible": choice(Visible),
    "user": parse_uid,
}


# -- its quantities ----------------------------------------------------------------------------------------------------
#
# Source: Kubernetes, `k8s.io/apimachinery/pkg/api/resource`: a number with a binary or decimal suffix, or an exponent.

_FORM: Final = re.compile(
    r"([+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30}))(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?[0-9]{1,2}))?",
    re.ASCII,
)
_BINARY: Final = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL: Final = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def parse_quantity(value: object) -> Fraction:
    """Return a quantity as a number. Raises InvalidRequestError for a text that is not a quantity."""
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidRequestError(
            f"{briefly(value)} is not a quantity of Kubernetes", hint="write it as 8Gi, 512Mi or 25", limit="capacity"
        )
    number, suffix, exponent = match.groups()
    if suffix in _BINARY:
        return Fraction(number) * (1 << (10 * _BINARY.index(suffix) + 10))
    power = int(exponent) if exponent else _DECIMAL.get(suffix, 0)
    return Fraction(f"{number}e{power}")


def quantity_of(mebibytes: int) -> str:
    """Return a number of MiB as a quantity, in the shortest form, which Kubernetes uses too."""
    suffixes = ["Mi", "Gi", "Ti"]
    while len(suffixes) > 1 and mebibytes and mebibytes % 1024 == 0:
        mebibytes //= 1024
        suffixes.pop(0)
    return f"{mebibytes}{suffixes[0]}"


def mebibytes_of(value: object) -> int:
    """Return a quantity of bytes in whole MiB, rounded down. Raises InvalidRequestError."""
    return int(parse_quantity(value) // MIB)


# -- its shares --------------------------------------------------------------------------------------------------------

THREADS: Final = "threads"
MEMORY: Final = "memory"

_WHOLE: Final = 1000
"""All threads of a GPU, in tenths of a percent."""

NVIDIA: Final = "gpu.nvidia.com"
"""The domain of NVIDIA's own driver: GPUs have its attributes, by its names, types and values, so that an expression of
CEL is the same for both drivers. Source: its GpuInfo.Attributes, 2026-05; Kubernetes wants names of others with their
domain, and one meaning for each."""

UUID_ATTRIBUTE: Final = f"{NVIDIA}/uuid"


class Allocated(NamedTuple):
    """A share of a GPU that the scheduler allocated, and whether it requires a strict node."""

    share: PreparedShare
    is_strict: bool


def device_name(gpu: str) -> str:
    """Return the name of a GPU in a ResourceSlice: a DNS label that does not depend on the other GPUs."""
    return gpu.lower()


def pods(claim: ResourceClaim) -> list[PreparedPod]:
    """Return the pods that a claim is reserved for."""
    reserved = claim.status.reserved_for if claim.status is not None else None
    return [PreparedPod(each.uid, each.name) for each in reserved or [] if each.resource == "pods"]


def is_shared(claim: ResourceClaim) -> bool:
    """Tell whether several pods may use a claim: it was not made for one of them, by a template or by the scheduler."""
    return not any(each.kind == "Pod" for each in claim.metadata.owner_references or [])


def shares(claim: ResourceClaim, *, uid: str, driver: str, pool: str, gpus: Iterable[str]) -> list[Allocated]:
    """Return the shares of a claim. Raises NotFoundError, InvalidRequestError and DaemonNotReadyError.

    `uid` is the claim's according to kubelet, and `gpus` are the UUIDs of the GPUs that this node offers.
    """
    name = f"{claim.metadata.namespace}/{claim.metadata.name}"
    if claim.metadata.uid != uid:
        raise NotFoundError(
            f"ResourceClaim {name} has the uid {claim.metadata.uid}, and kubelet prepares {uid}",
            hint="the claim was deleted and created again; kubelet tries again with the new one",
        )
    allocation = claim.status.allocation if claim.status is not None else None
    devices = allocation.devices if allocation is not None else None
    if devices is None:
        raise InvalidRequestError(
            f"ResourceClaim {name} is not allocated", hint="wait until the scheduler has allocated it"
        )
    by_device = {device_name(each): each for each in gpus}
    results = [each for each in devices.results or [] if each.driver == driver]
    found = [_share(each, pool, by_device, options_for(devices.config or [], each.request, driver)) for each in results]
    by_request = dict[str, Allocated]()
    for each in found:
        request = each.share.request.partition("/")[0]
        by_request[request] = _with(by_request[request], each, name) if request in by_request else each
    return [*by_request.values()]


def _with(one: Allocated, other: Allocated, claim: str) -> Allocated:
    """Return two shares of one request as one: a request with a count, as the scheduler makes of an extended resource.

    Raises DoesNotFitError where they are on two GPUs: a process under MPS can use one.
    """
    first, second = one.share, other.share
    if first.gpu != second.gpu:
        raise DoesNotFitError(
            f"request {first.request!r} of ResourceClaim {claim} was allocated on two GPUs, {first.gpu} and"
            f" {second.gpu}, and a container gets one GPU",
            hint="delete the pod, so that it is placed anew; in a claim, add the constraint"
            f" matchAttribute: {UUID_ATTRIBUTE}",
            limit="fragmentation",
        )
    share = structs.replace(
        first,
        tenths=min(first.tenths + second.tenths, _WHOLE),
        mebibytes=first.mebibytes + second.mebibytes,
        further=[*first.further, second.share_id],
    )
    return one._replace(share=share)


def _share(result: Result, pool: str, by_device: Mapping[str, str], options: Options) -> Allocated:
    what = f"{result.pool}/{result.device} for request {result.request!r}"
    if result.pool != pool:
        raise InvalidRequestError(
            f"{what} is of another pool than this node's, {pool}", hint="see the node setting of mpsd-kubernetes"
        )
    if result.admin_access:
        raise InvalidRequestError(
            f"{what} was allocated with adminAccess, which mpsd does not have: a lease has limits",
            hint="delete adminAccess from the request; nvidia-smi on the node shows every process",
            limit="adminAccess",
        )
    if result.device not in by_device:
        raise DaemonNotReadyError(f"mpsd does not show the GPU of {what}", hint="see mpsctl gpus on the node")
    capacity = {name.rpartition("/")[2]: value for name, value in (result.consumed_capacity or {}).items()}
    missing = [each for each in (THREADS, MEMORY) if each not in capacity]
    if missing:
        raise InvalidRequestError(
            f"{what} was allocated without {' and '.join(missing)}: the scheduler does not share devices by capacity",
            hint="switch the feature gate DRAConsumableCapacity on, in every component (on by default since 1.36)",
            limit="consumedCapacity",
        )
    tenths = int(parse_quantity(capacity[THREADS]) * 10)
    mebibytes = mebibytes_of(capacity[MEMORY])
    if not 0 < tenths <= _WHOLE or mebibytes < 1:
        raise InvalidRequestError(
            f"{what} is {capacity[THREADS]} % of the threads and {capacity[MEMORY]} of memory, which MPS cannot limit a"
            " client to",
            hint="ask for 1 to 100 of threads, and for 1Mi of memory or more",
            limit="capacity",
        )
    share = PreparedShare(
        request=result.request,
        pool=result.pool,
        device=result.device,
        share_id=result.share_id,
        gpu=by_device[result.device],
        tenths=tenths,
        mebibytes=mebibytes,
        client_priority=options.priority,
        processes=options.processes,
        stop=options.stop,
        connections=options.connections,
        visible=options.visible,
        user=options.user,
    )
    return Allocated(share, options.strictness is Attach.STRICT)
