"""The kernel's facts about other processes, and the names that processes give themselves."""

import concurrent.futures
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.model import ProcessIdentity
from mpsd.system.processes import foreign_files, proc, process_table
from mpsd.system.processes.proc import start_ticks
from tests.harness import look_at, wait_until

WAITS = "print(flush=True); import sys; sys.stdin.read()"


@contextlib.contextmanager
def running(name: str, *arguments: str, pipe_directory: Path, **options: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a process with this name in /proc, and this pipe directory in its environment."""
    process = subprocess.Popen(
        [name, "-c", WAITS, *arguments],
        executable=sys.executable,
        env={"CUDA_MPS_PIPE_DIRECTORY": str(pipe_directory), "HOME": "/", **options},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_what_is_known_of_it(tmp_path: Path) -> None:
    """The kernel's facts are returned: identity, uid, executable, arguments, CUDA's part of the environment."""
    variables = {"CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_MPS_LOG_DIRECTORY": "/log", "SECRET": "x"}
    with running("nvidia-cuda-mps-control", "-f", pipe_directory=tmp_path, **variables) as process:
        each = foreign_files.details(process.pid, Path(sys.executable))
        assert each is not None
        assert each.identity == ProcessIdentity(process.pid, start_ticks(process.pid) or 0)
        assert each.uid == os.getuid()
        assert each.executable == os.path.realpath(sys.executable)
        assert each.arguments == ("nvidia-cuda-mps-control", "-c", WAITS, "-f")
        environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path), "CUDA_VISIBLE_DEVICES": "GPU-1"}
        assert each.variables == {**environment, "CUDA_MPS_LOG_DIRECTORY": "/log"}
        assert each.runs
        # The start is exact to a hundredth of a second, the kernel's tick; the bound allows for a busy machine.
        assert abs(each.started - datetime.now(UTC)) < timedelta(minutes=1)
        process.kill()
        wait_until(lambda: (look := look_at(process.pid)) is not None and look.zombie, what="it to end")
        assert foreign_files.details(process.pid, Path(sys.executable)) is None


OVERWRITES: Final = """
import ctypes, os, sys
fields = open("/proc/self/stat", "rb").read().rpartition(b")")[2].split()
begin, end = int(fields[47]), int(fields[48])
area = bytes.fromhex(sys.argv[1]).ljust(end - begin, b"\\0")
ctypes.memmove(begin, area, end - begin)
print(flush=True)
sys.stdin.read()
"""
"""A program that writes over its environment."""

MANY: Final = {"A": "1", "LONG": "x" * 100}


@pytest.mark.parametrize(
    ("environment", "area", "expected"),
    [
        (MANY, None, {"A": "1"}),
        (MANY, b"", None),
        (MANY, b"orker -l=INFO)", None),
        (MANY, b"l=INFO)", None),
        (MANY, b"l=INFO) " + b"x" * 200, None),
        (MANY, b"\0\0A=2\0B=3", {"A": "2"}),
        (MANY, b"A=first\0A=second\0", {"A": "first"}),
        (MANY, b"B=\xff\0A=\xff\0", {"A": "\\xff"}),
        ({"A": "", "B": "1"}, None, {"A": ""}),
        ({"B": "1", "C": "2"}, None, {}),
        ({"B": "1"}, None, None),
        ({}, None, None),
    ],
)
def test_environment(environment: dict[str, str], area: bytes | None, expected: dict[str, str] | None) -> None:
    """Where the area of the environment shows no variable, the environment is unknown, and not empty."""
    script = WAITS if area is None else OVERWRITES
    command = [sys.executable, "-I", "-S", "-c", script, (area or b"").hex()]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = foreign_files.environment(process.pid, ["A"])
        if expected is None:
            assert isinstance(found, str)
            assert f"/proc/{process.pid}/environ cannot be read" in found
        else:
            assert found == expected
        process.kill()
        wait_until(lambda: (look := look_at(process.pid)) is not None and look.zombie, what="it to end")
        assert foreign_files.environment(process.pid, ["A"]) is None
    assert foreign_files.environment(process.pid, ["A"]) is None


def test_which_program_it_runs(tmp_path: Path) -> None:
    """A program is identified by device and inode, whatever its process's name; for a script, by its interpreter."""
    script = tmp_path / "script"
    script.write_text(f"#!{sys.executable} -I\n{WAITS}\n")
    copy = tmp_path / "copy"
    shutil.copyfile(sys.executable, copy)
    with running("nvidia-cuda-mps-control", "-f", pipe_directory=tmp_path) as process:
        assert foreign_files.runs(process.pid, Path(sys.executable))
        assert foreign_files.runs(process.pid, script)
        assert not foreign_files.runs(process.pid, copy)
        assert not foreign_files.runs(process.pid, tmp_path / "absent")
    assert not foreign_files.runs(process.pid, Path(sys.executable))


def test_sessions(tmp_path: Path) -> None:
    """Processes of a session are found by its leader, dead or alive; other processes and a reused pid do not count."""
    script = "sleep 600 >/dev/null & echo $!; read line"
    leader = subprocess.Popen(
        ["sh", "-c", script], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert leader.stdout is not None
    member = int(leader.stdout.readline())
    identity = ProcessIdentity(leader.pid, start_ticks(leader.pid) or 0)
    child = ProcessIdentity(member, start_ticks(member) or 0)
    try:
        with running("sleeps", pipe_directory=tmp_path):
            assert process_table.in_sessions([identity]) == {child: identity}
            leader.communicate()
            assert process_table.in_sessions([identity]) == {child: identity}
            assert process_table.in_sessions([ProcessIdentity(leader.pid, child.start_ticks + 1)]) == {}
            assert process_table.in_sessions([]) == {}
    finally:
        os.kill(member, signal.SIGKILL)
    wait_until(lambda: not process_table.in_sessions([identity]), what="it to be gone")


def leader() -> ProcessIdentity | None:
    return foreign_files.leader_with(process_table.session_leaders(), "TOKEN", "abc")


def test_leader_with() -> None:
    """A process with a unique variable is found if it leads its session."""
    command = [sys.executable, "-I", "-S", "-c", WAITS]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {"TOKEN": "abc"}}
    with subprocess.Popen(command, **options) as member:  # type: ignore[call-overload]
        assert member.stdout.readline() == b"\n"
        assert leader() is None
        with subprocess.Popen(command, start_new_session=True, **options) as its:  # type: ignore[call-overload]
            wait_until(lambda: leader() == proc.identify(its.pid), what="it to be found")
            assert foreign_files.leader_with([its.pid], "TOKEN", "ab") is None


def test_carriers() -> None:
    """Processes of a uid that were started with a value of a variable are found among others."""
    own, bare = os.getuid(), {"PATH": os.environ["PATH"]}
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={**bare, "MARK": "mine"}) as mine,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={**bare, "MARK": "another"}) as another,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={**bare, "MARKED": "mine"}) as other,
    ):
        found = foreign_files.carriers(own, "MARK", ["mine", "nobody's"]).by_token
        assert {value: [each.pid for each in processes] for value, processes in found.items()} == {"mine": [mine.pid]}
        assert foreign_files.carriers(own + 1, "MARK", ["mine"]).by_token == {}
        pids = [mine.pid, another.pid, other.pid]
        assert foreign_files.started_with(pids, "MARK", "mine") == [(proc.identify(mine.pid), "")]
        for each in (mine, another, other):
            each.communicate()


