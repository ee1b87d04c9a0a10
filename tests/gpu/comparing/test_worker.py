"""The client that does timed work, on a libcuda.so.1 without a GPU."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.driven_program import DrivenProgram

ROOT = Path(__file__).parents[3]
QUANTILES = ["p50", "p99", "p99.9", "most"]


@pytest.fixture
def worker(library: Path, request: pytest.FixtureRequest) -> Iterator[DrivenProgram]:
    """Yield a client that works without a framework; a parameter is the call of CUDA that fails."""
    variables = {"LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(ROOT), "FAKE_CUDA_MEMORY": str(1 << 30)}
    if hasattr(request, "param"):
        variables["FAKE_CUDA_FAIL"] = f"{request.param} 719"
    with DrivenProgram([sys.executable, "-m", "tests.gpu.comparing.worker", "libcuda"], variables) as program:
        yield program


def test_all_that_it_does(worker: DrivenProgram) -> None:
    """It says what it works with, and whether CUDA calls it a client of MPS; it measures rates and times, and ends."""
    assert worker.hello == {
        "ok": True,
        "pid": worker.pid,
        "by": "libcuda",
        "mps": None,
        "multiprocessors": 8,
        "free": 1 << 30,
        "total": 1 << 30,
    }
    for work in ("integer", "short", "least"):
        assert worker.do(f"prepare {work}") == {"ok": True}
        assert worker.do(f"run {work} 0.02")["rate"] > 0
        check_quantiles(worker.do(f"steps {work} 0.02"))
    times = worker.do("latency 100")
    check_quantiles(times)
    assert times["n"] == 100
    assert worker.do("loop 0.02")["kernels"] > 0
    assert [worker.do("hold 0.01"), worker.answer()] == [{"ok": True}] * 2
    assert worker.do("drop") == {"ok": True}
    assert worker.do("run decode:1 0.1") == {"ok": False, "error": "no work 'decode:1' without torch"}
    assert worker.end() == 0


@pytest.mark.parametrize("worker", ["cuLaunchKernel", "cuCtxSynchronize"], indirect=True)
def test_a_kernel_that_fails(worker: DrivenProgram) -> None:
    """Every kind of work waits for its kernels, and says where one failed."""
    for line in ("run integer 0.02", "run short 0.02", "latency 1", "steps integer 0.02", "loop 0.02"):
        answer = worker.do(line)
        assert not answer["ok"]
        assert "(719)" in answer["error"]


def check_quantiles(answer: dict[str, Any]) -> None:
    values = [answer[name] for name in QUANTILES]
    assert values == sorted(values)
    assert values[0] > 0
