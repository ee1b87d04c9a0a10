"""Checks of the machine, of the caller's environment, and of mpsd's files: what MPS needs, and what denies it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from mpsd.core import gpus
from mpsd.core.doctor.finding import (
    AS_ROOT,
    Finding,
    LogLine,
    Means,
    Mend,
    Observed,
    PipeDirectorySeen,
    SharedMemoryPlace,
    Verdict,
    check,
    fail,
    known,
    unknown,
    unread,
    warn,
)
from mpsd.core.doctor.parts import FRONT_END, MPSD
from mpsd.core.doctor.processes import is_elsewhere, living
from mpsd.core.model import Known, Unknown
from mpsd.core.mps.control_daemons import USUAL
from mpsd.core.mps.limits import PINNED_DEVICE_MEM_LIMIT
from mpsd.core.units import MIB, format_size

_SHM: Final = "/dev/shm"  # noqa: S108 - where POSIX shared memory is

_SMALL: Final = 64 * MIB
"""Bytes of /dev/shm in a container by default; servers need more for many clients."""

_ANONYMOUS: Final = 580
"""The first driver whose servers share memory with their clients without a file in /dev/shm (its own logs)."""

_RECENT: Final = 3600.0
"""Seconds during which a log line counts as current."""

_SHARED: Final = 0o1777
_DEVICE: Final = 0o666

_KERNEL: Final = (5, 4)
"""The first kernel with pidfd_open, pidfd_send_signal and polling of a pidfd (pidfd_open(2))."""

_PEER_PIDFD: Final = (6, 5)
"""The first kernel with SO_PEERPIDFD (unix(7))."""

_SEVERAL: Final = re.compile(r"^\s*[^,=]+=[^,]+,.*=")


@check(
    "environment",
    "the caller's environment does not bypass mpsd",
    "Programs started from that shell do not find mpsd's control daemons, or lose their limits.",
)
def _environment(seen: Observed) -> Iterator[Finding]:
    variables = seen.host.variables
    name = "CUDA_MPS_PIPE_DIRECTORY"
    directory = variables.get(name)
    if directory is not None and directory.rstrip("/") not in {str(each.path) for each in seen.files.own}:
        where = "is the default directory"
        if directory.rstrip("/") not in USUAL:
            where = f"is not one of mpsd's, which are in {seen.settings.paths.runtime_dir / 'mps'}"
        because = f"{name}={directory} {where}: programs started from this shell do not find mpsd's control daemons"
        yield warn(because, f"unset {name}; mpsctl run and mpsctl admit set it", name, **{name: directory})
    name = PINNED_DEVICE_MEM_LIMIT.variable
    limit = variables.get(name, "")
    if _SEVERAL.search(limit):
        because = (
            f"{name}={limit} names several GPUs: a client that does not see one of them ignores every limit,"
            " including those of the server"
        )
        yield warn(because, f"unset {name}", name, **{name: limit})
    name = "CUDA_MPS_PROTOCOL_VERSION"
    version = variables.get(name, "2")
    if version != "2":
        because = f"{name}={version} selects another protocol than that of mpsd's control daemons (2)"
        yield warn(because, f"unset {name}", name, **{name: version})


@check(
    "shm",
    f"{_SHM} is large enough, writable for every uid, and the same for mpsd, control daemons and mpsctl",
    "Servers fail to create shared memory; clients hang, or fail with 805.",
)
def _shm(seen: Observed) -> Iterator[Finding]:
    place = seen.host.shared_memory
    if isinstance(place, Unknown):
        remedy = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm; or share the host's (docker run --ipc=host)"
        found = [fail(place.reason, remedy)]
    else:
        found = [*_of_place(place.value), *_shared(seen, place.value)]
    node = known(seen.gpus.node)
    branch = gpus.driver_branch(node.driver) if node is not None else None
    for each in found:
        if branch is not None and branch >= _ANONYMOUS and each.verdict is not Verdict.UNKNOWN:
            doubt = f"from driver {_ANONYMOUS} on that may not matter: servers share memory without a file"
            yield replace(each, verdict=Verdict.UNKNOWN, because=f"{each.because}; {doubt}")
        else:
            yield each


def _of_place(place: SharedMemoryPlace) -> Iterator[Finding]:
    evidence = {"file_system": place.file_system, "bytes": place.bytes, "free": place.free, "mode": f"{place.mode:04o}"}
    if place.read_only:
        yield fail(f"{_SHM} is read-only", "mount -o remount,rw /dev/shm", "", **evidence)
    elif place.mode & _SHARED != _SHARED:
        because = f"{_SHM} has mode {place.mode:04o}, so servers of some uids cannot create their shared memory there"
        yield fail(because, "chmod 1777 /dev/shm", "", **evidence)
    elif place.bytes <= _SMALL:
        size = format_size(place.bytes // 1024 * 1024)
        remedy = "mount -o remount,size=50% /dev/shm; in a container --shm-size=1g, or the host's (--ipc=host)"
        yield warn(f"{_SHM} has a size of {size}: servers and clients share memory there", remedy, "", **evidence)
    elif place.free <= _SMALL:
        because = f"only {format_size(place.free // 1024 * 1024)} are left in {_SHM}"
        yield warn(because, "see what uses it: du -a /dev/shm | sort -n | tail", "", **evidence)


def _shared(seen: Observed, own: SharedMemoryPlace) -> Iterator[Finding]:
    """Compare the caller's /dev/shm with that of mpsd and its control daemons."""
    yield from unread(seen.processes, AS_ROOT)
    looked = [each for each in living(seen) if each.part != FRONT_END and not is_elsewhere(seen, each)]
    if not any(each.part == MPSD for each in looked) and not seen.host.first_pid_namespace:
        yield unknown("mpsd and its control daemons are not visible in this pid namespace", AS_ROOT)
    closed = [each.pid for each in looked if isinstance(each.shared_memory, Unknown)]
    if closed:
        because = f"uid {seen.host.uid} has no permission to inspect pid {', '.join(map(str, closed))}"
        yield unknown(because, AS_ROOT, pids=closed)
    for each in looked:
        device = known(each.shared_memory)
        if device not in {None, own.device}:
            because = (
                f"pid {each.pid} ({each.part}) has another /dev/shm than mpsctl: clients that share mpsctl's"
                " cannot connect (805)"
            )
            remedy = "share one /dev/shm: hostIPC: true, or mount the host's into both (docker run --ipc=host)"
            yield warn(because, remedy, f"pid {each.pid}", pid=each.pid, device=device, own_device=own.device)


