"""Ends of processes, as mpsd stores them."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from mpsd.core.enforcement.ending import EndCause, Ending, EndStep
from mpsd.core.model import ProcessIdentity
from mpsd.core.reload import LiveSettings
from mpsd.core.settings import LogFormat, Settings
from mpsd.daemon.ends.end_store import EndStore
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.record.log import configure
from mpsd.system import clock, proc, process
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


@contextlib.contextmanager
def idle() -> Iterator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    """Start a process that does nothing, and yield it."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as started:
        ticks = proc.start_ticks(started.pid)
        assert ticks is not None
        try:
            yield started, ProcessIdentity(started.pid, ticks)
        finally:
            started.kill()


@pytest.mark.parametrize("end", ["client gone", "server gone", "canary", "canary of another daemon"])
def test_late_server(tmp_path: Path, end: str) -> None:
    """The next mpsd knows which server is late, until the client or the server is gone, or a canary clears it."""

    async def scenario(client: ProcessIdentity, server: ProcessIdentity) -> None:
        store, cause = EndStore(tmp_path), EndCause("one", "it is a test")
        stored = Ending(client, 0, (cause,), clock.boot_id(), clock.now(), step=EndStep.TERMINATE_CLIENT)
        store.keep(structs.replace(stored, daemons=("gpu0",), late=(("gpu0", server),)))
        endings, changes = Endings(store, LiveSettings(Settings()), configure(LogFormat.JSON)), list[str]()
        endings.changed = lambda: changes.append(endings.late_on("gpu0"))
        endings.load()
        try:
            assert f"server {server.pid} did not end the contexts of client {client.pid}" in endings.late_on("gpu0")
            assert not endings.late_on("gpu1")
            if end in gone:
                gone[end].kill()
                await asyncio.to_thread(gone[end].wait)
            if end == "client gone":
                await eventually(lambda: changes, what="the change to be reported")
            elif "canary" in end:
                endings.clear_late("gpu0" if end == "canary" else "gpu1")
                assert len(changes) == (1 if end == "canary" else 0)
            assert bool(endings.late_on("gpu0")) is (end == "canary of another daemon")
        finally:
            endings.close()

    with idle() as (client, its), idle() as (server, of_server):
        gone = {"client gone": client, "server gone": server}
        asyncio.run(scenario(its, of_server))
