"""A front-end that outlives mpsd: for a command that takes long, whose answer the next mpsd must be able to read.

The front-end gets no input until mpsd has stored its identity on disk. A command that was sent therefore has a known
front-end, and a command that was not sent never will be: the input of its front-end closes when mpsd ends.
"""

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from mpsd.core.capabilities import Capability
from mpsd.core.errors import ControlUnresponsiveError
from mpsd.core.model import ProcessIdentity
from mpsd.core.mps.commands import Command
from mpsd.core.signal import Signal
from mpsd.system import clock
from mpsd.system.processes import process
from mpsd.system.processes.process import Process

T = TypeVar("T")

_MOST: Final = 64 * 1024
"""Maximum bytes of an answer that are read."""


@dataclass(frozen=True, slots=True)
class LongCommand(Generic[T]):
    """A command whose answer may take long, and the parts of it that outlive mpsd."""

    command: Command[T]
    answer: Path
    """The file that receives the output of the front-end."""
    because: str
    """The reason why the command waits, shown for other commands that cannot run meanwhile."""
    seconds: float
    """Seconds that mpsd waits for the answer after it sent the command."""

    def unanswered(self, pipe_directory: Path) -> ControlUnresponsiveError:
        """Return the error for a command that a control daemon did not answer in this time."""
        return ControlUnresponsiveError(
            f"the control daemon on {pipe_directory} did not answer {self.command.line!r} in time",
            hint="its server may be unable to end work on the GPU; for its state: mpsctl daemons",
        )


class PendingCommand(NamedTuple):
    """A long command in progress: its front-end, its nonce, and its deadline in seconds since boot."""

    front_end: ProcessIdentity
    nonce: str
    until: float


class LongCommands:
    """The long commands of a control daemon in their order: one occupies its pipe, and the others wait for that."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self.changed = Signal[()]()
        """A command has entered or left."""

    @property
    def first(self) -> str:
        """Why the command waits that occupies the pipe, or does so next; empty without any."""
        return self._reasons[0] if self._reasons else ""

    @contextlib.asynccontextmanager
    async def wait(self, because: str) -> AsyncIterator[None]:
        """Enter a command, which leaves at the end of the context."""
        self._reasons.append(because)
        self.changed.send()
        try:
            yield
        finally:
            self._reasons.remove(because)
            self.changed.send()


class LastingFrontEnd:
    """A front-end in its own session, whose output goes to a file."""

    def __init__(self, program: Process | None, answer: Path, say: int = -1) -> None:
        """`program` is None where it is gone and only its answer may exist; `say` is the write end of its input."""
        self.program = program
        self._answer = answer
        self._say = say

    @classmethod
    def start(
        cls, argv: Sequence[str], *, env: Mapping[str, str], answer: Path, allowed: frozenset[Capability] | None
    ) -> "LastingFrontEnd":
        """Start a front-end, which waits for its input. Raises OSError where it cannot be started."""
        sink = os.open(answer, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            source, say = os.pipe()
            with contextlib.ExitStack() as unless_started:
                unless_started.callback(os.close, say)
                try:
                    program = process.spawn(argv, env=env, stdin=source, stdout=sink, new_session=True, allowed=allowed)
                finally:
                    os.close(source)
                unless_started.pop_all()
        finally:
            os.close(sink)
        return cls(program, answer, say)

    def say(self, script: bytes) -> None:
        """Send the script, which is the whole input; it is shorter than what a pipe takes at once."""
        with contextlib.suppress(BrokenPipeError):  # the daemon rejected it, and its answer says so
            os.write(self._say, script)
        self._hush()

    def _hush(self) -> None:
        if self._say >= 0:
            os.close(self._say)
            self._say = -1

    @classmethod
    def adopt(cls, identity: ProcessIdentity, answer: Path) -> "LastingFrontEnd":
        """Take over a front-end that an earlier mpsd started; it may have ended since."""
        return cls(process.adopt(identity), answer)

    async def ended_by(self, until: float) -> bool:
        """Wait for its end until a time in seconds since boot, and tell whether it ended."""
        return self.program is None or await self.program.gone_within(max(until - clock.since_boot(), 0.0))

    def lines(self) -> list[str]:
        """Return its output, all of which it prints when it ends."""
        try:
            with self._answer.open("rb") as file:
                return file.read(_MOST).decode("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []

    async def kill(self) -> None:
        """Kill it, and return when it is gone."""
        self._hush()
        if self.program is not None:
            self.program.signal(signal.SIGKILL)
            await self.program.wait()

    def close(self) -> None:
        """Stop watching it, which does not affect it once it has its whole input."""
        self._hush()
        if self.program is not None:
            self.program.close()
