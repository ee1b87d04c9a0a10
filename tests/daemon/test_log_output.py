"""mpsd's own log without a reader: mpsd keeps running, stops on SIGTERM, and reports how many lines were lost."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.conftest import Start
from tests.daemon.helpers import kill, next_ready
from tests.daemon.leases.line import Talk
from tests.harness import wait_until
from tests.node import Node

pytestmark = [pytest.mark.real_daemon(535), pytest.mark.thorough]

_ROOT: Final = Path(__file__).resolve().parents[2]

TOO_MUCH: Final = {"threads": 10, "memory": "1GiB", "gpu": "0", "gpus": 2}
"""A request that is refused, with a line in the log."""


def pipe() -> tuple[int, int]:
    return os.pipe()


def terminal() -> tuple[int, int]:
    """Return a terminal that passes its input through unchanged."""
    mine, its = os.openpty()
    tty.setraw(its)
    return mine, its


def sockets() -> tuple[int, int]:
    mine, its = socket.socketpair()
    return mine.detach(), its.detach()


Unread = tuple[Node, int, int]


@pytest.fixture(params=[pipe, terminal, sockets], ids=lambda make: make.__name__)
def unread(make_node: Start, request: pytest.FixtureRequest) -> Iterator[Unread]:
    """Start an mpsd whose log has no reader; yield the node and both ends of the log."""
    make: Callable[[], tuple[int, int]] = request.param
    mine, its = make()
    node = make_node(simulate=1, config='[log]\nformat = "json"\n[api]\nlines_per_uid = 1000000\n')
    try:
        node.process = subprocess.Popen(
            node.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=its, cwd=_ROOT
        )
        wait_until(
            lambda: node.get("/readyz").status == 200,
            what="mpsd to be ready",
            deadline=20,
            not_yet=(OSError,),
        )
        yield node, mine, its
    finally:
        node.clean_up()
        os.close(mine)
        os.close(its)


def lost(node: Node) -> int:
    """Return the number of lost lines by mpsd's own report."""
    for note in node.get("/v1/status").json["notes"]:
        if "lines of mpsd's log were lost" in note:
            return int(note.split()[0])
    return 0


def fill(node: Node) -> None:
    """Have mpsd log until it has lost lines."""
    with Talk(node.socket) as talk:

        def refused() -> bool:
            assert all(talk.ask("POST", "/v1/leases", TOO_MUCH).status >= 400 for _ in range(50))
            return lost(node) > 0

        wait_until(refused, what="lines to be lost", deadline=60)


def read(descriptor: int) -> bytes:
    """Return the bytes that can be read now."""
    os.set_blocking(descriptor, False)
    pieces = []
    try:
        while piece := os.read(descriptor, 1 << 16):
            pieces.append(piece)
    except BlockingIOError:
        pass
    return b"".join(pieces)


def test_mpsd_goes_on(unread: Unread) -> None:
    """mpsd answers, counts lost lines, supervises, and keeps every event; a later reader gets a report of the gap."""
    node, mine, its = unread
    flags = fcntl.fcntl(its, fcntl.F_GETFL)
    fill(node)
    before = node.daemons()["gpu0"]["pid"]
    kill(before)
    next_ready(node, "gpu0", before)
    assert fcntl.fcntl(its, fcntl.F_GETFL) == flags, "what others have as their stderr is changed"
    text = bytearray()

    def told() -> list[dict[str, Any]]:
        text.extend(read(mine))
        lines = [json.loads(line) for line in bytes(text).split(b"\n")[:-1]]
        gaps = [line for line in lines if line["event"] == "log_lines_lost"]
        if not gaps and lines:
            node.request("POST", "/v1/leases", TOO_MUCH)  # there is room now, and a line to write
        return gaps

    gaps = wait_until(told, what="the gap to be told")
    assert gaps[0]["lines"] > 0
    assert gaps[0]["lines"] <= lost(node)
    stored = [json.loads(line) for line in node.get("/v1/events").body.splitlines()]
    assert {"daemon_death", "log_lines_lost"} <= {each["event"] for each in stored}
    assert [each["seq"] for each in stored] == list(range(stored[0]["seq"], stored[0]["seq"] + len(stored)))


def test_mpsd_ends(unread: Unread) -> None:
    """SIGTERM ends it as usual, though its log has no reader."""
    node, _, _ = unread
    fill(node)
    assert node.end(signal.SIGTERM) == 0


def test_reader_is_gone(make_node: Start) -> None:
    """When the reader of a pipe is gone, only the lines are lost; mpsd counts them."""
    node = make_node(simulate=1, config='[log]\nformat = "json"\n[api]\nlines_per_uid = 1000000\n')
    with subprocess.Popen(
        node.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=_ROOT
    ) as process:
        node.process = process
        assert process.stderr is not None
        process.stderr.close()
        wait_until(lambda: node.get("/readyz").status == 200, what="mpsd", deadline=20, not_yet=(OSError,))
        assert lost(node) > 0
        assert node.end(signal.SIGTERM) == 0


def test_refused_start_does_not_wait(make_node: Start) -> None:
    """An mpsd that cannot start exits, though the pipe for its log is full."""
    node = make_node(simulate=1, config="[nonsense]\n")
    mine, its = os.pipe()
    os.set_blocking(its, False)
    try:
        while True:
            os.write(its, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(its, True)
    process = subprocess.Popen([sys.executable, *node.command[1:]], stderr=its, stdout=subprocess.DEVNULL, cwd=_ROOT)
    try:
        assert process.wait(timeout=20) == 78
    finally:
        process.kill()
        process.wait()
        os.close(mine)
        os.close(its)
