"""The control pipe: each control daemon has one object here, the only access to it.

A control daemon serves one front-end at a time and rejects others with no output and status 0. It delimits nothing and
accepts wrong values without a message (all measured). This module therefore:

- runs one conversation at a time, each in a single front-end;
- puts each answer between marks that every control daemon echoes, so that neither silence nor the answer to another
  front-end passes for an answer;
- gives each conversation a deadline, and kills a front-end that exceeds it;
- reads back every setting.
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
from mpsd.core.model import UnforeseenAnswer
from mpsd.core.mps.commands import Command, echo_of, mark, quit_daemon
from mpsd.core.mps.limits import Setting
from mpsd.core.signal import Signal
from mpsd.core.units import briefly
from mpsd.system import clock, retry
from mpsd.system.mps.lasting_front_end import LastingFrontEnd, LongCommand, LongCommands, PendingCommand
from mpsd.system.processes import process

T = TypeVar("T")

_NO_DAEMON: Final = "Cannot find MPS control daemon process"

_LEAST: Final = 0.5
"""Minimum seconds for a front-end, even if the deadline comes earlier. Otherwise, after some rejections, the last
front-end would be killed as soon as it starts, and a daemon that is only busy would seem to hang."""


@dataclass(frozen=True, slots=True)
class ControlProgram:
    """The program that is both control daemon and front-end: NVIDIA's or the simulator's."""

    argv: tuple[str, ...]
    directories: tuple[str, ...] = ()
    """The directories of the program and its server, for which it searches PATH (measured, all versions)."""
    libraries: Path | None = None
    """A directory of links to the server's driver libraries, where the loader does not find them itself."""
    capabilities: frozenset[Capability] | None = None
    """The maximum capabilities of a single-user control daemon and its servers; None: all that mpsd has."""
    bound: bool = False
    """Whether control daemons end with mpsd, however that ends: those of a job do."""


def variables(pipe_directory: Path, log_directory: Path) -> dict[str, str]:
    """Return the variables that name the directories of a control daemon to itself, its front-ends and its clients."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(pipe_directory), "CUDA_MPS_LOG_DIRECTORY": str(log_directory)}


class Pending(Generic[T]):
    """A question of a conversation, and its answer once the conversation has brought it."""

    def __init__(self, question: Command[T] | Setting[T]) -> None:
        self.question = question
        self._lines: list[str] | None = None

    def bring(self, lines: list[str]) -> None:
        """Store the lines of the answer."""
        self._lines = lines

    @property
    def unforeseen(self) -> UnforeseenAnswer:
        """The question and its answer, for an answer that does not parse."""
        return UnforeseenAnswer("; ".join(self.question.script), briefly("\n".join(self._lines or ())))

    @property
    def answer(self) -> T:
        """The typed answer; for a setting, the value that was read back.

        Raises the ControlError that the lines stand for, and LimitNotHeldError for a setting that did not take effect.
        """
        found = self.found
        if isinstance(self.question, Setting) and found != self.question.wanted:
            raise LimitNotHeldError(
                f"after {self.question.setter!r}, the control daemon reports {_said(self._lines or ())}: the limit"
                " does not hold",
                hint="see the control daemon's log for the reason; another front-end may have changed the limit"
                " in between",
                limit=self.question.limit,
            )
        return found

    @property
    def found(self) -> T:
        """The same, but for a setting that did not take effect as well. Raises ControlError likewise."""
        if self._lines is None:
            raise ControlBrokenError(
                f"{'; '.join(self.question.script)!r} was never answered", hint="the conversation ended early"
            )
        parse = self.question.read_back if isinstance(self.question, Setting) else self.question.parse
        return parse(self._lines)


def _said(lines: Sequence[str]) -> str:
    return repr(lines[-1]) if lines else "nothing"


@dataclass(slots=True)
class Conversation:
    """The questions and settings of one front-end, in order, each with its pending answer."""

    pending: list[Pending[Any]] = field(default_factory=list)

    def ask(self, question: Command[T] | Setting[T]) -> Pending[T]:
        """Add a question, or a setting: set, read back, compare."""
        answer: Pending[T] = Pending(question)
        self.pending.append(answer)
        return answer

    def _segments(self) -> Iterator[list[Pending[Any]]]:
        """Yield the questions between two marks: answers of known length, the last one possibly of unknown length."""
        segment: list[Pending[Any]] = []
        for each in self.pending:
            segment.append(each)
            if each.question.expects is None:
                yield segment
                segment = []
        if segment:
            yield segment

    def script(self, nonce: str) -> list[str]:
        """Return the lines to send: a mark first, then a mark after each segment."""
        lines = [mark(nonce, 0)]
        for number, segment in enumerate(self._segments(), start=1):
            lines += [line for each in segment for line in each.question.script]
            lines.append(mark(nonce, number))
        return lines

    def distribute(self, nonce: str, output: list[str]) -> None:
        """Give each pending question its answer.

        Raises CollisionError when the output contains nothing of the conversation, and ControlBrokenError when its end
        is missing.
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
    """The conversation that stops the daemon: no answer can follow its last line."""

    seconds: int | None

    def script(self, nonce: str) -> list[str]:
        return [mark(nonce, 0), quit_daemon(self.seconds).line]

    def distribute(self, nonce: str, output: list[str]) -> None:
        if not output or output[0] != echo_of(mark(nonce, 0)):
            raise retry.CollisionError


