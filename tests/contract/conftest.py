"""The subjects of every contract test, and the bench on which a test drives them."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.subjects import Bench, Subject, subjects


# The simulator as the oldest and as the newest branch: test_alike compares the branches between line by line.
@pytest.fixture(params=subjects(470, 555))
def subject(request: pytest.FixtureRequest) -> Subject:
    """Return each control program in turn: the simulator's, and NVIDIA's own of four driver branches."""
    assert isinstance(request.param, Subject)
    return request.param


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """Make processes started here interruptible, even if these tests run in the background of a shell script.

    There SIGINT is ignored, which every process inherits; and with SIGINT a control daemon forces its servers to end.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def idle(subject: Subject, short_tmp: Path) -> Iterator[Bench]:
    """Yield a bench on which nothing has started yet."""
    bench = Bench(subject, short_tmp)
    yield bench
    bench.close()


@pytest.fixture
def bench(idle: Bench) -> Bench:
    """Return a bench with a control daemon that serves."""
    idle.start()
    return idle
