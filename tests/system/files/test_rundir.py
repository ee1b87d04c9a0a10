"""The directories that mpsd writes to, its lock and its socket: each has its final mode, and belongs to mpsd alone."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mpsd.core.errors import AlreadyRunningError, ConfigurationError
from mpsd.core.settings import Settings
from mpsd.system.files import rundir
from mpsd.system.files.rundir import RunDir
from mpsd.system.sockets import listeners
from tests.harness import wait_until

needs_root = pytest.mark.root("give a file away")


@pytest.fixture
def settings(short_tmp: Path) -> Settings:
    """Return settings with directories of this test."""
    return Settings().under(short_tmp / "root")


@pytest.fixture
def run_dir(settings: Settings) -> Iterator[RunDir]:
    """Claim the directories."""
    claimed = RunDir.claim(settings)
    yield claimed
    claimed.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestClaim:
    def test_directories(self, settings: Settings, run_dir: RunDir) -> None:
        """Each directory exists; every uid may traverse it and mpsd may write, whatever the umask."""
        assert run_dir.daemons == settings.paths.runtime_dir / "mps"
        for path in (settings.paths.runtime_dir, settings.paths.state_dir, settings.paths.log_dir):
            assert mode(path) == 0o755
        assert mode(settings.paths.runtime_dir / "mpsd.lock") == 0o600

    def test_umask(self, settings: Settings) -> None:
        """The umask with which mpsd starts neither closes nor opens a directory."""
        before = os.umask(0o077)
        try:
            run_dir = RunDir.claim(settings)
            paths = run_dir.daemon("gpu0")
            paths.create()
        finally:
            os.umask(before)
        run_dir.close()
        assert mode(settings.paths.runtime_dir) == mode(paths.log_directory) == 0o755
        assert mode(paths.pipe_directory) == 0o700

    def test_second_claim(self, settings: Settings) -> None:
        """A second claim is refused while the first holds, with how to find its holder; then it succeeds."""
        first = RunDir.claim(settings)
        with pytest.raises(AlreadyRunningError) as refused:
            RunDir.claim(settings)
        assert str(settings.paths.runtime_dir) in refused.value.detail
        assert f"mpsctl --socket {settings.socket} status" in refused.value.hint
        lock = os.open(settings.paths.runtime_dir / "mpsd.lock", os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(lock)
        first.close()
        RunDir.claim(settings).close()

    def test_between_fork_and_exec(self, settings: Settings) -> None:
        """A child that a killed mpsd has just forked holds the lock for a moment, and is no second mpsd."""
        first = RunDir.claim(settings)
        lock = os.dup(first._lock)  # like the child before its exec
        first.close()
        second = threading.Timer(0.05, os.close, [lock])
        second.start()
        RunDir.claim(settings).close()
        second.join()

    def test_lock_is_not_inherited(self, run_dir: RunDir) -> None:
        """No child of mpsd keeps the lock after mpsd has released it."""
        assert not os.get_inheritable(run_dir._lock)

    def test_lock_that_is_a_link(self, settings: Settings, short_tmp: Path) -> None:
        """A lock that was replaced by a symbolic link is not followed."""
        settings.paths.runtime_dir.mkdir(parents=True)
        (settings.paths.runtime_dir / "mpsd.lock").symlink_to(short_tmp / "elsewhere")
        with pytest.raises(ConfigurationError, match=r"mpsd\.lock is a symbolic link"):
            RunDir.claim(settings)
        assert not (short_tmp / "elsewhere").exists()


class TestDirectories:
    def test_link(self, settings: Settings, short_tmp: Path) -> None:
        """A symbolic link in place of a directory is refused."""
        settings.paths.runtime_dir.parent.mkdir()
        settings.paths.runtime_dir.symlink_to(short_tmp)
        with pytest.raises(ConfigurationError, match="symbolic link"):
            RunDir.claim(settings)

    def test_file(self, settings: Settings) -> None:
        """A file in place of a directory is refused."""
        settings.paths.runtime_dir.parent.mkdir()
        settings.paths.runtime_dir.write_bytes(b"")
        with pytest.raises(ConfigurationError, match="not private to mpsd"):
            RunDir.claim(settings)

    def test_writable_for_everybody(self, settings: Settings) -> None:
        """A directory that all users may write to, even a sticky one, is refused.

        A stranger could put a socket there.
        """
        settings.paths.runtime_dir.mkdir(parents=True)
        for each in (0o777, 0o1777, 0o757):
            settings.paths.runtime_dir.chmod(each)
            with pytest.raises(ConfigurationError, match="writable for all users"):
                RunDir.claim(settings)
        settings.paths.runtime_dir.chmod(0o775)
        RunDir.claim(settings).close()  # the group is mpsd's own

    @needs_root
    def test_of_another_user(self, settings: Settings) -> None:
        """A directory that belongs to another user is refused."""
        settings.paths.runtime_dir.mkdir(parents=True)
        os.chown(settings.paths.runtime_dir, 65534, 65534)
        with pytest.raises(ConfigurationError, match="belongs to another user"):
            RunDir.claim(settings)

    def test_what_an_operator_chose(self, settings: Settings) -> None:
        """An existing directory of mpsd's user keeps the mode that its operator gave it."""
        settings.paths.runtime_dir.mkdir(parents=True)
        settings.paths.runtime_dir.chmod(0o711)
        RunDir.claim(settings).close()
        assert mode(settings.paths.runtime_dir) == 0o711

    def test_cannot_be_made(self, settings: Settings, short_tmp: Path) -> None:
        """A directory that cannot be made is refused with the reason and an alternative."""
        (short_tmp / "file").write_bytes(b"")
        with pytest.raises(ConfigurationError) as refused:
            RunDir.claim(settings.under(short_tmp / "file"))
        assert f"cannot create {short_tmp / 'file' / 'run'}: File exists" in refused.value.detail
        assert "--root" in refused.value.hint