def test_threads() -> None:
    """The number of a thread is recognised as such; that of a process, or of none, is not."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.get_native_id).result()
        assert proc.process_of_thread(thread) == os.getpid()
    assert proc.process_of_thread(os.getpid()) is None
    assert proc.process_of_thread(2**22 + 1) is None


@pytest.mark.parametrize("line", ["\rUid:\t7\t7\t7", "Uid:\t7\t7\t7", "Gid:\t7\t7\t7", "\rTgid:\t1", "\rNSpid:\t5\t6"])
def test_names_with_line_ends(line: str) -> None:
    """A process's name may imitate a line of its /proc/PID/status; the real line counts."""
    name = f"import sys; open('/proc/self/comm', 'w', newline='').write(sys.argv[1]); {WAITS}"
    with subprocess.Popen([sys.executable, "-c", name, line], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert Path(f"/proc/{process.pid}/comm").read_bytes() == f"{line}\n".encode()
            assert proc.real_uid(process.pid) == os.getuid()
            assert proc.effective_user(process.pid) == (os.geteuid(), os.getegid())
            assert proc.process_of_thread(process.pid) is None
            assert proc.is_nested(process.pid) is proc.is_nested(os.getpid())
        finally:
            process.kill()


def test_facts_about_one_process() -> None:
    """A process's uid, name and start are returned, or that there is no such process."""
    assert proc.effective_user(os.getpid()) == (os.geteuid(), os.getegid())
    assert proc.command_of(os.getpid())
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert proc.effective_uid(gone.pid) is None
    assert proc.command_of(gone.pid) == ""


@pytest.mark.root("be another user")
def test_process_that_may_not_be_looked_at(tmp_path: Path) -> None:
    """To a caller that may not inspect it, another user's process is unknown, and not gone."""
    program = (
        "import os, sys; from pathlib import Path; from mpsd.system.processes import foreign_files, proc;"
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534);"
        "pid = int(sys.argv[1]);"
        "print(foreign_files.runs(pid, Path('/bin/sh')), proc.effective_uid(pid), flush=True);"
        "foreign_files.details(pid, Path(sys.executable))"
    )
    with running("nvidia-cuda-mps-control", "-f", pipe_directory=tmp_path) as process:
        done = subprocess.run(
            [sys.executable, "-c", program, str(process.pid)],
            capture_output=True, text=True, check=False, timeout=30, cwd=Path(__file__).parents[3],
        )  # fmt: skip
        assert done.stdout == "False 0\n", done.stderr
        assert done.stderr.endswith(f"PermissionError: [Errno 13] Permission denied: b'/proc/{process.pid}/exe'\n")


_LEADER_ENDS: Final = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_live_ticks() -> None:
    """A zombie is not alive; a process whose first thread alone has ended is."""
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert proc.start_ticks(ended.pid) is not None
    assert proc.live_ticks(ended.pid) is None
    ended.wait()
    assert proc.live_ticks(os.getpid()) == proc.start_ticks(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", _LEADER_ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as headless:
        wait_until(
            lambda: (stat := proc.stat_of(headless.pid)) is not None and stat.is_zombie, what="its first thread to end"
        )
        assert proc.live_ticks(headless.pid) is not None
        headless.kill()
