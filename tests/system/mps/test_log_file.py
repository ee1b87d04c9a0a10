"""The control daemon's log: followed line by line, and shortened while it is written, without losing a line."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.system.mps.log_file import LogFollower, Position, open_for_daemon
from tests.harness import remove_tree

_BLOCK: Final = 4096


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a directory on the default file system, and one in memory, which punches holes and cannot collapse."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK | os.X_OK):
        pytest.skip("no file system in memory on this machine")
    path = Path(tempfile.mkdtemp(prefix="mt-", dir="/dev/shm"))
    yield path
    remove_tree(path)


class Writer:
    """Writes like a control daemon: through a descriptor that stays open, each line at the current end."""

    def __init__(self, path: Path) -> None:
        self.descriptor = open_for_daemon(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def say(self, *lines: str) -> None:
        for line in lines:
            os.write(self.descriptor, f"{line}\n".encode())


def test_what_is_added_is_read_once(tmp_path: Path) -> None:
    """A follower reads lines that were added since its last reading, and none from before its start."""
    path = tmp_path / "control.log"
    with Writer(path) as writer:
        writer.say("before")
        follower = LogFollower(path)
        assert follower.read() == []
        writer.say("one", "two")
        assert follower.read() == ["one", "two"]
        assert follower.read() == []
        writer.say("three")
        assert follower.read() == ["three"]


def test_file_that_comes_later(tmp_path: Path) -> None:
    """A missing log has nothing to read, and is read from its beginning when it appears."""
    path = tmp_path / "control.log"
    follower = LogFollower(path)
    assert follower.read() == []
    assert follower.keep_within(0) == 0
    with Writer(path) as writer:
        writer.say("first")
        assert follower.read() == ["first"]


def test_half_a_line_waits(tmp_path: Path) -> None:
    """A line is read when it is complete, bytes that are no text included."""
    path = tmp_path / "control.log"
    with Writer(path) as writer:
        follower = LogFollower(path)
        os.write(writer.descriptor, b"half")
        assert follower.read() == []
        os.write(writer.descriptor, b" and \xff half\nnext")
        assert follower.read() == ["half and \ufffd half"]
        os.write(writer.descriptor, b"\n")
        assert follower.read() == ["next"]


def test_line_without_an_end(tmp_path: Path) -> None:
    """A line longer than any real one does not stop the follower."""
    path = tmp_path / "control.log"
    with Writer(path) as writer:
        follower = LogFollower(path)
        os.write(writer.descriptor, b"x" * (256 * 1024 + 10))
        assert [len(line) for line in follower.read()] == [256 * 1024]
        writer.say("", "next")
        assert follower.read() == ["x" * 10, "next"]


def test_more_than_one_reading_takes(tmp_path: Path) -> None:
    """When more was added than one reading takes, the follower knows, so that the next reading does not wait."""
    path = tmp_path / "control.log"
    with Writer(path) as writer:
        follower = LogFollower(path)
        os.write(writer.descriptor, b"0123456\n" * (300 * 1024))
        seen = 0
        while follower.behind:
            seen += len(follower.read())
        assert seen >= 256 * 1024
        assert seen + len(follower.read()) == 300 * 1024
        assert not follower.behind


def test_what_looks_like_an_end_of_a_line(tmp_path: Path) -> None:
    """A line ends only where the daemon ends it: no text in a line can forge another line."""
    path = tmp_path / "control.log"
    with Writer(path) as writer:
        follower = LogFollower(path)
        line = "x\r\x0b\x0c\x1c\x85\u2028[2026-11-21 02:59:14.618 Control 1] NEW UI"
        writer.say(line)
        assert follower.read() == [line]


@pytest.mark.parametrize("grown", [0, 1, 5000])
def test_truncated_and_written_again(directory: Path, grown: int) -> None:
    """A truncated log is read from its beginning also when it has outgrown its former size before the next reading."""
    path = directory / "control.log"
    with Writer(path) as writer:
        follower = LogFollower(path)
        writer.say("one", "two", *["x" * 100] * 20)
        assert len(follower.read()) == 22
        size = path.stat().st_size
        os.truncate(path, 0)
        # As many bytes as were read, and more; exactly as many in one more line cannot be distinguished from no change.
        lines = [f"{number:099d}" for number in range(-(-size // 100) + grown)]
        writer.say(*lines)
        seen = follower.read()
        while follower.behind:
            seen += follower.read()
        assert [*seen, *follower.read()] == lines


def test_replaced(directory: Path) -> None:
    """A log that replaced another is read from its beginning, also when it has the same inode."""
    path = directory / "control.log"
    with Writer(path) as writer:
        writer.say("of old")
        follower = LogFollower(path)
    path.unlink()
    assert follower.read() == []
    with Writer(path) as writer:
        writer.say("one", "two", "three")
        assert follower.read() == ["one", "two", "three"]
    path.rename(directory / "control.log.1")
    with Writer(path) as writer:
        writer.say("four")
        assert follower.read() == ["four"]
        assert follower.read() == []


def test_goes_on(directory: Path) -> None:
    """Another follower continues at the first one's position: it reads the lines written meanwhile, once."""
    path = directory / "control.log"
    with Writer(path) as writer:
        first = LogFollower(path)
        writer.say("one", "two")
        assert first.read() == ["one", "two"]
        os.write(writer.descriptor, b"half")
        assert first.read() == []
        writer.say(" and half", "three")
        second = LogFollower(path, first.position)
        assert second.read() == ["half and half", "three"]
        assert LogFollower(path, second.position).read() == []


