"""What the routes of the node do: a request's value in, an answer's value out. The dispatcher checks roles before."""

from datetime import timedelta
from typing import Final

from mpsd import __version__
from mpsd.core import model, mps_facts, settings
from mpsd.core.admission.admission import Amount
from mpsd.core.gpus import driver_branch
from mpsd.core.lifecycle import State
from mpsd.core.model import Drift, Health, Known
from mpsd.daemon.api import schema
from mpsd.daemon.api.request import Request
from mpsd.daemon.gpu.gpus import GpuView
from mpsd.daemon.node.node import Node, faulted
from mpsd.system import clock, process_table

_TOLD: Final = timedelta(hours=1)
"""For how long a limit that others changed is told about after mpsd put it back."""


class NodeHandlers:
    """The handlers of what one node is: its health, its GPUs, control daemons and clients, and its settings."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def healthz(self, _: Request) -> schema.HealthOut:
        """Tell whether mpsd itself answers."""
        return schema.HealthOut(ok=True, because="mpsd answers")

    async def readyz(self, _: Request) -> schema.HealthOut:
        """Tell whether the node is healthy; 503 when it is not."""
        reasons = self._reasons()
        return schema.HealthOut(ok=not reasons, because="; ".join(reasons) or "every control daemon is ready")

    async def status(self, _: Request) -> schema.StatusOut:
        """Return the node in one answer."""
        node, reasons, daemons = self._node, self._reasons(), self._node.daemons()
        gpus = [schema.ComponentOut(f"GPU {view.index}", view.health, view.because) for view in node.gpus.views()]
        drift = [
            _drifted(daemon.name, each)
            for daemon in daemons
            for each in (*daemon.drift, *daemon.undone)
            if each.undone is None or clock.now() - each.undone < _TOLD
        ]
        return schema.StatusOut(
            healthy=not reasons,
            because="; ".join(reasons) or "every control daemon is ready, and every limit reads back",
            version=__version__,
            simulated=node.simulated,
            since=node.since,
            gpus=gpus,
            daemons=[schema.ComponentOut(daemon.name, daemon.state, daemon.because) for daemon in daemons],
            drift=drift,
            leases=len(node.leases.ledger.leases),
            waiting=len(node.leases.ledger.waiting),
            clients=sum(len(server.clients) for daemon in daemons for server in daemon.servers),
            notes=self._notes(daemons),
        )

    def _notes(self, daemons: list[model.Daemon]) -> list[str]:
        """Return what is not wrong and should be known."""
        notes = [f"{each.because}; it needs {each.remedy}" for each in self._node.missing]
        notes += self._node.gpus.notes()
        notes += [
            f"{each.name}: this driver has no pinned device memory limit (535 has), so memory is counted only"
            for each in daemons
            if not each.has_mem_limit
        ]
        return notes

    def _reasons(self) -> list[str]:
        """Return every reason why the node is not healthy, the gravest kind first."""
        daemons, gpus = self._node.daemons(), list(self._node.gpus.views())
        reasons = [f"GPU {view.index} is unknown: {view.because}" for view in gpus if view.health is Health.UNKNOWN]
        reasons += [
            f"GPU {view.index} is {view.health}: {view.because}"
            for view in gpus
            if view.health in {Health.FAULTY, Health.MISCONFIGURED}
        ]
        reasons += [f"{each.name} is {each.state}: {each.because}" for each in daemons if each.state is not State.READY]
        reasons += [faulted(each.name, server) for each in daemons for server in each.servers if server.faulted]
        reasons += [f"{each.name}: {each.cannot_start}" for each in daemons if each.cannot_start]
        reasons += [f"{each.name}: {drift.limit} has drifted" for each in daemons for drift in each.drift]
        if self._node.leases.trouble:
            reasons.append(f"no lease can be granted: {self._node.leases.trouble}")
        reasons += [
            f"{each.name}: server {server.pid} is an orphan, its control daemon is dead"
            for each in daemons
            for server in each.servers
            if server.orphan
        ]
        if not daemons and not reasons:
            reasons.append("no GPU of this node can run MPS: see mpsctl gpus")
        return reasons

    async def gpus(self, _: Request) -> schema.GpusOut:
        """Return the GPUs."""
        return schema.GpusOut([self._gpu(view) for view in self._node.gpus.views()])

    def _gpu(self, view: GpuView) -> schema.GpuOut:
        gpu = view.gpu
        given = self._node.leases.ledger.taken(gpu.uuid) if gpu else Amount()
        clients = mps_facts.clients_max(gpu.compute_capability, driver_branch(gpu.driver_version)) if gpu else None
        return schema.GpuOut(
            uuid=gpu.uuid if gpu else None,
            index=view.index,
            name=gpu.name if gpu else None,
            memory_total=gpu.memory_total if gpu else None,
            memory_reserved=self._node.settings.current.admission.memory_reserve + (gpu.memory_reserved if gpu else 0),
            threads_granted=given.threads / 10,
            memory_granted=given.memory,
            memory_held=view.usage.value.memory_used if isinstance(view.usage, Known) else None,
            clients=given.clients,
            clients_max=clients,
            compute_mode=view.usage.value.compute_mode if isinstance(view.usage, Known) else None,
            health=view.health,
            because=view.because,
            hint=view.hint,
        )

    async def daemons(self, _: Request) -> schema.DaemonsOut:
        """Return the control daemons."""
        return schema.DaemonsOut([schema.DaemonOut.of(each) for each in self._node.daemons()])

    async def clients(self, _: Request) -> schema.ClientsOut:
        """Return the clients of every server."""
        attached = (each for each in self._node.violation_monitor.attached() if each.lease is not None and each.counted)
        leases = {(each.client.daemon, each.client.identity.pid): each.lease.id for each in attached if each.lease}
        return schema.ClientsOut(
            [
                schema.ClientOut(
                    pid=pid,
                    name=process_table.command_of(pid),
                    uid=process_table.uid_of(pid),
                    daemon=daemon.name,
                    gpu=daemon.gpu,
                    server=server.pid,
                    lease=leases.get((daemon.name, pid)),
                )
                for daemon in self._node.daemons()
                for server in daemon.servers
                for pid in server.clients
            ]
        )

    async def config(self, _: Request) -> schema.ConfigOut:
        """Return the settings in force."""
        return schema.ConfigOut(settings.effective(self._node.settings.current))


def _drifted(daemon: str, drift: Drift) -> str:
    """Say which limit others changed, to what, how if that is known, and whether it is put back."""
    whose = f"{drift.limit} of server {drift.server}" if drift.server else drift.limit
    culprit = f", by a foreign {drift.command!r}" if drift.command else ""
    if drift.undone is None:
        return f"{daemon}: {whose} is {drift.found} instead of {drift.wanted}{culprit}"
    at = drift.undone.isoformat(timespec="seconds")
    return f"{daemon}: {whose} was {drift.found} instead of {drift.wanted}{culprit}; put back at {at}"
