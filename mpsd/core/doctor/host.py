"""Checks of the machine and of the caller's environment: what MPS needs from the kernel, and what denies it."""

import re
from collections.abc import Iterator
from typing import Final

from mpsd.core import gpus
from mpsd.core.doctor.driver import without_shm
from mpsd.core.doctor.finding import AS_ROOT, Check, Finding, Verdict, unknown
from mpsd.core.doctor.observed import LogLine, Observed
from mpsd.core.doctor.processes import USUAL
from mpsd.core.model import Known, Unknown
from mpsd.core.mps.limits import PINNED_DEVICE_MEM_LIMIT
from mpsd.core.units import MIB, format_size

_SHM: Final = "/dev/shm"  # noqa: S108 - where POSIX shared memory is

_SMALL: Final = 64 * MIB
"""Bytes of /dev/shm in a container by default; servers need more for many clients."""

_NAMES: Final = re.compile(r"nvidia-cuda-mps|\bmpsd\b|/dev/nvidia|nvidia-mps")

_XID: Final = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<where>[0-9A-Fa-f:.]+)\): (?P<xid>[0-9]+)")

_RECENT: Final = 3600.0
"""Seconds during which a log line counts as current."""

_SHARED: Final = 0o1777
_DEVICE: Final = 0o666

_KERNEL: Final = (5, 4)
"""The first kernel with pidfd_open, pidfd_send_signal and polling of a pidfd (pidfd_open(2))."""

_PEER_PIDFD: Final = (6, 5)
"""The first kernel with SO_PEERPIDFD (unix(7))."""

_SEVERAL: Final = re.compile(r"^\s*[^,=]+=[^,]+,.*=")


def _environment(seen: Observed) -> Iterator[Finding]:
    variables = seen.host.variables
    directory = variables.get("CUDA_MPS_PIPE_DIRECTORY")
    own = seen.settings.paths.runtime_dir / "mps"
    if directory is not None and directory.rstrip("/") not in {str(each.path) for each in seen.files.own}:
        where = (
            "is the default directory"
            if directory.rstrip("/") in USUAL
            else f"is not one of mpsd's, which are in {own}"
        )
        because = (
            f"CUDA_MPS_PIPE_DIRECTORY={directory} {where}: programs started from this shell do not find"
            " mpsd's control daemons"
        )
        remedy = "unset CUDA_MPS_PIPE_DIRECTORY; mpsctl run and mpsctl admit set it"
        yield Finding(Verdict.WARN, because, {"CUDA_MPS_PIPE_DIRECTORY": directory}, remedy, "CUDA_MPS_PIPE_DIRECTORY")
    name = PINNED_DEVICE_MEM_LIMIT.variable
    limit = variables.get(name, "")
    if _SEVERAL.search(limit):
        because = f"{name}={limit} names several GPUs: a client that does not see one of them ignores every limit,"
        because += " including those of the server"
        yield Finding(Verdict.WARN, because, {name: limit}, f"unset {name}", name)
    if variables.get("CUDA_MPS_PROTOCOL_VERSION", "2") != "2":
        version = variables["CUDA_MPS_PROTOCOL_VERSION"]
        because = (
            f"CUDA_MPS_PROTOCOL_VERSION={version} selects another protocol than that of mpsd's control daemons (2)"
        )
        evidence = {"CUDA_MPS_PROTOCOL_VERSION": version}
        yield Finding(Verdict.WARN, because, evidence, "unset CUDA_MPS_PROTOCOL_VERSION", "CUDA_MPS_PROTOCOL_VERSION")


def _shm(seen: Observed) -> Iterator[Finding]:
    yield from (without_shm(seen, each) for each in _of_shm(seen))


