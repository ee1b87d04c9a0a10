"""The programs that measure a real GPU, run without one: they run to their end, and say what is missing."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.gpu.cuda import LIBRARY
from tests.real import real_daemons
from tests.tools import compiler

MIB: Final = 1 << 20
_ROOT: Final = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.real_daemon(535)
def test_questions(tmp_path: Path) -> None:
    """Every question has an answer, from NVIDIA's own control daemon and a fake libcuda.so.1 that is no client."""
    options = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{LIBRARY}"]
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([compiler(), *options, "-o", tmp_path / LIBRARY, source], check=True)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "FAKE_CUDA_MEMORY": str(300 * MIB),
        "PATH": f"{real_daemons()[535].parent}:{os.environ['PATH']}",
    }
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
    assert answers["SIGKILL of a busy client: its neighbour, in its work"] == "works"
    # The clients belong to no server that could be queried.
    assert [what for what, _ in rows if "could not be asked" in what] == ["terminating: could not be asked to its end"]
    assert answers["SIGKILL of a busy client, alone: its server"] == "[], and lists []"


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
