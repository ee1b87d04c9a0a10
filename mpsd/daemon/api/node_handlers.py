"""The handlers of the node routes: a request's value in, an answer's value out. The dispatcher has checked the role."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated, Final

from mpsd import __version__
from mpsd.client import answer_types
from mpsd.core import gpus, health, model, roles
from mpsd.core.admission.admission import NOTHING, Amount
from mpsd.core.configuration.document import effective
from mpsd.core.enforcement.verification import Verdict
from mpsd.core.enforcement.violations import Violation
from mpsd.core.errors import DaemonNotReadyError, MpsdError, NotPermittedError
from mpsd.core.model import GpuView, Health, Known
from mpsd.core.roles import UserIdentity
from mpsd.daemon.accounting.accountant import Accountant
from mpsd.daemon.api import rendering
from mpsd.daemon.api.bodies import Uid
from mpsd.daemon.api.decoding import parameter
from mpsd.daemon.api.table import Request, RequestOf, RequestQuery, encoded, is_own, sees_others
from mpsd.daemon.http.message import Answer
from mpsd.daemon.metrics.collector import Collector, negotiated
from mpsd.daemon.node.node import Node
from mpsd.system.processes import proc

_WELL: Final = (Verdict.OK, "", "")


class MetricsQuery(RequestQuery, frozen=True):
    """The metrics that a caller requests."""

    users: Annotated[
        bool, parameter("Whether to include metrics about individual users, their leases and clients.")
    ] = True


class GpusQuery(RequestQuery, frozen=True):
    """The user whose free amounts a caller requests."""

    uid: Annotated[
        Uid | None,
        parameter("The uid for whose next request the free amounts are; the caller's by default. For administrators."),
    ] = None


class NodeHandlers:
    """The handlers of the state of one node: its health, GPUs, control daemons and clients, and its settings."""

    def __init__(self, node: Node, accountant: Accountant, collector: Collector) -> None:
        self._node = node
        self._accountant = accountant
        self._collector = collector

    async def healthz(self, _: Request) -> answer_types.Health:
        """Tell whether mpsd itself answers."""
        return answer_types.Health(ok=True, because="mpsd answers")

    async def readyz(self, _: Request) -> answer_types.Health:
        """Tell whether the node is healthy; 503 when it is not."""
        node = self._node.health()
        return answer_types.Health(ok=node.healthy, because=node.because)

    async def principal(self, request: Request) -> answer_types.Principal:
        """Return the user and the role of the caller."""
        who, role = request.peer.credentials, request.principal.role
        assert role is not None  # noqa: S101 - the dispatcher has checked it
        return answer_types.Principal(uid=who.uid, gid=who.gid, role=role.name.lower())

    async def metrics(self, request: RequestOf[MetricsQuery]) -> Answer:
        """Return the metrics of the node: sums for every caller, and series of the caller's own leases.

        Administrators have the series of all leases. Others, such as the user of a scraper, do not: every one of these
        series is stored, and lists show who has which lease.
        """
        media_type = negotiated(request.accept)
        shows = partial(is_own, request) if request.content.users else None
        return Answer(200, await self._collector.answer(media_type, shows), media_type)

    async def status(self, request: Request) -> answer_types.Status:
        """Return the node in one answer, all of it from one moment."""
        free = await self._node.free(request.principal.user)
        node, found, operator = self._node, self._node.health(), request.principal.operator
        return answer_types.Status(
            healthy=found.healthy,
            because=found.because,
            headline=found.headline,
            reasons=[rendering.reason(each, operator=operator) for each in found.reasons],
            warnings=[rendering.reason(each, operator=operator) for each in found.warnings],
            violations=[rendering.violation(each) for each in node.violation_monitor.violations],
            version=__version__,
            simulated=node.simulated,
            since=rendering.time(node.since),
            gpus=[self._gpu(view, found.daemons, request, free) for view in found.gpus],
            daemons=[rendering.daemon(each, operator=operator) for each in found.daemons],
            leases=len(node.leases.ledger.leases),
            waiting=len(node.leases.ledger.waiting),
            clients=sum(len(server.clients) for daemon in found.daemons for server in daemon.servers),
            notes=self._notes(found.daemons),
        )

    def _notes(self, daemons: Iterable[model.Daemon]) -> list[str]:
        """Return notes for the operator about facts that are no faults."""
        notes = [f"{each.because}; it needs {each.remedy}" for each in self._node.missing]
        notes += filter(None, (roles.unknown_names(self._node.settings.current.names),))
        notes += self._node.gpus.notes()
        if trouble := self._accountant.trouble:
            notes.append(f"the history of granted and held amounts is not stored: {trouble}")
        notes += filter(None, (self._collector.trouble,))
        if lost := self._node.lost_lines:
            notes.append(f"{lost} lines of mpsd's log were lost, since its reader is gone or slow (mpsctl events)")
        notes += [
            f"{each.name}: this driver has no pinned device memory limit (535 has), so memory is counted only"
            for each in daemons
            if not each.has_mem_limit
        ]
        return notes

    async def gpus(self, request: RequestOf[GpusQuery]) -> answer_types.Gpus:
        user, uid = request.principal.user, request.content.uid
        if uid is not None and uid != user.uid:
            if not request.principal.admin:
                raise NotPermittedError("only an administrator can ask for another user", hint="omit uid")
            user = UserIdentity(uid, frozenset((uid,)))
        self._node.gpus.note_watcher()
        free = await self._node.free(user)
        daemons = self._node.control_daemons.all()
        return answer_types.Gpus(gpus=[self._gpu(view, daemons, request, free) for view in self._node.gpus.views()])

    def _gpu(
        self, view: GpuView, daemons: Iterable[model.Daemon], request: Request, free: Mapping[str, Amount | MpsdError]
    ) -> answer_types.Gpu:
        gpu, settings, who = view.gpu, self._node.settings.current, request.principal
        sees = sees_others(request, settings)
        users, is_one = self._node.leases.ledger.users(gpu.uuid) if gpu else ((), False)
        given = self._node.leases.ledger.taken(gpu.uuid) if gpu else NOTHING
        unleased = self._node.unleased.on(gpu.uuid) if gpu else NOTHING
        refused, impaired = health.verdict(view, daemons, self._node.leases.group_commit.trouble)
        activity = view.usage.value.activity if isinstance(view.usage, Known) else model.Activity()
        found = free.get(gpu.uuid, NOTHING) if gpu else NOTHING
        if refused is not None:
            hint = refused.hint_for(operator=who.operator)
            found = DaemonNotReadyError(refused.because, hint=hint, limit=refused.kind.limit)
        left, obstacle = (NOTHING, found) if isinstance(found, MpsdError) else (found, None)
        return answer_types.Gpu(
            uuid=gpu.uuid if gpu else None,
            index=view.index,
            name=gpu.name if gpu else None,
            memory_total=gpu.memory_total if gpu else None,
            memory_reserved=settings.admission.memory_reserve + (gpu.memory_reserved if gpu else 0),
            threads_total=100 * settings.admission.threads_oversubscription,
            threads_granted=given.threads / 10,
            memory_granted=given.memory,
            memory_held=view.usage.value.memory_used if isinstance(view.usage, Known) else None,
            utilization=activity.utilization,
            temperature=activity.temperature,
            power=activity.power,
            power_limit=activity.power_limit,
            clients=given.places,
            clients_max=gpus.clients_max(gpu) if gpu else None,
            threads_unleased=unleased.threads / 10,
            memory_unleased=unleased.memory,
            clients_unleased=unleased.places,
            compute_mode=view.usage.value.compute_mode if isinstance(view.usage, Known) else None,
            health=view.health,
            because=view.because,
            hint=health.hint_for(view.hint, refuses=view.health is not Health.OK, operator=who.operator),
            refused=refused.because if refused else None,
            refused_kind=refused.kind if refused else None,
            impaired=impaired.because if impaired else None,
            threads_free=left.threads / 10,
            memory_free=left.memory,
            clients_free=left.places,
            obstacle=rendering.obstacle(obstacle, operator=who.operator) if obstacle else None,
            hardware=rendering.hardware(gpu) if gpu else None,
            users=sorted(uid for uid in users if is_one or sees or uid == request.uid),
        )

    async def daemons(self, request: Request) -> answer_types.Daemons:
        return answer_types.Daemons(
            daemons=[
                rendering.daemon(each, operator=request.principal.operator) for each in self._node.control_daemons.all()
            ]
        )

    async def clients(self, request: Request) -> answer_types.Clients:
        """Return the clients of every server that the caller may see, and the sums of the others.

        The program of another user's client is left out.
        """
        self._inspect_new_clients()
        others = answer_types.OtherClients(clients=0, memory_held=0)
        found = await encoded(self._clients(request, others), request.pause)
        return answer_types.Clients(clients=found, others=others)

    def _clients(self, request: Request, others: answer_types.OtherClients) -> Iterator[answer_types.Client]:
        """Yield the clients that the caller may see, and add the others to their sums."""
        attached = (each for each in self._node.violation_monitor.attached() if each.lease is not None and each.counted)
        leases = {(each.client.daemon, each.client.identity.pid): each.lease for each in attached if each.lease}
        judged, sees = self._judged(), sees_others(request, self._node.settings.current)
        listed = (
            (daemon, server, pid)
            for daemon in self._node.control_daemons.all()
            for server in daemon.servers
            for pid in server.clients
        )
        for daemon, server, pid in listed:
            uid, lease = proc.effective_uid(pid), leases.get((daemon.name, pid))
            held = self._node.gpus.held(daemon.gpu, pid)
            own = request.principal.admin or request.uid in {uid, lease.owner.uid if lease else None}
            if own or sees:
                verdict, because, hint = judged.get((daemon.name, pid), _WELL)
                yield answer_types.Client(
                    pid=pid,
                    name=proc.command_of(pid) if own else "",
                    uid=uid,
                    daemon=daemon.name,
                    gpu=daemon.gpu,
                    server=server.pid,
                    lease=lease.id if lease else None,
                    memory_held=held,
                    verdict=verdict,
                    because=because,
                    hint=hint,
                )
            else:
                others["clients"] += 1
                others["memory_held"] += held or 0

    def _inspect_new_clients(self) -> None:
        """Have the clients inspected that control daemons have listed since the last inspection.

        A daemon lists a client as soon as it has named it, although the rest of its conversation may take long.
        """
        inspected = self._node.violation_monitor.listed()
        listed = (
            (client, daemon.gpu)
            for daemon in self._node.control_daemons.all()
            for server in daemon.servers
            for client in server.opened
        )
        if any(gpu not in inspected.get(client, ()) for client, gpu in listed):
            self._node.inspect()

    def _judged(self) -> dict[tuple[str, int], tuple[Verdict, str, str]]:
        """Return the clients with a violation or a doubt, by control daemon and pid, with the reason and the remedy."""
        monitor = self._node.violation_monitor
        found = {(each.daemon, each.process.pid): (Verdict.UNKNOWN, each.because, "") for each in monitor.doubts}
        violations: dict[tuple[str, int], list[Violation]] = {}
        for each in monitor.violations:
            violations.setdefault((each.daemon, each.process.pid), []).append(each)
        for client, broken in violations.items():
            found[client] = (Verdict.VIOLATION, "; ".join(each.because for each in broken), broken[0].hint)
        return found

    async def quarantines(self, _: Request) -> answer_types.Quarantines:
        """Return those who are quarantined, and who had pipe access at recent crashes of control daemons."""
        found = self._node.quarantine
        return answer_types.Quarantines(
            quarantines=[*map(rendering.quarantine, found.quarantined)],
            suspects=[*map(rendering.suspect, found.suspects)],
        )

    async def config(self, _: Request) -> answer_types.Config:
        """Return the settings in force."""
        return answer_types.Config(config=effective(self._node.settings.current))
