"""A front-end that outlives mpsd: for a command that takes long, and whose answer the next mpsd must be able to read.

It is told nothing until whoever starts it has noted on disk which process it is. So a command that was said has a
front-end that is known, and one that was not said never will be: its input ends with the mpsd that was to write it.
"""

import contextlib
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from mpsd.core.capabilities import Capability
from mpsd.core.model import ProcessIdentity
from mpsd.core.mps.commands import Command
from mpsd.system import clock, process
from mpsd.system.process import Process

T = TypeVar("T")

_MOST: Final = 64 * 1024
"""Bytes of an answer that are read."""


@dataclass(frozen=True, slots=True)
class LongCommand(Generic[T]):
    """A command whose answer may take long, and what outlives mpsd of it."""

    command: Command[T]
    answer: Path
    """The file that its front-end prints into."""
    because: str
    """What it waits for, for those who are not heard meanwhile."""
    seconds: float
    """How long its answer is waited for, once it was asked."""


class PendingCommand(NamedTuple):
    """A long command that was pending: the front-end that waits, its nonce, and until when, in seconds since boot."""

    front_end: ProcessIdentity
    nonce: str
    until: float


class LastingFrontEnd:
    """A front-end in a session of its own, whose output is a file."""

    def __init__(self, program: Process | None, answer: Path, say: int = -1) -> None:
        """`program` is None where it is gone, and only its answer may be there; `say` is where its input is written."""
        self.program = program
        self._answer = answer
        self._say = say

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        answer: Path,
        allowed: Collection[Capability] | None,
    ) -> "LastingFrontEnd":
        """Start one, which waits for what it is to say. Raises OSError where it cannot be started."""
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
        """Have it say this, which is all that it says; it is shorter than what a pipe takes at once."""
        with contextlib.suppress(BrokenPipeError):  # it was turned away: its answer says so
            os.write(self._say, script)
        self._hush()

    def _hush(self) -> None:
        if self._say >= 0:
            os.close(self._say)
            self._say = -1

    @classmethod
    def adopt(cls, identity: ProcessIdentity, answer: Path) -> "LastingFrontEnd":
        """Take over one that an earlier mpsd started; it may have ended since."""
        return cls(process.adopt(identity), answer)

    async def ended_by(self, until: float) -> bool:
        """Wait for its end, and tell whether it came by then, in seconds since boot."""
        return self.program is None or await self.program.gone_within(max(until - clock.since_boot(), 0.0))

    def lines(self) -> list[str]:
        """Return what it has printed. It prints all of it when it ends."""
        try:
            with self._answer.open("rb") as file:
                return file.read(_MOST).decode("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []

    async def kill(self) -> None:
        """End it, and return when it is gone."""
        self._hush()
        if self.program is not None:
            self.program.signal(signal.SIGKILL)
            await self.program.wait()

    def close(self) -> None:
        """Watch it no longer; that does nothing to it, once it has said what it was to say."""
        self._hush()
        if self.program is not None:
            self.program.close()
