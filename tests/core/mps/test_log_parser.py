"""Lines of the control daemon's log, and whose commands they show."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.mps.commands import ROWS, Effect, mark
from mpsd.core.mps.limits import ACTIVE_THREAD_PERCENTAGE, PINNED_DEVICE_MEM_LIMIT
from mpsd.core.mps.log_events import (
    REASONS_TO_ASK,
    ClientArrived,
    ClientConnected,
    ClientLeft,
    ClientStatus,
    ContextsMade,
    DaemonStarted,
    ForeignCommand,
    LimitGiven,
    LogEvent,
    ServerExited,
    ServerFailed,
    ServerFaulted,
    ServerReady,
    ServerStarting,
    SharedMemoryMade,
    Unaccounted,
)
from mpsd.core.mps.log_parser import CommandOrigin, LogLine, LogReader, parse

SET: Final = "set_default_active_thread_percentage 10"


def line(text: str) -> str:
    """Return a line in the format of control daemons (seen on 470.256.02, 535.261.03, 550.163.01 and 555.58.02)."""
    return f"[2026-11-21 02:59:14.618 Control 10975] {text}"


def conversation(*commands: str, whole: bool = True) -> list[str]:
    """Return the log lines of a conversation."""
    said = [line("Accepting connection..."), line("NEW UI")]
    for command in commands:
        said += [line(f"Cmd:{command}"), line("100.0")]
    return [*said, line("UI closed")] if whole else said


def foreign(lines: list[str], reader: LogReader | None = None) -> tuple[str, ...]:
    """Return the changing commands of others that a reader sees in these lines."""
    events = (reader or LogReader()).read(lines)
    return tuple(event.text for event in events if isinstance(event, ForeignCommand))


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


def test_stranger() -> None:
    """A stranger's changing commands are seen, in order, and its queries are not."""
    commands = ["get_server_list", SET, "ps", "quit", "bogus 1", "set_default_device_pinned_mem_limit 0 1G"]
    assert foreign(conversation(*commands)) == (SET, "quit", "set_default_device_pinned_mem_limit 0 1G")


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


def test_mpsd_itself() -> None:
    """mpsd's own conversations, which begin with a mark, are not foreign."""
    assert foreign(conversation(mark("abcd", 0), SET, mark("abcd", 1))) == ()


def test_mark_behind_the_first_command() -> None:
    """A mark after the first command, and an invalid mark, do not make a conversation mpsd's."""
    assert foreign(conversation("get_server_list", mark("abcd", 0), SET)) == (SET,)
    assert foreign(conversation("mpsdx", SET)) == (SET,)


def test_mark_without_the_key() -> None:
    """A conversation with an imitated mark, without the key, stays foreign."""
    for first in ("mpsd-", "mpsd-0123-0", mark("other", 0)):
        assert foreign(conversation(first, SET), LogReader("secret")) == (SET,)
    assert foreign(conversation(mark("secret77", 0), SET), LogReader("secret")) == ()


def test_one_after_the_other() -> None:
    """Each conversation is judged by itself."""
    log = [*conversation(mark("a", 0), SET), *conversation(SET), *conversation(mark("b", 0), "quit")]
    assert foreign(log) == (SET,)


def test_broken_off() -> None:
    """A conversation that ended with its daemon has no end in the log, and is judged all the same."""
    log = [
        *conversation(mark("a", 0), whole=False),
        *conversation(SET),
        *conversation(SET, whole=False),
        *conversation(mark("b", 0), SET),
    ]
    assert foreign(log) == (SET, SET)


def test_read_from_the_middle() -> None:
    """A conversation whose beginning was not seen counts as foreign: unknown is not mpsd's."""
    assert foreign([line(f"Cmd:{SET}"), line("10.0"), line("UI closed")]) == (SET,)


def test_answers_are_no_commands() -> None:
    """A daemon's answer is no command, whatever it looks like."""
    assert foreign([line("NEW UI"), line(f'Unknown command "{SET}"'), line(SET), f"Cmd:{SET}"]) == ()


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from([row.name for row in ROWS]), max_size=5)), max_size=6),
    st.data(),
)
def test_in_pieces(conversations: list[tuple[bool, list[str]]], data: st.DataObject) -> None:
    """However the log is cut into pieces, exactly the changing commands of others are seen."""
    log: list[str] = []
    expected: list[str] = []
    changing = {row.name for row in ROWS if row.effect is Effect.CHANGES}
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


