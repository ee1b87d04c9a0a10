"""Files and directories have their final modes under any umask, and mpsd never follows a stranger's files."""

import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.errors import ConfigurationError
from mpsd.core.settings import Settings
from mpsd.system.files import acl, path_safety
from mpsd.system.files.acl import Entry, Tag
from mpsd.system.files.rundir import RunDir
from tests.daemon.caller import needs_root
from tests.daemon.conftest import Start
from tests.harness import wait_until
from tests.node import Node

pytestmark = [pytest.mark.real_daemon(535), pytest.mark.thorough]

KINDS: Final = [pytest.param(kind, marks=needs_root) for kind in ("link", "fifo", "file")] + ["hard link"]
"""Kinds of files that a stranger may plant; every user who runs the tests can make the last one."""

ANN: Final = 2601
OWNER, USER, OWNING_GROUP, GROUP, MASK, OTHERS = Tag

MODES: Final = {
    "a": "drwxr-xr-x",
    "a/b": "drwxr-xr-x",
    "a/b/state": "drwxr-xr-x",
    "a/b/state/accounts.db": "-rw-------",
    "a/b/state/accounts.db-wal": "-rw-------",
    "a/b/state/history.db": "-rw-------",
    "a/b/state/history.db-wal": "-rw-------",
    "a/b/state/last-event": "-rw-------",
    "c": "drwxr-xr-x",
    "c/log": "drwxr-xr-x",
    "c/log/gpu0": "drwxr-xr-x",
    "c/log/gpu0/control.log": "-rw-r-----",
    "run": "drwxr-xr-x",
    "run/gpu0.let-in.json": "-rw-------",
    "run/gpu0.limits.json": "-rw-------",
    "run/gpu0.process.json": "-rw-------",
    "run/gpu0.reading.json": "-rw-------",
    "run/ends": "drwx------",
    "run/leases.ballast": "-rw-------",
    "run/leases.db": "-rw-------",
    "run/leases.db-journal": "-rw-------",
    "run/mps": "drwxr-xr-x",
    "run/mps/gpu0": "drwx------",
    "run/mps/gpu0/control": "srw-------",
    "run/mps/gpu0/control_lock": "-rw-------",
    "run/mps/gpu0/control_privileged": "srwxr-xr-x",
    "run/mps/gpu0/log": "prw-------",
    "run/mpsd.lock": "-rw-------",
    "run/mpsd.sock": "srw-rw-rw-",
}
"""Every path that mpsd and driver 535's control daemon make; the last ones are in a closed directory."""

PATHS: Final = """
[paths]
runtime_dir = "{root}/run"
state_dir = "{root}/a/b/state"
log_dir = "{root}/c/log"
"""

PLANT: Final = """
import os, sys
kind, path, victim = sys.argv[2:]
os.setgroups([])
os.setresgid(*[int(sys.argv[1])] * 3)
os.setresuid(*[int(sys.argv[1])] * 3)
{"link": lambda: os.symlink(victim, path),
 "fifo": lambda: os.mkfifo(path),
 "file": lambda: os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o666)),
 "directory": lambda: os.mkdir(path)}[kind]()
"""


def plant(kind: str, path: Path, victim: Path) -> None:
    """Have a stranger put a file in place of one of mpsd's, while the stranger may write there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.parent.stat().st_mode
    path.parent.chmod(0o777)
    if kind == "hard link":
        path.hardlink_to(victim)  # the kernel allows this to strangers only where fs.protected_hardlinks is 0
    else:
        command = [sys.executable, "-I", "-c", PLANT, str(ANN), kind, str(path), str(victim)]
        subprocess.run(command, check=True, timeout=30)
    path.parent.chmod(mode)


@pytest.fixture
def victim(short_tmp: Path) -> Iterator[Path]:
    """Yield a file of the tests' own user, which must be unchanged after the test."""
    short_tmp.chmod(0o711)
    path = short_tmp / "victim"
    path.write_bytes(b"precious")
    path.chmod(0o640)
    yield path
    found = path.stat()
    assert (path.read_bytes(), stat.filemode(found.st_mode), found.st_uid) == (b"precious", "-rw-r-----", os.geteuid())


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    """Use this umask, which every process started meanwhile inherits."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777], ids=oct)
def test_modes(make_node: Start, mask: int) -> None:
    """Under any umask of mpsd's starter, each path has its specified mode and owner."""
    node = make_node(simulate=1, rooted=False)
    node.config = PATHS.format(root=node.root)
    node.command  # noqa: B018 - it writes the configuration, which is not mpsd's to make
    node.configuration.chmod(0o644)
    node.stderr.touch()
    with umask(mask):
        node.start()
    not_mpsds = {node.stderr, node.configuration}

    def written() -> dict[str, os.stat_result]:
        paths = {f"{path.relative_to(node.root)}": path for path in {*node.root.rglob("*")} - not_mpsds}
        found = {name: path.lstat() for name, path in paths.items() if "simulated" not in name}
        assert found.keys() == MODES.keys()
        return found

    # A file may be missing yet, or be replaced at this moment.
    found = wait_until(written, what="mpsd's files alone", not_yet=(FileNotFoundError, AssertionError))
    assert {name: stat.filemode(each.st_mode) for name, each in found.items()} == MODES
    assert {(each.st_uid, each.st_gid) for each in found.values()} == {(os.geteuid(), os.getegid())}


