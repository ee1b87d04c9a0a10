"""The wait for a canary that does not answer: what hinders it, and whether it has begun."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mpsd.daemon.canary.canary import _watched
from mpsd.system.processes import process
from mpsd.system.processes.process import Process


@contextmanager
def sleeper() -> Iterator[Process]:
    """Start a process that does nothing, and yield it."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as started:
        found = process.find(started.pid)
        assert found is not None
        try:
            yield found
        finally:
            found.close()
            started.kill()


def test_that_never_begins() -> None:
    """The silence of a canary that did not get as far as CUDA, as on a busy machine, proves nothing."""
    with sleeper() as canary:
        waited = _watched(canary, 5.0, start=0.2, lines=list, hindrance=lambda: None)
        assert asyncio.run(waited) == (
            False,
            f"canary {canary.pid} did not begin to initialise CUDA within 0.2 s",
        )


def test_that_begins_late() -> None:
    """The time for the answer begins when the canary begins to initialise CUDA."""
    printed = iter([list[bytes]()] * 3)
    with sleeper() as canary:
        waited = _watched(canary, 0.4, start=0.4, lines=lambda: next(printed, [b"begins"]), hindrance=lambda: None)
        assert asyncio.run(waited) == (False, None)
