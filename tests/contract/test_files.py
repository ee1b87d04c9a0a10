"""A control daemon's directories: its files, their modes, and what is left in the end."""

import errno
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.contract.differences import DIFFERENCES
from tests.contract.subjects import STRANGER, Bench, Said, as_root
from tests.harness import wait_until

GET: Final = "get_default_active_thread_percentage"
NO_DAEMON: Final = Said(1, [], "Cannot find MPS control daemon process")

FILES: Final = {
    "control": "srw-rw-rw-",
    "control_lock": "-rw-rw-rw-",
    "control_privileged": "srwxr-xr-x",
    "log": "prwxrwxrwx",
    "nvidia-cuda-mps-control.pid": "-rw-rw-rw-",
}
STAYING: Final = {"control", "control_lock", "control_privileged"}
"""Files that are left when a daemon has quit."""

LONGEST_PIPE_DIRECTORY: Final = 106 - len("/control_privileged")
"""Bytes: a unix socket's address would hold one more."""


def names(directory: Path) -> set[str]:
    """Return the names of the files in a directory."""
    return {path.name for path in directory.iterdir()}


def test_files_and_modes(bench: Bench) -> None:
    """The pipe directory has two sockets, a lock and a FIFO, and from 550 on a pid file.

    All but one are open to all users.
    """
    found = {name: stat.filemode((bench.pipe / name).lstat().st_mode) for name in names(bench.pipe)}
    there = FILES.keys() - {"nvidia-cuda-mps-control.pid"} | DIFFERENCES[bench.subject.branch].files
    assert found == {name: FILES[name] for name in there}
    for name in DIFFERENCES[bench.subject.branch].files:
        assert (bench.pipe / name).read_text() == str(bench.daemon.pid)


def test_what_quitting_leaves(bench: Bench) -> None:
    """A daemon that quits removes the FIFO and the pid file, and nothing else."""
    bench.front_end("quit")
    assert bench.ended() == 0
    assert names(bench.pipe) == STAYING
    assert bench.front_end(GET) == NO_DAEMON


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals(bench: Bench, number: signal.Signals) -> None:
    """SIGTERM and SIGKILL end a daemon at once and leave every file; another daemon starts over them."""
    before = names(bench.pipe)
    bench.daemon.send_signal(number)
    assert bench.ended() == -number
    assert names(bench.pipe) == before
    assert bench.front_end(GET) == NO_DAEMON
    bench.start()
    assert names(bench.pipe) == before


def test_a_missing_pipe_directory(idle: Bench) -> None:
    """A missing pipe directory is made, writable by all users."""
    idle.pipe.rmdir()
    idle.start()
    assert stat.filemode(idle.pipe.stat().st_mode) == "drwxrwxrwx"


@pytest.mark.parametrize(
    "spoil", [lambda pipe: shutil.rmtree(pipe.parent), lambda pipe: pipe.touch()], ids=["parent", "file"]
)
def test_no_pipe_directory(idle: Bench, spoil: Callable[[Path], None]) -> None:
    """A pipe directory that cannot be made is an error, on stdout, with status 1."""
    idle.pipe = idle.root / "parent" / "pipe"
    idle.pipe.parent.mkdir()
    spoil(idle.pipe)
    idle.launch()
    assert idle.ended() == 1
    assert idle.raw_log() == [f"Cannot access CUDA_MPS_PIPE_DIRECTORY={idle.pipe}"]


def test_log_directory(idle: Bench) -> None:
    """A log directory that cannot be made gives a warning, and the daemon keeps running."""
    idle.logs = idle.root / "no" / "such"
    idle.start()
    idle.complete_log()
    assert idle.raw_log()[0] == (
        f"Warning: Failed writing log files to directory [{idle.logs}]. No logs will be available."
    )


def test_the_log_goes_to_stdout_alone(bench: Bench) -> None:
    """In the foreground nothing is written into the log directory."""
    bench.front_end(GET)
    assert names(bench.logs) == set()


