"""The end of a control daemon's log, as a story shows it."""

import pytest

from mpsd.cli.history import story

MARK = b"mpsd-80e3b1991fec75d81c49286b-0"
STARTS = b"Starting control daemon using socket /run/mpsd/mps/gpu0/control"


@pytest.mark.parametrize(
    ("raw", "lines"),
    [
        (b"a\nAccepting connection...\nb\n", ["a", "b"]),
        (b"a\nNEW UI\nCmd:" + MARK + b"\nUI closed\nb", ["a", "b"]),
        (b"NEW UI\nCmd:quit\nUI closed\nb", ["NEW UI", "Cmd:quit", "UI closed", "b"]),
        (b"NEW UI\nCmd:quit\nNEW UI\n" + MARK + b"\nUI closed", ["NEW UI", "Cmd:quit"]),
        (b"a\nNEW UI\n" + MARK, ["a"]),
        (b"NEW UI\nCmd:" + MARK + b"\n" + STARTS + b"\nb", [STARTS.decode(), "b"]),
        (b"\x1b[2Ja\xff\n\n1\n2\n3\n4", ["1", "2", "3", "4"]),
        (b"\x1b[2J\xff\xe2\x80\xae", ["\\x1b[2J\\xff\\u202e"]),
        (b"", []),
    ],
)
def test_a_log(raw: bytes, lines: list[str]) -> None:
    """A log's last lines are those of others, each harmless on a terminal; mpsd's own conversations are left out."""
    assert story.said_by_others(raw, 4) == lines
