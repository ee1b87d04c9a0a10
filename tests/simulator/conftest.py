"""The subject of the tests of what is beyond the simulated control pipe."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulator.bench import GpuBench


@pytest.fixture
def idle(short_tmp: Path) -> Iterator[GpuBench]:
    """Give a bench on which nothing was started yet."""
    bench = GpuBench(short_tmp, 555)
    yield bench
    bench.close()


@pytest.fixture
def bench(idle: GpuBench) -> GpuBench:
    """Give a bench with a control daemon that serves, and no server yet."""
    idle.start()
    return idle
