"""The canary that shows whether CUDA works, with a libcuda.so.1 without a GPU, built from fake_cuda.c."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.system.canary import BEGINS, CanaryProgram
from tests.daemon.helpers import is_running
from tests.gpu.test_client import library  # noqa: F401 - a fixture
from tests.harness import wait_until

ALARM: Final = ("--alarm", "60")


def run(library: Path, *arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:  # noqa: F811
    """Run the canary, and return its status and its answer."""
    done = subprocess.run(
        [*CanaryProgram().argv, *ALARM, *arguments],
        env={"LD_LIBRARY_PATH": str(library), **variables},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stderr == ""
    said: dict[str, Any] = json.loads(done.stdout.removeprefix(f"{BEGINS}\n"))
    del said["pid"]
    return done.returncode, said


@pytest.mark.parametrize(("variable", "mps"), [("1", True), ("0", False)])
def test_context(library: Path, variable: str, *, mps: bool) -> None:  # noqa: F811
    """A canary with a context says so, and whether the context is shared through MPS."""
    assert run(library, FAKE_CUDA_MPS=variable) == (0, {"ok": True, "mps": mps})


def test_driver_that_does_not_tell(library: Path) -> None:  # noqa: F811
    """A driver without the attribute does not make it fail."""
    assert run(library) == (0, {"ok": True})


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuCtxCreate_v2", "cuCtxDestroy_v2"])
def test_error(library: Path, call: str) -> None:  # noqa: F811
    """An error is reported by its name, its number, and the failed call, with `mps` where that is known by then."""
    error = {"ok": False, "error": "unknown", "code": 805, "call": call}
    assert run(library, FAKE_CUDA_FAIL=f"{call} 805") == (1, error)
    known = {"mps": True} if call.startswith("cuCtx") else {}
    assert run(library, FAKE_CUDA_FAIL=f"{call} 805", FAKE_CUDA_MPS="1") == (1, {**error, **known})


def test_no_library(tmp_path: Path) -> None:
    """A libcuda.so.1 that cannot be loaded gives a reason, and no traceback."""
    (tmp_path / "libcuda.so.1").write_text("not a library")
    status, said = run(tmp_path)
    assert (status, said["ok"], said["code"]) == (1, False, None)
    assert said["error"].startswith("libcuda.so.1 cannot be loaded: ")


def hanging(library: Path) -> dict[str, str]:  # noqa: F811
    """Return the environment of a canary that hangs as in a wedge."""
    return {"LD_LIBRARY_PATH": str(library), "FAKE_CUDA_HANG": "cuInit"}


def test_wedge(library: Path) -> None:  # noqa: F811
    """In a wedge the canary prints that it begins, and nothing more, and can be killed."""
    argv = [*CanaryProgram().argv, *ALARM]
    with pytest.raises(subprocess.TimeoutExpired) as overrun:
        subprocess.run(argv, env=hanging(library), capture_output=True, timeout=1, check=False)
    assert overrun.value.stdout == f"{BEGINS}\n".encode()


def test_alarm(library: Path) -> None:  # noqa: F811
    """In a wedge the canary ends by itself after the given time, also inside of CUDA."""
    argv = [*CanaryProgram().argv, "--alarm", "1"]
    done = subprocess.run(argv, env=hanging(library), capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGALRM, f"{BEGINS}\n".encode())


_PARENT: Final = """
import subprocess, sys
canary = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
print(canary.pid, canary.stdout.readline(), end="", flush=True)
sys.stdin.read()
"""


def test_parent_that_dies(library: Path) -> None:  # noqa: F811
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
from mpsd.system.canary import become
become("61004:61005")
print(os.getresuid(), os.getresgid(), os.getgroups())
"""


@pytest.mark.root("become another user")
def test_user() -> None:
    """The canary becomes the given user for good, without other groups."""
    done = subprocess.run([sys.executable, "-c", _WHO], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.strip() == "(61004, 61004, 61004) (61005, 61005, 61005) []"
