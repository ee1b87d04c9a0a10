"""The handlers of the lease routes: which callers may see and change a lease, and which holder a new one has."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import lru_cache, partial
from typing import Annotated, Final

from msgspec import Raw

from mpsd.client import answer_types
from mpsd.core import health, holders, model
from mpsd.core.admission import users
from mpsd.core.admission.ledger import QueuePlace
from mpsd.core.containers import cdi
from mpsd.core.enforcement.violations import Doubt, Violation
from mpsd.core.errors import (
    CapacityError,
    DoesNotFitError,
    GateFailedError,
    InvalidRequestError,
    NotPermittedError,
)
from mpsd.core.model import Lease, LeaseState, Share
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.roles import check_reserved
from mpsd.core.units import format_size
from mpsd.daemon.api import bodies, naming, rendering
from mpsd.daemon.api.decoding import parameter
from mpsd.daemon.api.table import Request, RequestOf, RequestQuery, encoded, is_own, sight
from mpsd.daemon.metrics.collector import Collector
from mpsd.daemon.node.node import Node
from mpsd.system import clock
from mpsd.system.files.encoding import to_json
from mpsd.system.host import installation
from mpsd.system.processes import proc

_LARGEST: Final = 3
"""Maximum leases that a refusal names."""

_NAME: Final = 40
"""Maximum characters of a lease's name in a refusal."""


class LeasesQuery(RequestQuery, frozen=True):
    """The leases that a caller requests."""

    ended: Annotated[bool, parameter("Whether leases that ended not long ago are listed too, at most 256.")] = False


class CdiQuery(RequestQuery, frozen=True):
    """The contents of a container's CDI document beside its lease's pipe directory."""

    shared_memory: Annotated[
        bool, parameter("Whether the container gets the machine's /dev/shm, as drivers before 580 need it.")
    ] = False


class ReleaseQuery(RequestQuery, frozen=True):
    """The condition of a release."""

    untaken: Annotated[
        bool, parameter("Whether it is released only while it is a claim that was not taken; 409 otherwise.")
    ] = False