def _of_shm(seen: Observed) -> Iterator[Finding]:
    if isinstance(seen.host.shared_memory, Unknown):
        remedy = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm; or share the host's (docker run --ipc=host)"
        yield Finding(Verdict.FAIL, seen.host.shared_memory.reason, {}, remedy)
        return
    place = seen.host.shared_memory.value
    evidence = {"file_system": place.file_system, "bytes": place.bytes, "free": place.free, "mode": f"{place.mode:04o}"}
    if place.read_only:
        yield Finding(Verdict.FAIL, f"{_SHM} is read-only", evidence, "mount -o remount,rw /dev/shm")
    elif place.mode & _SHARED != _SHARED:
        because = f"{_SHM} has mode {place.mode:04o}, so servers of some uids cannot create their shared memory there"
        yield Finding(Verdict.FAIL, because, evidence, "chmod 1777 /dev/shm")
    elif place.bytes <= _SMALL:
        because = (
            f"{_SHM} has a size of {format_size(place.bytes // 1024 * 1024)}: servers and clients share memory there"
        )
        remedy = "mount -o remount,size=50% /dev/shm; in a container --shm-size=1g, or the host's (--ipc=host)"
        yield Finding(Verdict.WARN, because, evidence, remedy)
    elif place.free <= _SMALL:
        because = f"only {format_size(place.free // 1024 * 1024)} are left in {_SHM}"
        yield Finding(Verdict.WARN, because, evidence, "see what uses it: du -a /dev/shm | sort -n | tail")


def _devices(seen: Observed) -> Iterator[Finding]:
    if seen.gpus.simulated:
        return
    if isinstance(seen.gpus.node, Unknown) and not any(each.mode is not None for each in seen.host.devices):
        yield unknown("no driver is loaded, so there are no device files")
        return
    for each in seen.host.devices:
        evidence = {"path": str(each.path), "mode": None if each.mode is None else f"{each.mode:04o}"}
        if each.mode is None:
            because = f"{each.path} does not exist, and a server that runs as its client's uid cannot create it"
            remedy = "nvidia-modprobe -u -c=0; or give the container its GPUs (--gpus all)"
            yield Finding(Verdict.FAIL, because, evidence, remedy, str(each.path))
        elif each.mode & _DEVICE != _DEVICE:
            because = f"{each.path} has mode {each.mode:04o}: servers of other uids than its owner cannot open it"
            remedy = "set NVreg_DeviceFileMode=0666 for the nvidia module, or add every user to its group"
            yield Finding(Verdict.WARN, because, evidence, remedy, str(each.path))


def _log(seen: Observed) -> Iterator[Finding]:
    """Yield a finding where the kernel's log could not be read."""
    if isinstance(seen.host.kernel_log, Unknown):
        yield unknown(seen.host.kernel_log.reason, AS_ROOT)


def _lines(seen: Observed) -> tuple[LogLine, ...]:
    return seen.host.kernel_log.value if isinstance(seen.host.kernel_log, Known) else ()


def _report_of(lines: list[LogLine]) -> dict[str, object]:
    return {"times": len(lines), "seconds_ago": round(lines[-1].age), "lines": [each.text for each in lines[-5:]]}


def _how_bad(lines: list[LogLine]) -> Verdict:
    """Return the verdict by age: an old problem may be fixed by now, and no fix removes a line from a log."""
    return Verdict.FAIL if lines[-1].age < _RECENT else Verdict.WARN


def _denied(seen: Observed, by: str, word: str, remedy: str) -> Iterator[Finding]:
    """Search both logs for denials: where auditd runs, denials do not appear in the kernel's log."""
    yield from _log(seen)
    if isinstance(seen.host.audit_log, Unknown):
        yield unknown(seen.host.audit_log.reason, AS_ROOT)
    audited = seen.host.audit_log.value if isinstance(seen.host.audit_log, Known) else ()
    both = (*_lines(seen), *audited)
    lines = [each for each in both if by in each.text and word in each.text and _NAMES.search(each.text)]
    if lines:
        because = f"{len(lines)} denials, the last one {lines[-1].age:.0f} s ago: {lines[-1].text}"
        yield Finding(_how_bad(lines), because, _report_of(lines), remedy)


def _selinux(seen: Observed) -> Iterator[Finding]:
    if seen.host.selinux == "enforcing":
        remedy = "ausearch -m avc -c nvidia-cuda-mps; label the pipe directory: chcon -R -t container_file_t DIR"
        yield from _denied(seen, "avc:", "denied", remedy)


def _apparmor(seen: Observed) -> Iterator[Finding]:
    if seen.host.apparmor:
        remedy = "aa-status; allow the access in that profile, then apparmor_parser -r FILE"
        yield from _denied(seen, "apparmor=", "DENIED", remedy)


