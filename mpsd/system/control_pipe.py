"""The control pipe: one object for each control daemon, and the only door to it.

A control daemon serves one front-end at a time, turns others away in silence with status 0, delimits nothing, and
accepts wrong values without a word (all measured). So this door serialises; it puts a whole conversation into one
front-end; it frames the answers between marks that every control daemon echoes back, so that silence cannot be taken
for an answer nor another's answer for one's own; it gives each conversation a deadline, and kills a front-end that
overruns it; and it sets nothing without reading it back.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from mpsd.core.capabilities import FRONT_END, Capability
from mpsd.core.errors import (
    ControlBrokenError,
    ControlBusyError,
    ControlUnreachableError,
    ControlUnresponsiveError,
    LimitNotHeldError,
    MpsdError,
)
from mpsd.core.mps.commands import Command, echo_of, mark, quit_daemon
from mpsd.core.mps.limits import Setting
from mpsd.system import clock, process, retry
from mpsd.system.lasting_front_end import LastingFrontEnd, LongCommand, PendingCommand

T = TypeVar("T")

_NO_DAEMON: Final = "Cannot find MPS control daemon process"

_LEAST: Final = 0.5
"""Seconds that a front-end has in any case. One that was started just before the deadline, behind others that were
turned away, would otherwise be killed at once, and a daemon that strangers keep busy be taken for one that hangs."""


@dataclass(frozen=True, slots=True)
class ControlProgram:
    """The program that is both control daemon and front-end: NVIDIA's, or the simulator's."""

    argv: tuple[str, ...]
    directories: tuple[str, ...] = ()
    """Where it and its server lie: it looks for that in PATH (measured, all versions)."""
    libraries: Path | None = None
    """Where the driver's libraries are linked to that its server needs, if the loader has to be told."""
    capabilities: frozenset[Capability] | None = None
    """What a control daemon for one user at a time, and its servers, can have; None: all that mpsd has."""


