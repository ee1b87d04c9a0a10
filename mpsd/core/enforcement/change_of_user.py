"""Processes of a lease's family that run as another user than the lease's owner, and so are not its clients. Pure.

Entrypoints, cron jobs and prologs do this: root takes out a lease, and becomes the user whose program it starts. That
user may not reach the control daemon, so the program runs outside MPS, on the whole GPU, or fails where the GPU is
closed.
"""

from collections.abc import Iterable
from typing import Final

from mpsd.core import holders
from mpsd.core.enforcement.violations import Violation
from mpsd.core.model import HoldingProcess, Lease, ProcessIdentity, Share, ViolationKind

HINT: Final = "a lease is for one user's processes, and root starts those of another user: mpsctl run --help"


def users(lease: Lease) -> frozenset[int]:
    """Return the uids that a lease's processes may have: its owner's, and those of holders that root named."""
    named = (each.uid for each in lease.holders if isinstance(each, HoldingProcess))
    return frozenset({lease.owner.uid, *(uid for uid in named if uid is not None)})


def lost(leases: Iterable[Lease], uid: int) -> Lease | None:
    """Return the lease that a process has lost because it runs as this uid; None if it has none, or one of its own.

    `leases` are those of its ancestors and control groups, the nearest first.
    """
    found = [*leases]
    return None if any(uid in users(lease) for lease in found) else next(iter(found), None)


def said(lease: Lease, identity: ProcessIdentity, uid: int, where: str = "") -> str:
    """Describe a holder of a lease, or a process in its family, that runs as this uid, and `where` if that is known."""
    process = f"process {identity.pid} of the family of lease {lease.id}"
    if identity in holders.processes(lease):
        process = f"process {identity.pid}, the holder of lease {lease.id},"
    return (
        f"{process} runs {where}as uid {uid}, and the lease is uid {lease.owner.uid}'s, so that the process has no part"
        f" in it: start it, as root, by mpsctl run --user {uid} -- PROGRAM"
    )


def of_holder(lease: Lease, holder: ProcessIdentity, share: Share, uid: int) -> Violation:
    """Return the violation of a holder that runs as this uid now, wherever it runs."""
    return _violation(lease, share, holder, said(lease, holder, uid))


def on_gpu(lease: Lease, share: Share, identity: ProcessIdentity, uid: int, *, outside: bool) -> Violation:
    """Return the violation of a process that runs as this uid on a GPU of the lease; `outside`: not under MPS."""
    where = f"{'outside MPS, without limits, ' if outside else ''}on the GPU of {share.daemon} "
    return _violation(lease, share, identity, said(lease, identity, uid, where))


def _violation(lease: Lease, share: Share, identity: ProcessIdentity, because: str) -> Violation:
    # The owner of a lease has no right to end the process of another user.
    return Violation(
        kind=ViolationKind.USER,
        process=identity,
        lease=lease.id,
        daemon=share.daemon,
        because=because,
        hint=HINT,
        own=False,
    )
