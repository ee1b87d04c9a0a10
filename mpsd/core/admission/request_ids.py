"""What each request_id was given: a retry gets the same again, and another request is refused."""

from collections.abc import Callable, Iterator

from mpsd.core.errors import RequestIdReusedError
from mpsd.core.holders import holders
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
"""What has to be the same in a retry. How long it waits may differ: a retry has waited for a while already.

So may the deadline of a claim.
"""


class RequestIds:
    """The leases that have not ended, by uid and request_id."""

    def __init__(self, find: Callable[[str], Lease | None]) -> None:
        """`find` returns a lease that has not ended."""
        self._find = find
        self._leases: dict[tuple[int, str], str] = {}

    def note(self, lease: Lease) -> None:
        """Note what a request was given, if it has a request_id."""
        if lease.request.request_id is not None:
            self._leases[_key(lease, lease.request.request_id)] = lease.id

    def forget(self, lease: Lease) -> None:
        """Forget a lease that has ended: the next request with its request_id is a new one."""
        if lease.request.request_id is None:
            return
        key = _key(lease, lease.request.request_id)
        if self._leases.get(key) == lease.id:
            del self._leases[key]

    def earlier(self, request: LeaseRequest, uid: int, named: Holder | None) -> Lease | None:
        """Return the lease, or the place in the queue, that this request was given when it was made before.

        `named` is the holder that it names, if it names one. A claim is that of its request also when it was taken.
        Raises RequestIdReusedError where the request_id was used for another request.
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
    """Return under what a lease is found again: that stays as it is when its claim is taken by another uid."""
    return (lease.owner.uid if lease.claimed_for is None else lease.claimed_for), request_id


def _other_holder(lease: Lease, named: Holder | None) -> Iterator[str]:
    if lease.claimed_for is not None:
        if not isinstance(named, Claim):
            yield f"the holder was a claim, and is {'its caller' if named is None else holders.said(named)}"
    elif named is not None and not any(holders.are_same(each, named) for each in lease.holders):
        yield f"the holder was {holders.said(lease.holders[0])}, and is {holders.said(named)}"


def _differences(lease: Lease, request: LeaseRequest) -> Iterator[str]:
    for name in _NAMES:
        before, now = getattr(lease.request, name), getattr(request, name)
        if before == now or (name == "ttl" and before is None and lease.ttl is not None):
            continue  # a lease of an mpsd that did not note what was asked for, or of a quota that sets it
        yield f"{name} was {_said(before)}, and is {_said(now)}"


def _said(value: object) -> str:
    if value is None:
        return "not given"
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if type(value) is str else str(value)
