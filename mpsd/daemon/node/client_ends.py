"""The end of one client by an administrator, with a lease or without one: who it may be, and how far it has come."""

import os
from contextlib import closing
from dataclasses import replace
from typing import Final

from mpsd.core.enforcement.ending import EndCause, Ending
from mpsd.core.errors import DaemonNotReadyError, NotFoundError, NotPermittedError
from mpsd.core.events import EventName
from mpsd.core.lifecycle import State
from mpsd.core.model import Known, ProcessIdentity
from mpsd.core.supervision.drain import Blocker, Operation, Outcome
from mpsd.daemon.control.supervisor import Supervisor
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.gpu.gpus import Gpus
from mpsd.daemon.leases.leases import Leases
from mpsd.daemon.node.control_daemons import ControlDaemons
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.processes import proc, process

VERB: Final = "end"
"""The verb of the operation, and the name of its cause among the causes of an ending."""

_INIT: Final = 1
_MOST_DONE: Final = 256
"""Completed ends that can still be queried."""

_CLIENTS: Final = "for those that can be ended: mpsctl clients"


class ClientEnds:
    """The ends of single clients. The next mpsd continues them, and knows those in progress."""

    def __init__(
        self, control_daemons: ControlDaemons, gpus: Gpus, leases: Leases, endings: Endings, log: Logger
    ) -> None:
        self._control_daemons, self._gpus, self._leases, self._endings = control_daemons, gpus, leases, endings
        self._log = log
        self._done: dict[str, Operation] = {}
        endings.over.connect(self._finish)

    async def begin(self, pid: int, by: int) -> Operation:
        """Begin to end a client for an administrator, by uid, and return the operation; stored before that.

        Raises NotFoundError for a process that is no client, NotPermittedError for one of mpsd or MPS itself,
        DaemonNotReadyError where it is unknown whether it is a client, and StorageError.
        """
        identity = proc.identify(pid)
        living = process.adopt(identity) if identity is not None else None
        if identity is None or living is None:
            raise NotFoundError(f"there is no process {pid}", hint=_CLIENTS)
        # The descriptor comes before all looks, and shows after them that they were at this process.
        with closing(living):
            self._check(pid)
            daemons = await self._daemons_of(identity)
            leases = [each for each in self._leases.ledger.leases.values() if identity in each.clients]
            has = f"with {' and '.join(f'lease {each.id}' for each in leases)}" if leases else "without a lease"
            because = f"uid {by} ends it, a client of {' and '.join(daemons)} {has}"
            if not living.is_gone():
                stop = self._leases.clients.stop(identity)
                self._endings.end(identity, EndCause(VERB, because), daemons=daemons, stop=stop)
        begun = self.operation(_id(identity))
        if begun is None:
            raise NotFoundError(f"process {pid} has just exited", hint=_CLIENTS)
        named = [each.id for each in leases]
        self._log.warning(EventName.CLIENT_ENDING, pid=pid, uid=by, leases=named, because=because)
        return begun

    def operation(self, operation: str) -> Operation | None:
        """Return an end that is in progress, or that was completed not long ago."""
        for ending, stays in self._endings.all():
            if _id(ending.process) == operation:
                return _operation(ending, stays)
        return self._done.get(operation)

    def _finish(self, ending: Ending) -> None:
        if any(each.by == VERB for each in ending.causes):
            done = replace(_operation(ending), state=Outcome.DONE, ended=clock.now())
            self._done[done.id] = done
            if len(self._done) > _MOST_DONE:
                del self._done[next(iter(self._done))]

    def _check(self, pid: int) -> None:
        """Refuse the processes that are no clients whatever a server lists. Raises NotPermittedError."""
        for daemon in self._control_daemons.all():
            if daemon.process is not None and pid == daemon.process.identity.pid:
                what = f"the control daemon {daemon.name}"
            elif any(pid == server.pid for server in daemon.servers):
                what = f"an MPS server of {daemon.name}"
            else:
                continue
            raise NotPermittedError(
                f"process {pid} is {what}, whose end ends all of its clients",
                hint=f"end one client (mpsctl clients), or all of {daemon.name}: mpsctl restart {daemon.name}"
                " --timeout 0",
            )
        if pid in {_INIT, os.getpid()} or proc.parent(pid) == os.getpid():
            raise NotPermittedError(f"process {pid} is mpsd's own, or the machine's first", hint=_CLIENTS)

    async def _daemons_of(self, process: ProcessIdentity) -> list[str]:
        """Return the control daemons of which a process is a client, by their servers or by NVML.

        What the servers reported already is enough; otherwise all are asked, and the GPUs are read.
        """
        pid, late = process.pid, list[str]()
        found = [each.name for each in self._control_daemons.supervisors() if _lists(each, process)]
        if not found:
            # A failed one is proven dead, and lists nobody.
            living = [each.name for each in self._control_daemons.supervisors() if each.state is not State.FAILED]
            late = await self._control_daemons.ask(living)
            await self._gpus.read()
            found = [
                each.name
                for each in self._control_daemons.supervisors()
                if _lists(each, process) or self._has_on_gpu(each, pid)
            ]
        if found:
            return found
        if late:
            raise DaemonNotReadyError(
                f"{' and '.join(late)} did not answer, so that it is unknown whether process {pid} is a client",
                hint="try again, or see why: mpsctl daemons",
            )
        raise NotFoundError(
            f"process {pid} is no client of MPS on this node, so that no server has to end its work first",
            hint=f"end it by a signal: kill {pid}; {_CLIENTS}",
        )

    def _has_on_gpu(self, supervisor: Supervisor, pid: int) -> bool:
        """Tell whether NVML has listed a process as a client on a GPU, which names it by its pid alone."""
        usage = self._gpus.usages.get(supervisor.gpu.uuid)
        on_gpu = usage.value.processes.get(pid) if isinstance(usage, Known) else None
        return on_gpu is not None and on_gpu.mps


def _lists(supervisor: Supervisor, process: ProcessIdentity) -> bool:
    """Tell whether a server has listed a process, and not an ended client whose pid the process has now."""
    return any(process in server.opened for server in supervisor.servers)


def _id(identity: ProcessIdentity) -> str:
    """Return the id of an operation, which the next mpsd finds without having stored it."""
    return f"end-{identity.pid}-{identity.start_ticks}"


def _operation(ending: Ending, stays: str = "") -> Operation:
    pid, began = ending.process.pid, ending.began
    daemon = ending.daemons[0] if ending.daemons else ""
    because = f"process {pid}: {ending.because}{stays and f'; {stays}'}"
    waits_for = (Blocker(stays, None, pid, began),) if stays else ()
    return Operation(_id(ending.process), daemon, VERB, Outcome.RUNNING, because, began, None, waits_for)
