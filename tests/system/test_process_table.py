"""Which processes of the node belong to a pipe directory, and as what."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from mpsd.core.model import ProcessIdentity
from mpsd.system import process_table
from mpsd.system.process import start_ticks
from mpsd.system.process_table import ProgramKind
from tests.harness import look_at, wait_until

PROGRAM = ("/usr/bin/nvidia-cuda-mps-control",)
WAITS = "print(flush=True); import sys; sys.stdin.read()"


@contextlib.contextmanager
def running(name: str, *arguments: str, pipe_directory: Path, **options: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a process that is called so, as /proc has it, with this pipe directory in its environment."""
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


def found(pipe_directory: Path, program: tuple[str, ...] = PROGRAM) -> dict[int, ProgramKind]:
    """Return what was found on a pipe directory."""
    return {each.identity.pid: each.part for each in process_table.on_pipe_directory(pipe_directory, program)}


@pytest.mark.parametrize(
    ("name", "arguments", "part"),
    [
        ("nvidia-cuda-mps-control", ["-f"], ProgramKind.DAEMON),
        ("/opt/x/nvidia-cuda-mps-control", ["-d"], ProgramKind.DAEMON),
        ("nvidia-cuda-mps-control", ["-multiuser-server", "-f"], ProgramKind.DAEMON),
        ("nvidia-cuda-mps-control", [], ProgramKind.FRONT_END),
        ("nvidia-cuda-mps-server", [], ProgramKind.SERVER),
        ("/usr/bin/nvidia-cuda-mps-server", ["-force-tegra"], ProgramKind.SERVER),
        ("nvidia-cuda-mps-controller", ["-f"], None),
        ("cat", [], None),
    ],
)
def test_parts(tmp_path: Path, name: str, arguments: list[str], part: ProgramKind | None) -> None:
    """A process is a control daemon, a front-end or a server by its name and its arguments, or none of them."""
    with running(name, *arguments, pipe_directory=tmp_path) as process:
        assert found(tmp_path).get(process.pid) is part


def test_by_pipe_directory(tmp_path: Path) -> None:
    """Only processes with this very pipe directory are found, with or without a slash at its end."""
    first, second = tmp_path / "gpu1", tmp_path / "gpu10"
    with (
        running("nvidia-cuda-mps-control", "-f", pipe_directory=first) as one,
        running("nvidia-cuda-mps-control", "-f", pipe_directory=second) as two,
        running(
            "nvidia-cuda-mps-control", "-f", pipe_directory=Path("x"), CUDA_MPS_PIPE_DIRECTORY=f"{first}/"
        ) as three,
    ):
        assert found(first).keys() == {one.pid, three.pid}
        assert found(second).keys() == {two.pid}
        assert found(tmp_path) == {}


def test_program_of_another_name(tmp_path: Path) -> None:
    """The control program in use is known by whatever it is called; a script's name stands behind its interpreter's."""
    with running("/opt/simulator/control", "-f", pipe_directory=tmp_path) as process:
        assert found(tmp_path) == {}
        assert found(tmp_path, ("/opt/simulator/control", "-c")) == {process.pid: ProgramKind.DAEMON}
    with running("/bin/sh", "-f", pipe_directory=tmp_path) as process:
        assert found(tmp_path) == {}
    script = tmp_path / "nvidia-cuda-mps-server"
    script.write_text(f"#!{sys.executable}\n{WAITS}\n")
    script.chmod(0o755)
    server = subprocess.Popen(
        [str(script)], env={"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        wait_until(lambda: found(tmp_path) == {server.pid: ProgramKind.SERVER}, what="the script to be found")
    finally:
        server.communicate()


def test_what_is_known_of_it(tmp_path: Path) -> None:
    """What the kernel says is told: identity, uid, executable, arguments, parent, CUDA's part of the environment."""
    variables = {"CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_MPS_LOG_DIRECTORY": "/log", "SECRET": "x"}
    with running("nvidia-cuda-mps-control", "-f", pipe_directory=tmp_path, **variables) as process:
        (each,) = process_table.on_pipe_directory(tmp_path, PROGRAM)
        assert each.identity == ProcessIdentity(process.pid, start_ticks(process.pid) or 0)
        assert (each.uid, each.parent) == (os.geteuid(), os.getpid())
        assert each.executable == os.path.realpath(sys.executable)
        assert each.arguments == ("nvidia-cuda-mps-control", "-c", WAITS, "-f")
        assert each.variables == {
            "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path),
            "CUDA_VISIBLE_DEVICES": "GPU-1",
            "CUDA_MPS_LOG_DIRECTORY": "/log",
        }
        # To the tick of the kernel's clock, which is a hundredth of a second, and however busy this machine is.
        assert abs(each.started - datetime.now(UTC)) < timedelta(minutes=1)
        assert process_table.started(process.pid) == each.started


def test_zombies_are_gone(tmp_path: Path) -> None:
    """A process that ended and was not waited for is none any more."""
    with running("nvidia-cuda-mps-control", "-f", pipe_directory=tmp_path) as process:
        assert len(found(tmp_path)) == 1
        process.kill()
        wait_until(lambda: (look := look_at(process.pid)) is not None and look.zombie, what="it to end")
        assert found(tmp_path) == {}


def test_facts_about_one_process() -> None:
    """A process's uid, name and start are told, and that there is none is told as well."""
    assert process_table.uid_of(os.getpid()) == os.geteuid() == process_table.own_uid()
    assert process_table.command_of(os.getpid())
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert process_table.uid_of(gone.pid) is None
    assert process_table.started(gone.pid) is None
    assert process_table.command_of(gone.pid) == ""


@pytest.mark.root("be another user")
def test_process_that_may_not_be_looked_at(tmp_path: Path) -> None:
    """To one who may not read its environment, another user's process is not among them; it is no error either."""
    program = (
        "import os, sys; from pathlib import Path; import psutil; from mpsd.system import process_table;"
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534);"
        "print(process_table.on_pipe_directory(Path(sys.argv[1]), ('x',)), process_table.uid_of(int(sys.argv[2])))"
    )
    with running("nvidia-cuda-mps-control", "-f", pipe_directory=tmp_path) as process:
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), str(process.pid)],
            capture_output=True, text=True, check=False, timeout=30, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert done.stdout == "[] 0\n", done.stderr
