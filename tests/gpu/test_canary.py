"""The canary that shows whether CUDA works, with a libcuda.so.1 without a GPU, built from fake_cuda.c."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.system.canary import CanaryProgram
from tests.gpu.test_client import library  # noqa: F401 - a fixture


def run(library: Path, *arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:  # noqa: F811
    """Run the canary, and return its status and its output."""
    done = subprocess.run(
        [*CanaryProgram().argv, *arguments],
        env={"LD_LIBRARY_PATH": str(library), **variables},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stderr == ""
    said: dict[str, Any] = json.loads(done.stdout)
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
    """An error is reported by its name, its number, and the failed call."""
    error = {"ok": False, "error": "unknown", "code": 805, "call": call}
    assert run(library, FAKE_CUDA_FAIL=f"{call} 805") == (1, error)


def test_no_library(tmp_path: Path) -> None:
    """A libcuda.so.1 that cannot be loaded gives a reason, and no traceback."""
    (tmp_path / "libcuda.so.1").write_text("not a library")
    status, said = run(tmp_path)
    assert (status, said["ok"], said["code"]) == (1, False, None)
    assert said["error"].startswith("libcuda.so.1 cannot be loaded: ")


def test_wedge(library: Path) -> None:  # noqa: F811
    """In a wedge the canary prints nothing, forever, and can be killed."""
    environment = {"LD_LIBRARY_PATH": str(library), "FAKE_CUDA_HANG": "cuInit"}
    with pytest.raises(subprocess.TimeoutExpired) as overrun:
        subprocess.run(CanaryProgram().argv, env=environment, capture_output=True, timeout=1, check=False)
    assert not overrun.value.stdout


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