_SERVERS: Final[list[tuple[str, list[LogEvent]]]] = [
    ("Created named shared memory region /cuda.shm.0.52.1", [SharedMemoryMade(77, "cuda.shm.0.52.1")]),
    ("Active Threads Percentage set to 33.0", [LimitGiven(77, ACTIVE_THREAD_PERCENTAGE, 330)]),
    (
        "Device pinned memory limit for device 0 set to 0x140000000 bytes",
        [LimitGiven(77, PINNED_DEVICE_MEM_LIMIT, 5 << 30)],
    ),
    ("Device pinned memory limit for device 1 set to 0x140000000 bytes", []),
    ("Server has started", [ServerReady(77)]),
    ("Client {PID: 4267, Context ID: 0} connected", [ClientConnected(77, 4267, 0)]),
    ("Status of client {4267, 1} is ACTIVE", [ClientStatus(77, 4267, 1, "ACTIVE")]),
    ("status of client {4267, 1} is INACTIVE", [ClientStatus(77, 4267, 1, "INACTIVE")]),
    ("Client {4267, 0} exit", [ClientLeft(77, 4267, 0)]),
    ("Volta MPS: Server is handling a fatal GPU error.", [ServerFaulted(77)]),
    ("Creating server context on device 0 (Tesla T4)", [ContextsMade(77)]),
    ("MPS server failed to start", [ServerFailed(77, "MPS server failed to start")]),
    ("Invalid CUDA_VISIBLE_DEVICES", [ServerFailed(77, "Invalid CUDA_VISIBLE_DEVICES")]),
    *(
        (text, list[LogEvent]())
        for text in (
            "Receive command failed, assuming client exit",
            "Receive command failed, assuming client exit. Client process disconnected",
            "Startup",
            "Connecting to control daemon on socket: /run/p/control",
            "Initializing server process",
            "Destroy server context on device 0",
            "Created anonymous shared memory region mps.shm.1000.4428",
            "Created named shared memory region of another name",
            "CUDA MPS Server for Linux/Unix. Binary version: 13000",
            "Display Driver version: 580",
            "Server Priority set to 0",
            "Received new client request for {PID: 4267, Context ID: 0}",
            "Creating worker thread for client {PID: 4267, Context ID: 0}",
            "Device Tesla T4 (uuid GPU-0) is associated",
            "Priority level of client {4267} is: 0",
            "The following devices",
            "0",
            "The following clients have a sticky error set:",
            "4267",
            "Server has been notified to shutdown",
            "Exiting",
        )
    ),
]

_DAEMONS: Final[list[tuple[str, list[LogEvent]]]] = [
    ("Starting control daemon using socket /run/p/control", [DaemonStarted(77)]),
    ("Starting new server 5 for user 1000", [ServerStarting(5, 1000)]),
    ("NEW SERVER 5: Ready", [ServerReady(5)]),
    ("Server 5 exited with status 1", [ServerExited(5, 1)]),
    (
        "Server encountered a fatal exception. Shutting down",
        [ServerFailed(77, "Server encountered a fatal exception. Shutting down")],
    ),
    (
        "NEW CLIENT 0 from user 1000: Server is not ready, push client to pending list",
        [ClientArrived(0, 1000, waits=True)],
    ),
    ("NEW CLIENT 9 from user 1000: Server already exists", [ClientArrived(9, 1000, waits=False)]),
    *(
        (text, list[LogEvent]())
        for text in (
            "To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=/run/p",
            "CUDA MPS Control binary version: 13000",
            "Accepting connection...",
            "User did not send valid credentials",
            "Unable to read new connection type information",
            "Removed Shm file at ",
            "Server 5 is <busy>",
            "Exit with status 1",
            "Force shutting down server 5",
            "quit command issued with timeout of 1",
            "Using log directory: /var/log/nvidia-mps",
        )
    ),
]


@pytest.mark.parametrize(
    ("line", "events"),
    [
        *((said(text), events) for text, events in _DAEMONS),
        *((said(text, "Server"), events) for text, events in _SERVERS),
        (
            said("Failed to start : invalid argument", "Legacy Server"),
            [ServerFailed(77, "Failed to start : invalid argument")],
        ),
    ],
)
def test_known_lines(line: str, events: list[LogEvent]) -> None:
    """Each known line is parsed to its event, alone and within a conversation."""
    for origin in CommandOrigin:
        reader = LogReader(origin=origin)
        assert reader.read([line]) == events
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
    """An unknown line is counted and kept, and means nothing; one without a timestamp may be a part of a command."""
    reader = LogReader()
    assert reader.read([unknown]) == ([] if unknown.startswith("[") else [Unaccounted(unknown)])
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
    reader.renew("b")
    assert reader.read([*conversation(mark("a", 0), SET), *conversation(mark("b1", 0), SET)]) == []
    assert reader.last_nonce == "b1"
    reader.read([said("Starting control daemon using socket /run/p/control")])
    assert foreign(conversation(mark("a", 0), SET), reader) == (SET,)
    assert foreign(conversation(mark("b", 0), SET), reader) == ()


@given(st.lists(st.text(max_size=60) | st.sampled_from([text for text, _ in (*_DAEMONS, *_SERVERS)]).map(said)))
def test_any_log(lines: list[str]) -> None:
    """In any log, every line is an event, or known to be meaningless, or counted."""
    reader = LogReader()
    events = reader.read(lines)
    assert len([each for each in events if not isinstance(each, Unaccounted)]) + reader.unknown <= len(lines)
