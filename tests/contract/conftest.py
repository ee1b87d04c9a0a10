"""The subjects that every test of the contract is run against, and the bench that it is run on."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.subjects import Bench, Subject, subjects


# The simulator as the oldest and as the newest: the branches between are compared line by line in test_alike.
@pytest.fixture(params=subjects(470, 555))
def subject(request: pytest.FixtureRequest) -> Subject:
    """Give each control program in turn: the simulator's, and NVIDIA's own of four driver branches."""
    assert isinstance(request.param, Subject)
    return request.param


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """Let what is started here be interrupted, even where these tests run in the background of a shell script.

    There SIGINT is ignored, which every process inherits; and with SIGINT a control daemon forces its servers to end.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def idle(subject: Subject, short_tmp: Path) -> Iterator[Bench]:
    """Give a bench on which nothing was started yet."""
    bench = Bench(subject, short_tmp)
    yield bench
    bench.close()


@pytest.fixture
def bench(idle: Bench) -> Bench:
    """Give a bench with a control daemon that serves."""
    idle.start()
    return idle
