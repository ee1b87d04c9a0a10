"""mpsd's control pipe: the true answer or an error with the reason, whatever the daemon and others do."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.core import gpus
from mpsd.core.errors import (
    ControlBrokenError,
    ControlBusyError,
    ControlNoAnswerError,
    ControlUnknownCommandError,
    ControlUnreachableError,
    ControlUnresponsiveError,
    InvalidRequestError,
    LimitNotHeldError,
    MpsdError,
    ServerNotFoundError,
)
from mpsd.core.model import Limits
from mpsd.core.mps import commands, log_parser
from mpsd.core.mps.commands import TABLE, Command
from mpsd.core.mps.limits import (
    ACTIVE_THREAD_PERCENTAGE,
    LIMITS,
    PINNED_DEVICE_MEM_LIMIT,
    LimitValue,
    Setting,
)
from mpsd.core.mps.log_parser import ForeignCommand
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.simulator.gpus import SimulatedGpus
from mpsd.system.mps.control_pipe import ControlPipe, Conversation
from tests.contract.differences import known
from tests.contract.subjects import Bench, subjects
from tests.harness import eventually, wait_until

pytestmark = pytest.mark.parametrize("subject", subjects(555), indirect=True)

SOON: Final = 0.5
"""Seconds for operations that must not succeed."""

WEDGED: Final = "exec sleep 1000"

GET_PERCENTAGE: Final = ACTIVE_THREAD_PERCENTAGE.ask_default()
GPU: Final = "GPU-11111111-2222-3333-4444-555555555555"


def percentage(tenths: int) -> Setting[LimitValue]:
    """Return the setting of a percentage, given in tenths."""
    return ACTIVE_THREAD_PERCENTAGE.default_setting(Limits(ActiveThreadPercentage(tenths), None))


def limit(mebibytes: int | None) -> Setting[LimitValue]:
    """Return the setting of a memory limit, given in MiB; None removes it."""
    wanted = None if mebibytes is None else PinnedDeviceMemLimit(mebibytes)
    return PINNED_DEVICE_MEM_LIMIT.default_setting(Limits(ActiveThreadPercentage(1000), wanted))


def handmade_limit(device: str, value: str, wanted: LimitValue) -> Setting[LimitValue]:
    """Return the setting of a memory limit that mpsd would never make."""
    row = PINNED_DEVICE_MEM_LIMIT
    getter = commands.command(row.default_getter, (device,), row.parse)
    return Setting(row.name, wanted, f"{row.default_setter} {device} {value}", getter)


def handmade_percentage(value: str, wanted: int) -> Setting[LimitValue]:
    """Return the setting of a percentage that mpsd would never make."""
    row = ACTIVE_THREAD_PERCENTAGE
    return Setting(row.name, wanted, f"{row.default_setter} {value}", GET_PERCENTAGE)


async def put(door: ControlPipe, setting: Setting[LimitValue]) -> None:
    """Set, read back and compare, in a separate conversation."""
    conversation = Conversation()
    pending = conversation.ask(setting)
    await door.converse(conversation)
    pending.answer  # noqa: B018 - it raises when the limit does not hold


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's own coroutine."""
    asyncio.run(test())


def only_the_daemon_runs(bench: Bench) -> bool:
    """Return whether no front-end is left."""
    return [process.pid for process in bench.processes()] == [bench.daemon.pid]


# -- set and verify ----------------------------------------------------------------------------------------------------


def test_every_percentage_holds(bench: Bench) -> None:
    """Every percentage of mpsd is set, read back and unchanged: all thousand of them."""

    async def test() -> None:
        conversation = Conversation()
        pending = {tenths: conversation.ask(percentage(tenths)) for tenths in range(1, 1001)}
        await bench.door().converse(conversation)
        assert {tenths: answer.answer for tenths, answer in pending.items()} == {each: each for each in pending}

    run(test)


def test_memory_limits_hold(bench: Bench) -> None:
    """Every memory limit of mpsd holds as far as it is reported, and so does the absence of one."""
    values = [1, 2, 511, 512, 1023, 1024, 1025, 1536, 2047, 2048, 8191, 8192, 81920, 2**20, 2**30 - 1, None]

    async def test() -> None:
        conversation = Conversation()
        pending = []
        for value in values:
            expected = None if value is None else PinnedDeviceMemLimit(value).as_reported.bytes
            pending.append((conversation.ask(limit(value)), expected))
            pending.append((conversation.ask(PINNED_DEVICE_MEM_LIMIT.ask_default()), expected))
        await bench.door().converse(conversation)
        assert [answer.answer for answer, _ in pending] == [expected for _, expected in pending]

    if known(PINNED_DEVICE_MEM_LIMIT.default_setter, bench.subject.branch):
        run(test)
    else:
        with pytest.raises(ControlUnknownCommandError):
            run(test)


