"""Lines of the control daemon's log, and whose commands they show."""

from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.mps.commands import ROWS, mark
from mpsd.core.mps.limits import ACTIVE_THREAD_PERCENTAGE, PINNED_DEVICE_MEM_LIMIT
from mpsd.core.mps.log_parser import (
    KNOWN_LINES,
    REASONS_TO_ASK,
    ClientArrived,
    ClientsChanged,
    CommandOrigin,
    ContextsMade,
    DaemonStarted,
    ForeignCommand,
    KnownLine,
    LimitGiven,
    LogEvent,
    LogLine,
    LogReader,
    QuitRefused,
    ServerExited,
    ServerFailed,
    ServerFaulted,
    ServerReady,
    ServerStarting,
    SharedMemoryMade,
    Unaccounted,
    UnknownLine,
    find_known,
    parse,
)

SET: Final = "set_default_active_thread_percentage 10"


def line(text: str) -> str:
    """Return a line in the format of control daemons (seen on 470.256.02, 535.261.03, 550.163.01 and 555.58.02)."""
    return f"[2026-11-21 02:59:14.618 Control 10975] {text}"


def conversation(*commands: str, whole: bool = True) -> list[str]:
    said = [line("Accepting connection..."), line("NEW UI")]
    for command in commands:
        said += [line(f"Cmd:{command}"), line("100.0")]
    return [*said, line("UI closed")] if whole else said


def foreign(lines: list[str], reader: LogReader | None = None) -> tuple[str, ...]:
    """Return the changing commands of others that a reader sees in these lines."""
    events = (reader or LogReader()).read(lines)
    return tuple(event.text for event in events if isinstance(event, ForeignCommand))


REFUSED: Final = "Not enough privilege to execute quit command"


@pytest.mark.parametrize(
    ("lines", "is_open", "refused"),
    [
        (["NEW UI", "Cmd:quit"], True, 0),
        (["NEW UI", "Cmd:  quit -t 5", "quit command issued with timeout of 5"], True, 0),
        (["NEW UI", "Cmd:quit", REFUSED], False, 1),
        (["NEW UI", "Cmd:quit", REFUSED, REFUSED], False, 1),  # the second one is forged
        (["NEW UI", "Cmd:quit", "UI closed"], False, 0),
        (["NEW UI", "Cmd:quit", "UI closed", "NEW UI", "Cmd:get_server_list"], False, 0),
        (["NEW UI", "Cmd:quit", "Cmd:get_server_list"], True, 0),
        (["NEW UI", "Cmd:quits"], False, 0),
    ],
)
def test_quit(lines: list[str], refused: int, *, is_open: bool) -> None:
    """A conversation with a `quit` is open until it ends, or until the command is refused."""
    reader = LogReader()
    events = reader.read(map(line, lines))
    assert (reader.is_quit_open, events.count(QuitRefused())) == (is_open, refused)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (line("NEW UI"), LogLine("2026-11-21 02:59:14.618", "Control", 10975, "NEW UI")),
        (line(""), LogLine("2026-11-21 02:59:14.618", "Control", 10975, "")),
        (line("Cmd:ps -p 3] x"), LogLine("2026-11-21 02:59:14.618", "Control", 10975, "Cmd:ps -p 3] x")),
        ("[2026-11-21 02:59:14.618 Server    77] Startup", LogLine("2026-11-21 02:59:14.618", "Server", 77, "Startup")),
        (
            "[2026-11-21 02:59:14.618 Legacy Server 4] Failed to start : invalid argument",
            LogLine("2026-11-21 02:59:14.618", "Legacy Server", 4, "Failed to start : invalid argument"),
        ),
        ("", None),
        ("no luck today", None),
        ("[2026-11-21 02:59:14.618 Control x] NEW UI", None),
        ("[2026-11-21", None),
        (f"[2026-11-21 02:59:14.618 Control {'9' * 5000}] NEW UI", None),
    ],
)
def test_lines(text: str, expected: LogLine | None) -> None:
    """A line of the usual form is a value; any other is none."""
    assert parse(text) == expected


