"""The holder and the owner that a request names, as the kernel reports them; the holder is watched until it is tied."""

import hmac
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Final, NamedTuple, TypeAlias

from mpsd.core import holders
from mpsd.core.admission import users
from mpsd.core.errors import InvalidRequestError, NotPermittedError, PeerUnknownError
from mpsd.core.model import Claim, GroupLife, Lease, Owner
from mpsd.core.roles import UserIdentity
from mpsd.core.settings import Settings
from mpsd.daemon.api.bodies import HolderRequest, LeaseRequest, RequestedClaim, RequestedOwner
from mpsd.daemon.api.table import Request, RequestOf
from mpsd.daemon.leases.holder_watch import NamedHolder
from mpsd.system.processes import control_groups, proc, process
from mpsd.system.processes.control_groups import Membership, OpenGroup, UnseenHierarchyError
from mpsd.system.processes.process import Process

Named: TypeAlias = tuple[Owner, UserIdentity, NamedHolder]
"""The owner of a lease, the same user for its quota, and the holder."""

NamedOrClaim: TypeAlias = tuple[Owner, UserIdentity, NamedHolder | Claim]
"""The same, or a claim that a holder will take."""

_ONE: Final = "name one holder"


@contextmanager
def of_request(request: RequestOf[LeaseRequest], settings: Settings) -> Iterator[NamedOrClaim]:
    """Yield the owner and the holder that a lease request names: by default the process that connected.

    The connection watches that process, and stops doing so when it closes. Raises InvalidRequestError,
    NotPermittedError, PeerUnknownError and QuotaError.
    """
    body, holder = request.content, request.content.holder
    if holder is None and body.pid is None and body.owner is None:
        living, who = connected(request), request.peer.credentials
        yield *_owner(request, None, who.uid, who.gid, living), NamedHolder.process(living)
        return
    if holder is None:
        with _process(request, body.pid) as named:
            held = NamedHolder.process(named.living, None if body.owner is None else named.real_uid)
            yield *_owner(request, body.owner, named.uid, named.gid, named.living), held
        return
    if body.pid is not None or sum(each is not None for each in (holder.cgroup, holder.unit, holder.claim)) != 1:
        raise InvalidRequestError("a lease is held by a pid, a cgroup, a unit or a claim", hint=_ONE, limit="holder")
    if holder.claim is not None:
        yield _claim(request, holder.claim, body.owner, settings)
        return
    with closing(_group(request, holder.cgroup, holder.unit)) as group:
        ttl = users.time_to_live(users.quota_of(request.principal.user, settings), body.ttl)
        _check_group(request, group, is_bounded=ttl is not None)
        yield *_owner_of_group(request, group, body.owner), NamedHolder.group(group, GroupLife(holder.life))


@contextmanager
def of_holder(request: RequestOf[HolderRequest], lease: Lease, *, is_claim: bool) -> Iterator[Named]:
    """Yield the owner and the holder of a request for another holder; `is_claim`: whether that holder takes a claim.

    Raises InvalidRequestError, NotPermittedError and PeerUnknownError.
    """
    body = request.content
    if sum(each is not None for each in (body.pid, body.cgroup, body.unit)) > 1:
        raise InvalidRequestError("a holder is a pid, a cgroup or a unit", hint=_ONE, limit="holder")
    if body.owner is not None and not (request.principal.admin and is_claim):
        raise NotPermittedError(
            "only an administrator that takes a claim can name the owner of the lease", hint="omit owner"
        )
    # 1. A process holds by itself, and counts as another user's where its uid is not that of the lease's owner.
    # 2. A process with `group` holds through its control group, which is opened before the process may be gone:
    #    the group is then certainly that of this process.
    # 3. A named group or unit has no owner of its own: it is the one that the caller names, else the one for whom a
    #    claim was made, else the user of the group's processes.
    is_bounded, life = lease.ttl is not None, GroupLife(body.life)
    if body.cgroup is None and body.unit is None:
        with _process(request, body.pid) as named:
            living = named.living
            claimed = _claiming_group(lease, living) if is_claim else None
            if claimed is not None:
                with closing(claimed):
                    yield *_owner(request, body.owner, named.uid, named.gid, None), NamedHolder.group(claimed, life)
                return
            owners = _owner(request, body.owner, named.uid, named.gid, None if body.group else living)
            if not body.group:
                owner_uid = owners[0].uid if is_claim else lease.owner.uid
                yield *owners, NamedHolder.process(living, None if named.real_uid == owner_uid else named.real_uid)
                return
            with closing(control_groups.of_process(living.pid)) as group:
                held = NamedHolder.group(group, life)  # before `is_gone`: the group is then that of this process
                if living.is_gone():
                    raise _no_process(living.pid)
                _check_group(request, group, is_bounded=is_bounded)
                yield *owners, held
        return
    with closing(_group(request, body.cgroup, body.unit)) as group:
        _check_group(request, group, is_bounded=is_bounded)
        wanted, owner = body.owner, lease.owner
        if wanted is None and lease.claim is not None and lease.claim.uid is not None:
            wanted = RequestedOwner(owner.uid, owner.gid)
        if is_claim:
            yield *_owner_of_group(request, group, wanted), NamedHolder.group(group, life)
        else:
            yield *_owner(request, wanted, owner.uid, owner.gid, None), NamedHolder.group(group, life)


