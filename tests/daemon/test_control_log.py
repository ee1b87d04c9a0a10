"""NVIDIA's control.log: kept within its size, without a line lost that mpsd had not read, whatever is done to it."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.conftest import Start
from tests.daemon.scene import LIMITS, kill, next_ready, undone
from tests.harness import remove_tree, wait_until
from tests.node import Node

pytestmark = pytest.mark.real_daemon(535)

_SIZE = 64 * 1024
_SMALL = f'{LIMITS}[daemon]\nlog_size = "64KiB"\nprobe_interval = 0.5\n'


@pytest.fixture
def memory() -> Iterator[Path]:
    """Give a directory on a file system in memory, which can punch holes and not collapse; there may be none."""
    if not os.access("/dev/shm", os.W_OK | os.X_OK):
        pytest.skip("no file system in memory on this machine")
    path = Path(tempfile.mkdtemp(prefix="mt-", dir="/dev/shm"))
    yield path
    remove_tree(path)


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start a node that keeps little of the log; each test has a GPU of its own there."""
    return node_for_all(simulate=3, config=_SMALL).start()


def chatter(node: Node, name: str, batches: int) -> list[str]:
    """Have a stranger say much, among it a changing command in each batch, and return those commands."""
    commands = [f"set_default_active_thread_percentage {10 + number / 10}" for number in range(batches)]
    for command in commands:
        node.ask(name, "\n".join([*["get_server_list"] * 500, command, *["get_server_list"] * 500]))
    return commands


def check_chatter(node: Node, name: str) -> None:
    """See that a log under much chatter stays small, and that mpsd reads every line of it."""
    commands = chatter(node, name, 10)
    wait_until(
        lambda: [line["command"] for line in node.events("foreign_command", daemon=name)] == commands,
        what="every one of the stranger's commands to be seen, once and in order",
    )
    log = node.control_log(name)
    wait_until(lambda: log.stat().st_blocks * 512 <= _SIZE + 4096, what="the log to be shortened")
    wait_until(lambda: node.events("log_shortened", daemon=name), what="that to be told")
    assert node.events("log_not_shortened") == []
    # And it goes on: what is said later is seen as well.
    node.ask(name, "set_default_active_thread_percentage 50")
    wait_until(
        lambda: node.events("foreign_command", daemon=name, command="set_default_active_thread_percentage 50"),
        what="that to be seen",
    )
    assert node.events("foreign_command", daemon=name)[-1]["command"] == "set_default_active_thread_percentage 50"


def test_chatter(node: Node) -> None:
    """However much a stranger says, the log takes no more disk than was configured, and nothing is missed."""
    check_chatter(node, "gpu0")


def test_chatter_on_a_file_system_in_memory(make_node: Start, memory: Path) -> None:
    """So it is where the file system has another way to give up the beginning of a file."""
    node = make_node(root=memory / "n", simulate=1, config=_SMALL)
    node.root.mkdir()
    try:
        node.start()
        check_chatter(node, "gpu0")
    finally:
        node.clean_up()


def test_truncated_by_hand(node: Node) -> None:
    """Somebody who truncates the log does not keep mpsd from seeing what comes after."""
    chatter(node, "gpu1", 2)
    wait_until(lambda: len(node.events("foreign_command", daemon="gpu1")) == 2, what="the commands to be seen")
    os.truncate(node.control_log("gpu1"), 0)
    command = "set_default_active_thread_percentage 20"
    node.ask("gpu1", command)
    wait_until(
        lambda: node.events("foreign_command", daemon="gpu1", command=command), what="the next command to be seen"
    )


def test_removed_by_hand(node: Node) -> None:
    """Somebody who removes the log takes the names of commands with it, and not the sight of what they did."""
    node.control_log("gpu2").unlink()
    node.ask("gpu2", "set_default_active_thread_percentage 20")
    assert undone(node, "gpu2", "active_thread_percentage")["found"] == 20.0
    assert node.exited() is None


def test_log_of_a_daemon_that_was_replaced(make_node: Start) -> None:
    """The log of a daemon that died is kept for whoever wants to know why; the next one appends to it."""
    node = make_node(simulate=1).start()
    before = node.daemons()["gpu0"]["pid"]
    kill(before)
    after = next_ready(node, "gpu0", before)["pid"]
    # Its lines come a little later than its answers, on a busy machine.
    wait_until(lambda: f" {after}]" in node.control_log("gpu0").read_text(), what="the next daemon's lines")
    assert f" {before}]" in node.control_log("gpu0").read_text()
