"""NVIDIA's control.log stays within its size, and mpsd reads every line first, whatever is done to the file."""

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.daemon.conftest import Start
from tests.daemon.helpers import LIMITS, by_hand, kill, next_ready, program, undone
from tests.harness import remove_tree, wait_until
from tests.node import Node

pytestmark = [pytest.mark.real_daemon(535), pytest.mark.thorough]

_LINES = int(os.environ.get("MPSD_TEST_LOG_LINES", "100000"))
"""The number of lines in a storm."""

_READING = 256 * 1024 // len("[2026-11-21 02:59:14.618 Control 10975] 10.0")
"""The most lines that mpsd reads at once."""

_SIZE = 64 * 1024
_SMALL = f'{LIMITS}[daemon]\nlog_size = "64KiB"\nprobe_interval = 0.5\n'


@pytest.fixture
def memory() -> Iterator[Path]:
    """Return a directory on a file system in memory, which can punch holes but not collapse; None if there is none."""
    if not os.access("/dev/shm", os.W_OK | os.X_OK):
        pytest.skip("no file system in memory on this machine")
    path = Path(tempfile.mkdtemp(prefix="mt-", dir="/dev/shm"))
    yield path
    remove_tree(path)


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start a node that keeps little of the log; each test uses its own GPU on it."""
    return node_for_all(simulate=3, config=_SMALL).start()


def told(node: Node, name: str) -> int:
    """Count the foreign commands that mpsd has reported, and check that it reported each exactly once.

    Each command has a number. Of many at once, mpsd reports the first ones singly, and then the last one, with how many
    were left out.
    """
    count = 0
    for event in node.events("foreign_command", daemon=name):
        count += event.get("left_out", 0)
        assert event["command"] == numbered(count)
        count += 1
    return count


def numbered(number: int) -> str:
    """Return a command that changes a limit and carries a number."""
    return f"set_default_active_thread_percentage 10 {number:06d}"


def taken(path: Path) -> int:
    """Return the bytes of disk that a file takes."""
    return path.stat().st_blocks * 512


def chatter(node: Node, name: str, batches: int) -> list[str]:
    """Have a stranger give many commands, with one that changes a limit in each batch, and return those."""
    commands = [f"set_default_active_thread_percentage {10 + number / 10}" for number in range(batches)]
    for command in commands:
        node.ask(name, "\n".join([*["get_server_list"] * 500, command, *["get_server_list"] * 500]))
    return commands


def test_chatter(node: Node) -> None:
    """However many commands a stranger gives, the log stays within its size on disk, and mpsd misses no line."""
    name = "gpu0"
    commands = chatter(node, name, 10)
    wait_until(
        lambda: [line["command"] for line in node.events("foreign_command", daemon=name)] == commands,
        what="every one of the stranger's commands to be seen, once and in order",
    )
    log = node.control_log(name)
    wait_until(lambda: taken(log) <= _SIZE + 4096, what="the log to be shortened")
    wait_until(lambda: node.events("log_shortened", daemon=name), what="that to be told")
    assert node.events("log_not_shortened") == []
    # Later commands are seen as well.
    node.ask(name, "set_default_active_thread_percentage 50")
    wait_until(
        lambda: node.events("foreign_command", daemon=name, command="set_default_active_thread_percentage 50"),
        what="that to be seen",
    )
    assert node.events("foreign_command", daemon=name)[-1]["command"] == "set_default_active_thread_percentage 50"


def let_in(node: Node, script: Path, answers: Path) -> "subprocess.Popen[bytes] | None":
    """Start a front-end with its commands, and return it once it is answered; None when the daemon turned it away."""
    with script.open() as said, answers.open("w") as heard:
        stranger = subprocess.Popen([str(node.control)], stdin=said, stdout=heard, env=node.by_hand("gpu0"))
    wait_until(lambda: stranger.poll() is not None or answers.stat().st_size, what="an answer, or a refusal")
    return stranger if stranger.poll() is None else None


@contextlib.contextmanager
def storm(node: Node, commands: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Have a stranger give so many commands in one conversation, and check at the end that each was answered."""
    script, answers = node.root / "script", node.root / "answers"
    script.write_text("".join(f"{numbered(number)}\n" for number in range(commands)))
    stranger = wait_until(lambda: let_in(node, script, answers), what="the stranger to be let in")
    try:
        yield stranger
        stranger.wait(timeout=50)
    finally:
        stranger.kill()
        stranger.wait()
    assert answers.read_text().splitlines() == ["10.0"] * commands


