"""What the routes of the leases do: who may see and change which lease, and who holds a new one."""

from collections.abc import Awaitable
from contextlib import closing
from datetime import timedelta
from functools import lru_cache
from typing import Final

from mpsd.core import model
from mpsd.core.admission import quota
from mpsd.core.admission.ledger import QueuePlace
from mpsd.core.errors import InvalidRequestError, NotPermittedError, PeerUnknownError
from mpsd.core.model import Lease, LeaseState, Owner
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.roles import UserIdentity
from mpsd.daemon.api import lease_schema
from mpsd.daemon.api.request import Request
from mpsd.daemon.api.schema import ViolationOut
from mpsd.daemon.node.node import Node
from mpsd.system import clock, proc, process, process_table
from mpsd.system.process import Process


class LeaseHandlers:
    """The handlers of the leases of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def leases(self, request: Request) -> lease_schema.LeasesOut:
        """Return the leases that the caller may see, and the sums of the rest."""
        ledger = self._node.leases.ledger
        places = ledger.places(clock.monotonic())
        seen = [lease for lease in ledger.all() if self._may_see(request, lease)]
        hidden = [lease for lease in ledger.all() if not self._may_see(request, lease)]
        shares = [share for lease in hidden for share in lease.shares]
        answer = lease_schema.LeasesOut(
            self._judged([_lease_out(lease, places.get(lease.id), secret=False) for lease in seen]),
            lease_schema.OthersOut(
                leases=len(hidden),
                waiting=sum(lease.state is LeaseState.WAITING for lease in hidden),
                threads_granted=sum(share.threads.tenths for share in shares) / 10,
                memory_granted=sum(share.memory.bytes for share in shares),
            ),
        )
        await self._node.leases.as_stored()
        return answer

    def _judged(self, leases: list[lease_schema.LeaseOut]) -> list[lease_schema.LeaseOut]:
        """Return leases with what was found wrong with their processes last, and what was not known of them."""
        by_id = {each.id: each for each in leases}
        for violation in self._node.violation_monitor.violations:
            if violation.lease in by_id:
                by_id[violation.lease].violations.append(ViolationOut.of(violation))
        for doubt in self._node.violation_monitor.doubts:
            if doubt.lease in by_id:
                by_id[doubt.lease].unknown.append(doubt.because)
        return leases

    def _may_see(self, request: Request, lease: Lease) -> bool:
        return self._node.settings.current.api.open or _is_own(request, lease)

    def _theirs(self, request: Request, *, act: bool) -> Lease:
        """Return the lease that the path names. Raises NotFoundError, NotPermittedError when it is another user's."""
        lease = self._node.leases.find(request.names["id"])
        allowed = _is_own(request, lease) if act else self._may_see(request, lease)
        if not allowed:
            raise NotPermittedError(
                f"lease {lease.id} belongs to another user", hint="ask its owner or an administrator"
            )
        return lease

    async def lease(self, request: Request) -> lease_schema.LeaseOut:
        """Return one lease."""
        lease = self._theirs(request, act=False)
        place = self._node.leases.ledger.place(lease.id, clock.monotonic())
        (answer,) = self._judged([_lease_out(lease, place, secret=_is_own(request, lease))])
        await self._node.leases.as_stored()
        return answer

    async def admit(self, request: Request) -> lease_schema.LeaseOut:
        """Grant a lease, now or after waiting for it, or say why not."""
        assert isinstance(request.body, lease_schema.LeaseRequest)  # noqa: S101 - the route table says so
        body = request.body
        if body.owner is not None and not request.admin:
            raise NotPermittedError(
                "only an administrator can take out a lease for another user", hint="omit owner, or ask root to do it"
            )
        if body.pid is None or body.pid == request.credentials.pid:
            credentials = request.credentials
            lease = await self._admit(request, body, _connected(request), credentials.uid, credentials.gid)
        else:
            with closing(_named(request, body.pid)) as holder:
                lease = await self._admit(request, body, holder, *_user_of(request, holder))
        return _lease_out(lease)

    def _admit(
        self, request: Request, body: lease_schema.LeaseRequest, holder: Process, uid: int, gid: int
    ) -> Awaitable[Lease]:
        owner, user = Owner(uid, gid, holder.pid, holder.started), request.user
        if body.owner is not None:
            wanted = body.owner
            owner = Owner(wanted.uid, wanted.gid, holder.pid, holder.started, proc.real_uid(holder.pid))
            user = UserIdentity(wanted.uid, frozenset((wanted.gid, *wanted.groups)))
        requested = _lease_request(body)
        return self._node.admit(
            requested, owner, holder, user, wait=body.wait, ttl=body.ttl, has_left=request.has_left, pid=body.pid
        )

    async def release(self, request: Request) -> None:
        """End a lease; one that has ended already is fine."""
        lease = self._theirs(request, act=True)
        verb = "released" if lease.owner.uid == request.credentials.uid else "revoked"
        await self._node.leases.release(lease.id, f"uid {request.credentials.uid} {verb} it")

    async def end(self, request: Request) -> lease_schema.LeaseOut:
        """End the clients of a lease, and then the lease; stored before it is answered."""
        lease = self._theirs(request, act=True)
        if lease.shares and lease.state is not LeaseState.ENDED:
            await self._node.refresh(lease)  # a client that has just attached is one of them
        await self._node.leases.closing.close(lease.id, f"uid {request.credentials.uid} ended it")
        return _lease_out(self._node.leases.find(lease.id), None)

    async def renew(self, request: Request) -> lease_schema.LeaseOut:
        """Give a lease more time."""
        assert isinstance(request.body, lease_schema.RenewRequest)  # noqa: S101 - the route table says so
        lease = self._theirs(request, act=True)
        self._node.quarantine.check(lease.owner.uid)
        ttl = quota.time_to_live(quota.quota_of(request.user, self._node.settings.current), request.body.ttl)
        return _lease_out(await self._node.leases.renew(lease.id, ttl or request.body.ttl))

    async def attach(self, request: Request) -> lease_schema.LeaseOut:
        """Open a lease's limits for those of its processes that are still to come, and answer when they are open."""
        lease = self._theirs(request, act=True)
        self._node.quarantine.check(lease.owner.uid)
        return _lease_out(await self._node.leases.clients.attach(lease.id))

    async def verify(self, request: Request) -> lease_schema.VerifyOut:
        """Tell whether every process of a lease is under MPS and within its limits, by what is read for this answer."""
        lease = self._theirs(request, act=False)
        late: list[str] = []
        if lease.shares and lease.state is not LeaseState.ENDED:
            late = await self._node.refresh(lease)
            lease = self._node.leases.find(lease.id)
        verdict = self._node.violation_monitor.verify(lease, late)
        return lease_schema.VerifyOut(
            lease=lease.id,
            ok=verdict.ok,
            verdict=verdict.verdict,
            because=verdict.because,
            memory_granted=sum(share.memory.bytes for share in lease.shares),
            memory_held=sum(each.held or 0 for each in verdict.processes),
            processes=[
                lease_schema.ProcessOut.of(each, process_table.command_of(each.pid)) for each in verdict.processes
            ],
            violations=[each.because for each in self._node.violation_monitor.violations if each.lease == lease.id],
            unknown=[*verdict.unknown],
        )


