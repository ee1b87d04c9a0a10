"""Control groups in the kernel, in each hierarchy that is mounted here: opened, identified, queried and found."""

import ast
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.errors import InvalidRequestError
from mpsd.system.processes import control_groups
from mpsd.system.processes.control_groups import Hierarchy, Membership, OpenGroup
from tests.control_groups import control_group, joins
from tests.harness import wait_until

HIERARCHIES = ("name=systemd", "cgroup2", "pids")

needs_root = pytest.mark.root("make control groups")


@contextmanager
def opened(path: Path | str) -> Iterator[OpenGroup]:
    group = control_groups.named(str(path))
    try:
        yield group
    finally:
        group.close()


@contextmanager
def inside(group: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process in a control group."""
    with subprocess.Popen([*joins(group), "sleep", "600"]) as process:
        wait_until((group / "cgroup.procs").read_text, what="the process to be there")
        yield process
        process.kill()


@needs_root
@pytest.mark.parametrize("hierarchy", HIERARCHIES)
class TestGroup:
    def test_processes(self, hierarchy: str) -> None:
        """A group's processes include those of the groups below it."""
        with control_group(hierarchy, "top") as top, opened(top) as group:
            assert group.group.inode == top.stat().st_ino
            assert not group.is_populated()
            with control_group(hierarchy, f"{top.name}/a") as low, control_group(hierarchy, f"{top.name}/{low.name}/b"):
                assert not group.is_populated()
                with inside(low) as process:
                    assert group.is_populated()
                    assert [*group.processes()] == [process.pid]
                wait_until(lambda: not group.is_populated(), what="the process to have left")
            assert not group.is_removed()

    def test_removed(self, hierarchy: str) -> None:
        """A removed group stays removed, even if a new group has its name."""
        with control_group(hierarchy, "gone") as path, opened(path) as group:
            path.rmdir()
            assert group.is_removed()
            path.mkdir()
            assert group.is_removed()
            assert control_groups.reopen(group.group) is None
            with opened(path) as other, inside(path):
                assert other.group.inode != group.group.inode
                assert other.is_populated()
                assert not group.is_populated()
                assert group.owners() == set()

    def test_owners(self, hierarchy: str) -> None:
        """A group's owners are those of its directory and of its list of processes."""
        with control_group(hierarchy, "owned") as path, opened(path) as group:
            assert group.owners() == {0}
            os.chown(path, 2721, 0)
            assert group.owners() == {0, 2721}
            os.chown(path / "cgroup.procs", 2721, 0)
            assert group.owners() == {2721}

    def test_cpu_time(self, hierarchy: str) -> None:
        """Where CPU time is counted, it includes each process in a group below, also ended ones."""
        with control_group(hierarchy, "ran") as path, opened(path) as group:
            before = group.cpu_time()
            assert before == (0 if hierarchy == "cgroup2" else None)
            with control_group(hierarchy, f"{path.name}/below") as below:
                subprocess.run([*joins(below), "true"], check=True)
            assert before is None or (group.cpu_time() or 0) > before

    def test_of_process(self, hierarchy: str) -> None:
        """A group is found by a process in it, and not by a process at the top."""
        with control_group(hierarchy, "mine") as path, inside(path) as process:
            found = control_groups.of_process(process.pid)
            try:
                # A process is in a group of each hierarchy; among those that make groups, systemd's comes first.
                assert found.group.inode == path.stat().st_ino or found.group.hierarchy not in {hierarchy, ""}
            finally:
                found.close()
            seen = control_groups.hierarchies()
            assert any(path.name in each for _, each in Membership(process.pid, seen).own())


@needs_root
def test_more_than_are_looked_into() -> None:
    """A group of version 1 with more groups below it than mpsd reads counts as having processes."""
    with control_group("pids", "many") as path, opened(path) as group:
        below = [path / f"g{number}" for number in range(control_groups.MOST_GROUPS)]
        for each in below:
            each.mkdir()
        try:
            assert group.is_populated()
            below.pop().rmdir()
            assert not group.is_populated()
        finally:
            for each in below:
                each.rmdir()


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """Leave this process only so many descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    files = []
    try:
        with suppress(OSError):
            while True:
                files.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(number):
            os.close(files.pop())
        yield
    finally:
        for each in files:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@needs_root
def test_descriptors_used_up() -> None:
    """Without a free descriptor, nothing is known about a group: it does not count as empty."""
    with (
        control_group("cgroup2", "full") as path,
        opened(path) as group,
        descriptors_left(0),
        pytest.raises(OSError, match="Too many open files"),
    ):
        group.is_populated()


@needs_root
@pytest.mark.parametrize("find", ["path", "process", "unit", "units"])
def test_nothing_is_left_open(find: str) -> None:
    """A search for a group leaves no descriptor open, however few are free."""
    units = ["s.slice", "s.slice/train.service", *(("t.slice", "t.slice/train.service") if find == "units" else ())]
    with (
        control_group("name=systemd", "both") as path,
        control_group("cgroup2", "both"),
        made("name=systemd", *units),
        inside(path) as process,
    ):
        looks: dict[str, Callable[[], OpenGroup]] = {
            "path": lambda: control_groups.named(f"/{path.name}"),
            "process": lambda: control_groups.of_process(process.pid),
        }
        look = looks.get(find, lambda: control_groups.of_unit("train", 0))
        told = []
        for number in range(8):
            before = [*Path("/proc/self/fd").iterdir()]
            try:
                with descriptors_left(number):
                    look().close()
                told.append("")
            except (OSError, InvalidRequestError) as error:
                told.append(str(error))
            assert len([*Path("/proc/self/fd").iterdir()]) == len(before)
        assert "Too many open files" in told[0]
        assert "there are several" in told[-1] if find == "units" else told[-1] == ""


@pytest.mark.parametrize(
    "path",
    ["/", "//", "/.", "/sys/fs/cgroup", "/../etc", "/a/../../etc", "etc", "", "/no/such/group", "/" + "a/" * 3000],
)
def test_no_group(path: str) -> None:
    """A path that is no group is refused, with a hint on what to name."""
    with pytest.raises(InvalidRequestError) as refusal:
        control_groups.named(path)
    assert refusal.value.hint
    assert refusal.value.limit == "cgroup"


@pytest.mark.parametrize(
    ("root", "path", "below"),
    [
        ("/", "/a/b", "/a/b"),
        ("/", "/", "/"),
        ("/a", "/a/b", "/b"),
        ("/a", "/a", "/"),
        ("/a", "/ab", None),
        ("/a", "/", None),
        ("/../..", "/../../x/y", "/x/y"),
        ("/", "/../x", None),
        ("/../..", "/../../../x", None),
    ],
)
def test_part_of_a_hierarchy(root: str, path: str, below: str | None) -> None:
    """Where a part of a hierarchy is mounted, as in a container, a group is found below that part, or not at all."""
    assert Hierarchy("", Path("/sys/fs/cgroup"), root, 1).below(path) == below


@needs_root
def test_mounts_of_any_name(short_tmp: Path) -> None:
    """Foreign mounts hide no hierarchy, whatever line ends their names contain."""
    script = "import sys; from mpsd.system.processes import control_groups; print(control_groups.hierarchies())"
    apart = ["unshare", "--mount", "--propagation", "private", "sh", "-ec"]
    told = []
    for name in ("plain", "a\r\u2028b\x0c\x85\x1c - cgroup2 c\r1 2 3", "\r9 1 0:x - cgroup2"):
        (short_tmp / name).mkdir()
        mounts = [*apart, 'mount -t tmpfs none "$0" && exec "$@"', str(short_tmp / name), sys.executable, "-c", script]
        told.append(subprocess.run(mounts, check=True, capture_output=True, timeout=60, text=True).stdout)
    assert told == [told[0]] * len(told)
    assert "Hierarchy" in told[0]


_PART: Final = """
import sys
from mpsd.core.errors import MpsdError
from mpsd.system.processes import control_groups
from mpsd.system.processes.control_groups import Membership

def told(look, *named):
    try:
        group = look(*named)
        again = control_groups.reopen(group.group)
        return group.group.path, group.group.inode, again is not None and again.group == group.group
    except MpsdError as error:
        return error.detail

pid = int(sys.argv.pop())
seen = control_groups.hierarchies()
print([
    *(told(control_groups.named, each) for each in sys.argv[1:]), told(control_groups.of_unit, "train", 0),
    told(control_groups.of_process, pid), [*Membership(pid, seen).groups(seen[0].name)],
])
"""


@needs_root
def test_only_a_part_is_mounted(short_tmp: Path) -> None:
    """Where a part of a hierarchy is mounted, a group in it keeps its path, and no other group is visible."""
    with (
        control_group("name=systemd", "part") as part,
        control_group("name=systemd", f"{part.name}/in.slice") as within,
        control_group("name=systemd", f"{part.name}/{within.name}/train.service") as unit,
        inside(unit) as process,
    ):
        (short_tmp / "c").mkdir()
        alone = """
            mount --bind "$0" "$1"
            while read -r _ _ _ _ at _; do
                case $at in "$1") ;; /sys/fs/cgroup*) umount --lazy "$at" || true ;; esac
            done </proc/self/mountinfo
            shift && exec "$@"
        """
        inner = f"/{within.name}/{unit.name}"
        path, outside = f"/{part.name}{inner}", f"/{part.name}-other"
        command = [sys.executable, "-c", _PART, path, f"{short_tmp}/c{inner}", inner, outside, str(process.pid)]
        apart = ["unshare", "--mount", "--propagation", "private", "bash", "-ec", alone, str(part), f"{short_tmp}/c"]
        done = subprocess.run([*apart, *command], check=True, capture_output=True, timeout=60, text=True)
        by_path, by_mount, bare, other, by_unit, by_process, around = ast.literal_eval(done.stdout)
        assert by_path == by_mount == by_process == (path, unit.stat().st_ino, True)
        assert around == [path, path.rpartition("/")[0]]
        for refused in (bare, other):
            assert f"mpsd sees those below /{part.name} alone" in refused
        assert f"only control groups below /{part.name} are mounted" in by_unit


@needs_root
def test_in_a_cgroup_namespace() -> None:
    """In a control group namespace with the node's hierarchies, a group has the same name as on the node."""
    with (
        control_group("name=systemd", "apart") as own,
        control_group("name=systemd", "named") as path,
        inside(path) as process,
    ):
        # A shell joins the group first, since a namespace begins at the group of its creator.
        script = [*joins(own), "unshare", "--cgroup", sys.executable, "-c", _PART, f"/{path.name}", str(path)]
        done = subprocess.run([*script, str(process.pid)], check=True, capture_output=True, timeout=60, text=True)
        by_path, by_mount, _, by_process, around = ast.literal_eval(done.stdout)
        assert by_path == by_mount == by_process == (f"/{path.name}", path.stat().st_ino, True)
        assert around == [f"/{path.name}"]