class LeaseHandlers:
    """The handlers of the leases of one node."""

    def __init__(self, node: Node, collector: Collector) -> None:
        self._node = node
        self._collector = collector
        self._outlines: dict[str, tuple[Lease, int, Raw]] = {}
        """By id, the last outline of a lease as JSON, with the lease and the clocks' difference that it shows."""

    async def leases(self, request: RequestOf[LeasesQuery]) -> answer_types.Leases:
        """Return the leases that the caller may see, ended ones on request, and the sums of the others."""
        self._node.leases.group_commit.commit()
        ledger = self._node.leases.ledger
        places = ledger.places(clock.monotonic())
        listed = [*ledger.all(), *(self._node.leases.ended if request.content.ended else ())]
        may_see = sight(request, self._node.settings.current)
        seen = [lease for lease in listed if may_see(lease)]
        hidden = [lease for lease in ledger.all() if not may_see(lease)]
        shares = [share for lease in hidden for share in lease.shares]
        violations, doubts = self._findings()
        if len(self._outlines) > 2 * len(listed):  # most of them ended
            self._outlines.clear()
        shown = (
            self._shown(lease, places.get(lease.id), violations, doubts, own=own, secret=False)
            if (own := is_own(request, lease)) or lease.id in places or lease.id in violations or lease.id in doubts
            else self._outline(lease)
            for lease in seen
        )
        return answer_types.Leases(
            leases=await encoded(shown, request.pause),
            others=answer_types.Others(
                leases=len(hidden),
                waiting=sum(lease.state is LeaseState.WAITING for lease in hidden),
                threads_granted=sum(share.threads.tenths for share in shares) / 10,
                memory_granted=sum(share.memory.bytes for share in shares),
            ),
        )

    def _outline(self, lease: Lease) -> Raw:
        """Return the outline of a lease with nothing to add, which every caller but its owner sees: it is made once.

        Its expiry is a time of day, so that it is made again where that clock was set.
        """
        time_of_day, monotonic = clock.both()
        offset = round((time_of_day - monotonic) / 1e6)
        before = self._outlines.get(lease.id)
        if before is None or before[0] is not lease or before[1] != offset:
            before = self._outlines[lease.id] = lease, offset, Raw(to_json(rendering.outline(lease, None)))
        return before[2]

    def _shown(
        self,
        lease: Lease,
        place: QueuePlace | None,
        violations: Mapping[str | None, list[Violation]],
        doubts: Mapping[str, list[Doubt]],
        *,
        own: bool,
        secret: bool,
    ) -> answer_types.Lease:
        """Return a lease with the last findings about its processes, the state of its holders, and its keepers.

        Keepers are the processes that keep it where all holders are gone. Of a lease that is not the caller's `own`,
        the answer is an outline.
        """
        answer = rendering.lease(lease, place, secret=secret) if own else rendering.outline(lease, place)
        answer["violations"] = [rendering.violation(each) for each in violations.get(lease.id, ())]
        answer["unknown"] = [each.because for each in doubts.get(lease.id, ())]
        if not own or self._node.leases.ledger.find(lease.id) is None or lease.claim is not None:
            return answer  # without a living lease, perhaps for a moment only, its holders are not watched
        for holder, said in zip(lease.holders, answer["holders"], strict=True):
            if not self._node.leases.holder_watch.lives(lease.id, holder):
                said["gone"] = True
        if all("gone" in each for each in answer["holders"]):
            # A bearer that has become a client is named once, as the client.
            kinds = {**dict.fromkeys(lease.bearers, "bearer"), **dict.fromkeys(lease.clients, "client")}
            answer["keepers"] = [
                answer_types.Keeper(kind=kind, pid=each.pid, name=proc.command_of(each.pid))
                for each, kind in kinds.items()
            ]
        return answer

    def _findings(self) -> tuple[Mapping[str | None, list[Violation]], Mapping[str, list[Doubt]]]:
        """Return the last known violations and doubts, by lease."""
        violations, doubts = defaultdict[str | None, list[Violation]](list), defaultdict[str, list[Doubt]](list)
        for violation in self._node.violation_monitor.violations:
            violations[violation.lease].append(violation)
        for doubt in self._node.violation_monitor.doubts:
            doubts[doubt.lease].append(doubt)
        return violations, doubts

    def _theirs(self, request: Request, *, outline: bool = False) -> Lease:
        """Return the lease in the path. Raises NotFoundError, and NotPermittedError for another user's lease.

        `outline`: whether one is enough that the caller may only see.
        """
        lease = self._node.leases.find(request.names["id"])
        permits = sight(request, self._node.settings.current) if outline else partial(is_own, request)
        if not permits(lease):
            raise NotPermittedError(
                f"lease {lease.id} belongs to another user", hint="ask its owner or an administrator"
            )
        return lease

    async def lease(self, request: Request) -> answer_types.Lease:
        lease = self._theirs(request, outline=True)
        own = is_own(request, lease)
        place = self._node.leases.ledger.place(lease.id, clock.monotonic())
        answer = self._shown(lease, place, *self._findings(), own=own, secret=own)
        self._node.leases.group_commit.commit()
        return answer

    async def admit(self, request: RequestOf[bodies.LeaseRequest]) -> answer_types.Lease:
        """Grant a lease, now or after waiting for it, or say why not."""
        began, body = clock.monotonic(), request.content
        if not request.principal.admin:
            check_reserved(body.labels, body.request_id)
            if body.owner is not None:
                raise NotPermittedError(
                    "only an administrator can take out a lease for another user",
                    hint="take it out for yourself, without an owner (--user), or ask an administrator",
                )
        try:
            with naming.of_request(request, self._node.settings.current) as (owner, user, holder):
                lease = await self._node.admit(
                    _lease_request(body),
                    owner,
                    holder,
                    user,
                    wait=body.wait,
                    ttl=body.ttl,
                    has_left=request.peer.has_left,
                    is_named=body.pid is not None or body.holder is not None,
                )
        except CapacityError as error:
            if error.limit in health.LIMITS and not request.principal.operator:
                error.hint = health.REFUSED_HINT
            elif isinstance(error, DoesNotFitError):
                error.hint += self._holding(request, error)
            raise
        if lease.granted == lease.created:  # the request did not wait
            self._collector.grants.observe(clock.monotonic() - began)
        return rendering.lease(lease)

    def _holding(self, request: Request, error: DoesNotFitError) -> str:
        """Name the leases that hold most of the lacking resource, if its caller may see them, and the others' sum."""
        found = [
            (lease, share)
            for lease in self._node.leases.ledger.all()
            for share in lease.shares
            if error.gpu == share.gpu
        ]
        order = -1 if error.limit == "threads" else 1  # the lacking amount decides, and the other one where it is equal
        found.sort(key=lambda each: (each[1].memory.bytes, each[1].threads.tenths)[::order], reverse=True)
        may_see = sight(request, self._node.settings.current)
        seen = [each for each in found if may_see(each[0])]
        hidden = [share for lease, share in found if not may_see(lease)]
        said = [
            f"{lease.id} ({f'{lease.request.name[:_NAME]}, ' if lease.request.name else ''}uid {lease.owner.uid}) has"
            f" {_amount([share])}"
            for lease, share in seen[:_LARGEST]
        ]
        if hidden:
            said.append(f"leases of other users have {_amount(hidden)}")
        return f"; {', '.join(said)}" if said else ""

    async def add_holder(self, request: RequestOf[bodies.HolderRequest]) -> answer_types.Lease:
        """Add or replace the holder of a lease, or take its claim; answer when that is stored and the limits open."""
        body, lease = request.content, self._node.leases.find(request.names["id"])
        if body.token is not None and not naming.is_token(body.token, lease):
            raise NotPermittedError(
                f"the token is not that of lease {lease.id}",
                hint="pass the token that came with the lease (MPSD_LEASE_TOKEN)",
            )
        if body.claim is not None:
            seconds = naming.claim_seconds(request, self._node.settings.current)
            await self._see_clients(lease)
            return rendering.lease(await self._node.leases.claims.leave(lease.id, seconds, body.claim.uid))
        if body.token is None:
            self._theirs(request)
            naming.check_holders(request, lease)
        is_claim = body.token is not None or lease.claim is not None
        with naming.of_holder(request, lease, is_claim=is_claim) as (owner, user, named):
            if is_claim:
                lease = await self._node.take(lease.id, owner, named, user)
            else:
                self._node.quarantine.check(lease.owner.uid, holders.origin(named.holder))
                lease = await self._node.leases.claims.add(lease.id, named, replace=body.replace)
        return rendering.lease(lease)

    async def release(self, request: RequestOf[ReleaseQuery]) -> None:
        """End a lease; a lease that has ended already is no error.

        Raises AlreadyClaimedError for a lease that was taken, where the caller wants to release it only if it was not.
        The check and the release take place in the same turn of the loop.
        """
        lease = self._theirs(request)
        if request.content.untaken:
            self._node.leases.claims.check_untaken(lease)
        verb = "released" if lease.owner.uid == request.uid else "revoked"
        await self._node.leases.release(lease.id, f"uid {request.uid} {verb} it")

    async def end(self, request: Request) -> answer_types.Lease:
        """End the clients of a lease, and then the lease; stored before the answer."""
        lease = self._theirs(request)
        await self._see_clients(lease)
        self._node.leases.close(lease.id, f"uid {request.uid} ended it")
        return rendering.lease(self._node.leases.find(lease.id), None)

    async def _see_clients(self, lease: Lease) -> None:
        """Find the clients of a lease that have just attached."""
        if lease.shares and lease.state is not LeaseState.ENDED:
            await self._node.refresh(lease)

    async def renew(self, request: RequestOf[bodies.RenewRequest]) -> answer_types.Lease:
        """Extend a lease."""
        lease = self._theirs(request)
        self._node.quarantine.check(lease.owner.uid)
        ttl = users.time_to_live(
            users.quota_of(request.principal.user, self._node.settings.current), request.content.ttl
        )
        return rendering.lease(self._node.leases.renew(lease.id, ttl or request.content.ttl))

    async def attach(self, request: Request) -> answer_types.Lease:
        """Open a lease's limits for its further processes, and answer when they are open."""
        lease = self._theirs(request)
        self._node.quarantine.check(lease.owner.uid)
        return rendering.lease(await self._node.leases.clients.attach(lease.id))

    async def cdi(self, request: RequestOf[CdiQuery]) -> bytes:
        """Return the CDI document of a claimed lease that no holder has taken; its hook runs mpsd's own mpsctl.

        Raises AlreadyClaimedError, and NotFoundError for a lease that waits or has ended.
        """
        lease = self._node.leases.claims.untaken(self._theirs(request).id)
        if len(lease.shares) > 1:
            raise InvalidRequestError(
                f"lease {lease.id} is on {len(lease.shares)} GPUs, and a process can use only one of them",
                hint="claim a lease on one GPU for each container",
                limit="gpus",
            )
        self._node.leases.group_commit.commit()
        device = cdi.Device(lease.id, str(self._node.settings.current.socket))
        variables = rendering.lease(lease)["env"]
        program = (str(installation.programs() / "mpsctl"),)
        return cdi.encode(cdi.document(device, variables, program=program, shared_memory=request.content.shared_memory))

    async def gate(self, request: RequestOf[bodies.GateRequest]) -> answer_types.Gate:
        """Answer when this many processes of a lease wait here and each is verified, or refuse all of them at once."""
        # The kernel says which process calls. One that belongs to the lease by its token alone is known to do so once a
        # server lists it.
        lease, caller, wanted = self._theirs(request), naming.connected(request), request.content
        if lease.state in {LeaseState.WAITING, LeaseState.ENDED}:
            because = f"lease {lease.id} has no processes that could wait for each other: it {_now_is(lease)}"
            raise GateFailedError(because, hint="wait at the gate of a lease that is granted: mpsctl leases")
        clients = self._node.leases.clients
        if not clients.is_process_of(lease, caller.identity):
            await self._see_clients(lease)
        if not clients.is_process_of(lease, caller.identity) or caller.is_gone():
            raise NotPermittedError(
                f"process {caller.pid} is no process of lease {lease.id}",
                hint="wait at its gate in the processes that its holder starts; each opens a connection of its own",
            )
        pids = await self._node.gates.wait(lease, caller, wanted.processes, wanted.within)
        return answer_types.Gate(lease=lease.id, processes=pids)

    async def verify(self, request: Request) -> answer_types.Verify:
        """Tell whether every process of a lease is under MPS and within its limits, by facts read for this answer."""
        lease, verdict = await self._node.verify(self._theirs(request))
        return answer_types.Verify(
            lease=lease.id,
            ok=verdict.ok,
            verdict=verdict.verdict,
            because=verdict.because,
            memory_granted=sum(share.memory.bytes for share in lease.shares),
            memory_held=sum(each.held or 0 for each in verdict.processes),
            processes=[rendering.process(each, proc.command_of(each.pid)) for each in verdict.processes],
            violations=[each.because for each in self._node.violation_monitor.violations if each.lease == lease.id],
            unknown=[*verdict.unknown],
            hint=verdict.hint or None,
        )


