"""The benches for tests of what is behind the simulated control pipe."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulator.bench import GpuBench


@pytest.fixture
def idle(short_tmp: Path) -> Iterator[GpuBench]:
    """Yield a bench on which nothing has started yet."""
    bench = GpuBench(short_tmp, 555)
    yield bench
    bench.close()


@pytest.fixture
def bench(idle: GpuBench) -> GpuBench:
    """Return a bench with a control daemon that serves, and without a server yet."""
    idle.start()
    return idle
