"""The lease of each request_id: a retry gets the same lease again, and a different request with that id is refused."""

from collections.abc import Callable, Iterator

from mpsd.core import holders
from mpsd.core.errors import RequestIdReusedError
from mpsd.core.model import Claim, Holder, Lease, LeaseRequest

_NAMES = (
    "threads",
    "memory",
    "fraction",
    "gpu",
    "gpus",
    "processes",
    "priority",
    "client_priority",
    "stop",
    "ttl",
    "name",
    "labels",
)
"""The fields that must be the same in a retry.

The time to wait may differ, because a retry has waited for a while already. So may the deadline of a claim.
"""


class RequestIds:
    """The leases that have not ended, by uid and request_id."""

    def __init__(self, find: Callable[[str], Lease | None]) -> None:
        """Take a function that returns a lease that has not ended."""
        self._find = find
        self._leases: dict[tuple[int, str], str] = {}

    def note(self, lease: Lease) -> None:
        """Note the lease of a request, if the request has a request_id."""
        if lease.request.request_id is not None:
            self._leases[_key(lease, lease.request.request_id)] = lease.id

    def forget(self, lease: Lease) -> None:
        """Forget a lease that has ended: the next request with its request_id is a new one."""
        if lease.request.request_id is None:
            return
        key = _key(lease, lease.request.request_id)
        if self._leases.get(key) == lease.id:
            del self._leases[key]

    def earlier(self, request: LeaseRequest, uid: int, named: Holder | Claim | None) -> Lease | None:
        """Return the lease, or its place in the queue, that an earlier attempt of this request got.

        `named` is the holder that the request names, or the claim for one, if any. A claim still belongs to its request
        after it was taken. Raises RequestIdReusedError where the request_id was used for a different request.
        """
        if request.request_id is None:
            return None
        lease = self._find(self._leases.get((uid, request.request_id), ""))
        if lease is None:
            return None
        differences = [*_differences(lease, request), *_other_holder(lease, named)]
        if differences:
            raise RequestIdReusedError(
                f"request_id {request.request_id!r} was used for {lease.id}, which is another request:"
                f" {'; '.join(differences)}",
                hint="use a new request_id for each request, and the same one to repeat a request as it was",
                limit="request_id",
            )
        return lease


def _key(lease: Lease, request_id: str) -> tuple[int, str]:
    """Return the key of a lease. It does not change when a process of another uid takes its claim."""
    return (lease.owner.uid if lease.claimed_for is None else lease.claimed_for), request_id


def _other_holder(lease: Lease, named: Holder | Claim | None) -> Iterator[str]:
    if lease.claimed_for is not None:
        if not isinstance(named, Claim):
            yield f"the holder was a claim, and is {'its caller' if named is None else holders.said(named)}"
    elif named is not None and (
        isinstance(named, Claim) or not any(holders.are_same(each, named) for each in lease.holders)
    ):
        yield f"the holder was {holders.said(holders.bound_to(lease)[0])}, and is {holders.said(named)}"


def _differences(lease: Lease, request: LeaseRequest) -> Iterator[str]:
    for name in _NAMES:
        before, now = getattr(lease.request, name), getattr(request, name)
        if before == now or (name == "ttl" and before is None and lease.ttl is not None):
            continue  # mpsd did not record what was requested, or a quota sets it
        yield f"{name} was {_said(before)}, and is {_said(now)}"


def _said(value: object) -> str:
    if value is None:
        return "not given"
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if type(value) is str else str(value)
