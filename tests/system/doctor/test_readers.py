"""Doctor's readers: real files, sockets, processes, and the output of other programs."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpsd.core.doctor.finding import Library, LoggedVersions, Means, Mend, ProcessSeen
from mpsd.core.doctor.parts import DAEMON, FRONT_END, SERVER
from mpsd.core.errors import AlreadyRunningError
from mpsd.core.model import Known, Reading, Unknown
from mpsd.core.settings import Settings
from mpsd.system.doctor import claims, disk, fixes, gpus, machine, proc, service
from mpsd.system.files.rundir import RunDir
from mpsd.system.processes import foreign_files
from mpsd.system.processes.foreign_reader import ForeignReader
from tests.harness import wait_until
from tests.system.processes.test_process_table import running

PROGRAM = ("/usr/bin/nvidia-cuda-mps-control",)

STAMP = "[2026-11-21 10:00:00.000 {} {}] {}\n"


@pytest.fixture
def settings(short_tmp: Path) -> Settings:
    """Return settings below a directory of this test."""
    return Settings().under(short_tmp)


# -- the kernel's log --------------------------------------------------------------------------------------------------


def test_kernel_log(tmp_path: Path) -> None:
    """Each read returns one record: the prefix of its text, and continuation lines, are no part of the text."""
    fifo = tmp_path / "kmsg"
    os.mkfifo(fifo)
    assert machine.kernel_log(fifo) == Known(())
    with fifo.open("r+b", buffering=0) as writer:
        writer.write(b"4,803,9876,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=7\n SUBSYSTEM=pci\n")
        log = machine.kernel_log(fifo)
        assert isinstance(log, Known)
        (line,) = log.value
        assert line.text == "NVRM: Xid (PCI:0000:3b:00): 79, pid=7"
        assert line.age == pytest.approx(time.monotonic() - 0.009876, abs=60)
    assert isinstance(machine.kernel_log(tmp_path / "none"), Unknown)


@pytest.mark.root("read the kernel's log")
def test_the_kernels_own_log() -> None:
    """The real kernel log is read to its end, without waiting for more."""
    log = machine.kernel_log(Path("/dev/kmsg"))
    assert isinstance(log, Known)
    assert log.value
    assert not any(line.text.startswith(("4,", "6,")) for line in log.value)
    assert all(line.age <= time.monotonic() for line in log.value)


def test_audit_log(tmp_path: Path) -> None:
    """auditd's own timestamps give the age of a line; a line without one is none of auditd's."""
    path = tmp_path / "audit.log"
    assert machine.audit_log(path) == Known(())
    path.write_text(f"half a li\ntype=AVC msg=audit({time.time() - 100:.3f}:7): avc:  denied\n")
    log = machine.audit_log(path)
    assert isinstance(log, Known)
    (line,) = log.value
    assert line.text.endswith("avc:  denied")
    assert 99 <= line.age < 160
    path.unlink()
    path.mkdir()
    assert isinstance(machine.audit_log(path), Unknown)


def test_this_machine() -> None:
    """The facts about this machine agree with those of its own tools."""
    host = machine.look({"CUDA_X": "1"})
    found = os.statvfs("/dev/shm")
    assert isinstance(host.shared_memory, Known)
    place = host.shared_memory.value
    assert (place.bytes, place.device) == (found.f_blocks * found.f_frsize, os.stat("/dev/shm").st_dev)  # noqa: PTH116
    mount = subprocess.run(["stat", "-f", "-c", "%T", "/dev/shm"], capture_output=True, text=True, check=True)
    assert place.file_system == mount.stdout.strip()
    assert (host.uid, host.variables, host.kernel) == (os.geteuid(), {"CUDA_X": "1"}, os.uname().release)
    assert [str(each) for each in host.devices][:2] == ["/dev/nvidiactl", "/dev/nvidia-uvm"]


# -- processes ---------------------------------------------------------------------------------------------------------


def processes(program: Sequence[str], runtime_dir: Path) -> Reading[tuple[ProcessSeen, ...]]:
    async def read() -> Reading[tuple[ProcessSeen, ...]]:
        async with ForeignReader() as reader:
            return await proc.processes(program, runtime_dir, reader)

    return asyncio.run(read())


def process_of(pid: int) -> ProcessSeen | None:
    async def read() -> ProcessSeen | None:
        async with ForeignReader() as reader:
            return await proc.process(pid, reader)

    return asyncio.run(read())


def test_process(tmp_path: Path) -> None:
    """The facts of /proc about a process of MPS are returned."""
    with running("nvidia-cuda-mps-control", "-f", pipe_directory=tmp_path, CUDA_X="1", OTHER="2") as control:
        found = processes(PROGRAM, tmp_path)
        assert isinstance(found, Known)
        (seen,) = [each for each in found.value if each.pid == control.pid]
    assert (seen.part, seen.uid, seen.parent) == ("control daemon", os.geteuid(), os.getpid())
    assert seen.variables == Known({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path), "CUDA_X": "1"})
    assert seen.pipe_directory == str(tmp_path)
    assert seen.shared_memory == Known(Path("/dev/shm").stat().st_dev)


@pytest.mark.root("run a process as another user")
def test_lookalikes(short_tmp: Path) -> None:
    """Another user's process counts by the program that it runs, or by its parent; otherwise it is a look-alike.

    The arguments of one that the kernel calls otherwise are not read.
    """
    short_tmp.chmod(0o755)
    control, impostor = short_tmp / "nvidia-cuda-mps-control", short_tmp / "theirs" / "nvidia-cuda-mps-server"
    impostor.parent.mkdir(mode=0o755)
    for each in (control, impostor):
        each.write_bytes(Path("/usr/bin/tail").read_bytes())
        each.chmod(0o755)
    ours = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "env": {}}
    theirs = {**ours, "user": 2601, "group": 2601, "extra_groups": []}
    with contextlib.ExitStack() as running_there:

        def start(*arguments: str, executable: str | Path, **options: Any) -> int:
            process = subprocess.Popen(arguments, executable=executable, **options)
            running_there.callback(process.communicate)
            return process.pid

        unread = start(str(control), "-f", executable="/usr/bin/tail", **theirs)
        expected = {
            start(str(control), "-f", executable=impostor, **theirs): True,
            start("nvidia-cuda-mps-server", "-f", executable=impostor, **theirs): True,
            start(str(control), "-f", executable=control, **theirs): False,
            start(str(control), "-f", executable=impostor, **ours): False,
        }

        def seen() -> dict[int, bool]:
            found = processes((str(control),), short_tmp)
            assert isinstance(found, Known)
            started = {*expected, unread}
            return {each.pid: each.lookalike for each in found.value if each.pid in started and each.state != "Z"}

        wait_until(lambda: seen() == expected, what="each to be seen as what it is")

        fifo = short_tmp / "control"
        os.mkfifo(fifo)  # whoever opens it waits for a writer
        many = {start(str(fifo), "-f", executable=impostor, **theirs) for _ in range(50)}

        async def look() -> Reading[tuple[ProcessSeen, ...]]:
            async with ForeignReader() as reader, asyncio.timeout(20):  # one by one, they take a minute
                return await proc.processes((str(fifo),), short_tmp, reader)

        found = asyncio.run(look())
        assert isinstance(found, Known)
        assert many <= {each.pid for each in found.value if each.lookalike}


@pytest.mark.parametrize(
    ("name", "arguments", "part"),
    [
        ("nvidia-cuda-mps-control", ["-f"], DAEMON),
        ("/opt/x/nvidia-cuda-mps-control", ["-d"], DAEMON),
        ("nvidia-cuda-mps-control", ["-multiuser-server", "-f"], DAEMON),
        ("nvidia-cuda-mps-control", [], FRONT_END),
        ("nvidia-cuda-mps-server", [], SERVER),
        ("/usr/bin/nvidia-cuda-mps-server", ["-force-tegra"], SERVER),
        ("nvidia-cuda-mps-controller", ["-f"], None),
        ("cat", [], None),
    ],
)
def test_parts(tmp_path: Path, name: str, arguments: list[str], part: str | None) -> None:
    """A process is a control daemon, a front-end, a server or none of them, by its name and its arguments."""
    with running(name, *arguments, pipe_directory=tmp_path) as process:
        assert claims.part_of(foreign_files.arguments(process.pid), PROGRAM) == part


def test_program_of_another_name() -> None:
    """The control program in use is recognised under any name; a script's name is behind its interpreter's."""
    assert claims.part_of(("/opt/simulator/control", "-c", "-f"), PROGRAM) is None
    assert claims.part_of(("/opt/x/control", "-c", "-f"), ("/opt/x/control", "-c")) == DAEMON
    assert claims.part_of(("/bin/sh", "-f"), PROGRAM) is None
    assert claims.part_of(("/bin/sh", "/x/nvidia-cuda-mps-server"), PROGRAM) == SERVER
    assert claims.part_of((), PROGRAM) is None


def test_program_that_was_replaced(short_tmp: Path) -> None:
    """A process whose program file was replaced is recognised by the kernel's record."""
    program = short_tmp / "nvidia-cuda-mps-server"
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o755)
    with subprocess.Popen([program, "60"], env={}) as process:
        try:
            seen = process_of(process.pid)
            assert seen is not None
            assert seen.executable == Known(str(program))
            program.unlink()
            seen = process_of(process.pid)
            assert seen is not None
            assert seen.executable == Known(f"{program} (deleted)")
        finally:
            process.kill()
    assert process_of(process.pid) is None