def test_second_daemon(bench: Bench) -> None:
    """A second daemon on the same directory reports the first, with status 1; the first is not disturbed."""
    done = subprocess.run(
        [*bench.subject.argv, "-f"], env=bench.environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, b"An instance of this daemon is already running\n")
    assert bench.front_end(GET) == Said(0, ["100.0"], "")
    assert any(line.startswith("Using log directory: ") for line in bench.complete_log())


def test_the_longest_pipe_directory(idle: Bench) -> None:
    """The longest of the sockets' paths may have 106 bytes, one less than a unix socket's address holds."""
    idle.pipe = idle.root / ("x" * (LONGEST_PIPE_DIRECTORY - len(f"{idle.root}/")))
    idle.pipe.mkdir()
    idle.start()


def test_too_long_a_pipe_directory(idle: Bench) -> None:
    """With one byte more the daemon exits with status 1 without a reason, and leaves a lock and a FIFO."""
    idle.pipe = idle.root / ("x" * (LONGEST_PIPE_DIRECTORY + 1 - len(f"{idle.root}/")))
    idle.pipe.mkdir()
    idle.launch()
    assert idle.ended() == 1
    assert all(line.startswith(("Starting control daemon", "To connect CUDA")) for line in idle.log())
    assert len(idle.log()) == len(idle.raw_log())
    assert names(idle.pipe) == {"control_lock", "log"}
    assert idle.front_end(GET) == NO_DAEMON


def test_deleted_pipe_directory(bench: Bench) -> None:
    """A daemon whose directory is deleted keeps running, unreachable for good; another can start in its place."""
    first = bench.daemon
    shutil.rmtree(bench.pipe)
    assert bench.front_end(GET) == NO_DAEMON
    bench.pipe.mkdir()
    assert bench.front_end(GET) == NO_DAEMON
    assert first.poll() is None
    bench.start()
    assert first.poll() is None


def test_truncated_log(bench: Bench) -> None:
    """A log opened for appending can be truncated under the daemon: the next line is written at its start."""
    bench.complete_log()
    os.truncate(bench.log_file, 0)
    bench.complete_log()
    assert bench.log_file.read_bytes().startswith(b"[")
    assert bench.log()[:2] == ["Accepting connection...", "NEW UI"]


def _reaches(path: Path, uid: int) -> bool:
    """Return whether this uid can reach a socket, tried in a separate process.

    The kernel checks the kind of socket afterwards: an error about the kind means that the uid has access.
    """
    child = os.fork()
    if child == 0:
        result = -1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            with socket.socket(socket.AF_UNIX) as connection:
                result = connection.connect_ex(os.fspath(path))
        finally:
            os._exit(result)
    result = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert result in {0, errno.EPROTOTYPE, errno.EACCES}
    return result != errno.EACCES


def _let_through(directory: Path, uid: int) -> None:
    """Let one uid traverse a directory of mode 0700, by a POSIX ACL."""
    # linux/posix_acl_xattr.h: version, then tag, permissions and id of each entry: owner, user, group, mask, others.
    nobody = 0xFFFFFFFF
    entries = ((0x01, 7, nobody), (0x02, 1, uid), (0x04, 0, nobody), (0x10, 1, nobody), (0x20, 0, nobody))
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(directory, "system.posix_acl_access", value)


@as_root
def test_a_closed_pipe_directory(bench: Bench) -> None:
    """The socket is open to all users; a closed directory excludes all but the uid that an ACL names."""
    bench.root.chmod(0o711)
    control = bench.pipe / "control"
    assert _reaches(control, STRANGER)
    bench.pipe.chmod(0o700)
    assert not _reaches(control, STRANGER)
    _let_through(bench.pipe, STRANGER)
    assert _reaches(control, STRANGER)
    assert not _reaches(control, STRANGER - 1)
    wait_until(bench.answers, what="the daemon to serve after that")