def _xid(seen: Observed) -> Iterator[Finding]:
    yield from _log(seen)
    found: dict[tuple[str, int], list[LogLine]] = {}
    for line in _lines(seen):
        match = _XID.search(line.text)
        if match is not None:
            found.setdefault((match["where"], int(match["xid"])), []).append(line)
    for (where, number), lines in found.items():
        last = lines[-1]
        because = (
            f"the GPU at {where} reported {gpus.describe_xid(number)}, most recently {last.age:.0f} s ago: {last.text}"
        )
        evidence = {"pci": where, "xid": number, **_report_of(lines)}
        verdict, remedy = Verdict.WARN, "find the program that caused it; the GPU can still be used"
        if gpus.condemns(number):
            verdict, remedy = (
                _how_bad(lines),
                ("unless this was done already: drain the control daemon, nvidia-smi --gpu-reset, mpsctl reset"),
            )
        yield Finding(verdict, because, evidence, remedy, where)


def _oom(seen: Observed) -> Iterator[Finding]:
    yield from _log(seen)
    lines = [each for each in _lines(seen) if "Killed process" in each.text and _NAMES.search(each.text)]
    if lines:
        because = (
            f"the kernel killed processes of MPS because memory ran out, most recently {lines[-1].age:.0f} s ago: "
        )
        remedy = (
            "free -h; give more memory to the control group of mpsd and its servers (MemoryMax=, a container's limit)"
        )
        yield Finding(_how_bad(lines), because + lines[-1].text, _report_of(lines), remedy)


def _sandbox(seen: Observed) -> Iterator[Finding]:
    yield from _log(seen)
    if any("Starting gVisor" in line.text for line in _lines(seen)):
        remedy = "use another container runtime: runc, not runsc"
        yield Finding(
            Verdict.FAIL, "the kernel is gVisor, which does not pass on the identity of MPS clients", {}, remedy
        )


def _kernel(seen: Observed) -> Iterator[Finding]:
    match = re.match(r"([0-9]+)\.([0-9]+)", seen.host.kernel)
    if match is None:
        yield unknown(f"{seen.host.kernel!r} is not a Linux version")
        return
    version = int(match[1]), int(match[2])
    evidence = {"kernel": seen.host.kernel}
    if version < _KERNEL:
        because = f"kernel {seen.host.kernel} has no pidfd that can be polled, which needs Linux 5.4"
        yield Finding(Verdict.FAIL, because, evidence, "use a newer kernel")
    elif version < _PEER_PIDFD and not seen.host.first_pid_namespace:
        because = (
            f"kernel {seen.host.kernel} has no SO_PEERPIDFD (Linux 6.5), which identifies callers in other"
            " pid namespaces"
        )
        yield Finding(Verdict.WARN, because, evidence, "run mpsd with hostPID: true, or use a newer kernel")


CHECKS: Final = (
    Check(
        "environment",
        "the caller's environment does not bypass mpsd",
        "Programs started from that shell do not find mpsd's control daemons, or lose their limits.",
        _environment,
    ),
    Check(
        "shm",
        f"{_SHM} is large enough, and writable for every uid",
        "Servers fail to create shared memory; clients fail with 805.",
        _shm,
    ),
    Check(
        "device-nodes",
        "the driver's device files exist, and every uid can open them",
        "Servers exit with status 1, without a reason.",
        _devices,
    ),
    Check(
        "selinux",
        "SELinux has not denied MPS anything",
        "Clients cannot connect, or mpsd cannot label or open files.",
        _selinux,
    ),
    Check(
        "apparmor",
        "AppArmor has not denied MPS anything",
        "Clients cannot connect, or mpsd cannot open files.",
        _apparmor,
    ),
    Check(
        "xid",
        "no GPU reported an error since boot",
        "After some errors, work on that GPU fails until it is reset.",
        _xid,
    ),
    Check("oom", "the kernel has not killed a process of MPS", "When a server is killed, all its clients end.", _oom),
    Check("sandbox", "the kernel is Linux", "In gVisor, clients cannot be identified, and none is served.", _sandbox),
    Check("kernel", "the kernel has what mpsd needs", "Processes cannot be watched, or cannot be told apart.", _kernel),
)
"""In the order of the report."""