@pytest.mark.parametrize(
    ("arguments", "is_one"),
    [
        ("/usr/bin/python3 /usr/bin/mpsd run", True),
        ("/usr/bin/mpsd run --root /x", True),
        ("/usr/lib/mpsd/bin/python3 -I /usr/bin/mpsd run", True),
        ("python -m mpsd demo", True),
        ("sudo mpsd run", False),
        ("python -m mpsd.cli.main run -- true", False),
        ("mpsctl run -- mpsd", False),
        ("mpsd check", False),
        ("-m", False),
        ("", False),
    ],
)
def test_what_is_an_mpsd(arguments: str, *, is_one: bool) -> None:
    """A process is an mpsd by the arguments that it was started with."""
    assert claims.is_mpsd(arguments.split()) is is_one


# -- the disk ----------------------------------------------------------------------------------------------------------


def test_pipe_directories(settings: Settings) -> None:
    """Only directories that control daemons make count, and a listening socket is detected without connecting."""
    directory = settings.paths.runtime_dir / "mps" / "gpu0"
    directory.mkdir(parents=True)
    (directory / "notes").touch()
    (directory / "control_lock").touch()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / "control"))
        (seen,) = disk.look(settings, private=True).own
        assert (seen.entries, seen.listening) == (Known(("control", "control_lock")), False)
        listener.listen()
        (seen,) = disk.look(settings, private=True).own
        assert (seen.name, seen.listening) == ("gpu0", True)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    (seen,) = disk.look(settings, private=True).own
    assert (seen.entries, seen.listening) == (Known(("control", "control_lock")), False)