def _share(segment: list[Pending[Any]], lines: list[str]) -> None:
    """Give all questions but the last their fixed number of lines, and the last one the remainder.

    Where a control daemon prints more or fewer lines than it should, some questions get lines that they cannot parse.
    No question takes them for its own answer, so the result is an error and never a success.
    """
    for each in segment[:-1]:
        count = each.question.expects or 0
        each.bring(lines[:count])
        lines = lines[count:]
    segment[-1].bring(lines)


class ControlPipe:
    """The access to one control daemon."""

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
        """Held during several conversations in a row, so that no long command comes between them."""
        self.key = key or secrets.token_hex(8)
        """The prefix of the nonces of all marks, which identifies mpsd's conversations in the daemon's log."""
        self.nonce = ""
        """The nonce of the latest conversation that was answered to its end."""
        self.deadline = deadline
        """The maximum seconds of a conversation from its first front-end on, collisions with others included."""
        self.long_commands = LongCommands()
        self.conversation_ended = Signal[float, str | None]()
        """With the duration of a conversation in seconds, and the code of the error that ended it."""
        self._lasting: LastingFrontEnd | None = None
        """The front-end of the long command that occupies the pipe."""
        self._is_given_up = False

    @property
    def waits_for(self) -> str:
        """Why the long command waits that occupies the pipe, or does so next; empty without such a command."""
        return self.long_commands.first

    async def converse(self, conversation: Conversation) -> None:
        """Hold a conversation, after those that were requested earlier, and bring every answer.

        Raises ControlUnreachableError when no daemon listens, ControlBusyError when other front-ends occupied it for
        the whole deadline, ControlUnresponsiveError when the conversation exceeded the deadline, and ControlBrokenError
        or ControlGarbledError when the answers do not parse. Except for the first two, a part of the conversation may
        have taken effect.
        """
        began = clock.monotonic()
        try:
            await self._say(conversation, self.deadline)
        except MpsdError as error:
            self.conversation_ended.send(clock.monotonic() - began, error.code)
            raise
        self.conversation_ended.send(clock.monotonic() - began, None)

    async def quit(self, seconds: int | None) -> None:
        """Tell the daemon to quit, and to end its servers by force after `seconds`; its pidfd shows whether it exited.

        Raises the errors of `converse` when the command did not reach the daemon, or the daemon did not exit within
        `seconds` plus the deadline. Without `seconds`, the daemon exits after its last client, at any time; this method
        then returns once the command was sent or the deadline has passed. The daemon continues to wait after the
        front-end has ended (measured, all versions).
        """
        try:
            if seconds is None:
                with contextlib.suppress(ControlUnresponsiveError):
                    await self._say(_Farewell(None), self.deadline)
            else:
                await self._say(_Farewell(seconds), seconds + self.deadline)
        except ControlUnreachableError:
            # The daemon no longer listens, which was the aim: a front-end can lose the daemon's last lines (seen on 470
            # and 535: status 1 or no output, although the daemon had quit).
            return

    async def ask_long(self, long: LongCommand[T], note: Callable[[PendingCommand], None]) -> T:
        """Ask a question that may take long, through a front-end that outlives mpsd; the next mpsd calls `take_over`.

        `note` stores the identity of the front-end before it sends anything. Raises the errors of `converse`, but
        ControlUnresponsiveError only after the command's own time, and the errors of `note`.
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
        """Wait for the answer to a command of an earlier mpsd. Raises the errors of `ask_long`.

        ControlBusyError here means that the daemon received no part of it, or that its answer is lost. After the
        command's own time, the earlier mpsd may have killed the front-end, so that no answer is a late one.
        """
        async with self._seat(long.because):
            self._lasting = LastingFrontEnd.adopt(pending.front_end, long.answer)
            try:
                return await self._finish(long, pending)
            except retry.CollisionError:
                is_late = clock.since_boot() >= pending.until
                raise (long.unanswered(self._pipe_directory) if is_late else self._busy(self.deadline)) from None

    @contextlib.asynccontextmanager
    async def _seat(self, because: str) -> AsyncIterator[None]:
        async with self.long_commands.wait(because), self.whole, self._lock:
            self._is_given_up = False
            try:
                yield
            finally:
                if self._lasting is not None:
                    self._lasting.close()
                self._lasting = None

    async def _start_lasting(self, long: LongCommand[Any], note: Callable[[PendingCommand], None]) -> PendingCommand:
        if self._lasting is not None:
            self._lasting.close()  # the front-end was rejected, and has exited
        allowed = None if self._program.capabilities is None else FRONT_END
        try:
            front_end = self._lasting = LastingFrontEnd.start(
                self._program.argv, env=self._environment, answer=long.answer, allowed=allowed
            )
        except OSError as error:
            raise self._not_started(error) from error
        assert front_end.program is not None  # noqa: S101 - `start` returns one that has a program
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
        """Wait for the front-end to exit and return its answer; a late front-end is killed."""
        assert self._lasting is not None  # noqa: S101 - the caller started it or took it over
        if not await self._lasting.ended_by(pending.until):
            await self._lasting.kill()
            raise long.unanswered(self._pipe_directory)
        if self._is_given_up:
            raise ControlBrokenError(f"{long.command.line!r} was given up", hint="the control daemon is being stopped")
        conversation = Conversation()
        answer = conversation.ask(long.command)
        conversation.distribute(pending.nonce, self._lasting.lines())
        self.nonce = pending.nonce
        return answer.answer

    async def give_up(self) -> None:
        """End the front-end that waits for a long command, if any, because the daemon itself must stop."""
        if self._lasting is not None:
            self._is_given_up = True
            await self._lasting.kill()

    def _busy(self, seconds: float) -> ControlBusyError:
        return ControlBusyError(
            f"other front-ends occupied the control daemon on {self._pipe_directory} for {seconds:g} s",
            hint="end the processes that are connected to it, or the leases of their uids",
        )

    def _not_started(self, error: OSError) -> ControlUnreachableError:
        # This happens during a driver upgrade, for example: the program returns later, and until then only this is
        # known.
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
        """Send these lines through one front-end and return its output lines."""
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
        """Ask one question. Raises the errors of `converse`, and the error that the answer stands for."""
        conversation = Conversation()
        answer = conversation.ask(command)
        await self.converse(conversation)
        return answer.answer