@check(
    "device-nodes",
    "the driver's device files exist, and every uid can open them",
    "Servers exit with status 1, without a reason.",
)
def _devices(seen: Observed) -> Iterator[Finding]:
    if seen.gpus.simulated:
        return
    if isinstance(seen.gpus.node, Unknown) and all(mode is None for mode in seen.host.devices.values()):
        yield unknown("no driver is loaded, so there are no device files")
        return
    for file, mode in seen.host.devices.items():
        path = str(file)
        if mode is None:
            because = f"{path} does not exist, and a server that runs as its client's uid cannot create it"
            remedy = "nvidia-modprobe -u -c=0; or give the container its GPUs (--gpus all)"
            yield fail(because, remedy, path, path=path, mode=None)
        elif mode & _DEVICE != _DEVICE:
            because = f"{path} has mode {mode:04o}: servers of other uids than its owner cannot open it"
            remedy = "set NVreg_DeviceFileMode=0666 for the nvidia module, or add every user to its group"
            yield warn(because, remedy, path, path=path, mode=f"{mode:04o}")


@check("kernel", "the kernel has what mpsd needs", "Processes cannot be watched, or cannot be told apart.")
def _kernel(seen: Observed) -> Iterator[Finding]:
    kernel = seen.host.kernel
    match = re.match(r"([0-9]+)\.([0-9]+)", kernel)
    if match is None:
        yield unknown(f"{kernel!r} is not a Linux version")
        return
    version = int(match[1]), int(match[2])
    if version < _KERNEL:
        because = f"kernel {kernel} has no pidfd that can be polled, which needs Linux 5.4"
        yield fail(because, "use a newer kernel", kernel=kernel)
    elif version < _PEER_PIDFD and not seen.host.first_pid_namespace:
        because = f"kernel {kernel} has no SO_PEERPIDFD (Linux 6.5), which identifies callers in other pid namespaces"
        yield warn(because, "run mpsd with hostPID: true, or use a newer kernel", kernel=kernel)