@pytest.mark.parametrize("name", ["a\nb: c d zz e f g h", "a\rb: c d zz e f g h", "a\u2028b: c d zz e f g h"])
def test_sockets_with_odd_names(short_tmp: Path, name: str) -> None:
    """A socket whose path contains line ends hides no other, and causes no failure."""
    with socket.socket(socket.AF_UNIX) as odd, socket.socket(socket.AF_UNIX) as other:
        odd.bind(f"{short_tmp}/{name}")
        odd.listen()
        other.bind(f"{short_tmp}/other")
        other.listen()
        assert f"{short_tmp}/other" in disk.listened()


def test_directories(settings: Settings) -> None:
    """A missing directory is fine; one that mpsd's own start would refuse is named, with the start's own hint."""
    seen = disk.look(settings, private=True)
    assert seen.unfit == ()
    assert [each.path for each in seen.space] == [settings.paths.runtime_dir.parent] * 3
    settings.paths.runtime_dir.mkdir()
    settings.paths.runtime_dir.chmod(0o777)
    settings.paths.state_dir.symlink_to("/usr")
    far = replace(settings, paths=replace(settings.paths, log_dir=settings.paths.log_dir / "x"))
    unfit = [because for because, hint in disk.look(far, private=True).unfit if hint]
    assert [each.partition(" ")[0] for each in unfit] == [
        f"{settings.paths.runtime_dir}",
        f"{settings.paths.state_dir}",
    ]


