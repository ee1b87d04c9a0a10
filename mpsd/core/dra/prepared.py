"""What was prepared for a claim: the driver's own record, which kubelet expects it to have. Pure.

kubelet says once that a claim is to be prepared, and perhaps hours later that it is over; it may have been restarted
between, and so may the driver and mpsd. The record says what each share is to be like, so that its lease can be claimed
again where it has ended before the claim was over: when the node was restarted, or when no container came in time.
"""

import re
from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from msgspec import Struct, structs

from mpsd.core.dra.allocation import Share
from mpsd.core.kubernetes import pods
from mpsd.core.kubernetes.claims import Holder

VERSION: Final = 1
"""Of the record's form."""


class PreparedShare(Struct, forbid_unknown_fields=True):
    """A share, as it was allocated."""

    request: str
    pool: str
    device: str
    share_id: str | None
    gpu: str
    tenths: int
    mebibytes: int
    client_priority: int | None = None
    processes: int | str | None = None
    stop: str | None = None
    user: int | None = None

    @classmethod
    def of(cls, share: Share) -> "PreparedShare":
        """Make it from what was allocated."""
        wanted = share.configuration
        return cls(
            request=share.request,
            pool=share.pool,
            device=share.device,
            share_id=share.share_id,
            gpu=share.gpu,
            tenths=share.tenths,
            mebibytes=share.mebibytes,
            client_priority=wanted.priority,
            processes=wanted.processes,
            stop=wanted.stop,
            user=wanted.user,
        )


class PreparedPod(Struct, forbid_unknown_fields=True):
    """A pod that the claim was reserved for when it was prepared."""

    uid: str
    name: str


class Stage(StrEnum):
    """How far a claim is."""

    BEGUN = "begun"
    """kubelet has asked, and was not answered yet."""
    PREPARED = "prepared"
    OVER = "over"
    """kubelet has said that it is: nothing of it is claimed again."""


class PreparedClaim(Struct, forbid_unknown_fields=True):
    """A claim that kubelet had prepared, or began to."""

    uid: str
    namespace: str
    name: str
    pods: list[PreparedPod]
    shares: list[PreparedShare]
    stage: Stage = Stage.BEGUN
    version: int = VERSION

    def at(self, stage: Stage) -> "PreparedClaim":
        """Return it at another stage."""
        return structs.replace(self, stage=stage)

    def of_pods(self, reserved: list[PreparedPod]) -> "PreparedClaim":
        """Return it with the pods that it is reserved for now."""
        return structs.replace(self, pods=reserved)


# -- its leases --------------------------------------------------------------------------------------------------------

_REQUEST: Final = re.compile(r"dra-([0-9A-Za-z-]{1,64})-([0-9]{1,3})")


def request_id(claim: str, number: int) -> str:
    """Return what makes mpsd answer a repeated request for a share with the same lease, for as long as that lives."""
    return f"dra-{claim}-{number}"


class ShareLease(NamedTuple):
    """The lease of a share."""

    lease: str
    claim: str
    number: int
    """Which share of its claim."""
    pod: str | None
    """The uid of the pod whose control group holds it; None while it is a claim of mpsd's."""
    group: str
    uid: int
    """Its owner."""
    left: float
    """Seconds until the claim ends."""
    has_clients: bool = False


def share_lease(lease: str, request: str | None, uid: int, held: Iterable[Holder], now: datetime) -> ShareLease | None:
    """Return a lease as that of a share; None for any other.

    Anybody may choose a request_id. So a lease counts only where an administrator alone can have made it so: one that
    is held by a claim, or by the control group of a pod.
    """
    match = _REQUEST.fullmatch(request or "")
    if match is None:
        return None
    for each in held:
        if each.kind == "claim":
            left = (datetime.fromisoformat(each.deadline) - now).total_seconds() if each.deadline else 0.0
            return ShareLease(lease, match[1], int(match[2]), None, "", uid, left)
        pod = pods.pod_of(each.group) if each.kind == "cgroup" else None
        if pod is not None:
            return ShareLease(lease, match[1], int(match[2]), pod, each.group, uid, 0.0)
    return None


# -- what is next ------------------------------------------------------------------------------------------------------


class Release(NamedTuple):
    """End a lease that no claim has; one that is a claim of mpsd's only if nobody takes it first."""

    lease: ShareLease
    because: str


class Renew(NamedTuple):
    """Give a claim of mpsd's more time."""

    lease: ShareLease


class Take(NamedTuple):
    """Have a lease taken by a pod of its claim, once one is there, and for the user of its program."""

    lease: ShareLease
    claim: PreparedClaim


class Replace(NamedTuple):
    """Claim the leases again that a prepared claim has lost."""

    claim: PreparedClaim


class Finish(NamedTuple):
    """Take back what is left of a claim that is over."""

    claim: PreparedClaim


class Forget(NamedTuple):
    """Forget a claim that was never prepared, and has nothing any more."""

    claim: PreparedClaim


Action: TypeAlias = Release | Renew | Take | Replace | Finish | Forget


def next_actions(
    claims: Iterable[PreparedClaim],
    leases: Iterable[ShareLease],
    is_populated: Callable[[str], bool],
    deadline: float,
) -> list[Action]:
    """Return what is next about each claim, and about each lease that none has.

    `deadline` is how long a claim of mpsd's lives unless it is renewed. A claim that was begun is kubelet's to repeat
    or to end; until then its leases are not renewed, so that nothing stays where kubelet has forgotten it.
    """
    known = {each.uid: each for each in claims}
    had: dict[str, dict[int, ShareLease]] = {uid: {} for uid in known}
    actions: list[Action] = []
    for each in leases:
        owner = known.get(each.claim)
        if owner is not None and each.number < len(owner.shares):
            had[each.claim][each.number] = each
        elif each.pod is None or not is_populated(each.group):
            actions.append(Release(each, "no claim is prepared that has it"))
    for uid, claim in known.items():
        actions += _next_of(claim, had[uid].values(), deadline)
    return actions


def _next_of(claim: PreparedClaim, leases: Collection[ShareLease], deadline: float) -> list[Action]:
    match claim.stage:
        case Stage.OVER:
            return [Finish(claim)]
        case Stage.BEGUN:
            return [] if leases else [Forget(claim)]
        case Stage.PREPARED:
            replace = [Replace(claim)] if len(leases) < len(claim.shares) else []
            renew = [Renew(each) for each in leases if each.pod is None and each.left < deadline / 2]
            return [*replace, *renew, *(Take(each, claim) for each in leases if not each.has_clients)]
