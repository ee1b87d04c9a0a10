"""Files that a control daemon makes in its pipe directory with access for all: only mpsd's daemon can use them.

The subjects are NVIDIA's own control daemons.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.daemon.caller import calling, granted, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import branches, event, kill, next_ready, program, states
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon

pytestmark = [needs_root, pytest.mark.thorough]

ANN, BOB = 61101, 61102

TRY: Final = """
import os, sys
uid, path, flags = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
try:
    os.open(path, flags | os.O_NONBLOCK)
except OSError as error:
    sys.exit(error.strerror)
"""

HOLD: Final = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o666)
os.setresuid(*[int(sys.argv[2])] * 3)
print("open", flush=True)
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


OCCUPIED: Final = """
import fcntl, os, signal, sys
control, uid, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
noted = os.path.splitext(sys.argv[0])[0] + ".pid"
if arguments[:1] == ["-f"] and not os.path.exists(noted):
    ready, held = os.pipe()
    if not os.fork():
        os.setsid()
        lock = os.open(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control_lock", os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.lockf(lock, fcntl.LOCK_EX)
        with open(noted, "w") as file:
            file.write(str(os.getpid()))
        os.setresuid(uid, uid, uid)
        os.write(held, b".")
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(1, 2)
        signal.pause()
    os.read(ready, 1)
os.execv(control, [control, *arguments])
"""
"""A control program that is late the first time: when it starts, another process has the lock."""


def opens(uid: int, path: Path, flags: int) -> bool:
    """Return whether a uid may open a file in this way; only a lack of permission prevents it."""
    command = [sys.executable, "-I", "-c", TRY, str(uid), str(path), str(flags)]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert tried.stderr.strip() in {"", "Permission denied"}
    return tried.returncode == 0


def holding(path: Path, uid: int) -> "subprocess.Popen[str]":
    """Start a process of a uid that has a lock file open, and waits for the lock."""
    command = [sys.executable, "-I", "-c", HOLD, str(path), str(uid)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    return holder


@pytest.mark.parametrize("real", branches(470, 555))
class TestEveryDriver:
    """The files of each of NVIDIA's control daemons."""

    def test_one_user(self, make_node: Start, real: RealDaemon) -> None:
        """A holder, whose server writes the log, can write to the FIFO; it can read nothing there, and has no lock."""
        node = make_node(simulate=1, control=real.control, config='[daemon]\nusers = "one"\n').start()
        directory = node.pipe_directory("gpu0")
        with calling(node.socket, uid=ANN) as ann:
            granted(ann)
            assert opens(ANN, directory / "log", os.O_WRONLY)
            assert not opens(ANN, directory / "log", os.O_RDWR)
            assert not opens(ANN, directory / "log", os.O_RDONLY)
            for name in ("control_lock", "nvidia-cuda-mps-control.pid"):
                assert not (directory / name).exists() or not opens(ANN, directory / name, os.O_RDONLY)
                assert not (directory / name).exists() or not opens(ANN, directory / name, os.O_WRONLY)
            assert not opens(BOB, directory / "log", os.O_WRONLY)

    def test_made_new(self, make_node: Start, real: RealDaemon) -> None:
        """A process that waits for a daemon's lock does not get that of the next daemon, which starts at once."""
        node = make_node(simulate=1, control=real.control).start()
        before = node.daemons()["gpu0"]["pid"]
        directory = node.pipe_directory("gpu0")
        made = {each.name: each.stat().st_ino for each in directory.iterdir()}
        holder = holding(directory / "control_lock", ANN)
        fifo = os.open(directory / "log", os.O_WRONLY | os.O_NONBLOCK)
        try:
            kill(before)
            next_ready(node, "gpu0", before)
            assert len(node.events("daemon_death")) == 1
            for name in ("control", "control_lock", "log"):
                found = directory / name
                # A free inode number may be reused; a process with the file open prevents that.
                assert found.stat().st_ino != made[name] or name == "control"
            with pytest.raises(BrokenPipeError):
                os.write(fifo, b"x")
        finally:
            os.close(fifo)
            holder.kill()
            holder.communicate()


@pytest.mark.parametrize("real", branches(555))
def test_many_users(make_node: Start, real: RealDaemon) -> None:
    """Where one server of root serves all users, none of them can write into the log."""
    node = make_node(simulate=1, control=real.control, config='[daemon]\nusers = "many"\n').start()
    with calling(node.socket, uid=ANN) as ann:
        granted(ann)
        assert not opens(ANN, node.pipe_directory("gpu0") / "log", os.O_WRONLY)
        # The next mpsd knows the log of the daemon that it adopts.
        assert node.end() == 0
        node.start()
        assert not opens(ANN, node.pipe_directory("gpu0") / "log", os.O_WRONLY)
        assert stat.S_IMODE((node.pipe_directory("gpu0") / "log").stat().st_mode) == 0o600


@pytest.mark.parametrize("real", branches(535))
def test_lock_that_is_held(make_node: Start, short_tmp: Path, real: RealDaemon) -> None:
    """The holder of the lock that a control daemon needs is named, and no death is counted, however often."""
    script = short_tmp / "held.py"
    script.write_text(OCCUPIED)
    control = program(short_tmp / "control", f'exec {sys.executable} -I {script} {real.control} {ANN} "$@"')
    node = make_node(simulate=1, control=control)
    node.start(ready=False)
    held = wait_until(lambda: _starting(node), what=f"the holder to be named; the log is {node.stderr}")
    pid = int((short_tmp / "held.pid").read_text())
    assert held == f"it could not start: pid {pid} (uid {ANN}) holds {node.pipe_directory('gpu0')}/control_lock"
    kill(pid)
    node.wait_for_state("gpu0", "ready")
    assert not node.events("daemon_death")
    assert "failed" not in states(node, "gpu0")
    assert event(node, "daemon_state", state="cooling")


def _starting(node: Node) -> str | None:
    because: str = node.daemons()["gpu0"]["because"]
    return because if "could not start" in because else None