@pytest.mark.root("run mpsd for other users")
def test_closed_directory(settings: Settings) -> None:
    """A directory that other users cannot traverse is named, unless mpsd is only for those that can."""
    settings.paths.runtime_dir.mkdir(parents=True)
    settings.paths.runtime_dir.chmod(0o700)
    closed = settings.paths.runtime_dir.parent
    closed.chmod(0o711)
    assert disk.look(settings, private=True).unfit == ()
    ((because, hint),) = disk.look(settings, private=False).unfit
    assert f"other uids may not traverse {settings.paths.runtime_dir}" in because
    assert f"chmod o+x {settings.paths.runtime_dir}" in hint


def test_versions(settings: Settings) -> None:
    """The last lines of a control daemon's logs that name versions count."""
    directory = settings.paths.log_dir / "gpu0"
    directory.mkdir(parents=True)
    log = directory / "control.log"
    log.write_text("".join(STAMP.format("Control", 6, f"CUDA MPS Control binary version: {n}") for n in (11080, 12080)))
    (directory / "server.log").write_text(STAMP.format("Server", 7, "Display Driver version: 575"))
    assert disk.look(settings, private=True).versions == Known((LoggedVersions("gpu0", log, 12080, "575"),))


# -- mpsd from outside -------------------------------------------------------------------------------------------------


def test_socket(short_tmp: Path) -> None:
    """A socket without a listener, one with a listener, another kind of file, and no file are distinguished."""
    path = short_tmp / "s"
    assert service.look_at_socket(path).kind is None
    path.touch()
    assert service.look_at_socket(path).kind == "file"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o640)
        seen = service.look_at_socket(path)
        assert (seen.kind, seen.mode, seen.owner) == ("socket", 0o640, os.geteuid())
        assert seen.listener is None
        listener.listen()
        assert service.look_at_socket(path).listener == (os.getpid(), os.geteuid())


def test_what_mpsd_was_told() -> None:
    """mpsd's own arguments name its files; a relative path is relative to its own directory."""
    socket = Path("/tmp/mpsd-demo-x/run/mpsd.sock")
    arguments_of = service.arguments_of(
        os.getpid(), ("mpsd", "run", "--root", "/r", "--config=c.toml", "--control", "prog"), socket
    )
    assert arguments_of == service.ServiceArguments(Path.cwd() / "c.toml", Path("/r"), "prog")
    assert service.arguments_of(os.getpid(), ("mpsd", "run", "--simulate", "2"), socket) == service.ServiceArguments()
    assert service.arguments_of(os.getpid(), ("mpsd", "run", "--control", "demo"), socket) == service.ServiceArguments(
        control="demo"
    )
    assert service.arguments_of(os.getpid(), ("mpsd", "demo"), socket) == service.ServiceArguments(
        root=Path("/tmp/mpsd-demo-x")
    )


def test_units() -> None:
    """The output of systemctl is read unit by unit; a unit unknown to systemd is left out."""
    printed = "Id=mpsd.service\nLoadState=loaded\nActiveState=active\n\nId=mpsd.socket\nLoadState=not-found\n"
    assert service.read_units(printed) == {
        "mpsd.service": {"Id": "mpsd.service", "LoadState": "loaded", "ActiveState": "active"}
    }
    assert service.read_units("") == {}


# -- packages ----------------------------------------------------------------------------------------------------------