@given(st.text(max_size=200))
def test_any_line(text: str) -> None:
    """Any line is a value or none."""
    parsed = parse(text)
    assert parsed is None or parsed.text in text


@pytest.mark.parametrize("spoken", [f"\t{SET}", f" \v{SET}", SET.replace(" ", "\t"), SET.replace(" ", "\r\f")])
def test_stranger_with_other_spaces(spoken: str) -> None:
    """A command is seen after and between all characters that a control daemon treats as space.

    Measured on all versions.
    """
    assert foreign(conversation(spoken)) == (spoken,)


@pytest.mark.parametrize("space", ["\x1c", "\x85", "\xa0", "\u3000"])
def test_what_is_no_space(space: str) -> None:
    """A character that only Unicode treats as space makes an unknown command, without effect.

    Measured on all versions.
    """
    assert foreign(conversation(SET.replace(" ", space))) == ()


def test_mark_behind_the_first_command() -> None:
    """A mark after the first command, and an invalid mark, do not make a conversation mpsd's."""
    assert foreign(conversation("get_server_list", mark("abcd", 0), SET)) == (SET,)
    assert foreign(conversation("mpsdx", SET)) == (SET,)


def test_mark_without_the_key() -> None:
    """A conversation with an imitated mark, without the key, stays foreign."""
    for first in ("mpsd-", "mpsd-0123-0", mark("other", 0)):
        assert foreign(conversation(first, SET), LogReader("secret")) == (SET,)
    assert foreign(conversation(mark("secret77", 0), SET), LogReader("secret")) == ()


def test_read_from_the_middle() -> None:
    """A conversation whose beginning was not seen counts as foreign: unknown is not mpsd's."""
    assert foreign([line(f"Cmd:{SET}"), line("10.0"), line("UI closed")]) == (SET,)


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from([row.name for row in ROWS]), max_size=5)), max_size=6),
    st.data(),
)
def test_in_pieces(conversations: list[tuple[bool, list[str]]], data: st.DataObject) -> None:
    """However the log is cut into pieces, exactly the changing commands of others are seen."""
    log: list[str] = []
    expected: list[str] = []
    changing = {row.name for row in ROWS if row.changes}
    for ours, commands in conversations:
        log += conversation(*([mark("n", 0)] if ours else []), *commands)
        expected += [command for command in commands if command in changing and not ours]
    reader, seen = LogReader(), list[str]()
    while log:
        size = data.draw(st.integers(1, len(log)))
        seen += foreign(log[:size], reader)
        del log[:size]
    assert seen == expected


def said(text: str, source: str = "Control") -> str:
    """Return a line as one of these programs writes it."""
    return f"[2026-11-21 02:59:14.618 {source} 77] {text}"


LOGS: Final = {path.stem: path.read_text().splitlines() for path in sorted((Path(__file__).parent / "logs").iterdir())}
"""The logs of NVIDIA's programs, by driver or source: each form of a line once. The lines with a # name the source."""

LOG_LINES: Final = [(name, each) for name, lines in LOGS.items() for each in lines if not each.startswith("# ")]

FAULT: Final = ServerFaulted(633)

