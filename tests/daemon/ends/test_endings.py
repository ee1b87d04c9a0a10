"""Ends of processes, as mpsd stores them."""

import asyncio
import contextlib
import signal
import sys
from pathlib import Path

from mpsd.core.enforcement.ending import EndCause
from mpsd.core.reload import LiveSettings
from mpsd.core.settings import LogFormat, Settings
from mpsd.daemon.ends.end_store import EndStore
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.record.log import configure
from mpsd.system import process
from tests.harness import eventually


def pidfds() -> int:
    """Return the number of this process's pidfds."""
    count = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the directory itself
            count += str(each.readlink()) == "anon_inode:[pidfd]"
    return count


def test_new_cause(tmp_path: Path) -> None:
    """A new cause has every attempt made once more: an end that could not proceed before is not exhausted for it."""

    async def scenario() -> None:
        target = process.spawn([sys.executable, "-c", "import signal; signal.pause()"], env={})
        endings = Endings(EndStore(tmp_path), LiveSettings(Settings()), configure(LogFormat.JSON))
        try:
            endings.end(target.identity, EndCause("one", "it is a test"), daemons=("gpu0",))
            await eventually(lambda: (now := endings.progress(target.identity, "one")) and now.stays, what="it to stay")
            before = endings.progress(target.identity, "one")
            assert endings.progress(target.identity, "other") is None
            endings.end(target.identity, EndCause("other", "it is a test, too"))
            after = endings.progress(target.identity, "other")
            assert before is not None
            assert after is not None
            assert (after.stays, after.exhausted) == ("", False)
            assert after.since > before.since
        finally:
            endings.close()
            target.signal(signal.SIGKILL)
            await target.wait()
            target.close()

    asyncio.run(scenario())


def test_let_go_at_once(tmp_path: Path) -> None:
    """An end that is cancelled before its first step leaves no descriptor behind."""

    async def scenario() -> tuple[int, int]:
        target = process.spawn([sys.executable, "-c", "import signal; signal.pause()"], env={})
        try:
            endings = Endings(EndStore(tmp_path), LiveSettings(Settings()), configure(LogFormat.JSON))
            before = pidfds()
            endings.end(target.identity, EndCause("a test", "it is a test"))
            endings.let_go(target.identity, "a test")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return before, pidfds()
        finally:
            target.signal(signal.SIGKILL)
            await target.wait()
            target.close()

    before, after = asyncio.run(scenario())
    assert after == before
