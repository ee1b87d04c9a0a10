"""Notifications about the files of a directory: each change is reported, a storm once, and every fault is survived."""

import asyncio
import contextlib
import os
import resource
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest

from mpsd.system.files.inotify import DirectoryWatch
from tests.harness import eventually

_QUEUE: Final = Path("/proc/sys/fs/inotify/max_queued_events")


class Watched:
    """A directory, and how often a change in it was reported."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "control.log"
        self.told = 0
        self.watch = DirectoryWatch(directory, self._count)

    def _count(self) -> None:
        self.told += 1

    def say(self, text: str = "x", name: str = "control.log") -> None:
        """Append to a file there."""
        with (self.file.parent / name).open("a") as file:
            file.write(text)

    async def hears(self, what: str) -> None:
        """Wait for a notification, and until no more come: files are opened, written and closed one by one."""
        await eventually(lambda: self.told, what=f"{what} to be told")
        self.told = 0


def watching(directory: Path, test: Callable[[Watched], Awaitable[None]]) -> None:

    async def run() -> None:
        watched = Watched(directory)
        watched.watch.renew()
        try:
            await test(watched)
        finally:
            watched.watch.close()

    asyncio.run(run())


def test_what_is_told(tmp_path: Path) -> None:
    """Writing, truncating, creating or moving any file there is reported."""

    async def test(watched: Watched) -> None:
        watched.say()
        await watched.hears("a new file")
        watched.say()
        await watched.hears("what was written")
        os.truncate(watched.file, 0)
        await watched.hears("that it was truncated")
        watched.file.unlink()
        watched.say(name="elsewhere")
        await watched.hears("another file")
        (tmp_path / "elsewhere").rename(watched.file)
        await watched.hears("that one took its place")

    watching(tmp_path, test)


def test_a_storm_is_told_once(tmp_path: Path) -> None:
    """Several writes before the watcher runs are reported once."""

    async def test(watched: Watched) -> None:
        for number in range(1000):
            watched.say(name=f"{number % 2}")
        await eventually(lambda: watched.told, what="the storm to be told")
        assert watched.told == 1
        watched.told = 0
        watched.say()
        await watched.hears("what came after it")

    watching(tmp_path, test)


def test_more_than_the_kernel_keeps(tmp_path: Path) -> None:
    """A notification is sent also when the kernel's queue has overflowed, and again for later changes."""
    files = [(tmp_path / name).open("wb", buffering=0) for name in "ab"]

    async def test(watched: Watched) -> None:
        for _ in range(int(_QUEUE.read_text()) // 2 + 10):
            for file in files:  # in rotation, since the kernel merges two equal notifications in a row
                file.write(b"x")
        await watched.hears("what is left of it")
        watched.say()
        await watched.hears("what came after it")

    try:
        watching(tmp_path, test)
    finally:
        for file in files:
            file.close()


@pytest.mark.parametrize("held", [False, True])
def test_directory_that_comes_back(tmp_path: Path, held: bool) -> None:  # noqa: FBT001 - a case of two
    """A directory that was removed and made again is watched again, also while a file of the old one is open.

    Changes in the old directory are no longer reported.
    """
    directory = tmp_path / "log"
    directory.mkdir()

    async def test(watched: Watched) -> None:
        watched.say()
        await watched.hears("the file")
        with watched.file.open("a") if held else contextlib.nullcontext() as file:
            watched.file.unlink()
            directory.rmdir()
            with pytest.raises(FileNotFoundError):
                watched.watch.renew()
            directory.mkdir()
            watched.watch.renew()
            watched.say()
            await watched.hears("the file in the new directory")
            if file is not None:
                file.write("x")
                file.flush()
        directory.rename(tmp_path / "elsewhere")
        directory.mkdir()
        watched.watch.renew()
        (tmp_path / "elsewhere" / "control.log").write_text("y")
        watched.say()
        await watched.hears("the file in the third directory")

    watching(directory, test)


def test_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    """A watch on a missing directory fails, leaves nothing behind, and can start later; a file is no directory."""
    directory = tmp_path / "log"

    async def test() -> None:
        watched = Watched(directory)
        try:
            for _ in range(3):
                with pytest.raises(FileNotFoundError):
                    watched.watch.renew()
                assert watched.watch.has_news()
            directory.mkdir()
            watched.watch.renew()
            watched.say()
            await watched.hears("the first file")
        finally:
            watched.watch.close()
        file = DirectoryWatch(watched.file, lambda: None)
        with pytest.raises(NotADirectoryError):
            file.renew()
        file.close()

    asyncio.run(test())


def test_no_descriptor_left(tmp_path: Path) -> None:
    """Without a free descriptor the watch reports an error, and can start once there is one."""

    async def test() -> None:
        watched = Watched(tmp_path)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(OSError, match=r"no file descriptor is left, or fs\.inotify\.max_user_instances"):
                watched.watch.renew()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        watched.watch.renew()
        try:
            watched.say()
            await watched.hears("what was written")
        finally:
            watched.watch.close()

    asyncio.run(test())


def test_after_the_end(tmp_path: Path) -> None:
    """Nothing is reported after the watch is closed, not even earlier changes; closing it twice is safe."""

    async def test(watched: Watched) -> None:
        watched.say()
        other = Watched(tmp_path)
        other.watch.renew()
        watched.say()
        await asyncio.sleep(0)
        watched.watch.close()
        watched.watch.close()
        await other.hears("what was written, to somebody else")
        assert watched.told == 0
        other.watch.close()

    watching(tmp_path, test)


def test_news(tmp_path: Path) -> None:
    """A write is known at once, before the callback for it; without a watch, anything may have been written."""

    async def test(watched: Watched) -> None:
        assert not watched.watch.has_news()
        watched.say()
        assert watched.watch.has_news()
        await watched.hears("what was written")
        assert not watched.watch.has_news()
        watched.watch.close()
        assert watched.watch.has_news()

    watching(tmp_path, test)
