"""Ends of processes, as mpsd stores them."""

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from msgspec import structs

from mpsd.core.enforcement.ending import EndCause, Ending, EndStep, PendingAnswer
from mpsd.core.errors import StorageError
from mpsd.core.model import ProcessIdentity, Server
from mpsd.core.mps.limits import NOTHING
from mpsd.core.reload import LiveSettings
from mpsd.core.settings import LogFormat, Settings
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.ends.steps import EndStore
from mpsd.daemon.record.log import configure
from mpsd.system import clock
from mpsd.system.mps.control_pipe import ControlPipe, ControlProgram
from mpsd.system.processes import proc, process
from tests.descriptors import without_descriptors
from tests.harness import eventually
from tests.tools import lacking


def pidfds() -> int:
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


async def ended(endings: Endings, target: ProcessIdentity) -> None:
    try:
        endings.end(target, EndCause("a test", "it is a test"))
        await eventually(lambda: endings.progress(target, "a test") is None, what="its end")
    finally:
        endings.close()


def test_end_without_descriptors(tmp_path: Path) -> None:
    """A process that ends while no descriptor is free has ended; its server is suspect where it cannot be read."""

    async def scenario(started: "subprocess.Popen[bytes]", target: ProcessIdentity) -> None:
        server, store, suspected = proc.identify(os.getpid()), EndStore(tmp_path), list[int]()
        assert server is not None
        cause = EndCause("a test", "it is a test")
        until, unreleased = clock.since_boot() + 600, (("gpu0", server),)
        ending = Ending(target, os.getuid(), (cause,), clock.boot_id(), clock.now(), step=EndStep.SIGKILL)
        store.store(structs.replace(ending, until=until, unreleased=unreleased))
        endings = Endings(store, LiveSettings(Settings()), configure(LogFormat.JSON))
        endings.suspected.connect(lambda _daemon, pid, _uid, _because: suspected.append(pid))
        endings.load()
        with without_descriptors():
            started.kill()
            await eventually(lambda: endings.progress(target, "a test") is None, what="its end")
        assert suspected == [server.pid]
        endings.close()

    with idle() as (started, target):
        asyncio.run(scenario(started, target))


def test_without_descriptors(tmp_path: Path) -> None:
    """An end for which mpsd has no descriptor is refused like one that cannot be stored, and begins when it has one."""

    async def scenario(target: ProcessIdentity) -> None:
        endings = Endings(EndStore(tmp_path), LiveSettings(Settings()), configure(LogFormat.JSON))
        for few in (0, 1):  # the pidfd is the first that it takes
            with (
                without_descriptors(but=few),
                pytest.raises(StorageError, match="cannot begin: Too many open files"),
            ):
                endings.end(target, EndCause("a test", "it is a test"))
        await ended(endings, target)

    with idle() as (started, target):
        asyncio.run(scenario(target))
        assert started.wait(10) == -signal.SIGTERM


def test_file_that_cannot_be_removed(tmp_path: Path) -> None:
    """An end is over, and the next one begins, also where its files cannot be removed."""

    async def scenario(target: ProcessIdentity) -> None:
        store = EndStore(tmp_path)
        endings = Endings(store, LiveSettings(Settings()), configure(LogFormat.JSON))
        store.answer_to(target).mkdir()  # a directory cannot be unlinked, also by root
        await ended(endings, target)

    with idle() as (started, target):
        asyncio.run(scenario(target))
        assert started.wait(10) == -signal.SIGTERM


@contextlib.contextmanager
def idle(first: str = "") -> Iterator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    """Start a process that executes a line and then does nothing, and yield it."""
    program = f"import signal; {first or 'pass'}; print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        ticks = proc.start_ticks(started.pid)
        assert ticks is not None
        try:
            yield started, ProcessIdentity(started.pid, ticks)
        finally:
            started.kill()


class HangingDaemon:
    """A control daemon whose front-ends get no answer, with a server for each process."""

    name = "gpu0"

    def __init__(self, directory: Path, *servers: Server) -> None:
        self.pipe = ControlPipe(ControlProgram(("sleep", "1000")), directory, directory, deadline=1.0)
        self.answers = False
        self.lacks = 0
        """The error number of what the machine lacks to query it; 0 for none."""
        self.servers = servers

    async def servers_now(self) -> tuple[Server, ...] | None:
        if self.lacks:
            raise OSError(self.lacks, os.strerror(self.lacks))
        return self.servers if self.answers else None


