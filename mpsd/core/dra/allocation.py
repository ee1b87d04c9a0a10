"""The requirements of an allocated claim on this node: a share of one GPU for each allocated device. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from mpsd.core.dra import configuration, quantities
from mpsd.core.dra.configuration import Configuration
from mpsd.core.dra.objects import ResourceClaim, Result
from mpsd.core.dra.prepared import PreparedShare
from mpsd.core.errors import DaemonNotReadyError, InvalidRequestError, NotFoundError

THREADS: Final = "threads"
MEMORY: Final = "memory"


class Allocated(NamedTuple):
    """A share of a GPU that the scheduler allocated, and the strictness that it requires of the node, if any."""

    share: PreparedShare
    strictness: str | None


def device_name(gpu: str) -> str:
    """Return the name of a GPU in a ResourceSlice: a DNS label that does not depend on the other GPUs."""
    return gpu.lower()


def pods(claim: ResourceClaim) -> list[tuple[str, str]]:
    """Return the uid and name of each pod that a claim is reserved for."""
    reserved = claim.status.reserved_for if claim.status is not None else None
    return [(each.uid, each.name) for each in reserved or [] if each.resource == "pods"]


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
    found = [
        _share(each, pool, by_device, configuration.for_request(devices.config or [], each.request, driver))
        for each in results
    ]
    for request, number in Counter(each.share.request.partition("/")[0] for each in found).items():
        if number > 1:
            raise InvalidRequestError(
                f"request {request!r} of ResourceClaim {name} was allocated {number} shares, and a process under MPS"
                " can use one",
                hint="write count: 1, and a request of its own for each container: resources.claims[].request",
                limit="count",
            )
    return found


def _share(result: Result, pool: str, by_device: Mapping[str, str], settings: Configuration) -> Allocated:
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
    tenths = int(quantities.parse(capacity[THREADS]) * 10)
    mebibytes = quantities.mebibytes(capacity[MEMORY])
    if not 0 < tenths <= 1000 or mebibytes < 1:  # noqa: PLR2004 - all threads, in tenths of a percent
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
        client_priority=settings.priority,
        processes=settings.processes,
        stop=settings.stop,
        user=settings.user,
    )
    return Allocated(share, settings.strictness)