REFUSED_BEFORE: Final[dict[str, Callable[[], object]]] = {
    "percentage 0": lambda: ActiveThreadPercentage.parse("0"),
    "percentage 150": lambda: ActiveThreadPercentage.parse("150"),
    "percentage abc": lambda: ActiveThreadPercentage.parse("abc"),
    "percentage 0.01": lambda: ActiveThreadPercentage.parse("0.01"),
    "percentage -5": lambda: percentage(-50),
    "memory 0": lambda: PinnedDeviceMemLimit.parse("0"),
    "memory abc": lambda: PinnedDeviceMemLimit.parse("abc"),
    "memory 10T": lambda: PinnedDeviceMemLimit.parse("10T"),
    "memory -1G": lambda: PinnedDeviceMemLimit.parse("-1G"),
    "memory 2**30 MiB": lambda: limit(2**30),
}


def test_refused_values_never_reach_the_pipe(bench: Bench, tmp_path: Path) -> None:
    """When an invalid value is added to a conversation, nothing is sent: the daemon's log has no such command."""

    async def test() -> None:
        inventory = await SimulatedGpus(2, tmp_path).inventory()
        conversation = Conversation()
        for bad in REFUSED_BEFORE.values():
            with pytest.raises(InvalidRequestError):
                conversation.ask(bad())  # type: ignore[arg-type]
        with pytest.raises(MpsdError):
            gpus.select(inventory.gpus, GPU)
        conversation.ask(GET_PERCENTAGE)
        await bench.door().converse(conversation)

    run(test)
    assert [line for line in bench.complete_log() if line.startswith("Cmd:set_")] == []


IGNORED_PERCENTAGES: Final = {"0": 0, "150": 1500, "abc": 100, "-5": -50, "0.01": 1, "100.1": 1001, "33.36": 333}
"""Arguments, and the value that a caller may mean by each, in tenths."""


def test_percentages_that_the_daemon_does_not_hold(bench: Bench) -> None:
    """A percentage that the daemon ignores or rounds away is an error with the limit and the value in force."""

    async def test() -> None:
        door = bench.door()
        for value, wanted in IGNORED_PERCENTAGES.items():
            await put(door, percentage(420))
            with pytest.raises(LimitNotHeldError) as caught:
                await put(door, handmade_percentage(value, wanted))
            assert caught.value.limit == "active_thread_percentage"

    run(test)


IGNORED_LIMITS: Final = {
    ("0", "10T"): 10 * 2**40,
    ("0", "0"): 2**20,
    ("0", "abc"): 2**20,
    ("0", "1.5G"): 3 * 2**29,
    ("0", "-1G"): 2**30,
    ("32", "1G"): 2**30,
    ("-1", "1G"): 2**30,
    (GPU, "1G"): 2**30,
}


def test_limits_that_the_daemon_does_not_hold(bench: Bench) -> None:
    """A memory limit that the daemon reads as another, or as none, is an error in spite of its silence."""
    knows = known(PINNED_DEVICE_MEM_LIMIT.default_setter, bench.subject.branch)
    expected = LimitNotHeldError if knows else ControlUnknownCommandError

    async def test() -> None:
        for (device, value), wanted in IGNORED_LIMITS.items():
            with pytest.raises(expected):
                await put(bench.door(), handmade_limit(device, value, wanted))

    run(test)


def test_an_ignored_limit_takes_no_other_answer(bench: Bench) -> None:
    """Of several settings in one conversation, only the one that the daemon ignored fails."""
    gigabyte = 2**30

    async def test() -> None:
        conversation = Conversation()
        ignored = conversation.ask(handmade_limit("32", "1G", gigabyte))
        held = conversation.ask(limit(1024))
        shares = [conversation.ask(percentage(tenths)) for tenths in (100, 200)]
        await bench.door().converse(conversation)
        assert [each.answer for each in shares] == [100, 200]
        with pytest.raises((LimitNotHeldError, ControlUnknownCommandError)):
            ignored.answer  # noqa: B018 - it raises
        if known(PINNED_DEVICE_MEM_LIMIT.default_setter, bench.subject.branch):
            assert held.answer == gigabyte

    run(test)


# -- what a driver does not know ---------------------------------------------------------------------------------------

QUESTIONS: Final[tuple[Command[Any], ...]] = (
    commands.get_server_list(),
    commands.get_server_status(999),
    commands.get_client_list(999),
    *(limit.ask_default() for limit in LIMITS),
)