# -- what the logs of the machine say of MPS ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sign:
    """A kind of log line that is a finding."""

    pattern: re.Pattern[str]
    words: str
    remedy: str


_OURS: Final = r"(?=.*(?:nvidia-cuda-mps|\bmpsd\b|/dev/nvidia|nvidia-mps))"
"""Lines that name MPS, mpsd or a device file of NVIDIA's driver."""

_SIGNS: Final = (
    _Sign(
        re.compile(_OURS + r".*avc: +denied(?!.*permissive=1)"),
        "SELinux denied an access to MPS",
        "ausearch -m avc -c nvidia-cuda-mps; label the pipe directory: chcon -R -t container_file_t DIR",
    ),
    _Sign(
        re.compile(_OURS + r'.*apparmor="DENIED"'),
        "AppArmor denied an access to MPS",
        "aa-status; allow the access in that profile, then apparmor_parser -r FILE",
    ),
    _Sign(
        re.compile(_OURS + r".*Killed process"),
        "the kernel killed a process of MPS because memory ran out",
        "free -h; give more memory to the control group of mpsd and its servers (MemoryMax=, a container's limit)",
    ),
    _Sign(
        re.compile(r"Starting gVisor"),
        "the kernel is gVisor, which does not pass on the identity of MPS clients",
        "use another container runtime: runc, not runsc",
    ),
)

_XID: Final = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<where>[0-9A-Fa-f:.]+)\): (?P<xid>[0-9]+)")


@check(
    "kernel-log",
    "the kernel has denied MPS nothing, killed none of its processes, and reported no error of a GPU",
    "Clients cannot connect or end; after some errors, work on that GPU fails until it is reset.",
)
def _logs(seen: Observed) -> Iterator[Finding]:
    lines: list[LogLine] = []
    for log in seen.host.logs.values():
        yield from unread(log, AS_ROOT)
        lines += log.value if isinstance(log, Known) else ()
    for sign in _SIGNS:
        found = [each for each in lines if sign.pattern.search(each.text)]
        if found:
            yield _of_lines(found, sign.words, sign.remedy)
    yield from _xids(lines)


def _of_lines(lines: list[LogLine], words: str, remedy: str, subject: str = "", *, grave: bool = True) -> Finding:
    """Return the finding of these lines; old ones are a warning, since no fix removes a line from a log."""
    last = lines[-1]
    because = f"{words}, most recently {last.age:.0f} s ago: {last.text}"
    evidence = {"times": len(lines), "seconds_ago": round(last.age), "lines": [each.text for each in lines[-5:]]}
    verdict = Verdict.FAIL if grave and last.age < _RECENT else Verdict.WARN
    return Finding(verdict, because, evidence, remedy, subject)


def _xids(lines: list[LogLine]) -> Iterator[Finding]:
    found: dict[tuple[str, int], list[LogLine]] = {}
    for line in lines:
        match = _XID.search(line.text)
        if match is not None:
            found.setdefault((match["where"], int(match["xid"])), []).append(line)
    for (where, number), of_gpu in found.items():
        grave = gpus.condemns(number)
        remedy = "find the program that caused it; the GPU can still be used"
        if grave:
            remedy = "unless this was done already: drain the control daemon, nvidia-smi --gpu-reset, mpsctl reset"
        words = f"the GPU at {where} reported {gpus.describe_xid(number)}"
        yield _of_lines(of_gpu, words, remedy, where, grave=grave)


CHECKS: Final = (_environment, _shm, _devices, _kernel, _logs)
"""In the order of the report."""


