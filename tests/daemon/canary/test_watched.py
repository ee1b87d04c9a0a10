"""The wait for a canary that its user stops, and continues just before the deadline."""

import asyncio
import os
import signal
import sys

import pytest

from mpsd.daemon.canary.canary import _watched
from mpsd.system import process


@pytest.mark.parametrize("disturbed", [False, True])
def test_stopped_meanwhile(*, disturbed: bool) -> None:
    """A canary that was stopped meanwhile proves nothing, though it runs at the deadline."""

    async def scenario() -> tuple[bool, bool]:
        sleeper = process.spawn([sys.executable, "-c", "import signal; signal.pause()"], env={})
        try:
            if disturbed:
                os.kill(sleeper.pid, signal.SIGSTOP)
                asyncio.get_running_loop().call_later(0.8, os.kill, sleeper.pid, signal.SIGCONT)
            return await _watched(sleeper, 1.0)
        finally:
            sleeper.signal(signal.SIGKILL)
            await sleeper.wait()
            sleeper.close()

    assert asyncio.run(scenario()) == (False, disturbed)