def test_questions_by_driver(bench: Bench) -> None:
    """A query that a driver does not know is an error that names the first driver with it."""

    async def test() -> None:
        conversation = Conversation()
        answers = {question.row.name: conversation.ask(question) for question in QUESTIONS}
        await bench.door().converse(conversation)
        for name, answer in answers.items():
            if known(name, bench.subject.branch):
                with contextlib.suppress(ServerNotFoundError):
                    answer.answer  # noqa: B018 - it raises nothing else
            else:
                with pytest.raises(ControlUnknownCommandError, match=name) as caught:
                    answer.answer  # noqa: B018 - it raises
                assert str(TABLE[name].since) in caught.value.hint

    run(test)


# -- many at once ------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_64_askers(bench: Bench) -> None:
    """Each of 64 concurrent tasks gets the answer to its own query."""

    async def test() -> None:
        door = bench.door(deadline=60)

        async def ask(number: int) -> None:
            conversation = Conversation()
            unknown = conversation.ask(commands.get_client_list(1000 + number))
            share = conversation.ask(percentage(10 + number))
            await door.converse(conversation)
            assert share.answer == 10 + number
            with pytest.raises(ServerNotFoundError, match=f"Server {1000 + number} not found"):
                unknown.answer  # noqa: B018 - it raises

        async with asyncio.TaskGroup() as group:
            for number in range(64):
                group.create_task(ask(number))

    run(test)


def test_a_long_conversation(bench: Bench) -> None:
    """A conversation of hundreds of commands, answered with no line, one or more, gives each query its answer."""

    async def test() -> None:
        conversation = Conversation()
        shares, servers, lists = [], [], []
        for number in range(200):
            lists.append(conversation.ask(commands.get_server_list()))
            shares.append(conversation.ask(percentage(number + 1)))
            servers.append(conversation.ask(commands.get_client_list(number + 1000)))
        await bench.door().converse(conversation)
        assert [each.answer for each in lists] == [()] * 200
        assert [each.answer for each in shares] == list(range(1, 201))
        for number, each in enumerate(servers):
            with pytest.raises(ServerNotFoundError, match=f"Server {number + 1000} not found"):
                each.answer  # noqa: B018 - it raises

    run(test)


def test_two_doors(bench: Bench) -> None:
    """Two control pipes to one daemon collide, and both still get all their answers."""

    async def test() -> None:
        async def ask(own: int) -> None:
            door = bench.door(deadline=60)
            for _ in range(10):
                await put(door, percentage(own))

        async with asyncio.TaskGroup() as group:
            group.create_task(ask(250))
            group.create_task(ask(750))

    run(test)


# -- strangers ---------------------------------------------------------------------------------------------------------


def test_a_stranger_who_stays(bench: Bench) -> None:
    """While the daemon serves a stranger's front-end, mpsd retries until its deadline, without any effect."""

    async def test() -> None:
        with pytest.raises(ControlBusyError) as caught:
            await put(bench.door(deadline=SOON), percentage(100))
        assert str(bench.pipe) in caught.value.detail
        assert caught.value.retryable

    with bench.held():
        before = bench.log().count("Accepting connection...")
        run(test)
        assert bench.log().count("Accepting connection...") > before + 1
    assert "Cmd:set_default_active_thread_percentage 10.0" not in bench.complete_log()


def test_a_stranger_who_leaves(bench: Bench) -> None:
    """When the stranger leaves in time, mpsd gets its answer."""

    async def test() -> None:
        with bench.held():
            before = bench.log().count("Accepting connection...")
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(put(bench.door(), percentage(100)))
                await eventually(
                    lambda: bench.log().count("Accepting connection...") > before + 1, what="mpsd to be turned away"
                )
                assert not asking.done()
                bench.let_go()

    run(test)
    assert bench.front_end("get_default_active_thread_percentage").printed == ["10.0"]


def test_whose_hand_it_was(bench: Bench) -> None:
    """Every conversation of mpsd begins with a unique mark, so that a stranger's is recognised among them."""

    async def test() -> None:
        door = bench.door()
        await put(door, percentage(100))
        bench.front_end("set_default_active_thread_percentage 20")
        await put(door, percentage(300))

    run(test)
    bench.complete_log()
    events = log_parser.LogReader().read(bench.raw_log())
    assert [event.text for event in events if isinstance(event, ForeignCommand)] == [
        "set_default_active_thread_percentage 20"
    ]


# -- when the daemon is not well ---------------------------------------------------------------------------------------