class TestCheck:
    def at(self, length: int, name: str) -> Settings:
        """Return settings whose longest path with this name has so many bytes."""
        start = "/tmp/"
        return Settings().under(Path(start + "x" * (length - len(start) - len(f"/run/{name}"))))

    def test_control_socket(self) -> None:
        """A control daemon's socket may have 106 bytes, and not one more, with the longest name of a daemon."""
        for names, longest in (
            (["gpu0"], "mps/gpu0/control_privileged"),
            (["gpu0", "gpu10"], "mps/gpu10/control_privileged"),
        ):
            rundir.check(self.at(106, longest), names, private=True)
            with pytest.raises(ConfigurationError, match=r"has 107 bytes, and the maximum is 106") as refused:
                rundir.check(self.at(107, longest), names, private=True)
            assert refused.value.limit == "paths.runtime_dir"

    def test_bytes_are_counted(self) -> None:
        """Bytes count, not characters."""
        settings = Settings().under(Path("/tmp/" + "ü" * 40))
        with pytest.raises(ConfigurationError, match="bytes"):
            rundir.check(settings, ["gpu0"], private=True)

    def test_own_socket(self) -> None:
        """mpsd's own socket may have 107 bytes."""
        for length in (107, 108):
            socket_path = Path("/tmp/" + "s" * (length - 5))
            settings = replace(Settings(), api=replace(Settings().api, socket=socket_path))
            if length == 107:
                rundir.check(settings, ["gpu0"], private=True)
            else:
                with pytest.raises(ConfigurationError, match="the maximum is 107"):
                    rundir.check(settings, ["gpu0"], private=True)

    def test_nothing_is_made(self, settings: Settings) -> None:
        """A check creates nothing."""
        rundir.check(settings, ["gpu0"], private=True)
        assert not settings.paths.runtime_dir.parent.exists()

    def test_closed_to_others(self, short_tmp: Path) -> None:
        """The first directory of a path that another uid cannot traverse is found.

        Missing directories close nothing.
        """
        below = short_tmp / "a" / "b"
        below.mkdir(parents=True)
        for path in (short_tmp, below.parent, below):
            path.chmod(0o711)
        assert rundir.closed_to_others(below) is None
        assert rundir.closed_to_others(below / "not" / "there") is None
        below.chmod(0o750)
        assert rundir.closed_to_others(below / "not") == below
        short_tmp.chmod(0o700)
        assert rundir.closed_to_others(below) == short_tmp


class TestSocket:
    def test_published(self, short_tmp: Path) -> None:
        """The socket listens under its name with its mode, and no temporary file is left."""
        path = short_tmp / "mpsd.sock"
        with listeners.publish(path, 0o640, None) as listener:
            assert mode(path) == 0o640
            assert [each.name for each in short_tmp.iterdir()] == ["mpsd.sock"]
            assert not listener.get_inheritable()
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(os.fspath(path))
                accepted, _ = listener.accept()
                accepted.close()
        listeners.unpublish(path)
        listeners.unpublish(path)
        assert list(short_tmp.iterdir()) == []

    def test_it_is_never_seen_with_another_mode(self, short_tmp: Path) -> None:
        """At any moment the socket is missing, or visible with its final mode."""
        path, seen, over = short_tmp / "mpsd.sock", set[int](), threading.Event()

        def look() -> None:
            while not over.is_set():
                with contextlib.suppress(FileNotFoundError):
                    seen.add(mode(path))

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            for _ in range(300):
                listeners.publish(path, 0o604, None).close()
                listeners.unpublish(path)
            listeners.publish(path, 0o604, None).close()
            wait_until(lambda: seen, what="the one who looks to have seen it")
        finally:
            over.set()
            watcher.join()
        assert seen == {0o604}

    @pytest.mark.parametrize("what", ["socket", "file", "link"])
    def test_what_lay_there(self, short_tmp: Path, what: str) -> None:
        """An old file in its place is replaced, and a link is not followed."""
        path, victim = short_tmp / "mpsd.sock", short_tmp / "victim"
        victim.write_bytes(b"precious")
        match what:
            case "socket":
                with socket.socket(socket.AF_UNIX) as stale:
                    stale.bind(os.fspath(path))
            case "file":
                path.write_bytes(b"")
            case _:
                path.symlink_to(victim)
        listeners.publish(path, 0o600, None).close()
        assert path.is_socket()
        assert not path.is_symlink()
        assert victim.read_bytes() == b"precious"

    def test_no_group(self, short_tmp: Path) -> None:
        """Without a group, as with an unknown one, the socket has mpsd's own, and gives no other user access."""
        path = short_tmp / "mpsd.sock"
        listeners.publish(path, 0o660, None).close()
        assert path.stat().st_gid == os.getegid()

    def test_directory_in_its_place(self, short_tmp: Path) -> None:
        """No file is left when the socket cannot take its place either."""
        (short_tmp / "mpsd.sock").mkdir()
        with pytest.raises(ConfigurationError, match=os.strerror(errno.EISDIR)):
            listeners.publish(short_tmp / "mpsd.sock", 0o660, None)
        assert [each.name for each in short_tmp.iterdir()] == ["mpsd.sock"]
