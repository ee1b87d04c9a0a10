"""Lines of the control daemon's log, and whose commands they show."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.commands import ROWS, Effect, mark
from mpsd.core.mpslog import ForeignHand, LogLine, parse

SET: Final = "set_default_active_thread_percentage 10"


def line(text: str) -> str:
    """Return a line as control daemons write it (seen on 470.256.02, 535.261.03, 550.163.01 and 555.58.02)."""
    return f"[2026-11-21 02:59:14.618 Control 10975] {text}"


def conversation(*commands: str, whole: bool = True) -> list[str]:
    """Return what a conversation leaves in the log."""
    said = [line("Accepting connection..."), line("NEW UI")]
    for command in commands:
        said += [line(f"Cmd:{command}"), line("100.0")]
    return [*said, line("UI closed")] if whole else said


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
    ],
)
def test_lines(text: str, expected: LogLine | None) -> None:
    """A line of the usual form is a value; anything else is none."""
    assert parse(text) == expected


@given(st.text(max_size=200))
def test_any_line(text: str) -> None:
    """Whatever stands in the log, it is a value or none."""
    parsed = parse(text)
    assert parsed is None or parsed.text in text


def test_stranger() -> None:
    """A stranger's changing commands are seen, in their order, and its questions are not."""
    commands = ["get_server_list", SET, "ps", "quit", "bogus 1", "set_default_device_pinned_mem_limit 0 1G"]
    assert ForeignHand().seen(conversation(*commands)) == (SET, "quit", "set_default_device_pinned_mem_limit 0 1G")


def test_mpsd_itself() -> None:
    """What mpsd says, whose conversations open with a mark, is nobody's foreign hand."""
    assert ForeignHand().seen(conversation(mark("abcd", 0), SET, mark("abcd", 1))) == ()


def test_mark_behind_the_first_command() -> None:
    """A mark that comes later makes nobody mpsd, and one that is no mark does not either."""
    assert ForeignHand().seen(conversation("get_server_list", mark("abcd", 0), SET)) == (SET,)
    assert ForeignHand().seen(conversation("mpsdx", SET)) == (SET,)


def test_mark_without_the_key() -> None:
    """Whoever writes what looks like a mark, and does not know the key, stays a stranger."""
    for first in ("mpsd-", "mpsd-0123-0", mark("other", 0)):
        assert ForeignHand("secret").seen(conversation(first, SET)) == (SET,)
    assert ForeignHand("secret").seen(conversation(mark("secret77", 0), SET)) == ()


def test_one_after_the_other() -> None:
    """Each conversation is judged by itself."""
    log = [*conversation(mark("a", 0), SET), *conversation(SET), *conversation(mark("b", 0), "quit")]
    assert ForeignHand().seen(log) == (SET,)


def test_broken_off() -> None:
    """A conversation that ended with the life of its daemon has no end in the log, and is judged no less."""
    log = [
        *conversation(mark("a", 0), whole=False),
        *conversation(SET),
        *conversation(SET, whole=False),
        *conversation(mark("b", 0), SET),
    ]
    assert ForeignHand().seen(log) == (SET, SET)


def test_read_from_the_middle() -> None:
    """Where a conversation's beginning was not seen, its changes count as a stranger's: what is unknown is not ours."""
    assert ForeignHand().seen([line(f"Cmd:{SET}"), line("10.0"), line("UI closed")]) == (SET,)


def test_answers_are_no_commands() -> None:
    """What a daemon answers is no command, whatever it looks like."""
    assert ForeignHand().seen([line("NEW UI"), line(f'Unknown command "{SET}"'), line(SET), f"Cmd:{SET}"]) == ()


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from([row.name for row in ROWS]), max_size=5)), max_size=6),
    st.data(),
)
def test_in_pieces(conversations: list[tuple[bool, list[str]]], data: st.DataObject) -> None:
    """However the log comes in pieces, just the changing commands of others are seen."""
    log: list[str] = []
    expected: list[str] = []
    changing = {row.name for row in ROWS if row.effect is Effect.CHANGES}
    for ours, commands in conversations:
        log += conversation(*([mark("n", 0)] if ours else []), *commands)
        expected += [command for command in commands if command in changing and not ours]
    hand, seen = ForeignHand(), list[str]()
    while log:
        size = data.draw(st.integers(1, len(log)))
        seen += hand.seen(log[:size])
        del log[:size]
    assert seen == expected