def test_package_of_the_control_program(tmp_path: Path) -> None:
    """dpkg's own lists give the package and version of a program; without them the result is unknown."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.touch()
    assert gpus.package_of(program, tmp_path) is None
    (tmp_path / "info").mkdir()
    (tmp_path / "info" / "nvidia-cuda-mps:amd64.list").write_text(f"/.\n{program}\n")
    (tmp_path / "status").write_text(
        "Package: other\nVersion: 1\n\nPackage: nvidia-cuda-mps\nStatus: install ok installed\nDescription: x\n"
        " Version: no\nVersion: 535.261.03-1\n\n"
    )
    assert gpus.package_of(program, tmp_path) == ("nvidia-cuda-mps", "535.261.03-1")
    assert gpus.package_of(tmp_path / "another", tmp_path) is None


def test_library(tmp_path: Path) -> None:
    """The version of CUDA's library is in the name of its link's target."""
    assert gpus.library(None, [tmp_path]) is None
    (tmp_path / "libcuda.so.1").touch()
    assert gpus.library(tmp_path) is None
    (tmp_path / "libcuda.so.1").rename(tmp_path / "libcuda.so.535.261.03")
    (tmp_path / "libcuda.so.1").symlink_to("libcuda.so.535.261.03")
    found = Library(tmp_path / "libcuda.so.1", "535.261.03")
    assert gpus.library(None, [Path("/nowhere"), tmp_path]) == gpus.library(tmp_path) == found


# -- mending -----------------------------------------------------------------------------------------------------------


async def _mend(settings: Settings, means: Means, *targets: str) -> list[str]:
    return await fixes.mend(settings, "check", Mend(means, targets))


def test_mending_is_told_and_done_once(settings: Settings) -> None:
    """Each fix is a line of the log; fixing a missing file does nothing."""
    stale = settings.paths.runtime_dir / "mps" / "gpu0" / "control"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert asyncio.run(_mend(settings, Means.REMOVE, str(stale))) == [f"removed {stale}"]
    assert asyncio.run(_mend(settings, Means.REMOVE, str(stale))) == []
    lines = [json.loads(line) for line in (settings.paths.log_dir / "doctor.log").read_text().splitlines()]
    assert [(each["event"], each["check"], each["did"], each["uid"]) for each in lines] == [
        ("doctor_fixed", "check", f"removed {stale}", os.geteuid())
    ]


def test_what_somebody_has_by_now_is_not_removed(settings: Settings) -> None:
    """A control daemon that came after doctor looked at the node keeps its files."""
    directory = settings.paths.runtime_dir / "mps" / "gpu0"
    directory.mkdir(parents=True)
    (directory / "log").touch()
    with running("nvidia-cuda-mps-control", "-f", pipe_directory=directory):
        assert asyncio.run(_mend(settings, Means.REMOVE, str(directory / "log"))) == []
    assert asyncio.run(_mend(settings, Means.REMOVE, str(directory / "log"))) == [f"removed {directory / 'log'}"]


def test_not_while_an_mpsd_runs(settings: Settings) -> None:
    """No file is removed while an mpsd holds the lock: it may be about to start a control daemon there."""
    stale = settings.paths.runtime_dir / "mps" / "gpu0" / "control"
    stale.parent.mkdir(parents=True)
    stale.touch()
    lock = RunDir.claim(settings)
    try:
        with pytest.raises(AlreadyRunningError):
            asyncio.run(_mend(settings, Means.REMOVE, str(stale)))
        assert stale.exists()
    finally:
        lock.close()


def test_what_cannot_be_written_down_is_not_done(settings: Settings) -> None:
    """A fix that cannot be logged is not carried out, since it would leave no trace."""
    stale = settings.paths.runtime_dir / "mps" / "gpu0" / "control"
    stale.parent.mkdir(parents=True)
    stale.touch()
    (settings.paths.log_dir / "doctor.log").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        asyncio.run(_mend(settings, Means.REMOVE, str(stale)))
    assert stale.exists()