EVENTS: Final[dict[str, list[LogEvent]]] = {
    "460": [
        ClientArrived(0, 0, waits=True),
        ServerStarting(17, 0),
        ContextsMade(17),
        ServerReady(17),
        LimitGiven(17, ACTIVE_THREAD_PERCENTAGE, 330),
        ServerReady(17),
        ClientArrived(0, 0, waits=False),
        ClientsChanged(),
        ClientsChanged(),
        ClientsChanged(),
    ],
    "2021": [DaemonStarted(1), ClientArrived(0, 1000, waits=True), ServerStarting(17, 1000)],
    # The control daemon names no server in "Server encountered a fatal exception. Shutting down", and its pid is none.
    "2024": [ClientArrived(0, 1001, waits=True), ServerStarting(92, 1001), ServerExited(92, 1)],
    "2025": [
        ContextsMade(82),
        SharedMemoryMade(82, "cuda.shm.0.52.1"),
        LimitGiven(82, ACTIVE_THREAD_PERCENTAGE, 120),
        LimitGiven(82, PINNED_DEVICE_MEM_LIMIT, 1 << 30),
        ServerReady(82),
        ClientsChanged(),
    ],
    "470-555": [DaemonStarted(16273), ServerStarting(16282, 0), ServerExited(16282, 0)],
    "580": [
        DaemonStarted(437),
        ClientArrived(442, 0, waits=True),
        ServerStarting(444, 0),
        ContextsMade(444),
        ServerReady(444),
        LimitGiven(444, ACTIVE_THREAD_PERCENTAGE, 1000),
        ServerReady(444),
        ClientsChanged(),
        ClientArrived(442, 0, waits=False),
        *[ClientsChanged()] * 4,
        LimitGiven(444, PINNED_DEVICE_MEM_LIMIT, 4 << 30),
        ServerExited(600, 0),
        *[FAULT] * 8,
    ],
    "580-public": [
        DaemonStarted(4242),
        ClientArrived(4267, 1000, waits=True),
        ServerStarting(4428, 1000),
        ContextsMade(4428),
        LimitGiven(4428, ACTIVE_THREAD_PERCENTAGE, 330),
        LimitGiven(4428, PINNED_DEVICE_MEM_LIMIT, 5 << 30),
        ServerReady(4428),
        ServerReady(4428),
        *[ClientsChanged()] * 4,
        ClientArrived(4281, 1000, waits=False),
        ServerExited(4428, 1),
    ],
    "documented": [
        DaemonStarted(9),
        ServerStarting(77, 1000),
        ContextsMade(77),
        SharedMemoryMade(77, "cuda.shm.1000.4d.1"),
        ServerFaulted(77),
        ClientsChanged(),
        *[ServerFaulted(77)] * 2,
        ContextsMade(77),
        ServerFailed(77, "Failed to start : invalid argument"),
        ServerFailed(77, "MPS server failed to start"),
        ServerFailed(77, "Invalid CUDA_VISIBLE_DEVICES"),
        ServerExited(77, 1),
    ],
}
"""The events of each log, in order."""


@pytest.mark.parametrize("name", LOGS)
def test_logs(name: str) -> None:
    """Every line of the logs of all drivers is known, and has exactly the expected events."""
    reader = LogReader()
    events = reader.read(each for log, each in LOG_LINES if log == name)
    assert (list(reader.latest), reader.unknown) == ([], 0)
    assert events == EVENTS[name]


@pytest.mark.parametrize("known", KNOWN_LINES, ids=lambda known: known.pattern)
def test_sources(known: KnownLine) -> None:
    """Each row of the table names exactly the logs that have a line of its form."""
    having = {name for name, each in LOG_LINES if row_of(each) is known}
    assert having == {*known.sources.split()}


def row_of(line: str) -> KnownLine | None:
    parsed = parse(line)
    found = find_known(parsed.text) if parsed is not None else None
    return None if found is None else found[0]


def test_within_conversations() -> None:
    """A known line means the same within a conversation of anyone."""
    for origin in CommandOrigin:
        for _, each in LOG_LINES:
            assert LogReader(origin=origin).read([each]) == LogReader().read([each])


@pytest.mark.parametrize(
    "text",
    ["Device pinned memory limit for device 1 set to 0x140000000 bytes", "Volta MPS: 0", "4267"],
)
def test_lines_that_mean_nothing(text: str) -> None:
    """A limit of another device than a client's own, and an entry of a list, mean nothing and are known."""
    reader = LogReader()
    assert reader.read([said(text, "Server")]) == []
    assert reader.unknown == 0


def test_what_mpsd_asks_is_no_news() -> None:
    """Lines caused by mpsd's own queries are no reason to query again; those caused by others are."""
    asked = [*ROWS, "Server 5 not found", "Server 5 is <busy>", "5", "100.0", 'Unknown command "x"']
    events = LogReader("k").read(conversation(mark("k", 0), *map(str, asked)) + [line(f"{each}") for each in asked])
    assert not any(isinstance(event, REASONS_TO_ASK) for event in events)


