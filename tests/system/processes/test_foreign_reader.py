"""What belongs to others is read beside the caller, who gets an answer in time, or the reason why there is none."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

from mpsd.core.model import Known, Unknown
from mpsd.system.processes import foreign_files
from mpsd.system.processes.foreign_reader import ForeignReader, owner_of
from tests.harness import eventually, wait_until

T = TypeVar("T")

ANN, SUBORDINATE = 61001, 200000


def with_reader(story: Callable[[ForeignReader], Awaitable[T]]) -> T:
    async def tell() -> T:
        async with ForeignReader() as reader:
            return await story(reader)

    return asyncio.run(tell())


def test_late(short_tmp: Path) -> None:
    """Nobody else waits for a read that does not end. It is unknown then, and the next read of that owner works."""
    fifo = short_tmp / "program"
    os.mkfifo(fifo)  # to open it for reading waits for a writer

    async def story(reader: ForeignReader) -> None:
        hangs = asyncio.create_task(reader.ask("a", foreign_files.runs, os.getpid(), fifo))
        queued = asyncio.create_task(reader.ask("a", foreign_files.started_with, [], "A", ""))
        for _ in range(3):
            assert await reader.ask("b", foreign_files.started_with, [], "A", "") == Known([])
        assert not hangs.done()
        assert isinstance(await hangs, Unknown)
        assert isinstance(await queued, Known | Unknown)
        assert await reader.ask("a", foreign_files.started_with, [], "A", "") == Known([])

    with_reader(story)


def test_its_program_dies() -> None:
    """A question that is open when the program dies is asked again, once; the error of a read is the caller's."""

    async def story(reader: ForeignReader) -> None:
        assert await reader.ask("a", foreign_files.started_with, [], "A", "") == Known([])
        link = reader._link
        assert link is not None
        link._process.signal(signal.SIGKILL)
        assert await reader.ask("a", foreign_files.started_with, [], "A", "") == Known([])
        with pytest.raises(FileNotFoundError):
            await reader.ask("a", foreign_files.arguments, 2**22 + 1)

    with_reader(story)


def test_its_program_is_stopped() -> None:
    """A program that was stopped is replaced: one answer is unknown, and the next one comes."""

    async def story(reader: ForeignReader) -> None:
        assert await reader.ask("a", foreign_files.started_with, [], "A", "") == Known([])
        assert reader._link is not None
        reader._link._process.signal(signal.SIGSTOP)
        assert isinstance(await reader.ask("a", foreign_files.started_with, [], "A", ""), Unknown)
        assert await reader.ask("a", foreign_files.started_with, [], "A", "") == Known([])

    with_reader(story)


def test_part_of_an_answer(short_tmp: Path) -> None:
    """The part of an answer that a read had written when it was killed is unknown, and the next answer comes."""
    fifo = short_tmp / "program"
    os.mkfifo(fifo)
    argv = (sys.executable, "-c", "input()", *("x" * 100_000 for _ in range(3)))  # more than a pipe holds

    async def story(reader: ForeignReader) -> None:
        asked = asyncio.create_task(reader.ask("a", foreign_files.details, process.pid, fifo))
        link = await eventually(lambda: reader._link, what="its program")
        program = link._process
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
        child = int(await eventually(children.read_text, what="its child"))
        waits_in = Path(f"/proc/{child}/wchan").read_text
        await eventually(lambda: waits_in() == "wait_for_partner", what="the read to wait for the FIFO")
        program.signal(signal.SIGSTOP)
        stat = Path(f"/proc/{program.pid}/stat").read_text
        await eventually(lambda: ") T " in stat(), what="the program to stop")
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        await eventually(lambda: "pipe_write" in waits_in(), what="a part of the answer to be written")
        os.kill(child, signal.SIGKILL)
        program.signal(signal.SIGCONT)
        assert isinstance(await asked, Unknown)
        assert await reader.ask("a", foreign_files.started_with, [], "A", "") == Known([])

    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        with_reader(story)
        process.communicate(b"\n")


def test_its_program_is_gone(short_tmp: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A read that ends after the end of the program, as mpsd was killed, writes nothing into mpsd's log."""
    fifo = short_tmp / "program"
    os.mkfifo(fifo)

    async def story(reader: ForeignReader) -> int:
        hangs = asyncio.create_task(reader.ask("a", foreign_files.runs, os.getpid(), fifo))
        link = await asyncio.to_thread(wait_until, lambda: reader._link, what="its program")
        program = link._process
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
        child = await asyncio.to_thread(wait_until, children.read_text, what="its child")
        waits = os.pidfd_open(int(child))
        wchan = Path(f"/proc/{int(child)}/wchan")
        await asyncio.to_thread(wait_until, lambda: wchan.read_text() == "wait_for_partner", what="the read to hang")
        hangs.cancel()
        program.signal(signal.SIGKILL)
        return waits

    ended = with_reader(story)
    os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    assert select.select([ended], [], [], 20)[0]
    os.close(ended)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("length", "is_kept"), [(1000, True), (1100, False)])
def test_size(length: int, is_kept: bool) -> None:  # noqa: FBT001 - a case
    """More than a kibibyte of the variables that are asked for is unknown, whatever else is there."""
    environment = {"A": "x" * length, "B": "y" * 100_000}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=environment) as process:
        wait_until(lambda: foreign_files.arguments(process.pid) == ("cat",), what="it to run")
        found = foreign_files.environment(process.pid, ["A"])
        assert found == {"A": environment["A"]} if is_kept else isinstance(found, str)
        process.communicate()


MAPPED: Final = f"""
import os, sys
os.unshare = __import__("ctypes").CDLL(None).unshare
os.setresgid({ANN}, {ANN}, {ANN}); os.setresuid({ANN}, {ANN}, {ANN})
assert os.unshare(0x10000000) == 0  # CLONE_NEWUSER
print(flush=True)
sys.stdin.readline()
os.setresuid(1, 1, 1)
print(flush=True)
sys.stdin.readline()
"""
"""A process that makes a user namespace, and becomes another user there when somebody has mapped one."""


@pytest.mark.root("be another user, and map users")
class TestOwners:
    def test_subordinate_uid(self) -> None:
        """A process in a user namespace belongs to the user who made it, whatever its uid."""
        popen: Any = subprocess.Popen([sys.executable, "-c", MAPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with popen as process:
            process.stdout.readline()
            Path(f"/proc/{process.pid}/uid_map").write_text(f"0 {ANN} 1\n1 {SUBORDINATE} 10\n")
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()
            assert Path(f"/proc/{process.pid}").stat().st_uid in {0, SUBORDINATE}
            assert owner_of(process.pid) == f"uid {ANN}"
            process.communicate()

    def test_containers_of_root(self) -> None:
        """Root's processes in a pid namespace of their own are an owner of their own; a nested one changes nothing."""
        nested = ["unshare", "--pid", "--fork", "--kill-child", "unshare", "--pid", "--fork", "--kill-child", "cat"]
        assert owner_of(os.getpid()) == "uid 0"
        with subprocess.Popen(nested, stdin=subprocess.PIPE) as process:

            def below(pid: int) -> list[int]:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                return [int(each) for each in children]

            def all_below() -> list[int] | None:
                found, ahead = list[int](), [process.pid]
                while ahead:
                    children = below(ahead.pop())
                    found += children
                    ahead += children
                return found if len(found) == 2 else None

            outer, inner = wait_until(all_below, what="both to run")
            assert owner_of(outer) == owner_of(inner)
            assert owner_of(outer).startswith("uid 0 in pid namespace ")
            process.kill()