# -- paths -------------------------------------------------------------------------------------------------------------

_LITTLE: Final = 64 * MIB
"""Free bytes below which a log of NVIDIA's, or a store of mpsd's, may soon run out of space."""

_FEW: Final = 100
"""Free inodes below which files may soon not be made."""


def _elsewhere(seen: Observed) -> Iterator[Finding]:
    """Yield those of mpsd's directories that were not inspected, because the paths lead elsewhere here."""
    for path in seen.files.apart:
        because = f"{path} is a different directory for mpsd and for mpsctl, since one of them is in a container"
        yield unknown(because, "run mpsctl doctor where mpsd runs", str(path))


@check(
    "directories",
    "mpsd could start with its directories: their paths, owners, modes and file systems",
    "mpsd refuses to start; where a running one has them, servers of other uids cannot connect.",
)
def _directories(seen: Observed) -> Iterator[Finding]:
    yield from _elsewhere(seen)
    for because, remedy in seen.files.unfit:
        yield fail(because, remedy)


@check("disk", "there is free space for state, logs and sockets", "No lease can be granted, and no log can be written.")
def _disk(seen: Observed) -> Iterator[Finding]:
    yield from _elsewhere(seen)
    for each in seen.files.space:
        if each.read_only and not seen.host.uid:  # the mount of any other caller says nothing about mpsd's
            because = f"{each.path} is on a file system that is mounted read-only"
            remedy = f"mount -o remount,rw, or find out why: dmesg; findmnt -T {each.path}"
            yield fail(because, remedy, str(each.path), path=str(each.path))
            continue
        few = each.free_files is not None and each.free_files < _FEW
        if each.free >= _LITTLE and not few:
            continue
        left = f"{each.free_files} files" if few else format_size(each.free // 1024 * 1024)
        because = f"only {left} are left on the file system of {each.path}: leases and logs need space"
        evidence = {"path": str(each.path), "free": each.free, "free_files": each.free_files}
        verdict = Verdict.FAIL if 0 in {each.free, each.free_files} else Verdict.WARN
        yield Finding(verdict, because, evidence, f"free space: du -xh {each.path} | sort -h | tail", str(each.path))


def _on(seen: Observed, directory: PipeDirectorySeen) -> list[int] | None:
    """Return the processes of MPS on a pipe directory; None where that is uncertain."""
    processes = known(seen.processes)
    if processes is None or not seen.host.first_pid_namespace:
        return None
    if any(isinstance(each.variables, Unknown) and each.part != MPSD for each in processes):
        return None
    return [each.pid for each in processes if each.pipe_directory == str(directory.path)]


@check(
    "leftovers",
    "no pipe directory has a socket, FIFO or lock that no process uses",
    "Clients that find one run without MPS and without limits, and get no error.",
    "removes them",
    unwatched=True,
)
def _leftovers(seen: Observed) -> Iterator[Finding]:
    holder = known(seen.service.lock_holder)
    if holder is not None:
        because = f"pid {holder} holds mpsd's lock and does not answer: it may be starting a control daemon"
        yield unknown(because, "see check mpsd")
        return
    for directory in seen.files.own:
        yield from unread(directory.entries, AS_ROOT, directory.name)
        entries = known(directory.entries)
        if not entries:
            continue
        has = f"{directory.path} has {', '.join(entries)}"
        processes = _on(seen, directory)
        if processes is None:
            yield unknown(f"{has}, and not all processes of MPS are visible", AS_ROOT)
        elif not processes and not directory.listening:
            because = f"{has}, which no process of MPS uses: clients that use this directory run without MPS"
            remedy = "mpsctl doctor --fix; the next control daemon there replaces them, too"
            evidence = {"path": str(directory.path), "entries": list(entries)}
            mend = Mend(Means.REMOVE, tuple(str(directory.path / each) for each in entries))
            yield Finding(Verdict.WARN, because, evidence, remedy, directory.name, mend)


PATH_CHECKS: Final = (_directories, _disk, _leftovers)
"""In the order of the report."""
