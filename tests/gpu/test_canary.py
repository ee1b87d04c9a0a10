"""The canary that shows whether CUDA works, with a libcuda.so.1 without a GPU, built from fake_cuda.c."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.system.mps.canary import BEGINS, CanaryProgram
from tests.daemon.helpers import is_running
from tests.harness import wait_until

pytestmark = pytest.mark.thorough

ALARM: Final = ("--alarm", "60")


@contextmanager
def running(*arguments: str, **variables: str) -> "Iterator[subprocess.Popen[str]]":
    """Start the canary, and end it by the end of its stdin."""
    with subprocess.Popen(
        [*CanaryProgram().argv, *ALARM, *arguments],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as canary:
        yield canary


def run(library: Path, **variables: str) -> tuple[int, dict[str, Any]]:
    """Run the canary, and return its status and its answer, for which it stays."""
    with running(LD_LIBRARY_PATH=str(library), **variables) as canary:
        assert canary.stdout is not None
        lines = iter(canary.stdout.readline, "")
        said: dict[str, Any] = next(json.loads(each) for each in lines if each != f"{BEGINS}\n")
        assert canary.poll() is None
        output, _ = canary.communicate(timeout=30)
    assert output == ""
    assert said.pop("pid") == canary.pid
    return canary.returncode, said


def test_context(library: Path) -> None:
    """A canary with a context says so, and stays until its parent has asked about it."""
    assert run(library) == (0, {"ok": True, "mps": None})


@pytest.mark.parametrize(("value", "mps"), [("0", False), ("1", True)])
def test_mps(library: Path, value: str, *, mps: bool) -> None:
    """A canary reports whether CUDA says that it uses MPS, also where it gets no context."""
    assert run(library, FAKE_CUDA_MPS=value) == (0, {"ok": True, "mps": mps})
    _, said = run(library, FAKE_CUDA_MPS=value, FAKE_CUDA_FAIL="cuCtxCreate_v2 2")
    assert (said["code"], said["mps"]) == (2, mps)
    # An error of this call alone is no error of the canary: it is unknown whether it uses MPS.
    assert run(library, FAKE_CUDA_MPS=value, FAKE_CUDA_FAIL="cuDeviceGetAttribute 1")[1]["mps"] is None


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuCtxCreate_v2"])
def test_error(library: Path, call: str) -> None:
    """An error is reported by its name, its number, and the failed call."""
    error = {"ok": False, "error": "unknown", "code": 805, "call": call, "mps": None}
    assert run(library, FAKE_CUDA_FAIL=f"{call} 805") == (1, error)


def test_no_library(tmp_path: Path) -> None:
    """A libcuda.so.1 that cannot be loaded gives a reason, and no traceback."""
    (tmp_path / "libcuda.so.1").write_text("not a library")
    status, said = run(tmp_path)
    assert (status, said["ok"], said["code"]) == (1, False, None)
    assert said["error"].startswith("libcuda.so.1 cannot be loaded: ")


def hanging(library: Path) -> dict[str, str]:
    """Return the environment of a canary that hangs as in a wedge."""
    return {"LD_LIBRARY_PATH": str(library), "FAKE_CUDA_HANG": "cuInit"}


def test_alarm(library: Path) -> None:
    """In a wedge the canary prints that it begins, and nothing more. It ends after the given time, also inside CUDA."""
    with running("--alarm", "1", **hanging(library)) as canary:
        assert canary.wait(30) == -signal.SIGALRM
        assert canary.stdout is not None
        assert canary.stdout.read() == f"{BEGINS}\n"


def test_alarm_after_the_answer(library: Path) -> None:
    """A canary whose stdin does not end ends after the given time, too."""
    with running("--alarm", "1", LD_LIBRARY_PATH=str(library)) as canary:
        assert canary.wait(30) == -signal.SIGALRM


def test_parent_that_is_gone(library: Path) -> None:
    """A canary whose parent has ended before it begins does not use CUDA: in a wedge, it would stay."""
    argv = [*CanaryProgram().argv, *ALARM]
    done = subprocess.run(
        argv, env=hanging(library), stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


_PARENT: Final = """
import subprocess, sys
canary = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(canary.pid, canary.stdout.readline(), end="", flush=True)
sys.stdin.read()
"""


def test_parent_that_dies(library: Path) -> None:
    """In a wedge the canary ends as soon as its parent has been killed."""
    argv = [sys.executable, "-c", _PARENT, *CanaryProgram().argv, *ALARM]
    with subprocess.Popen(
        argv, env=hanging(library), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, begins = parent.stdout.readline().split()
        assert begins == BEGINS
        parent.kill()
    wait_until(lambda: not is_running(int(pid)), what="the canary to end")


_WHO: Final = """
import os
from mpsd.system.mps.canary import become
become("61004:61005")
print(os.getresuid(), os.getresgid(), os.getgroups())
"""


@pytest.mark.root("become another user")
def test_user() -> None:
    """The canary becomes the given user for good, without other groups."""
    done = subprocess.run([sys.executable, "-c", _WHO], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.strip() == "(61004, 61004, 61004) (61005, 61005, 61005) []"
