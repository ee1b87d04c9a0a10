"""How a process ended that is no child of mpsd, and what is left of one that could not be started or watched."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.model import ProcessIdentity
from mpsd.system.processes import proc, process
from tests.descriptors import without_descriptors
from tests.harness import look_at, wait_until

ENDS: Final = {
    "kill -SEGV $$": (-signal.SIGSEGV, "SIGSEGV", "killed by SIGSEGV"),
    "kill -ABRT $$": (-signal.SIGABRT, "SIGABRT", "killed by SIGABRT"),
    "kill -40 $$": (-40, "signal 40", "killed by signal 40"),
    "exit 3": (3, None, "exited with status 3"),
}


@pytest.mark.parametrize("script", ENDS)
def test_zombie(script: str) -> None:
    """The status of a zombie is known, and its signal too."""
    returncode, name, words = ENDS[script]
    with subprocess.Popen(["sh", "-c", f"read go; {script}"], stdin=subprocess.PIPE, cwd="/") as child:
        ticks = proc.start_ticks(child.pid)
        assert ticks is not None
        watched = process.adopt(ProcessIdentity(child.pid, ticks))
        assert watched is not None
        assert child.stdin is not None
        child.stdin.close()
        assert asyncio.run(watched.wait()) == returncode
        assert (process.signal_of(returncode), process.describe_end(returncode)) == (name, words)
        watched.close()


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def test_few_descriptors() -> None:
    """A program that cannot be started, or watched, for lack of descriptors leaves none open, and no process."""

    async def outputs() -> list[str]:
        found = []
        for few in range(12):
            with without_descriptors(but=few):
                try:
                    found.append((await process.run(["echo", "told"], env={}, stdin=b"", seconds=30)).output)
                except OSError as error:
                    found.append(os.strerror(error.errno or 0))
        return found

    before = children()
    found = asyncio.run(outputs())
    assert {*found} == {"Too many open files", "told\n"}
    assert found == sorted(found)
    assert children() == before


def test_pidfd_without_descriptors() -> None:
    """A pidfd whose process cannot be read for lack of descriptors is closed."""
    pidfd = os.pidfd_open(os.getpid())
    with without_descriptors(), pytest.raises(OSError, match="Too many open files"):
        process.from_pidfd(pidfd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pidfd)


@pytest.mark.parametrize("script", ENDS)
def test_reaped(script: str) -> None:
    """After the process was reaped, the status is known from kernel 6.15 on, and unknown before."""
    child = subprocess.Popen(["sh", "-c", f"read go; {script}"], stdin=subprocess.PIPE, cwd="/")
    pidfd = os.pidfd_open(child.pid)
    try:
        assert process.returncode_of(pidfd) is None
        assert child.stdin is not None
        child.stdin.close()
        wait_until(lambda: (found := look_at(child.pid)) is None or found.zombie, what="its end")
        child.wait()
        assert process.returncode_of(pidfd) == (ENDS[script][0] if _kernel() >= (6, 15) else None)
    finally:
        os.close(pidfd)


def test_unknown() -> None:
    """An unknown status is described as unknown, and is no signal."""
    assert process.signal_of(None) is None
    assert "not known" in process.describe_end(None)


def _kernel() -> tuple[int, int]:
    major, minor, *_ = os.uname().release.split(".")
    return int(major), int(minor)
