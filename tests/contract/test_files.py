"""What a control daemon does with its directories: what lies there, how, and what becomes of it in the end."""

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
"""What is left when a daemon has quit."""

LONGEST_PIPE_DIRECTORY: Final = 106 - len("/control_privileged")
"""Bytes: a unix socket's address would hold one more."""


def names(directory: Path) -> set[str]:
    """Return what lies in a directory."""
    return {path.name for path in directory.iterdir()}


def test_files_and_modes(bench: Bench) -> None:
    """The pipe directory has two sockets, a lock and a FIFO, and from 550 on a pid file, all but one for everybody."""
    found = {name: stat.filemode((bench.pipe / name).lstat().st_mode) for name in names(bench.pipe)}
    there = FILES.keys() - {"nvidia-cuda-mps-control.pid"} | DIFFERENCES[bench.subject.branch].files
    assert found == {name: FILES[name] for name in there}
    for name in DIFFERENCES[bench.subject.branch].files:
        assert (bench.pipe / name).read_text() == str(bench.daemon.pid)


def test_what_quitting_leaves(bench: Bench) -> None:
    """A daemon that quits takes the FIFO and the pid file with it, and nothing else."""
    bench.front_end("quit")
    assert bench.ended() == 0
    assert names(bench.pipe) == STAYING
    assert bench.front_end(GET) == NO_DAEMON


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals(bench: Bench, number: signal.Signals) -> None:
    """SIGTERM and SIGKILL end a daemon at once and leave every file; another starts over them as if there were none."""
    before = names(bench.pipe)
    bench.daemon.send_signal(number)
    assert bench.ended() == -number
    assert names(bench.pipe) == before
    assert bench.front_end(GET) == NO_DAEMON
    bench.start()
    assert names(bench.pipe) == before


def test_a_missing_pipe_directory(idle: Bench) -> None:
    """A missing pipe directory is made, and for everybody to write to."""
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
    """A log directory that cannot be made gives a warning, and the daemon runs on."""
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
    """A second daemon on the same directory says that there is one, with status 1; the first is not disturbed."""
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
    """With one byte more the daemon ends with status 1 and without a word of why, and leaves a lock and a FIFO."""
    idle.pipe = idle.root / ("x" * (LONGEST_PIPE_DIRECTORY + 1 - len(f"{idle.root}/")))
    idle.pipe.mkdir()
    idle.launch()
    assert idle.ended() == 1
    assert all(line.startswith(("Starting control daemon", "To connect CUDA")) for line in idle.log())
    assert len(idle.log()) == len(idle.raw_log())
    assert names(idle.pipe) == {"control_lock", "log"}
    assert idle.front_end(GET) == NO_DAEMON


def test_deleted_pipe_directory(bench: Bench) -> None:
    """A daemon whose directory is deleted runs on, out of reach for good; another can start in its place."""
    first = bench.daemon
    shutil.rmtree(bench.pipe)
    assert bench.front_end(GET) == NO_DAEMON
    bench.pipe.mkdir()
    assert bench.front_end(GET) == NO_DAEMON
    assert first.poll() is None
    bench.start()
    assert first.poll() is None


def test_truncated_log(bench: Bench) -> None:
    """A log opened for appending can be truncated under the daemon: the next line stands at its start."""
    bench.complete_log()
    os.truncate(bench.log_file, 0)
    bench.complete_log()
    assert bench.log_file.read_bytes().startswith(b"[")
    assert bench.log()[:2] == ["Accepting connection...", "NEW UI"]


def _reaches(path: Path, uid: int) -> bool:
    """Tell whether this uid gets as far as a socket, tried in a process of its own.

    What kind of socket it is comes after that: to be of another kind is to have been let through.
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
    """Give one uid the right to pass through a directory of mode 0700, by a POSIX ACL."""
    # linux/posix_acl_xattr.h: version, then tag, permissions and id of each entry: owner, user, group, mask, others.
    nobody = 0xFFFFFFFF
    entries = ((0x01, 7, nobody), (0x02, 1, uid), (0x04, 0, nobody), (0x10, 1, nobody), (0x20, 0, nobody))
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(directory, "system.posix_acl_access", value)


@as_root
def test_a_closed_pipe_directory(bench: Bench) -> None:
    """The socket lets everybody in; a closed directory does not, but for the uid that an ACL names."""
    bench.root.chmod(0o711)
    control = bench.pipe / "control"
    assert _reaches(control, STRANGER)
    bench.pipe.chmod(0o700)
    assert not _reaches(control, STRANGER)
    _let_through(bench.pipe, STRANGER)
    assert _reaches(control, STRANGER)
    assert not _reaches(control, STRANGER - 1)
    wait_until(bench.answers, what="the daemon to serve after that")