@pytest.mark.parametrize("place", ["disk", "memory"])
@pytest.mark.thorough
def test_storm(make_node: Start, request: pytest.FixtureRequest, short_tmp: Path, place: str) -> None:
    """mpsd misses none of 100,000 lines in one conversation, and the log takes little more than 1 MiB all the while."""
    root = short_tmp / "storm" if place == "disk" else request.getfixturevalue("memory") / "n"
    root.mkdir()
    node = make_node(root=root, simulate=1, config=f'{LIMITS}[daemon]\nlog_size = "1MiB"\n')
    try:
        node.start()
        log, sizes, commands, began = node.control_log("gpu0"), list[int](), _LINES // 2, time.monotonic()
        with storm(node, commands) as stranger:

            def ended() -> bool:
                sizes.append(taken(log))
                return stranger.poll() is not None

            wait_until(ended, what="the stranger to have said it all", deadline=50)
        wait_until(lambda: told(node, "gpu0") == commands, what="the last of them to be told")
        wait_until(lambda: taken(log) <= 1024 * 1024 + 4096, what="the log to be within its size again")
        wait_until(
            lambda: sum(each["bytes"] for each in node.events("log_shortened")) > 60 * _LINES - 2 * 1024 * 1024,
            what="all that was removed to be told",
        )
        # In any time, the storm causes at most one report in five seconds.
        assert len(node.events("log_shortened")) <= (time.monotonic() - began) / 5 + 1
        # On a busy machine, more lines can arrive between two readings.
        assert max(sizes) < 4 * 1024 * 1024
        # The command is the last that mpsd had read when it restored the limit: all commands set it to the same value.
        culprit = undone(node, "gpu0", "active_thread_percentage")["command"]
        assert culprit == numbered(int(culprit.split()[-1]))
    finally:
        node.clean_up()


@pytest.mark.thorough
def test_killed_in_a_storm(make_node: Start) -> None:
    """An mpsd that is killed repeatedly while a stranger gives commands misses no line that a reader could see.

    The next mpsd repeats reports that the killed one had no time to record: at most one reading for each kill. Only the
    count of left-out lines that it had not yet reported is lost.
    """
    node = make_node(simulate=1, config=f'{LIMITS}[daemon]\nlog_size = "64KiB"\n').start()
    commands, kills = _LINES // 2, 0
    with storm(node, commands) as stranger:

        def at_work(before: int) -> bool:
            return len(node.events("log_shortened")) > before or stranger.poll() is not None

        while stranger.poll() is None:
            wait_until(partial(at_work, len(node.events("log_shortened"))), what="mpsd to read, tell and shorten")
            node.end(signal.SIGKILL)
            node.start(ready=False)
            kills += 1
    # The end of the storm may be among the lines that the last killed mpsd had only counted; later lines are reported.
    node.ask("gpu0", numbered(commands))
    wait_until(
        lambda: node.events("foreign_command", command=numbered(commands)),
        what="the last of them to be told",
        deadline=30,
    )
    following = again = lost = 0
    for event in node.events("foreign_command"):
        number = int(event["command"].split()[-1])
        first = number - event.get("left_out", 0)
        lost += first > following
        again += max(following - first, 0)
        following = number + 1
    assert following == commands + 1
    assert lost <= kills
    assert kills  # a slow machine has time for one only
    assert again < kills * _READING


def test_truncated_by_hand(node: Node) -> None:
    """mpsd sees new lines also after another process has truncated the log."""
    chatter(node, "gpu1", 2)
    wait_until(lambda: len(node.events("foreign_command", daemon="gpu1")) == 2, what="the commands to be seen")
    os.truncate(node.control_log("gpu1"), 0)
    command = "set_default_active_thread_percentage 20"
    node.ask("gpu1", command)
    wait_until(
        lambda: node.events("foreign_command", daemon="gpu1", command=command), what="the next command to be seen"
    )


def test_removed_by_hand(node: Node) -> None:
    """Removing the log removes the commands' names, but mpsd still detects their effects."""
    node.control_log("gpu2").unlink()
    node.ask("gpu2", "set_default_active_thread_percentage 20")
    assert undone(node, "gpu2", "active_thread_percentage")["found"] == 20.0
    assert node.exited() is None


def read_up_to_the_end(node: Node, name: str) -> bool:
    """Return whether mpsd has recorded that it read the whole log."""
    noted = node.root / "run" / f"{name}.reading.json"
    if not noted.exists():
        return False
    offset: int = json.loads(noted.read_bytes())["record"]["control"]["offset"]
    return offset == node.control_log(name).stat().st_size


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_mpsd_comes_back(make_node: Start, number: signal.Signals) -> None:
    """Foreign commands given while mpsd was down are reported once by the next mpsd, and their changes are undone."""
    node = make_node(simulate=1, config=_SMALL).start()
    pid = node.daemons()["gpu0"]["pid"]
    for life in range(3):
        for command in map(numbered, range(7 * life, 7 * life + 5)):
            node.ask("gpu0", command)
        wait_until(lambda: told(node, "gpu0") % 7 == 5 and read_up_to_the_end(node, "gpu0"), what="all to be noted")
        node.end(number)
        # More lines than the log may keep, so that it is cut as soon as it is read.
        script = [numbered(7 * life + 5), *["get_server_list"] * 1000, numbered(7 * life + 6)]
        node.ask("gpu0", "\n".join(script))
        node.start()
    wait_until(lambda: told(node, "gpu0") == 21, what="all of it to be told")
    seen = undone(node, "gpu0", "active_thread_percentage")
    assert (seen["found"], seen["command"]) == (10.0, numbered(20))
    assert by_hand(node, "gpu0") == (["50.0"], ["8G"])
    assert node.daemons()["gpu0"]["pid"] == pid


