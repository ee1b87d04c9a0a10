"""Why nothing is granted on one control daemon: the findings of its parts, and those of its canaries."""

import asyncio
import contextlib
from collections.abc import Callable

from mpsd.core.lifecycle import ANSWERED
from mpsd.core.signal import Signal
from mpsd.daemon.control.control_log import ControlLog
from mpsd.daemon.control.limits import WantedLimits
from mpsd.daemon.control.replacement import Replacement, StoppedServers
from mpsd.daemon.control.state import Lifecycle, Questions
from mpsd.daemon.ends.endings import Endings
from mpsd.system.mps.control_pipe import ControlPipe


class Trouble:
    """Why it is not certain that the next client of a control daemon gets the wanted limits, and a context."""

    def __init__(
        self,
        name: str,
        *,
        lifecycle: Lifecycle,
        questions: Questions,
        pipe: ControlPipe,
        control_log: ControlLog,
        limits: WantedLimits,
        replacement: Replacement,
        stopped_servers: StoppedServers,
        endings: Endings,
    ) -> None:
        self._name = name
        self._lifecycle, self._questions, self._pipe = lifecycle, questions, pipe
        self._control_log, self._limits = control_log, limits
        self._replacement, self._stopped_servers, self._endings = replacement, stopped_servers, endings
        self.changed = Signal[()]()
        """What canaries have shown, or have to show, is another thing."""
        self.suspicion = ""
        """Why nothing is granted until a canary has shown that its server serves."""
        self.unexamined = asyncio.Event()
        """Set while its watch has not examined the servers yet that were adopted with it."""

    @property
    def for_clients(self) -> str:
        """Why a client may not get the wanted limits, and a context; empty when it is certain that it does."""
        faults = self._control_log.serving.faults
        fault = f"server {min(faults)} handles a fatal GPU fault" if faults else ""
        adopted = "its servers were adopted, and are not examined yet" if self.unexamined.is_set() else ""
        return self.for_canary or self.late_end or fault or self.stopped_server or adopted or self.suspicion

    @property
    def for_canary(self) -> str:
        """The same for a canary, which finds out whether a server that is late accepts clients."""
        if self._pipe.waits_for:
            return self._pipe.waits_for  # a process that connects meanwhile may be refused (NVIDIA: error 807)
        if self._lifecycle.state not in ANSWERED:
            return f"it is {self._lifecycle.state}: {self._lifecycle.because}"
        return "it is about to be replaced for its next user" if self._replacement.is_due else self._limits.trouble

    @property
    def stopped_server(self) -> str:
        """Why it serves no client at this very moment; empty where no server of it is known to be stopped."""
        return self._stopped_servers.trouble

    @property
    def late_end(self) -> str:
        """Why its server may refuse its next client: it did not end the contexts of one in time; empty otherwise."""
        return self._endings.late_on(self._name)

    def clear_late(self) -> None:
        """Admit again: a canary has shown that its server accepts clients, or could show nothing."""
        self._endings.clear_late(self._name)

    def unanswered_doubts(self) -> Callable[[], bool] | None:
        """Read the log, and return a function that tells whether the doubts so far were answered; None where all are.

        A later doubt does not count: no user may delay a grant to another user for ever.
        """
        with contextlib.suppress(OSError):  # the supervisor reports its consequences
            self._control_log.read_news()
        return self._questions.unanswered_doubts()

    def suspect(self, because: str) -> None:
        """Grant nothing on it for this reason, until a canary has shown that its server serves; empty withdraws it."""
        if self.suspicion != because:
            self.suspicion = because
            self.changed.send()

    def note_examined(self) -> None:
        """Let grants continue that waited for the examination of adopted servers, unless one of them is suspect."""
        self.unexamined.clear()
        self.changed.send()
