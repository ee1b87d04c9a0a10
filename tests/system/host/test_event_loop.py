"""The timers of the event loop, as their users rely on them."""

import subprocess
import sys

_SLEEPS = """
import asyncio, random, time
from mpsd.system import clock
from mpsd.system.host import event_loop

async def main():
    early, woken, end = 0.0, 0, time.monotonic() + 0.5
    while time.monotonic() < end:
        seconds, begun = random.uniform(0.0001, 0.004), time.monotonic()
        await asyncio.sleep(seconds)
        early = max(early, begun + seconds - time.monotonic())
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        await asyncio.sleep(clock.until_next(0.01))
        woken += 1
    begun = time.monotonic()
    try:
        async with asyncio.timeout(0.0017):
            await asyncio.Event().wait()
    except TimeoutError:
        early = max(early, begun + 0.0017 - time.monotonic())
    print(early, woken)

event_loop.run(main())
"""


_NO_DESCRIPTOR = """
import asyncio, os, resource
from mpsd.core.errors import ConfigurationError
from mpsd.system.host import event_loop

resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0) + 1,) * 2)
try:
    event_loop.run(asyncio.sleep(0))
except ConfigurationError as error:
    print(error.detail)
"""


def test_no_descriptor() -> None:
    """A timer that cannot be made is reported like any other failure at the start."""
    done = subprocess.run([sys.executable, "-c", _NO_DESCRIPTOR], capture_output=True, text=True, check=True)
    assert done.stdout == "cannot create an event loop: Too many open files\n"
    assert "never awaited" not in done.stderr


def test_never_early() -> None:
    """No timer fires early, and consecutive waits are each woken once."""
    done = subprocess.run([sys.executable, "-c", _SLEEPS], capture_output=True, text=True, check=True)
    early, woken = done.stdout.split()
    assert float(early) <= 0
    assert 0 < int(woken) <= 51
