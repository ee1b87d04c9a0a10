"""A story has the events of its subject, in order, without other subjects' repetitions and other users' facts."""

from typing import Any

import pytest

from mpsd.cli.history import story
from mpsd.cli.history.sentences import GpuNames

A, B = "GPU-a", "GPU-b"
EVENTS: list[Any] = [
    {"event": "daemon_state", "daemon": "gpu0", "state": "ready"},
    {"event": "lease_waits", "lease": "one", "uid": 7},
    {"event": "lease_granted", "lease": "two", "uid": 8, "gpus": [A]},
    {"event": "daemon_death", "level": "warning", "daemon": "gpu1"},
    {"event": "daemon_death", "level": "warning", "daemon": "gpu0"},
    {"event": "daemon_state", "daemon": "gpu0", "state": "cooling"},
    {"event": "daemon_state", "daemon": "gpu0", "state": "ready"},
    {"event": "limits_verified", "daemon": "gpu0"},
    {"event": "lease_granted", "lease": "one", "uid": 7, "gpus": [A]},
    {"event": "violation", "level": "warning", "daemon": "gpu0", "lease": "two"},
    {"event": "store_full", "level": "error"},
    {"event": "operation_begun", "daemon": "gpu0"},
    {"event": "client_ended", "daemon": "gpu0"},
    {"event": "lease_refused", "uid": 8},
    {"event": "lease_ended", "lease": "one", "uid": 7},
    {"event": "store_writable"},
]
for _each in EVENTS:
    _each.setdefault("level", "info")


def numbers(events: list[Any]) -> list[int]:
    return [number for each in events for number, known in enumerate(EVENTS) if known is each]


def test_a_lease() -> None:
    """A lease's story goes from its request to its end: its share, and the events of its control daemon and node."""
    assert numbers(story.events_of_lease(EVENTS, "one", {A: "gpu0", B: "gpu1"})) == [1, 4, 6, 8, 10, 11, 14]
    assert numbers(story.events_of_lease(EVENTS, "two", {A: "gpu0"})) == [2, 4, 6, 9, 10, 11, 15]
    assert story.events_of_lease(EVENTS, "three", {A: "gpu0"}) == []


def test_a_gpu() -> None:
    """A GPU's story has its events and its control daemon's, and the leases that the reader may see.

    Others are counted.
    """
    told, hidden = story.events_of_gpu(EVENTS, GpuNames(0, A, "gpu0"), lambda each: each.get("uid") != 8)
    assert (numbers(told), hidden) == ([0, 4, 6, 8, 9, 10, 11, 12, 14, 15], 1)
    told, hidden = story.events_of_gpu(EVENTS, GpuNames(1, B, "gpu1"), lambda _: True)
    assert (numbers(told), hidden) == ([3, 10, 15], 0)


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