class TestPlanted:
    """Files that a stranger left in place of mpsd's, while the directory was writable."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_file(self, short_tmp: Path, victim: Path, kind: str) -> None:
        """mpsd opens no file that a stranger put there: the claim is refused, and names the file."""
        settings = Settings().under(short_tmp / "root")
        run, state = settings.paths.runtime_dir, settings.paths.state_dir
        RunDir.claim(settings).close()
        names = ["leases.db", "leases.db-journal", "leases.ballast", "mps"]
        names += [f"gpu0.{name}.json" for name in ("process", "tally", "reading")]
        mine = [run / "mpsd.lock", *(run / name for name in names)]
        mine += [state / name for name in ("history.db", "history.db-wal", "last-event", "gpu0.intention.json")]
        for path in mine:
            if path.is_dir():
                path.rmdir()
            path.unlink(missing_ok=True)
            plant(kind, path, victim)
            with pytest.raises(ConfigurationError) as refused:
                RunDir.claim(settings)
            assert refused.value.detail.startswith(f"{path} "), (path, refused.value.detail)
            assert refused.value.hint
            path.unlink()
        RunDir.claim(settings).close()

    @pytest.mark.parametrize(
        ("kind", "path", "words"),
        [
            pytest.param("link", "run/leases.db", "belongs to uid 2601", marks=needs_root),
            ("hard link", "state/history.db", "has another hard link"),
            pytest.param("fifo", "run/gpu0.tally.json", "belongs to uid 2601", marks=needs_root),
            pytest.param("fifo", "log/gpu0/control.log", "belongs to uid 2601", marks=needs_root),
            ("hard link", "log/gpu0/server.log", "has another hard link"),
            pytest.param("directory", "run/mps", "is not private to mpsd", marks=needs_root),
        ],
    )
    def test_start(self, make_node: Start, victim: Path, kind: str, path: str, words: str) -> None:
        """An mpsd that finds such a file says so and exits with 78; once the file is removed, mpsd starts."""
        node = make_node(simulate=1)
        planted = node.root / path
        plant(kind, planted, victim)
        status, said = node.refuse()
        assert status == 78
        assert f"mpsd: {planted} {words}" in said
        assert "Traceback" not in said
        if planted.is_dir():
            planted.rmdir()
        else:
            planted.unlink()
        node.start()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", ["control", "control_lock", "log", "nvidia-cuda-mps-control.pid"])
    def test_what_a_control_daemon_makes(self, make_node: Start, victim: Path, name: str, kind: str) -> None:
        """Each control daemon makes its own files: an old file with such a name is removed before it starts."""
        node = make_node(simulate=1)
        planted = node.root / "run/mps/gpu0" / name
        plant(kind, planted, victim)
        was = planted.lstat()
        node.start()
        if os.path.lexists(planted):  # not every driver makes each of them
            found = planted.lstat()
            # An inode number may be reused.
            assert (found.st_ino, found.st_ctime_ns) != (was.st_ino, was.st_ctime_ns)
            assert not stat.S_ISLNK(found.st_mode)
            assert found.st_nlink == 1

    @pytest.mark.parametrize("kind", KINDS)
    def test_pipe_directory(self, make_node: Start, victim: Path, kind: str) -> None:
        """No control daemon starts in a directory with other files: it might write to them."""
        node, path = make_node(simulate=1), "run/mps/gpu0/control_lock.new"
        planted = node.root / path
        plant(kind, planted, victim)
        node.start(ready=False)
        daemon = node.wait_for_state("gpu0", "failed")
        assert daemon["because"].startswith(f"{planted} ")
        assert daemon["hint"]
        assert daemon["pid"] is None
        planted.unlink()
        assert node.request("POST", "/v1/daemons/gpu0/reset").status == 202
        node.wait_for_state("gpu0", "ready")


class TestPathComponents:
    """The components of the paths to mpsd's directories."""

    def refused(self, node: Node) -> str:
        """Return the output of an mpsd that does not start, with its hint; it must have made nothing."""
        status, said = node.refuse()
        assert status == 78, said
        assert not (node.root / "run").exists()
        return said

    def test_parent_that_everybody_may_write(self, make_node: Start) -> None:
        """Where all users may rename mpsd's directories, mpsd does not start; its hint is a remedy that works."""
        node = make_node(simulate=1)
        node.root.chmod(0o777)
        said = self.refused(node)
        assert f"mpsd: {node.root} is world-writable, so every user can replace" in said
        assert f"hint: chmod o-w {node.root} (or +t" in said
        node.root.chmod(0o1777)
        node.start()

    @needs_root
    def test_parent_of_another(self, make_node: Start) -> None:
        """mpsd does not start where one other user may rename its directories, either."""
        node = make_node(simulate=1)
        os.chown(node.root, ANN, ANN)
        said = self.refused(node)
        assert f"mpsd: {node.root} belongs to uid {ANN}, which can replace" in said
        assert f"hint: chown root {node.root}" in said

    @needs_root
    def test_stranger_s_link(self, make_node: Start, short_tmp: Path) -> None:
        """A stranger's symbolic link in the path is not followed, wherever it leads: nothing is made behind it."""
        node = make_node(simulate=1, rooted=False)
        shared, target = node.root / "shared", short_tmp / "target"
        target.mkdir()
        shared.mkdir()
        shared.chmod(0o1777)
        plant("link", shared / "link", target)
        shared.chmod(0o1777)
        node.config = PATHS.format(root=shared / "link" / "deeper")
        assert f"mpsd: {shared}/link belongs to uid {ANN}" in self.refused(node)
        assert list(target.iterdir()) == []

    def test_root_s_link(self, short_tmp: Path) -> None:
        """A symbolic link of root is followed, and its target is checked as well; a loop ends."""
        (short_tmp / "open" / "below").mkdir(parents=True)
        (short_tmp / "link").symlink_to("./open/../open/below")
        path_safety.check_path(short_tmp / "link" / "run")
        (short_tmp / "open").chmod(0o777)
        with pytest.raises(ConfigurationError, match=f"{short_tmp}/open is world-writable,"):
            path_safety.check_path(short_tmp / "link" / "run")
        (short_tmp / "a").symlink_to(short_tmp / "b")
        (short_tmp / "b").symlink_to(short_tmp / "a")
        with pytest.raises(OSError, match="Too many levels"):
            path_safety.check_path(short_tmp / "a" / "run")

    def test_own_directory_that_another_may_write(self, short_tmp: Path) -> None:
        """An access list that lets another user or group write to mpsd's own directory is detected too."""
        settings = Settings().under(short_tmp / "root")
        RunDir.claim(settings).close()
        owner, group, mask, others = Entry(OWNER, 7), Entry(OWNING_GROUP, 5), Entry(MASK, 7), Entry(OTHERS, 5)
        for entries in (
            (owner, Entry(USER, 7, ANN), group, mask, others),
            (owner, group, Entry(GROUP, 7, ANN), mask, others),
        ):
            acl.write(settings.paths.state_dir, entries)
            with pytest.raises(ConfigurationError, match="is not private to mpsd"):
                RunDir.claim(settings)
        acl.write(settings.paths.state_dir, (owner, Entry(USER, 5, ANN), Entry(USER, 7, 0), group, mask, others))
        RunDir.claim(settings).close()

    @needs_root
    def test_own_directory_of_another_group(self, short_tmp: Path) -> None:
        """A directory of a group that is neither root's nor mpsd's is detected too."""
        settings = Settings().under(short_tmp / "root")
        RunDir.claim(settings).close()
        os.chown(settings.paths.log_dir, 0, ANN)
        RunDir.claim(settings).close()
        settings.paths.log_dir.chmod(0o775)
        with pytest.raises(ConfigurationError, match="is not private to mpsd"):
            RunDir.claim(settings)