@needs_root
class TestUnits:
    @pytest.mark.parametrize("hierarchy", ["name=systemd", "cgroup2"])
    def test_in_slices(self, hierarchy: str) -> None:
        """A unit is found in a slice of root, at any depth; its suffix may be omitted."""
        with made(hierarchy, "t.slice", "t.slice/t-a.slice", "t.slice/t-a.slice/train.service") as (*_, unit):
            for name in ("train", "train.service"):
                found = control_groups.of_unit(name, 0)
                assert found.group.inode == unit.stat().st_ino
                found.close()

    def test_delegated(self) -> None:
        """A unit stays the unit when systemd gave its control group to its user (Delegate=)."""
        with made("name=systemd", "t.slice", "t.slice/train.service") as (*_, unit):
            os.chown(unit, 2721, 0)
            found = control_groups.of_unit("train", 0)
            assert found.group.inode == unit.stat().st_ino
            found.close()

    def test_given_slice(self) -> None:
        """In a slice that was given to a user, any group may be that user's, so none counts as a unit."""
        with made("name=systemd", "t.slice", "t.slice/train.service") as (top, _):
            os.chown(top, 2721, 0)
            with pytest.raises(InvalidRequestError, match="does not run"):
                control_groups.of_unit("train", 0)

    @pytest.mark.parametrize(
        "groups",
        [
            ("t.scope", "t.scope/train.service"),
            ("t.slice", "t.slice/docker", "t.slice/docker/train.service"),
            ("other.service",),
        ],
    )
    def test_elsewhere(self, groups: tuple[str, ...]) -> None:
        """A group with the unit's name that a user made elsewhere is not the unit."""
        with made("name=systemd", *groups), pytest.raises(InvalidRequestError) as refusal:
            control_groups.of_unit("train", 0)
        assert refusal.value.limit == "unit"

    def test_of_another(self) -> None:
        """A slice that does not belong to root has no system units; for its own user, a user's slice has units."""
        top = ("user.slice", "user.slice/user-2721.slice", "user.slice/user-2721.slice/user@2721.service")
        with made("name=systemd", *top, f"{top[-1]}/train.service") as (*_, unit):
            os.chown(unit, 2721, 0)
            with pytest.raises(InvalidRequestError):
                control_groups.of_unit("train", 0)
            found = control_groups.of_unit("train", 2721)
            assert found.group.inode == unit.stat().st_ino
            found.close()

    def test_several(self) -> None:
        """When two units have the same name, neither is chosen."""
        groups = ("s.slice", "s.slice/train.service", "t.slice", "t.slice/train.service")
        with made("name=systemd", *groups), pytest.raises(InvalidRequestError, match="several"):
            control_groups.of_unit("train", 0)

    def test_too_many(self) -> None:
        """Too many groups or slices of a user are refused, with the hint to name the group by its path."""
        top = ("user.slice", "user.slice/user-2721.slice", "user.slice/user-2721.slice/user@2721.service")
        for most, suffix in ((control_groups.MOST_ENTRIES, ""), (control_groups.MOST_ENTRIES // 32, ".slice")):
            others = (f"{top[-1]}/g{number}{suffix}" for number in range(most))
            with made("name=systemd", *top, *others) as paths:
                for each in paths[len(top) :]:
                    os.chown(each, 2721, 0)
                with pytest.raises(InvalidRequestError, match="too many control groups") as refusal:
                    control_groups.of_unit("train", 2721)
                assert "--cgroup PATH" in refusal.value.hint
                assert refusal.value.limit == "unit"
                with pytest.raises(InvalidRequestError, match="does not run"):
                    control_groups.of_unit("train", 0)


@contextmanager
def made(hierarchy: str, *names: str) -> Iterator[list[Path]]:
    """Make control groups with exactly these names, from the top of a hierarchy, and remove them."""
    with control_group(hierarchy, "probe") as probe:
        top = probe.parent
    paths = [top / name for name in names]
    if any(each.exists() for each in paths):
        pytest.skip("this machine has such a control group itself")
    for each in paths:
        each.mkdir()
    try:
        yield paths
    finally:
        for each in reversed(paths):
            each.rmdir()
