"""The CUDA client behind the tests of a real GPU, with a libcuda.so.1 without one, built from fake_cuda.c."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.gate.inner import inner_pytest
from tests.gpu.client import PIECE
from tests.gpu.cuda import LIBRARY
from tests.gpu.machine import PROGRAM, Client

pytestmark = pytest.mark.thorough

MIB: Final = 1 << 20
_ROOT: Final = Path(__file__).parents[2]

Start = Callable[..., Client]
"""Starts a client with these variables of the library."""


@pytest.fixture
def start(library: Path) -> Iterator[Start]:
    """Return a function that starts clients; they are ended after the test."""
    with ExitStack() as stack:

        def started(*options: str, **variables: str) -> Client:
            memory = {"FAKE_CUDA_MEMORY": str(300 * MIB)}
            place = {"LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(_ROOT)}
            return stack.enter_context(Client([*PROGRAM, *options], {**place, **memory, **variables}))

        yield started


def test_what_it_says_first(start: Start) -> None:
    """The client first describes its GPU, and does so again on request."""
    client = start(FAKE_CUDA_MULTIPROCESSORS="33")
    said = {"pid": client.pid, "gpu": "Fake GPU", "cuda": "12.4", "multiprocessors": 33, "mps": None, "ok": True}
    assert client.hello == {**said, "free": 300 * MIB, "total": 300 * MIB}
    assert client.do("info") == client.hello
    assert client.end() == 0


@pytest.mark.parametrize(("value", "told"), [("0", False), ("1", True)])
def test_place(start: Start, value: str, told: bool) -> None:  # noqa: FBT001 - a parameter
    """The client passes on whether CUDA calls it a client of MPS."""
    assert start(FAKE_CUDA_MPS=value).hello["mps"] is told


def test_memory(start: Start) -> None:
    """The client allocates until it is refused, keeps its memory, and frees all of it."""
    client = start()
    assert client.do("alloc 32MiB") == {"ok": True}
    assert client.do("info")["free"] == 268 * MIB
    until_refused = {"ok": True, "held": 4 * PIECE, "refused": "CUDA_ERROR_OUT_OF_MEMORY"}
    assert client.do("alloc-until-refused") == until_refused
    refused = {"ok": False, "error": "CUDA_ERROR_OUT_OF_MEMORY", "code": 2, "call": "cuMemAlloc_v2"}
    assert client.do("alloc 64MiB") == refused
    assert client.do("free") == {"ok": True}
    assert client.do("info")["free"] == 300 * MIB
    assert client.do("alloc-until-refused") == until_refused


def test_work(start: Start) -> None:
    """The client reports its rate and its number of multiprocessors, and frees the memory for the work afterwards."""
    client = start(FAKE_CUDA_MULTIPROCESSORS="5")
    done = client.do("busy 0.05")
    assert done["ok"]
    assert done["rate"] > 0
    assert done["kernels"] > 0
    assert done["multiprocessors"] == 5
    assert client.do("info")["free"] == 300 * MIB
    times = client.do("latency 100")
    assert 0 < times["p50"] <= times["p99"] <= times["p99.9"]
    assert client.do("sync") == {"ok": True}


def test_work_until_the_next_line(start: Start) -> None:
    """A client that works until told otherwise first says that it has begun, and then what it did."""
    client = start(FAKE_CUDA_MULTIPROCESSORS="5")
    client.begin()
    assert not client.has_answered
    work = client.finish()
    assert (work["ok"], work["multiprocessors"]) == (True, 5)
    assert work["rate"] > 0
    assert client.end() == 0


def test_fork(start: Start) -> None:
    """A forked child has lost CUDA, and its parent has not."""
    client = start()
    assert client.do("fork") == {"ok": True, "child": "CUDA_ERROR_NOT_INITIALIZED and CUDA_ERROR_NOT_INITIALIZED"}
    assert client.do("sync") == {"ok": True}


def test_one_long_kernel(start: Start) -> None:
    """The client says when its kernel is launched, and again when it has ended; a signal can end it in between."""
    client = start()
    assert client.do("launch 0.1") == {"ok": True}
    assert client.answer() == {"ok": True}
    assert client.do("launch 3600") == {"ok": True}
    assert not client.has_answered
    assert client.kill(signal.SIGTERM) == -signal.SIGTERM


def test_contexts(start: Start) -> None:
    """A late client initialises CUDA and makes contexts on command, each with its own memory."""
    client = start("--late")
    assert client.hello == {"ok": True, "pid": client.pid}
    for line in ("init", "create", "alloc 32MiB", "create", "alloc 64MiB", "busy 0.05"):
        assert client.do(line)["ok"], line
    assert client.do("info")["free"] == 204 * MIB
    assert client.do("destroy") == {"ok": True}
    assert client.do("info")["free"] == 268 * MIB
    for line in ("primary", "alloc 32MiB", "reset"):
        assert client.do(line) == {"ok": True}, line
    assert client.do("info")["free"] == 268 * MIB
    assert client.do("busy 0.05")["ok"]
    assert client.end() == 0


def test_fault(start: Start) -> None:
    """A fault is reported, and stays: every later call fails with it, while the client keeps answering."""
    client = start()
    error = {"ok": False, "error": "CUDA_ERROR_ILLEGAL_ADDRESS", "code": 700}
    assert client.do("fault") == {**error, "call": "cuCtxSynchronize"}
    assert client.do("sync") == {**error, "call": "cuCtxSynchronize"}
    assert client.do("alloc 1MiB") == {**error, "call": "cuMemAlloc_v2"}
    assert client.do("busy 0.05") == {**error, "call": "cuMemAlloc_v2"}
    assert client.end() == 0


@pytest.mark.parametrize("call", ["cuMemsetD32_v2", "cuLaunchKernel", "cuMemcpyDtoH_v2"])
def test_work_that_fails_midway(start: Start, call: str) -> None:
    """An error during the work is reported as that of the failed call."""
    client = start(FAKE_CUDA_FAIL=f"{call} 719")
    assert client.do("busy 0.05") == {"ok": False, "error": "unknown", "code": 719, "call": call}
    assert client.do("info")["free"] == 300 * MIB


@pytest.mark.parametrize("call", ["cuInit", "cuCtxCreate_v2", "cuModuleLoadData"])
def test_no_context(start: Start, call: str) -> None:
    """A client without a context says why, and exits with status 1."""
    client = start(FAKE_CUDA_FAIL=f"{call} 805")
    assert client.hello == {"ok": False, "error": "unknown", "code": 805, "call": call}
    assert client.process.wait(10) == 1


def test_no_library(start: Start, tmp_path: Path) -> None:
    """A libcuda.so.1 that cannot be loaded gives a reason, and no traceback."""
    (tmp_path / LIBRARY).write_text("not a library")
    client = start(LD_LIBRARY_PATH=str(tmp_path))
    assert client.hello["ok"] is False
    assert client.hello["error"].startswith("libcuda.so.1 cannot be loaded: ")
    assert client.process.wait(10) == 1


NEEDY: Final = """
import pytest

@pytest.mark.gpu
def test_it():
    pass
"""


@pytest.mark.parametrize(("required", "closing"), [("", "1 skipped"), ("1", "1 error")])
def test_without_a_gpu(library: Path, tmp_path: Path, required: str, closing: str) -> None:
    """Without a GPU its tests skip, visibly and with the reason; with MPSD_REQUIRE_GPU=1 they fail with it."""
    environment = {"LD_LIBRARY_PATH": str(library), "FAKE_CUDA_FAIL": "cuInit 100", "MPSD_REQUIRE_GPU": required}
    said = inner_pytest(tmp_path, NEEDY, "-m", "gpu", **environment)
    assert closing in said, said
    assert "no GPU for CUDA here: CUDA_ERROR_NO_DEVICE" in said
    assert ("NOT TESTED ON A REAL GPU" in said) is not required.isdigit()