def _now_is(lease: Lease) -> str:
    return "waits" if lease.state is LeaseState.WAITING else f"has ended: {lease.because}"


def _amount(shares: Collection[Share]) -> str:
    threads = sum(share.threads.tenths for share in shares) / 10
    return f"{threads:g} % and {format_size(sum(share.memory.bytes for share in shares))}"


# Most requests ask for the same amount as an earlier one.
_threads: Final = lru_cache(64)(ActiveThreadPercentage.parse)
_memory: Final = lru_cache(64)(PinnedDeviceMemLimit.parse)


def _lease_request(body: bodies.LeaseRequest) -> model.LeaseRequest:
    """Convert a request from its wire form. Raises InvalidRequestError."""
    return model.LeaseRequest(
        threads=None if body.threads is None else _threads(body.threads),
        memory=None if body.memory is None else _memory(body.memory),
        fraction=body.fraction,
        gpu=body.gpu,
        gpus=body.gpus,
        processes=None if isinstance(body.processes, str) else body.processes,
        processes_max=body.processes_max,
        priority=body.priority,
        name=body.name,
        labels=body.labels,
        request_id=body.request_id,
        client_priority=body.client_priority,
        connections=body.connections,
        visible=None if body.visible is None else model.Visible(body.visible),
        stop=model.Stop(body.stop),
        ttl=body.ttl,
    )
