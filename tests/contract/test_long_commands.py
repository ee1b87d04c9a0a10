"""A command that takes long has a front-end that outlives mpsd: it is given once and answered once, to any mpsd."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise
from typing import Any, Final

import msgspec
import pytest

from mpsd.core.errors import (
    ControlBrokenError,
    ControlBusyError,
    ControlUnknownCommandError,
    ControlUnresponsiveError,
    ServerNotFoundError,
    StorageError,
)
from mpsd.core.model import ProcessIdentity
from mpsd.core.mps import commands
from mpsd.core.mps.commands import is_mark
from mpsd.core.mps.limits import ACTIVE_THREAD_PERCENTAGE, LimitValue
from mpsd.system.mps.control_pipe import ControlPipe
from mpsd.system.mps.lasting_front_end import LongCommand, PendingCommand
from tests.contract.subjects import Bench
from tests.harness import eventually, look_at

GET: Final = ACTIVE_THREAD_PERCENTAGE.ask_default()


def long(bench: Bench, seconds: float = 20.0) -> LongCommand[LimitValue]:
    """Return a command with a known answer, declared as one that may take long."""
    return LongCommand(GET, bench.root / "answer", "it is a test", seconds)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def conversations(bench: Bench) -> int:
    """Return how often mpsd gave the command: behind its own mark."""
    log = bench.log()
    return sum(is_mark(one.removeprefix("Cmd:")) and f"Cmd:{GET.line}" in other for one, other in _pairs(log))


def _pairs(log: list[str]) -> Iterator[tuple[str, str]]:
    said = [line for line in log if line.startswith("Cmd:")]
    return pairwise(said)


async def asked(bench: Bench, door: ControlPipe) -> tuple["asyncio.Task[LimitValue]", PendingCommand]:
    """Give a command, and return the pending record once it is stored."""
    noted: list[PendingCommand] = []
    task = asyncio.create_task(door.ask_long(long(bench), noted.append))
    await eventually(lambda: noted, what="the front-end to be noted")
    return task, noted[0]


def test_answer(bench: Bench) -> None:
    """A long command is answered like any other, by a front-end that was recorded before it sent anything."""

    async def test() -> None:
        door = bench.door()
        seen: list[tuple[bool, int]] = []

        def note(who: PendingCommand) -> None:
            seen.append((look_at(who.front_end.pid) is not None, conversations(bench)))

        assert await door.ask_long(long(bench), note) == 1000
        assert seen == [(True, 0)]
        await eventually(lambda: conversations(bench) == 1, what="the log to show that it was asked once")
        assert door.waits_for == ""

    run(test)


def test_what_cannot_be_noted_is_not_said(bench: Bench) -> None:
    """When the pending command cannot be stored, nothing is sent, and the daemon's connection is free."""

    async def test() -> None:
        door = bench.door()

        def note(_: PendingCommand) -> None:
            raise StorageError("it cannot be written", hint="free space")

        with pytest.raises(StorageError):
            await door.ask_long(long(bench), note)
        assert conversations(bench) == 0
        assert await door.ask(GET) == 1000

    run(test)


def test_seat(bench: Bench) -> None:
    """While it waits, it states what it waits for, and other conversations of this mpsd wait beyond their deadline."""

    async def test() -> None:
        door = bench.door(0.3)
        bench.daemon.send_signal(signal.SIGSTOP)
        task, _ = await asked(bench, door)
        assert door.waits_for == "it is a test"
        other = asyncio.create_task(door.ask(GET))
        await asyncio.wait({other}, timeout=0.8)
        assert not other.done()
        bench.daemon.send_signal(signal.SIGCONT)
        assert await task == 1000
        assert await other == 1000
        assert door.waits_for == ""

    run(test)


def test_one_after_the_other(bench: Bench) -> None:
    """A second long command waits for the first, and for each the pipe states what it waits for."""

    async def test() -> None:
        door = bench.door()
        bench.daemon.send_signal(signal.SIGSTOP)
        first, _ = await asked(bench, door)
        later = LongCommand(GET, bench.root / "answer", "it is the second test", 20.0)
        noted: list[str] = []
        second = asyncio.create_task(door.ask_long(later, lambda _: noted.append(door.waits_for)))
        abandoned = asyncio.create_task(door.ask_long(later, lambda _: None))
        await asyncio.wait({second, abandoned}, timeout=0.1)
        abandoned.cancel()
        await asyncio.wait({abandoned})
        assert door.waits_for == "it is a test"
        bench.daemon.send_signal(signal.SIGCONT)
        assert await first == 1000
        assert await second == 1000
        assert noted == ["it is the second test"]
        assert door.waits_for == ""

    run(test)