@pytest.mark.parametrize(
    "unknown",
    [
        "no stamp",
        "",
        said("a word that is new"),
        said("Server 5 exited with status 99999999999"),
        said("NEW CLIENT x from user 0: Server already exists"),
        said("a word that is new", "Server"),
        said("Active Threads Percentage set to 33.0.0", "Server"),
        said("Client {PID: 1, Context ID: 99999999999} connected", "Server"),
    ],
)
def test_unknown_lines(unknown: str) -> None:
    """An unknown line is counted and kept; one of a server may say anything."""
    reader = LogReader()
    events = [UnknownLine()] if "Control" not in unknown else []
    assert reader.read([unknown]) == (events if unknown.startswith("[") else [Unaccounted(unknown)])
    assert reader.unknown == 1
    assert list(reader.latest) == [unknown]


def test_unknown_lines_are_bounded() -> None:
    """All unknown lines are counted; the latest are kept, each cut to a readable length."""
    reader = LogReader()
    reader.read([f"{number} {'x' * 10_000}" for number in range(1000)])
    assert reader.unknown == 1000
    assert [each.partition(" ")[0] for each in reader.latest] == [str(number) for number in range(968, 1000)]
    assert max(map(len, reader.latest)) == 200


def test_answers_are_not_unknown() -> None:
    """A daemon's answer within a conversation is no unknown line; outside of one it is."""
    reader = LogReader()
    reader.read([*conversation("bogus", whole=False), line("Server 999 not found"), line("PID ID SERVER")])
    assert reader.unknown == 0
    reader.read([line("UI closed"), line("Server 999 not found")])
    assert reader.unknown == 1


def test_a_daemon_that_died() -> None:
    """An unfinished conversation of a dead daemon ends when the next daemon starts."""
    reader = LogReader("k")
    log = [*conversation(mark("k", 0), whole=False), said("Starting control daemon using socket /run/p/control")]
    assert foreign([*log, line("a line that is new")], reader) == ()
    assert reader.unknown == 1


def test_goes_on_where_another_stopped() -> None:
    """A reader that starts at another's position judges the rest of a conversation as that one would have."""
    log = conversation(mark("k", 0), SET, SET)
    for size in range(len(log)):
        first = LogReader("k")
        second = LogReader("k", CommandOrigin.NOBODYS)
        assert foreign(log[:size], first) == ()
        second.origin = first.origin
        assert foreign(log[size:], second) == ()


@pytest.mark.parametrize("text", ["get_server_list", "bogus", "", "get_server_list 1"])
def test_what_others_ask(text: str) -> None:
    """Nothing in a foreign conversation counts as a mere query: there may be more in it than is visible."""
    reader = LogReader("k")
    assert reader.read(conversation(text)) == [Unaccounted(text)]
    assert reader.read(conversation(mark("k", 0), text)) == []


def test_key_of_each_daemon() -> None:
    """A new key is valid from then on; the former daemon's key, until the next daemon has written its first line."""
    reader = LogReader("a")
    reader.add_key("b")
    assert reader.read([*conversation(mark("a", 0), SET), *conversation(mark("b1", 0), SET)]) == []
    assert reader.last_nonce == "b1"
    reader.read([said("Starting control daemon using socket /run/p/control")])
    assert foreign(conversation(mark("a", 0), SET), reader) == (SET,)
    assert foreign(conversation(mark("b", 0), SET), reader) == ()


@given(st.lists(st.text(max_size=60) | st.sampled_from([each for _, each in LOG_LINES])))
def test_any_log(lines: list[str]) -> None:
    """In any log, every line is an event, or known to be meaningless, or counted."""
    reader = LogReader()
    events = reader.read(lines)
    assert len([each for each in events if not isinstance(each, Unaccounted | UnknownLine)]) + reader.unknown <= len(
        lines
    )
