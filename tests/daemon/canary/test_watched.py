"""The wait for a canary that does not answer: what hinders it, and whether it has begun."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from mpsd.daemon.canary.canary import _watched
from mpsd.system import proc, process
from mpsd.system.process import Process


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


@pytest.mark.parametrize("disturbed", [False, True])
def test_stopped_meanwhile(*, disturbed: bool) -> None:
    """The silence proves nothing if a process that has to answer was stopped, though it runs at the deadline."""

    async def scenario(canary: Process, server: Process) -> tuple[bool, str | None]:
        if disturbed:
            os.kill(server.pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.8, os.kill, server.pid, signal.SIGCONT)
        return await _watched(
            canary,
            1.0,
            start=1.0,
            lines=lambda: [b"begins"],
            hindrance=lambda: "it is stopped" if proc.is_stopped(server.pid) else None,
        )

    with ExitStack() as running:
        canary, server = running.enter_context(sleeper()), running.enter_context(sleeper())
        assert asyncio.run(scenario(canary, server)) == (False, "it is stopped" if disturbed else None)


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
