"""The programs that measure a real GPU, run without one: they run to their end, and say what is missing."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.daemon.helpers import is_running
from tests.gpu.cuda import LIBRARY
from tests.gpu.everything import PARTS
from tests.real import real_daemons
from tests.tools import compiler

MIB: Final = 1 << 20
_ROOT: Final = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a machine with NVIDIA's own control daemon, and a fake libcuda.so.1 that is no client.

    The directory `first` comes first in PATH.
    """
    options = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{LIBRARY}"]
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([compiler(), *options, "-o", tmp_path / LIBRARY, source], check=True)
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "FAKE_CUDA_MEMORY": str(300 * MIB),
        "PATH": f"{tmp_path}/first:{real_daemons()[535].parent}:{os.environ['PATH']}",
    }


@pytest.mark.slow
@pytest.mark.real_daemon(535)
def test_questions(environment: dict[str, str]) -> None:
    """Every question has an answer, from NVIDIA's own control daemon and clients without a server."""
    command = [sys.executable, "-m", "tests.gpu.questions", "--quick"]
    done = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True, timeout=120, check=True)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert all(len(row) == 2 for row in rows)
    answers = dict(rows)
    context = (
        "8 multiprocessors ran (CUDA says 8); 256 MiB, then CUDA_ERROR_OUT_OF_MEMORY (CUDA says 0.3 of 0.3 GiB free)"
    )
    assert answers["opened, then closed: cuInit before, the context 5 s later"] == context
    assert answers["part, since then: it is reset"] == context
    assert answers["SIGKILL of a client in mid-kernel: its neighbour, in its work"] == "works"
    assert answers["SIGTERM of a client in mid-kernel: its neighbour, in its work"] == "works"
    # The clients belong to no server that could be queried.
    assert [what for what, _ in rows if "could not be asked" in what] == ["terminating: could not be asked to its end"]
    assert answers["SIGKILL of a client in mid-kernel, alone: its server"] == "[], and lists []"
    assert len(answers) == len(rows)
    order = [next(number for number, (what, _) in enumerate(rows) if each in what) for each in FIRST]
    assert order == sorted(order)


FIRST: Final = ("cuInit before", "second context", "SIGTERM of", "SIGKILL of", "terminating", "alone", "successor")
"""Parts of the questions, in the order of the issue that asks them: the ones of which least is known come first."""

_CONTROL: Final = """#!/bin/sh
[ $# -eq 0 ] || exec {real} "$@"
asked=$(cat)
case $asked in
get_server_list) echo {server} ;;
terminate_client*) sleep 3; echo 0 ;;
*) echo "$asked" | {real} ;;
esac
"""
"""A front-end whose control daemon has a server, which takes longer for a client than the client's kernel lasts."""


@pytest.mark.slow
@pytest.mark.real_daemon(535)
def test_an_end_that_waits_for_the_kernel(tmp_path: Path, environment: dict[str, str]) -> None:
    """The answer of `terminate_client` is awaited for as long as the kernel and its server take."""
    with subprocess.Popen(["sleep", "600"]) as server:
        control = tmp_path / "first" / "nvidia-cuda-mps-control"
        control.parent.mkdir()
        control.write_text(_CONTROL.format(real=real_daemons()[535], server=server.pid))
        control.chmod(0o755)
        command = [sys.executable, "-m", "tests.gpu.questions", "--quick", "terminating"]
        done = subprocess.run(
            command, env=environment, cwd=_ROOT, capture_output=True, text=True, timeout=120, check=True
        )
        assert "| terminate_client of a client in mid-kernel | '0' after 3." in done.stdout
        assert "s, of a kernel of 1.2 s |" in done.stdout
        assert "could not be asked" not in done.stdout
    assert server.returncode == -signal.SIGKILL  # the program ends the servers that quit left


def test_unknown_question() -> None:
    """A question that does not exist is refused, and the others are named."""
    command = [sys.executable, "-m", "tests.gpu.questions", "nothing"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no question nothing: there are binding, contexts, ending-by-SIGTERM, " in done.stderr


_PART: Final = """
import os, sys, time
started = {started!r}
for _ in range(2):  # a daemon of a daemon, each in a session of its own
    if os.fork():
        {first}
        sys.exit(3)
    os.setsid()
open(started, "w").write(str(os.getpid()))
time.sleep(600)
"""

_RUN: Final = """
import sys
from tests.gpu import everything
print(everything.run_part([sys.executable, "-c", sys.argv[1]], {}, 3))
print([*everything.descendants(everything.os.getpid())])
"""


@pytest.mark.parametrize(
    ("first", "expected"),
    [("time.sleep(600)", "not done after 3 s"), ("while not os.path.exists(started): pass", "status 3")],
)
def test_nothing_outlives_a_part(tmp_path: Path, first: str, expected: str) -> None:
    """The processes of a part end with it, its daemons too, whether the part ends in time or not."""
    started = tmp_path / "started"
    part = _PART.format(first=first, started=str(started))
    done = subprocess.run(
        [sys.executable, "-c", _RUN, part], cwd=_ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [expected, "[]"]
    assert not is_running(int(started.read_text()))


def test_time_of_all_parts() -> None:
    """All parts together have less than eight minutes, and the questions come first."""
    assert sum(seconds for _, _, seconds in PARTS) + 30 <= 480
    assert "tests.gpu.questions" in PARTS[0][1]


def test_what_a_machine_lacks(tmp_path: Path) -> None:
    """Nothing runs on a machine that lacks something, and everything that it lacks is listed at once."""
    (tmp_path / "mpsd-0-py3-none-any.whl").touch()
    command = [sys.executable, str(_ROOT / "tests/gpu/everything.py"), "--wheels", str(tmp_path)]
    environment = {"PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    said = done.stdout.splitlines()
    assert said[0] == "This machine lacks:"
    for each in (
        "nvidia-cuda-mps-control in PATH",
        "nvidia-cuda-mps-server in PATH",
        "libcuda.so.1",
        "libnvidia-ml.so.1",
    ):
        assert any(line.startswith(f"- {each}") for line in said), each