def test_goes_on_in_a_log_that_was_shortened(directory: Path) -> None:
    """A follower finds its place in a shortened log, also when the first one died before it recorded that."""
    path = directory / "control.log"
    with Writer(path) as writer:
        first = LogFollower(path)
        writer.say(*[f"{number} {'x' * 100}" for number in range(2000)])
        assert len(first.read()) == 2000
        noted = first.position
        assert first.keep_within(8 * _BLOCK) > 0
        writer.say("next", "and next")
        assert LogFollower(path, first.position).read() == ["next", "and next"]
        assert LogFollower(path, noted).read() == ["next", "and next"]
        third = LogFollower(path, noted)
        third.keep_within(_BLOCK)  # before it has read anything
        assert third.read() == ["next", "and next"]


def test_goes_on_in_another_log(directory: Path) -> None:
    """A log that is not the one that was read is read from its beginning, however similar it is."""
    path = directory / "control.log"
    with Writer(path) as writer:
        first = LogFollower(path)
        writer.say(*["before"] * 500)
        assert len(first.read()) == 500
    path.unlink()
    with Writer(path) as writer:
        writer.say(*["beyond"] * 600)
        assert LogFollower(path, first.position).read() == ["beyond"] * 600


def test_log_that_nobody_appends_to(tmp_path: Path) -> None:
    """A log that is perhaps not opened for appending gets a hole, and keeps its length."""
    path = tmp_path / "server.log"
    with path.open("wb", buffering=0) as log:
        follower = LogFollower(path, collapses=False)
        for number in range(20):
            log.write(f"{number} {'x' * 4095}\n".encode())
            assert [line.split()[0] for line in follower.read()] == [str(number)]
            follower.keep_within(4 * _BLOCK)
        assert taken(path) <= 5 * _BLOCK
        assert path.stat().st_size == log.tell()


def test_log_is_appended_to(tmp_path: Path) -> None:
    """A log is opened for appending, not inherited, and closed to other users; a link is not followed."""
    path = tmp_path / "control.log"
    path.write_bytes(b"of the one before\n")
    with Writer(path) as writer:
        assert not os.get_inheritable(writer.descriptor)
        writer.say("mine")
    assert path.read_bytes() == b"of the one before\nmine\n"
    fresh = tmp_path / "fresh.log"
    with Writer(fresh):
        assert fresh.stat().st_mode & 0o007 == 0
    link = tmp_path / "link.log"
    link.symlink_to(path)
    with pytest.raises(OSError, match="Too many levels"):
        open_for_daemon(link)


def taken(path: Path) -> int:
    """Return the bytes of disk that a file takes."""
    return path.stat().st_blocks * 512


def test_kept_within(directory: Path) -> None:
    """A log stays within its size by dropping older lines, and every line is read once and in order."""
    path = directory / "control.log"
    limit, seen, said = 16 * _BLOCK, list[str](), list[str]()
    with Writer(path) as writer:
        follower = LogFollower(path)
        for _ in range(40):
            batch = [f"line {len(said) + number} {'x' * 80}" for number in range(100)]
            said += batch
            writer.say(*batch)
            seen += follower.read()
            follower.keep_within(limit)
            assert taken(path) <= limit + _BLOCK
        assert seen == said
        # The newest half of it is left, as it was written.
        assert path.read_bytes().endswith(f"{said[-1]}\n".encode())
        left = [line for line in path.read_text().lstrip("\0").splitlines()[1:] if line]
        assert left == [line for line in seen if line in set(left)]
        assert len("\n".join(left)) > limit // 4


def test_log_of_one_block(tmp_path: Path) -> None:
    """A file ends in an incomplete block, which cannot be freed; that is no error."""
    path = tmp_path / "control.log"
    with Writer(path) as writer:
        follower = LogFollower(path)
        writer.say("x" * 100)
        follower.read()
        assert follower.keep_within(1) == 0


def test_link_in_its_place(tmp_path: Path) -> None:
    """A link in place of the log is not shortened: its target belongs to another program."""
    path, victim = tmp_path / "control.log", tmp_path / "victim"
    with Writer(path) as writer:
        follower = LogFollower(path)
        writer.say(*["x" * 100] * 1000)
        follower.read()
        path.rename(victim)
        path.symlink_to(victim)
        size = taken(victim)
        with pytest.raises(OSError, match="Too many levels"):
            follower.keep_within(_BLOCK)
        assert taken(victim) == size


_STEPS: Final = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(1, 100)),
        st.tuples(st.just("read"), st.just(0)),
        st.tuples(st.just("keep"), st.integers(1, 6)),
        st.tuples(st.just("end"), st.just(0)),
    ),
    min_size=10,
    max_size=60,
)


@given(_STEPS)
def test_any_order(steps: list[tuple[str, int]]) -> None:
    """In any order of writing, reading, shortening and replacing, every line is read once, in order, and whole.

    The recorded position is the end of a reading, not what the following shortening made of it: the worst moment to
    die.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "control.log"
        with Writer(path) as writer:
            follower, said, seen = LogFollower(path), list[str](), list[str]()
            noted = follower.position
            for step, count in steps:
                match step:
                    case "say":
                        lines = [f"{len(said) + number} {'x' * 300}" for number in range(count)]
                        said += lines
                        writer.say(*lines)
                    case "read":
                        seen += follower.read()
                        noted = follower.position
                    case "keep":
                        follower.keep_within(count * _BLOCK)
                    case _:
                        follower = LogFollower(path, noted)
            seen += follower.read()
            assert seen == said


def test_position_far_beyond_the_end(tmp_path: Path) -> None:
    """A stored position beyond any file, as damage may leave it, is ignored: the log is read from its start."""
    path = tmp_path / "log"
    path.write_text("line\n")
    for offset in (2**62, 6, -1):
        follower = LogFollower(path, Position(path.stat().st_ino, offset, b"x"))
        assert follower.read() == ["line"]