def check_holders(request: Request, lease: Lease) -> None:
    """Refuse to change the holders of a lease that is held by a group which the caller may not name: a container's.

    Raises NotPermittedError and PeerUnknownError, and OSError without descriptors.
    """
    for holder in holders.groups(lease) if not request.principal.admin else ():
        may = False
        with suppress(UnseenHierarchyError):
            if (group := control_groups.reopen(holder.group)) is not None:
                with closing(group):
                    may = _may_name(request, group)
        if not may:
            raise NotPermittedError(
                f"lease {lease.id} is held by the control group {holder.group.path}, which is not delegated to uid"
                f" {request.uid}: an administrator alone changes its holders",
                hint="every process of that uid in the group is a client of the lease already; for others, take out a"
                " lease: mpsctl run",
            )


def claim_seconds(request: RequestOf[HolderRequest], settings: Settings) -> float:
    """Return how long a claim holds a lease. Raises NotPermittedError and InvalidRequestError.

    The claim is for the owner of the lease, or for the uid that it names.
    """
    body = request.content
    assert body.claim is not None  # noqa: S101 - the caller has checked it
    if not request.principal.admin:
        raise NotPermittedError("only an administrator can have a claim hold a lease", hint="hand it to a process")
    named = (body.pid, body.cgroup, body.unit, body.token, body.owner, body.claim.gid)
    if any(each is not None for each in named) or body.group or body.claim.groups or not body.replace:
        raise InvalidRequestError(
            "a claim takes the place of all holders, and is for the owner of the lease or for one uid",
            hint="pass claim, with its deadline and perhaps a uid, and replace",
            limit="holder",
        )
    return settings.admission.claim_deadline if body.claim.deadline is None else body.claim.deadline


def is_token(token: str, lease: Lease) -> bool:
    """Tell whether this is the token of a lease, in a time that does not depend on the token."""
    return bool(lease.token) and hmac.compare_digest(token.encode(errors="replace"), lease.token.encode())


def _owner(
    request: Request, wanted: RequestedOwner | None, uid: int, gid: int, holder: Process | None
) -> tuple[Owner, UserIdentity]:
    """Return the owner of a lease: the one that an administrator named, or the user of the process."""
    pid, started = (0, None) if holder is None else (holder.pid, holder.started)
    if wanted is not None:
        user = UserIdentity(wanted.uid, frozenset((wanted.gid, *wanted.groups)))
        return Owner(wanted.uid, wanted.gid, pid, started), user
    # The groups that count for quotas: all of the caller, the given one of another user.
    user = request.principal.user
    return Owner(uid, gid, pid, started), user if uid == user.uid else UserIdentity(uid, frozenset((gid,)))


def _claim(request: Request, wanted: RequestedClaim, owner: RequestedOwner | None, settings: Settings) -> NamedOrClaim:
    if not request.principal.admin:
        raise NotPermittedError(
            "only an administrator can claim a lease for others", hint="take out a lease: mpsctl run"
        )
    if owner is not None and wanted.uid not in {None, owner.uid}:
        raise InvalidRequestError("claim.uid and owner.uid differ", hint="name one of them", limit="holder")
    if owner is None and wanted.uid is not None:
        owner = RequestedOwner(wanted.uid, wanted.uid if wanted.gid is None else wanted.gid)
    seconds = settings.admission.claim_deadline if wanted.deadline is None else wanted.deadline
    credentials = request.peer.credentials
    claim = Claim(seconds, None if owner is None else owner.uid, groups=tuple(wanted.groups))
    return *_owner(request, owner, credentials.uid, credentials.gid, None), claim


# -- control groups ----------------------------------------------------------------------------------------------------


def _group(request: Request, path: str | None, unit: str | None) -> OpenGroup:
    """Open the control group that a caller named. Raises InvalidRequestError."""
    if unit is not None:
        return control_groups.of_unit(unit, 0 if request.principal.admin else request.uid)
    return control_groups.named(path or "")


def _claiming_group(lease: Lease, living: Process) -> OpenGroup | None:
    """Open the control group by which a process takes a claim, or by which the claim was taken; None for none.

    The administrator who made the claim has named such groups. Raises OSError when no descriptor is free.
    """
    if lease.claim is not None:
        group = control_groups.around(living.pid, lease.claim.groups)
    else:
        group = control_groups.around(living.pid, groups=[each.group for each in holders.groups(lease)])
    if group is not None and living.is_gone():
        group.close()
        raise _no_process(living.pid)
    return group