@pytest.mark.parametrize("answers", [True, False])
def test_taken_over(bench: Bench, answers: bool) -> None:  # noqa: FBT001 - a parameter
    """After mpsd has died the front-end waits on, and the next mpsd reads its answer, without repeating the command."""
    bench.daemon.send_signal(signal.SIGSTOP)
    who = _died_asking(bench)
    assert look_at(who.front_end.pid) is not None

    async def test() -> None:
        if answers:
            bench.daemon.send_signal(signal.SIGCONT)
            await eventually(lambda: _is_over(who.front_end.pid), what="the front-end to end")
        later = asyncio.create_task(bench.door().take_over(long(bench), who))
        bench.daemon.send_signal(signal.SIGCONT)
        assert await later == 1000
        await eventually(lambda: conversations(bench) == 1, what="the log to show that it was asked once")

    run(test)


def _died_asking(bench: Bench) -> PendingCommand:
    """Have a process give the command and die afterwards; return the pending record."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:

        async def ask() -> None:
            _, who = await asked(bench, bench.door())
            os.write(writing, msgspec.json.encode(who))
            os._exit(0)

        run(ask)
    os.close(writing)
    with open(reading, "rb") as pipe:  # noqa: PTH123 - a descriptor
        who = msgspec.json.decode(pipe.read(), type=PendingCommand)
    os.waitpid(pid, 0)
    return who


def _is_over(pid: int) -> bool:
    found = look_at(pid)
    return found is None or found.zombie


def test_nothing_was_said(bench: Bench) -> None:
    """An mpsd that died before it sent the command leaves a front-end that ends silently; the command can be given."""

    async def test() -> None:
        (bench.root / "answer").write_text("")
        nobody = PendingCommand(ProcessIdentity(2**22, 1), "nonce", 1e9)
        with pytest.raises(ControlBusyError):
            await bench.door().take_over(long(bench), nobody)
        assert conversations(bench) == 0

    run(test)


def test_nothing_came_in_time(bench: Bench) -> None:
    """A front-end without an answer, whose deadline has passed, was killed for that by an mpsd that died afterwards."""

    async def test() -> None:
        (bench.root / "answer").write_text("")
        killed = PendingCommand(ProcessIdentity(2**22, 1), "nonce", 0.0)
        with pytest.raises(ControlUnresponsiveError, match="in time"):
            await bench.door().take_over(long(bench), killed)

    run(test)


def test_deadline(bench: Bench) -> None:
    """At its own deadline its front-end is ended, and the connection is free once the daemon continues."""

    async def test() -> None:
        door = bench.door()
        bench.daemon.send_signal(signal.SIGSTOP)
        noted: list[PendingCommand] = []
        with pytest.raises(ControlUnresponsiveError, match=f"did not answer '{GET.line}' in time"):
            await door.ask_long(long(bench, 0.5), noted.append)
        assert _is_over(noted[0].front_end.pid)
        bench.daemon.send_signal(signal.SIGCONT)
        assert await door.ask(GET) == 1000

    run(test)


def test_given_up(bench: Bench) -> None:
    """An operation that stops the daemon need not wait for it."""

    async def test() -> None:
        door = bench.door()
        bench.daemon.send_signal(signal.SIGSTOP)
        task, who = await asked(bench, door)
        await door.give_up()
        with pytest.raises(ControlBrokenError, match="was given up"):
            await task
        assert _is_over(who.front_end.pid)
        bench.daemon.send_signal(signal.SIGCONT)

    run(test)


def test_terminate_client_of_nobody(bench: Bench) -> None:
    """A missing server is reported as such; a driver without the command says so."""
    command = LongCommand(commands.terminate_client(999, 1000), bench.root / "answer", "it is a test", 20.0)
    error = ControlUnknownCommandError if bench.subject.branch < 535 else ServerNotFoundError

    async def test() -> None:
        with pytest.raises(error):
            await bench.door().ask_long(command, lambda _: None)

    run(test)


@pytest.mark.parametrize(("lines", "ended"), [(["0"], True), (["CUDA_SUCCESS"], True), (["1"], False), ([], False)])
def test_words(lines: list[str], ended: bool) -> None:  # noqa: FBT001 - a parameter
    """Both words of NVIDIA's documents say that contexts are ended, and no other does."""
    command = commands.terminate_client(1, 2)
    with contextlib.nullcontext() if ended else pytest.raises(Exception, match="terminate_client"):
        command.parse(lines)