def test_a_stopped_daemon(bench: Bench) -> None:
    """A stopped daemon is unresponsive; the front-end is gone, nothing has changed, and later everything works."""

    async def test() -> None:
        door = bench.door(deadline=SOON)
        bench.daemon.send_signal(signal.SIGSTOP)
        with pytest.raises(ControlUnresponsiveError) as caught:
            await put(door, percentage(100))
        assert "CONT" in caught.value.hint
        assert only_the_daemon_runs(bench)
        bench.daemon.send_signal(signal.SIGCONT)
        door.deadline = 20
        assert await door.ask(GET_PERCENTAGE) == 1000

    run(test)


def test_a_cancelled_task(bench: Bench) -> None:
    """A task that is cancelled during a query leaves no front-end behind, and the next one is served."""

    async def test() -> None:
        door = bench.door()
        bench.daemon.send_signal(signal.SIGSTOP)
        asking = asyncio.ensure_future(door.ask(GET_PERCENTAGE))
        waiting = asyncio.ensure_future(door.ask(GET_PERCENTAGE))
        await eventually(lambda: len(bench.processes()) == 2, what="the front-end to run")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        bench.daemon.send_signal(signal.SIGCONT)
        assert await waiting == 1000
        assert only_the_daemon_runs(bench)

    run(test)


def test_no_daemon(idle: Bench) -> None:
    """Without a daemon, or with the files of a dead one, mpsd reports that no process listens."""

    async def unreachable() -> None:
        with pytest.raises(ControlUnreachableError, match=str(idle.pipe)):
            await idle.door().ask(GET_PERCENTAGE)

    run(unreachable)
    idle.start()
    idle.kill()
    run(unreachable)


def test_a_daemon_that_dies_in_the_middle(bench: Bench) -> None:
    """When the daemon dies during a conversation, no part of it counts as answered."""

    async def test() -> None:
        conversation = Conversation()
        last = [conversation.ask(percentage(number % 1000 + 1)) for number in range(20_000)][-1]

        async def kill() -> None:
            await eventually(
                lambda: "Cmd:set_default_active_thread_percentage 0.9" in bench.log(), what="its beginning"
            )
            bench.daemon.kill()

        async with asyncio.TaskGroup() as group:
            group.create_task(kill())
            with pytest.raises((ControlBrokenError, ControlUnreachableError)):
                await bench.door().converse(conversation)
        with pytest.raises(ControlBrokenError):
            last.answer  # noqa: B018 - it raises

    run(test)


def test_a_busy_server(bench: Bench) -> None:
    """The silence of a busy server is an error and no value, for a query as for a setting."""
    bench.put_server(WEDGED)
    server = bench.start_server()

    async def test() -> None:
        door = bench.door()
        assert await door.ask(commands.get_server_list()) == (server,)
        question = ACTIVE_THREAD_PERCENTAGE.ask_server(server)
        with pytest.raises(ControlNoAnswerError):
            await door.ask(question)
        with pytest.raises(ControlNoAnswerError):
            await put(
                door, Setting("active_thread_percentage", 100, f"set_active_thread_percentage {server} 10", question)
            )

    run(test)


def test_server_states(bench: Bench) -> None:
    """A server that is not ready is INITIALIZING, if the driver reports states at all."""
    bench.put_server(WEDGED)
    server = bench.start_server()

    async def test() -> None:
        assert await bench.door().ask(commands.get_server_status(server)) == "INITIALIZING"

    if known("get_server_status", bench.subject.branch):
        run(test)
    else:
        with pytest.raises(ControlUnknownCommandError):
            run(test)


# -- quitting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", [None, WEDGED], ids=["idle", "wedged"])
def test_quit(bench: Bench, server: str | None) -> None:
    """After `quit` the daemon is gone with its wedged server, though its last output may be lost."""
    if server is not None:
        bench.put_server(server)
        bench.start_server()

    async def test() -> None:
        door = bench.door()
        await door.quit(0)
        await eventually(lambda: bench.daemon.poll() is not None, what="the daemon to be gone")
        with pytest.raises(ControlUnreachableError):
            await door.ask(GET_PERCENTAGE)

    run(test)
    assert bench.ended() == 0
    wait_until(lambda: bench.processes() == [], what="its server to be gone")


def test_quit_and_a_server_that_will_not_go(bench: Bench) -> None:
    """A daemon that waits for a server that never ends is unresponsive, and is left alone."""
    bench.put_server('trap "" INT; exec sleep 1000')
    bench.start_server()

    async def test() -> None:
        with pytest.raises(ControlUnresponsiveError):
            await bench.door(deadline=SOON).quit(0)

    run(test)
    assert bench.daemon.poll() is None


def test_our_own_environment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables in mpsd's own environment do not lead a query to another daemon."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")

    async def test() -> None:
        assert await bench.door().ask(GET_PERCENTAGE) == 1000

    run(test)
