"""The benches for tests of what is behind the simulated control pipe."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulator.bench import GpuBench


@pytest.fixture
def branch() -> int:
    """Return the driver branch that the bench imitates; a test can have other ones as parameters."""
    return 555


@pytest.fixture
def idle(short_tmp: Path, branch: int) -> Iterator[GpuBench]:
    """Yield a bench on which nothing has started yet."""
    bench = GpuBench(short_tmp, branch)
    yield bench
    bench.close()


@pytest.fixture
def bench(idle: GpuBench) -> GpuBench:
    """Return a bench with a control daemon that serves, and without a server yet."""
    idle.start()
    return idle