def test_mpsd_knows_its_own_hand_again(make_node: Start) -> None:
    """Limits that mpsd set just before it was killed, and had not read in the log, are not attributed to a stranger."""
    node = make_node(simulate=1, config=LIMITS).start()
    wait_until(lambda: read_up_to_the_end(node, "gpu0"), what="the first conversation to be read")
    noted = node.root / "run" / "gpu0.reading.json"
    assert stat.filemode(noted.stat().st_mode) == "-rw-------"  # a process that knows the key can pass for mpsd
    node.end(signal.SIGKILL)
    key = json.loads(noted.read_text())["record"]["key"]
    said = node.front_end("gpu0", f"mpsd-{key}01234567-0\nset_default_active_thread_percentage 20\n").stdout
    assert said.splitlines()[1:] == ["20.0"]
    node.start()
    assert undone(node, "gpu0", "active_thread_percentage")["command"] is None
    node.ask("gpu0", numbered(0))
    wait_until(lambda: told(node, "gpu0") == 1, what="a stranger's command, and no other, to be told")


def test_servers_log(make_node: Start, short_tmp: Path) -> None:
    """mpsd also follows the logs of servers: it reports the lines that it knows, and keeps the latest of the others."""
    stamp = "[2026-11-21 02:59:14.618 Server 77]"
    said = [
        f"{stamp} Server has started",
        f"{stamp} Volta MPS: Server is handling a fatal GPU error.",
        f"{stamp} what a new driver says",
        "[2026-11-21 02:59:14.618 Legacy Server 78] Failed to start : invalid argument",
        f"{stamp} NEW UI",
        f"{stamp} Cmd:set_default_active_thread_percentage 10",
    ]
    server = program(
        short_tmp / "nvidia-cuda-mps-server",
        "echo what it prints\n" + "\n".join(f"echo '{line}' >> $CUDA_MPS_LOG_DIRECTORY/server.log" for line in said),
    )
    node = make_node(simulate=1, config=LIMITS, env={"PATH": f"{server.parent}:{os.environ['PATH']}"}).start()
    node.ask("gpu0", f"start_server -uid {os.geteuid()}")
    wait_until(lambda: node.daemons()["gpu0"]["unknown_lines"] == 2, what="the lines that are new to be counted")
    assert node.daemons()["gpu0"]["latest_unknown_lines"] == ["what it prints", f"{stamp} what a new driver says"]
    assert 'mpsd_daemon_unknown_lines_total{daemon="gpu0"} 2' in node.get("/metrics").body.decode()
    checks = json.loads(node.mpsctl("doctor", "--only", "node", "-o", "json").stdout)["checks"]
    assert [each["verdict"] for each in checks if "2 lines in the logs of gpu0" in each["because"]] == ["warn"]
    (fault,) = node.events("server_faulted")
    assert (fault["daemon"], fault["server"]) == ("gpu0", 77)
    (failure,) = node.events("server_failed")
    assert (failure["server"], failure["words"]) == (78, "Failed to start : invalid argument")
    # A line in a server's log is not attributed as a command.
    assert [event["command"] for event in node.events("foreign_command")] == [f"start_server -uid {os.geteuid()}"]


def test_server_that_exits(make_node: Start, short_tmp: Path) -> None:
    """A server that exits with a status other than 0 is reported with that status."""
    server = program(short_tmp / "nvidia-cuda-mps-server", "exit 3")
    node = make_node(simulate=1, config=LIMITS, env={"PATH": f"{server.parent}:{os.environ['PATH']}"}).start()
    node.ask("gpu0", f"start_server -uid {os.geteuid()}")
    (ended,) = wait_until(lambda: node.events("server_exited"), what="its end to be told")
    assert ended["status"] == 3


def test_log_directory_removed(make_node: Start) -> None:
    """Removing the directory of the log does not end mpsd, and mpsd reads the next daemon's log."""
    node = make_node(simulate=1, config=LIMITS).start()
    shutil.rmtree(node.control_log("gpu0").parent)
    wait_until(lambda: node.events("log_not_watched", daemon="gpu0"), what="that to be told")
    before = node.daemons()["gpu0"]["pid"]
    kill(before)
    next_ready(node, "gpu0", before)
    node.ask("gpu0", numbered(0))
    wait_until(lambda: told(node, "gpu0") == 1, what="a stranger's command to be told")
    assert len(node.events("log_not_watched", daemon="gpu0")) == 1


def test_log_of_a_daemon_that_was_replaced(make_node: Start) -> None:
    """The log of a daemon that died is kept for diagnosis; the next daemon appends to it."""
    node = make_node(simulate=1).start()
    before = node.daemons()["gpu0"]["pid"]
    kill(before)
    after = next_ready(node, "gpu0", before)["pid"]
    # On a busy machine its lines appear a little later than its answers.
    wait_until(lambda: f" {after}]" in node.control_log("gpu0").read_text(), what="the next daemon's lines")
    assert f" {before}]" in node.control_log("gpu0").read_text()