def _may_name(request: Request, group: OpenGroup) -> bool:
    """Tell whether a caller that is no administrator may name a control group: one that was delegated to its uid.

    The groups of the machine belong to root. The root of a container is the same uid, and may name only the group that
    it is in, and those below it. Raises PeerUnknownError.
    """
    if group.owners() != {request.uid}:
        return False
    if not request.principal.contained:
        return True
    caller = connected(request)
    own = dict(Membership(caller.pid, control_groups.hierarchies()).own()).get(group.group.hierarchy)
    return own is not None and f"{group.group.path}/".startswith(f"{own}/") and not caller.is_gone()


def _check_group(request: Request, group: OpenGroup, *, is_bounded: bool) -> None:
    """Refuse a control group that the caller may not name.

    Raises NotPermittedError, InvalidRequestError and PeerUnknownError.
    """
    if request.principal.admin:
        return
    if not _may_name(request, group):
        raise NotPermittedError(
            f"the control group {group.group.path} is not delegated to uid {request.uid}: "
            + (
                "in a container, that uid may name only the caller's own group and those below it"
                if request.principal.contained
                else "its directory and its cgroup.procs belong to another user"
            ),
            hint="name a group of your own, such as a unit of systemctl --user, or hold the lease by a process",
            limit="cgroup",
        )
    if not is_bounded:
        raise InvalidRequestError(
            "a lease that a control group holds needs a time to live: an empty group would hold it for ever",
            hint="add ttl (--ttl DURATION), and renew the lease: mpsctl renew",
            limit="ttl",
        )


def _owner_of_group(request: Request, group: OpenGroup, wanted: RequestedOwner | None) -> tuple[Owner, UserIdentity]:
    """Return the owner of a lease that a group holds: the named one, the caller, or for an administrator any user.

    Raises InvalidRequestError where no process of the group shows its user.
    """
    who = request.peer.credentials
    user: tuple[int, int] | None = (who.uid, who.gid)
    if wanted is None and request.principal.admin:
        user = next(filter(None, (proc.effective_user(pid) for pid in group.processes() if pid)), None)
    if user is None:
        raise InvalidRequestError(
            f"the control group {group.group.path} has no process yet, so its user is unknown",
            hint="name its owner: owner (--user NAME)",
            limit="owner",
        )
    return _owner(request, wanted, *user, None)


# -- processes ---------------------------------------------------------------------------------------------------------


class _NamedProcess(NamedTuple):
    """A process that a request names, with the kernel's facts about its user, all read while it lived."""

    living: Process
    uid: int
    """The uid that MPS sees, which is the effective one; the lease belongs to that user."""
    gid: int
    real_uid: int | None


@contextmanager
def _process(request: Request, pid: int | None) -> Iterator[_NamedProcess]:
    """Yield the process that a caller named, for an administrator of any user, or the caller's own.

    Raises InvalidRequestError when it is gone by now, and NotPermittedError when it belongs to another user.
    """
    who = request.peer.credentials
    if pid is None or pid == who.pid:
        living = connected(request)
        yield _NamedProcess(living, who.uid, who.gid, proc.real_uid(living.pid))
        return
    with closing(_opened(request, pid)) as living:
        user, real_uid = proc.effective_user(pid), proc.real_uid(pid)
        # A lookup by pid belongs to this process only if it still exists: then the pid was its own all the while.
        if user is None or living.is_gone():
            raise _no_process(pid)
        if user[0] != who.uid and not request.principal.admin:
            because = f"process {pid} does not belong to uid {who.uid}"
            raise NotPermittedError(because, hint="name a process of your own")
        yield _NamedProcess(living, *user, real_uid)


def connected(request: Request) -> Process:
    """Return the calling process. Raises PeerUnknownError when the kernel does not show it."""
    connected = request.peer.process()
    if connected is None:
        unseen = request.peer.credentials.pid == 0
        raise PeerUnknownError(
            (
                "the calling process is outside mpsd's pid namespace: mpsd sees its pid as 0, cannot tell it"
                " and its clients from others, and cannot tie a lease to their life"
            )
            if unseen
            else "the calling process is gone, so no lease can be tied to its life",
            hint="run mpsd's container in the host's pid namespace (hostPID: true, --pid=host)"
            if unseen
            else "keep the process that opened the connection alive for as long as its lease",
        )
    return connected


def _opened(request: Request, pid: int) -> Process:
    """Watch the process that a caller named by its pid. Raises InvalidRequestError when there is none."""
    if request.peer.credentials.pid == 0 or proc.is_nested(request.peer.credentials.pid):
        raise InvalidRequestError(
            f"process {pid} was named from another pid namespace, where this pid means another process",
            hint="take out the lease from the process that will hold it: mpsctl run",
            limit="pid",
        )
    found = process.find(pid)
    if found is None and (leader := proc.process_of_thread(pid)) is not None:
        raise InvalidRequestError(
            f"{pid} is the number of a thread of process {leader}", hint=f"name the process: {leader}", limit="pid"
        )
    if found is None:
        raise _no_process(pid)
    return found


def _no_process(pid: int) -> InvalidRequestError:
    return InvalidRequestError(f"there is no process {pid}", hint="name a running process", limit="pid")