def variables(pipe_directory: Path, log_directory: Path) -> dict[str, str]:
    """Name the directories of one control daemon, as it, its front-ends and its clients must be told them."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(pipe_directory), "CUDA_MPS_LOG_DIRECTORY": str(log_directory)}


class Pending(Generic[T]):
    """An answer that a conversation will bring."""

    def __init__(self, question: Command[T] | Setting[T]) -> None:
        self.question = question
        self._lines: list[str] | None = None

    def bring(self, lines: list[str]) -> None:
        """Hand over the lines that came back."""
        self._lines = lines

    @property
    def answer(self) -> T:
        """The typed answer; for a setting, the value read back.

        Raises the ControlError that the lines amount to, and LimitNotHeldError for a setting that did not take.
        """
        if self._lines is None:
            raise ControlBrokenError(
                f"{'; '.join(self.question.script)!r} was never answered", hint="the conversation ended early"
            )
        if not isinstance(self.question, Setting):
            return self.question.parse(self._lines)
        found = self.question.read_back(self._lines)
        if found != self.question.wanted:
            raise LimitNotHeldError(
                f"after {self.question.setter!r}, the control daemon reports {_said(self._lines)}: the limit"
                " does not hold",
                hint="see the control daemon's log for the reason; another front-end may have changed the limit"
                " in between",
                limit=self.question.limit,
            )
        return found


def _said(lines: Sequence[str]) -> str:
    return repr(lines[-1]) if lines else "nothing"


@dataclass(slots=True)
class Conversation:
    """What is to be said in one front-end, and where each answer goes."""

    pending: list[Pending[Any]] = field(default_factory=list)

    def ask(self, command: Command[T]) -> Pending[T]:
        """Add a question."""
        answer: Pending[T] = Pending(command)
        self.pending.append(answer)
        return answer

    def set(self, setting: Setting[T]) -> Pending[T]:
        """Add a setting: set, read back, compare."""
        answer: Pending[T] = Pending(setting)
        self.pending.append(answer)
        return answer

    def _segments(self) -> Iterator[list[Pending[Any]]]:
        """Yield what stands between two marks: answers of a certain length, and one of uncertain length at the end."""
        segment: list[Pending[Any]] = []
        for each in self.pending:
            segment.append(each)
            if each.question.expects is None:
                yield segment
                segment = []
        if segment:
            yield segment

    def script(self, nonce: str) -> list[str]:
        """Return the lines to send: a mark first, and one behind each segment."""
        lines = [mark(nonce, 0)]
        for number, segment in enumerate(self._segments(), start=1):
            lines += [line for each in segment for line in each.question.script]
            lines.append(mark(nonce, number))
        return lines

    def distribute(self, nonce: str, output: list[str]) -> None:
        """Hand each answer to whom it belongs.

        Raises CollisionError when nothing of the conversation was heard, and ControlBrokenError when its end is
        missing.
        """
        if not output or output[0] != echo_of(mark(nonce, 0)):
            raise retry.CollisionError
        rest = output[1:]
        for number, segment in enumerate(self._segments(), start=1):
            end = echo_of(mark(nonce, number))
            if end not in rest:
                raise ControlBrokenError(
                    f"the control daemon's answer broke off after {_said(output)}",
                    hint="it died or was stopped during the conversation: check its state, then read back its limits",
                )
            cut = rest.index(end)
            _share(segment, rest[:cut])
            rest = rest[cut + 1 :]


@dataclass(frozen=True, slots=True)
class _Farewell:
    """The conversation that ends the daemon: nothing can be heard behind its last word."""

    seconds: int | None

    def script(self, nonce: str) -> list[str]:
        return [mark(nonce, 0), quit_daemon(self.seconds).line]

    def distribute(self, nonce: str, output: list[str]) -> None:
        if not output or output[0] != echo_of(mark(nonce, 0)):
            raise retry.CollisionError


def _share(segment: list[Pending[Any]], lines: list[str]) -> None:
    """Give all but the last their certain number of lines, and the last the remainder.

    Where a control daemon says more or less than it should, some of them get what they cannot parse, and none gets what
    it could take for its own: that is an error for those, and never a success.
    """
    for each in segment[:-1]:
        count = each.question.expects or 0
        each.bring(lines[:count])
        lines = lines[count:]
    segment[-1].bring(lines)


class ControlPipe:
    """The door to one control daemon."""

    def __init__(
        self,
        program: ControlProgram,
        pipe_directory: Path,
        log_directory: Path,
        *,
        deadline: float,
        key: str | None = None,
    ) -> None:
        self._program = program
        self._environment = process.environment(variables(pipe_directory, log_directory))
        self._pipe_directory = pipe_directory
        self._lock = asyncio.Lock()
        self.whole = asyncio.Lock()
        """Held by whoever has several conversations in a row, so that no long command comes between them."""
        self.key = key or secrets.token_hex(8)
        """What the nonces of all its marks begin with: by this its conversations are known in the daemon's log."""
        self.nonce = ""
        """That of the latest conversation that was answered to its end."""
        self.deadline = deadline
        """Seconds that a conversation may take from its first front-end on, strangers in the way included."""
        self.waits_for = ""
        """What a long command waits for that has the only seat, or has it next; empty when none does."""
        self.changed: Callable[[], None] = lambda: None
        """Called when that changes."""
        self.held: Callable[[float, str | None], None] = lambda _seconds, _code: None
        """Called after each conversation with how long it took, and the code of the error that it ended by."""
        self._lasting: LastingFrontEnd | None = None
        """The front-end that has the seat for that long."""
        self._is_given_up = False

    async def hold(self, conversation: Conversation) -> None:
        """Hold a conversation, after those that were asked for before it, and bring every answer.

        Raises ControlUnreachableError when no daemon listens, ControlBusyError when strangers held it for the whole
        deadline, ControlUnresponsiveError when it took longer, ControlBrokenError and ControlGarbledError when its
        answers do not add up. In every case but the first two something of the conversation may have taken effect.
        """
        began = clock.monotonic()
        try:
            await self._say(conversation, self.deadline)
        except MpsdError as error:
            self.held(clock.monotonic() - began, error.code)
            raise
        self.held(clock.monotonic() - began, None)

    async def quit(self, seconds: int | None) -> None:
        """Tell the daemon to quit, and to force its servers after `seconds`; whether it went, its pidfd says.

        Raises as `hold` does when it could not be told, or did not go in `seconds` and the deadline together. Without
        `seconds` it goes when its last client has gone, whenever that is: this returns when it is told, or has had the
        time to be. It waits on when the front-end that told it is ended (measured, all versions).
        """
        try:
            if seconds is None:
                with contextlib.suppress(ControlUnresponsiveError):
                    await self._say(_Farewell(None), self.deadline)
            else:
                await self._say(_Farewell(seconds), seconds + self.deadline)
        except ControlUnreachableError:
            # Nobody listens any more, which is what was asked for: a front-end can lose the daemon's last words (seen
            # on 470 and 535: status 1 or silence, though the daemon had quit).
            return

    async def ask_long(self, long: LongCommand[T], note: Callable[[PendingCommand], None]) -> T:
        """Ask what may take long, by a front-end that goes on when mpsd ends; `take_over` is for the next mpsd.

        `note` stores which process that is before it says anything. Raises as `hold` does, but that
        ControlUnresponsiveError comes when the command's own time is over; and what `note` raises.
        """
        async with self._seat(long.because):
            try:
                async for attempt in retry.collisions(self.deadline):
                    with attempt:
                        pending = await self._start_lasting(long, note)
                        return await self._finish(long, pending)
            except retry.CollisionError:
                raise self._busy(self.deadline) from None
        raise AssertionError  # the retry ends by a return or an error

    async def take_over(self, long: LongCommand[T], pending: PendingCommand) -> T:
        """Wait for the answer to what an earlier mpsd asked. Raises as `ask_long` does.

        ControlBusyError: no word of it was heard, or its answer is lost.
        """
        async with self._seat(long.because):
            self._lasting = LastingFrontEnd.adopt(pending.front_end, long.answer)
            try:
                return await self._finish(long, pending)
            except retry.CollisionError:
                raise self._busy(self.deadline) from None

    @contextlib.asynccontextmanager
    async def _seat(self, because: str) -> AsyncIterator[None]:
        self.waits_for, self._is_given_up = because, False
        self.changed()
        try:
            async with self.whole, self._lock:
                yield
        finally:
            if self._lasting is not None:
                self._lasting.close()
            self._lasting, self.waits_for = None, ""
            self.changed()

    async def _start_lasting(self, long: LongCommand[Any], note: Callable[[PendingCommand], None]) -> PendingCommand:
        if self._lasting is not None:
            self._lasting.close()  # it was turned away, and is gone
        allowed = None if self._program.capabilities is None else FRONT_END
        try:
            front_end = self._lasting = LastingFrontEnd.start(
                self._program.argv, env=self._environment, answer=long.answer, allowed=allowed
            )
        except OSError as error:
            raise self._not_started(error) from error
        assert front_end.program is not None  # noqa: S101 - it was started just now
        nonce, until = self.key + secrets.token_hex(4), clock.since_boot() + long.seconds
        pending = PendingCommand(front_end.program.identity, nonce, until)
        conversation = Conversation()
        conversation.ask(long.command)
        is_noted = False
        try:
            note(pending)
            is_noted = True
        finally:
            if not is_noted:
                await front_end.kill()
        front_end.say("".join(f"{line}\n" for line in conversation.script(nonce)).encode())
        return pending

    async def _finish(self, long: LongCommand[T], pending: PendingCommand) -> T:
        """Wait for the end of the front-end, and return its answer; one that is late is ended."""
        assert self._lasting is not None  # noqa: S101 - it was started, or taken over
        if not await self._lasting.ended_by(pending.until):
            await self._lasting.kill()
            raise ControlUnresponsiveError(
                f"the control daemon on {self._pipe_directory} did not answer {long.command.line!r} in time",
                hint="its server may be unable to end work on the GPU; for its state: mpsctl daemons",
            )
        if self._is_given_up:
            raise ControlBrokenError(f"{long.command.line!r} was given up", hint="the control daemon is being stopped")
        conversation = Conversation()
        answer = conversation.ask(long.command)
        conversation.distribute(pending.nonce, self._lasting.lines())
        self.nonce = pending.nonce
        return answer.answer

    async def give_up(self) -> None:
        """End the front-end that waits for a long command, if one does: the daemon itself is to go."""
        if self._lasting is not None:
            self._is_given_up = True
            await self._lasting.kill()

    def _busy(self, seconds: float) -> ControlBusyError:
        return ControlBusyError(
            f"other front-ends occupied the control daemon on {self._pipe_directory} for {seconds:g} s",
            hint="end the processes that are connected to it, or the leases of their uids",
        )

    def _not_started(self, error: OSError) -> ControlUnreachableError:
        # As while a driver is upgraded: it comes back, and until then only this is known.
        return ControlUnreachableError(
            f"the front-end {self._program.argv[0]} could not be started: {error.strerror}",
            hint="check that the control program exists and is executable",
        )

    async def _say(self, conversation: Conversation | _Farewell, seconds: float) -> None:
        async with self._lock:
            until = clock.monotonic() + seconds
            try:
                async for attempt in retry.collisions(seconds):
                    with attempt:
                        nonce = self.key + secrets.token_hex(4)
                        output = await self._front_end(conversation.script(nonce), until)
                        conversation.distribute(nonce, output)
                        self.nonce = nonce
            except retry.CollisionError:
                raise self._busy(seconds) from None

    async def _front_end(self, script: list[str], until: float) -> list[str]:
        """Say this in one front-end and return the lines that came back."""
        seconds = max(until - clock.monotonic(), _LEAST)
        text = "".join(f"{line}\n" for line in script).encode()
        allowed = None if self._program.capabilities is None else FRONT_END
        try:
            finished = await process.run(
                self._program.argv, env=self._environment, stdin=text, seconds=seconds, allowed=allowed
            )
        except OSError as error:
            raise self._not_started(error) from error
        if finished.returncode is None:
            raise ControlUnresponsiveError(
                f"the control daemon on {self._pipe_directory} did not answer in time",
                hint="it hangs or is stopped (kill -CONT resumes it); mpsd does not kill it, since its clients"
                " may be unaffected",
            )
        lines = finished.output.splitlines()
        if finished.returncode != 0 and lines[:1] == [_NO_DAEMON]:
            raise ControlUnreachableError(
                f"no control daemon listens on {self._pipe_directory}", hint="for its state: mpsctl daemons"
            )
        return lines

    async def ask(self, command: Command[T]) -> T:
        """Ask one question. Raises as `hold` does, and what the answer amounts to."""
        conversation = Conversation()
        answer = conversation.ask(command)
        await self.hold(conversation)
        return answer.answer