def _is_own(request: Request, lease: Lease) -> bool:
    """Tell whether a lease is the caller's own, or the caller an administrator."""
    return request.admin or lease.owner.uid == request.credentials.uid


def _lease_out(lease: Lease, place: QueuePlace | None = None, *, secret: bool = True) -> lease_schema.LeaseOut:
    """Return a lease as the wire has it, with the end of its time on the wall clock, where people look for it.

    `secret`: whether the answer is about this lease alone, and for its owner or an administrator.
    """
    expires = None
    if lease.expires is not None and lease.state is not LeaseState.ENDED:
        expires = clock.now() + timedelta(seconds=lease.expires - clock.monotonic())
    return lease_schema.LeaseOut.of(lease, expires=expires, place=place, secret=secret)


# Most ask for as much as somebody has asked for before.
_threads: Final = lru_cache(64)(ActiveThreadPercentage.parse)
_memory: Final = lru_cache(64)(PinnedDeviceMemLimit.parse)


def _lease_request(body: lease_schema.LeaseRequest) -> model.LeaseRequest:
    """Turn what came over the wire into the value that is decided upon. Raises InvalidRequestError."""
    return model.LeaseRequest(
        threads=None if body.threads is None else _threads(body.threads),
        memory=None if body.memory is None else _memory(body.memory),
        fraction=body.fraction,
        gpu=body.gpu,
        gpus=body.gpus,
        processes=None if isinstance(body.processes, str) else body.processes,
        priority=body.priority,
        name=body.name,
        labels=body.labels,
        request_id=body.request_id,
        client_priority=body.client_priority,
        stop=model.Stop(body.stop),
        ttl=body.ttl,
    )


def _connected(request: Request) -> Process:
    """Return the process that called. Raises PeerUnknownError when the kernel does not show it."""
    connected = request.process()
    if connected is None:
        unseen = request.credentials.pid == 0
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


def _named(request: Request, pid: int) -> Process:
    """Watch the process that a caller named by its pid. Raises InvalidRequestError when it is none."""
    if request.credentials.pid == 0 or proc.is_nested(request.credentials.pid):
        raise InvalidRequestError(
            f"process {pid} was named from another pid namespace, where this pid means another process",
            hint="take out the lease from the process that is to hold it: mpsctl run",
            limit="pid",
        )
    found = process.find(pid)
    if found is None and (leader := process_table.process_of_thread(pid)) is not None:
        raise InvalidRequestError(
            f"{pid} is the number of a thread of process {leader}", hint=f"name the process: {leader}", limit="pid"
        )
    if found is None:
        raise _no_process(pid)
    return found


def _user_of(request: Request, named: Process) -> tuple[int, int]:
    """Return the uid and gid of a process that a caller named: one of its own, or anybody's for an administrator.

    The lease is that user's, whose uid is the one that MPS sees. Raises InvalidRequestError when it is gone by now, and
    NotPermittedError when it is another user's.
    """
    user = process_table.user_of(named.pid)
    # What was looked up by pid is about this process only if it is there still: its pid was its own all the while.
    if user is None or named.is_gone():
        raise _no_process(named.pid)
    if user[0] != request.credentials.uid and not request.admin:
        because = f"process {named.pid} does not belong to uid {request.credentials.uid}"
        raise NotPermittedError(because, hint="name a process of your own")
    return user


def _no_process(pid: int) -> InvalidRequestError:
    return InvalidRequestError(f"there is no process {pid}", hint="name a running process", limit="pid")