@pytest.mark.parametrize("obstacle", ["silence", "shortage"])
def test_obstacle_that_is_gone(tmp_path: Path, obstacle: str) -> None:
    """An end that proceeds is not said to stay for the obstacle that it met before, however long its next step takes.

    A drain that is late would take it for stuck, and end its control daemon by force.
    """

    async def scenario(client: ProcessIdentity, server: ProcessIdentity) -> None:
        daemon = HangingDaemon(tmp_path, Server(server.pid, clients=(client.pid,), limits=NOTHING))
        endings = Endings(EndStore(tmp_path), LiveSettings(Settings()), configure(LogFormat.JSON))
        endings.add(daemon)

        def stays() -> str:
            progress = endings.progress(client, "one")
            assert progress is not None
            return progress.stays

        try:
            if obstacle == "shortage":
                daemon.lacks = errno.ENFILE
            endings.end(client, EndCause("one", "it is a test"))
            because = "the machine lacks a resource" if obstacle == "shortage" else "gpu0 does not answer"
            await eventually(lambda: because in stays(), what="it to stay")
            daemon.answers, daemon.lacks = True, 0
            await eventually(lambda: daemon.pipe.waits_for, what="its server to be asked")
            assert not stays()
        finally:
            await daemon.pipe.give_up()
            endings.close()

    with idle() as (_, its), idle() as (_, of_server):
        asyncio.run(scenario(its, of_server))


def test_answer_that_nobody_can_give(tmp_path: Path) -> None:
    """An end whose control daemon is unknown waits for its answer only while the server lives, and says that."""

    async def scenario(client: ProcessIdentity, server: ProcessIdentity, end: Callable[[], None]) -> None:
        store, cause = EndStore(tmp_path), EndCause("one", "it is a test")
        pending = PendingAnswer("gpu0", server, server, "nonce", 1e9)
        stored = Ending(client, 0, (cause,), clock.boot_id(), clock.now(), step=EndStep.TERMINATE_CLIENT)
        store.store(structs.replace(stored, pending=pending))
        endings = Endings(store, LiveSettings(Settings()), configure(LogFormat.JSON))
        endings.load()
        try:
            await eventually(
                lambda: (now := endings.progress(client, "one")) and "does not know gpu0" in now.stays, what="a reason"
            )
            end()
            await eventually(lambda: endings.progress(client, "one") is None, what="its end")
        finally:
            endings.close()

    with idle() as (client, its), idle() as (server, of_server):

        def end() -> None:
            for each in (client, server):
                each.kill()
                each.wait()

        asyncio.run(scenario(its, of_server, end))


_SEIZE: Final = 0x4206
_CONT: Final = 7
_TRACEEXIT: Final = 0x40
"""Source: linux/ptrace.h."""


def test_process_that_the_kernel_does_not_release(tmp_path: Path) -> None:
    """A killed process that does not exit is said to stay, and its end is over when it has exited."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    settings = replace(Settings(), enforcement=replace(Settings().enforcement, grace=0.1))

    async def scenario(target: ProcessIdentity) -> None:
        endings = Endings(EndStore(tmp_path), LiveSettings(settings), configure(LogFormat.JSON))
        try:
            endings.end(target, EndCause("one", "it is a test"))
            because = "it got SIGKILL, and the kernel has not released it yet"
            await eventually(
                lambda: (now := endings.progress(target, "one")) and now.stays == because, what="it to stay"
            )
            assert libc.ptrace(_CONT, target.pid, None, None) == 0
            await eventually(lambda: endings.progress(target, "one") is None, what="its end")
        finally:
            endings.close()

    with idle("signal.signal(signal.SIGTERM, signal.SIG_IGN)") as (_, target):
        # A tracer holds a process at the last moment of its exit, as a device driver can do.
        if libc.ptrace(_SEIZE, target.pid, None, _TRACEEXIT) != 0:
            lacking("ptrace is not permitted here")
        try:
            asyncio.run(scenario(target))
        finally:
            libc.ptrace(_CONT, target.pid, None, None)


@pytest.mark.parametrize("end", ["client gone", "server gone", "canary", "canary of another daemon"])
def test_late_server(tmp_path: Path, end: str) -> None:
    """The next mpsd knows which server is late, until the client or the server is gone, or a canary clears it."""

    async def scenario(client: ProcessIdentity, server: ProcessIdentity) -> None:
        store, cause = EndStore(tmp_path), EndCause("one", "it is a test")
        stored = Ending(client, 0, (cause,), clock.boot_id(), clock.now(), step=EndStep.TERMINATE_CLIENT)
        store.store(structs.replace(stored, daemons=("gpu0",), late=(("gpu0", server),)))
        endings, changes = Endings(store, LiveSettings(Settings()), configure(LogFormat.JSON)), list[str]()
        endings.changed.connect(lambda: changes.append(endings.late_on("gpu0")))
        endings.load()
        try:
            assert str(client.pid) in endings.late_on("gpu0")
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
