"""Checks of the files on the disk: paths, permissions, space, and leftovers."""

from collections.abc import Iterator
from typing import Final

from mpsd.core.doctor.finding import AS_ROOT, Check, Finding, Means, Mend, Verdict, unknown
from mpsd.core.doctor.observed import Observed, PipeDirectorySeen
from mpsd.core.model import Known, Unknown
from mpsd.core.mps_facts import CONTROL_PATH_BYTES, LONGEST_SOCKET_NAME, SOCKET_PATH_BYTES
from mpsd.core.settings import Unadmitted
from mpsd.core.units import MIB, format_size

_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "lustre", "gpfs", "fuse.sshfs", "virtiofs"}
)
"""Network file systems: NVIDIA requires the pipe directory on a local one (documentation)."""

_LITTLE: Final = 64 * MIB
"""Free bytes below which a log of NVIDIA's, or a store of mpsd's, may soon run out of space."""

_FEW: Final = 100
"""Free inodes below which files may soon not be made."""

_LATE: Final = 60.0
"""Seconds that a file may be ahead of the clock."""


def _pipe_path(seen: Observed) -> Iterator[Finding]:
    names = [each.name for each in seen.files.own] or ["gpu0"]
    longest = max(names, key=len)
    control = seen.settings.paths.runtime_dir / "mps" / longest / LONGEST_SOCKET_NAME
    for path, most in ((control, CONTROL_PATH_BYTES), (seen.settings.socket, SOCKET_PATH_BYTES)):
        length = len(str(path).encode("utf-8", "surrogateescape"))
        if length > most:
            because = f"{path} has {length} bytes, and the maximum for a socket path is {most}: "
            because += (
                "the control daemon exits without a message and does not listen"
                if path is control
                else "mpsd refuses to start"
            )
            evidence = {"path": str(path), "bytes": length, "most": most}
            yield Finding(Verdict.FAIL, because, evidence, "choose a shorter paths.runtime_dir (or --root)")


def _traverse(seen: Observed) -> Iterator[Finding]:
    closed = seen.files.closed
    if closed is None:
        return
    because = (
        f"other uids may not traverse {closed}, and MPS runs a server under its client's uid: clients fail with 805"
    )
    own = closed in {seen.settings.paths.runtime_dir, seen.settings.paths.runtime_dir / "mps"}
    mend = Mend(Means.OPEN, (str(closed),)) if own else None
    # With --root, mpsd serves users that can traverse that directory, and an mpsd without root serves one uid: only a
    # warning.
    verdict = Verdict.WARN if seen.files.private or seen.host.uid else Verdict.FAIL
    yield Finding(verdict, because, {"path": str(closed)}, f"chmod o+x {closed}", str(closed), mend)


def _elsewhere(seen: Observed) -> Iterator[Finding]:
    """Yield those of mpsd's directories that were not inspected, because the paths lead elsewhere here."""
    for path in seen.files.apart:
        because = f"{path} is a different directory for mpsd and for mpsctl, since one of them is in a container"
        yield unknown(because, "run mpsctl doctor where mpsd runs", subject=str(path))


def _directories(seen: Observed) -> Iterator[Finding]:
    yield from _elsewhere(seen)
    for each in seen.files.directories:
        if each.strange is not None:
            because, remedy = each.strange
            yield Finding(
                Verdict.FAIL, because, {"setting": each.setting, "path": str(each.path)}, remedy, str(each.path)
            )


def _file_system(seen: Observed) -> Iterator[Finding]:
    yield from _elsewhere(seen)
    for each in seen.files.directories:
        evidence = {"setting": each.setting, "path": str(each.there), "file_system": each.file_system}
        if each.read_only and seen.host.uid and isinstance(seen.service.answers, Known):
            # Only root can tell whether a running mpsd has it from the same mount; a client's container has another
            # mount.
            because = f"{each.there} is mounted read-only for mpsctl, which says nothing about mpsd"
            yield unknown(because, AS_ROOT, subject=str(each.path))
        elif each.read_only:
            because = f"{each.there} is on a file system that is mounted read-only ({each.file_system})"
            yield Finding(
                Verdict.FAIL,
                because,
                evidence,
                f"mount -o remount,rw, or choose another {each.setting}",
                str(each.path),
            )
        elif each.setting == "paths.runtime_dir" and each.file_system in _NETWORK:
            because = (
                f"{each.there} is on {each.file_system}: the sockets and FIFOs of MPS work only on a local file system"
            )
            yield Finding(Verdict.FAIL, because, evidence, "choose a paths.runtime_dir under /run", str(each.path))
        elif (
            each.setting == "paths.runtime_dir" and not each.keeps_acls and seen.settings.unadmitted is Unadmitted.DENY
        ):
            because = f"the file system of {each.there} ({each.file_system}) does not support POSIX ACLs, which limit"
            because += " pipe access to the uids that hold a lease"
            remedy = 'choose a directory on tmpfs, ext4, xfs or btrfs; or set enforcement.unadmitted = "defaults"'
            yield Finding(Verdict.FAIL, because, evidence, remedy, str(each.path))


def _disk(seen: Observed) -> Iterator[Finding]:
    yield from _elsewhere(seen)
    for each in seen.files.directories:
        if each.free is None:
            yield unknown("the free space cannot be read", AS_ROOT, subject=str(each.path))
            continue
        evidence = {"path": str(each.there), "free": each.free, "free_files": each.free_files}
        few = each.free_files is not None and each.free_files < _FEW
        if each.free >= _LITTLE and not few:
            continue
        left = f"{each.free_files} files" if few else format_size(each.free // 1024 * 1024)
        none = each.free == 0 or each.free_files == 0
        yield Finding(
            Verdict.FAIL if none else Verdict.WARN,
            f"only {left} are left on the file system of {each.there}: leases and logs need space",
            evidence,
            f"free space: du -xh {each.there} | sort -h | tail",
            str(each.path),
        )


def _damaged(seen: Observed) -> Iterator[Finding]:
    for path in seen.files.damaged:
        because = f"{path} is a file that mpsd could not parse and set aside"
        yield Finding(Verdict.WARN, because, {"path": str(path)}, f"inspect it, then: rm {path}", str(path))


def _on(seen: Observed, directory: PipeDirectorySeen) -> list[int] | None:
    """Return the processes of MPS on a pipe directory; None where that is uncertain."""
    if isinstance(seen.processes, Unknown) or not seen.host.first_pid_namespace:
        return None
    hidden = [each for each in seen.processes.value if isinstance(each.variables, Unknown) and each.part != "mpsd"]
    if hidden:
        return None
    return [each.pid for each in seen.processes.value if each.pipe_directory == str(directory.path)]


def _leftovers(seen: Observed) -> Iterator[Finding]:
    answers = seen.service.answers
    managed = {each.name for each in answers.value.daemons} if isinstance(answers, Known) else set()
    holder = seen.service.lock_holder
    if isinstance(answers, Unknown) and isinstance(holder, Known) and holder.value is not None:
        yield unknown(
            f"pid {holder.value} holds mpsd's lock and does not answer: it may be starting a control daemon",
            "see check mpsd",
        )
        return
    for directory in seen.files.own:
        if directory.name in managed:
            continue
        if isinstance(directory.entries, Unknown):
            yield unknown(directory.entries.reason, AS_ROOT, subject=directory.name)
            continue
        entries = directory.entries.value
        if not entries:
            continue
        processes = _on(seen, directory)
        if processes is None:
            yield unknown(
                f"{directory.path} has {', '.join(entries)}, and not all processes of MPS are visible", AS_ROOT
            )
        elif not processes and not directory.listening:
            because = (
                f"{directory.path} has {', '.join(entries)}, which no process of MPS uses: clients that use"
                " this directory"
            )
            because += " run without MPS"
            paths = tuple(str(directory.path / each) for each in entries)
            remedy = "mpsctl doctor --fix; the next control daemon there replaces them, too"
            evidence = {"path": str(directory.path), "entries": list(entries)}
            yield Finding(Verdict.WARN, because, evidence, remedy, directory.name, Mend(Means.REMOVE, paths))


def _shared_memory(seen: Observed) -> Iterator[Finding]:
    if not seen.files.shared_memory:
        return
    if isinstance(seen.processes, Unknown) or not seen.host.first_pid_namespace:
        yield unknown("the owners of the shared memory can be determined only if all processes are visible", AS_ROOT)
        return
    living = {each.pid for each in seen.processes.value if each.state != "Z"}
    left = [each for each in seen.files.shared_memory if each.server not in living]
    if left:
        names = [each.name for each in left]
        size = format_size(sum(each.bytes for each in left) // 1024 * 1024)
        because = f"{len(left)} files in /dev/shm ({size}) belong to servers that are gone: {', '.join(names[:4])}"
        because += " and others" if len(names) > 4 else ""  # noqa: PLR2004 - as many as fit into a line
        paths = tuple(f"/dev/shm/{each}" for each in names)  # noqa: S108 - where POSIX shared memory is
        mend = Mend(Means.REMOVE_SHARED_MEMORY, tuple(names))
        yield Finding(Verdict.WARN, because, {"paths": list(paths)}, "as root: mpsctl doctor --fix", mend=mend)


def _server_start(seen: Observed) -> Iterator[Finding]:
    servers = seen.files.servers
    if isinstance(servers, Unknown):
        yield unknown(servers.reason, AS_ROOT)
        return
    for each in servers.value:
        if each.failures:
            words = f", and the last one logged {each.words!r}" if each.words else ", and none logged a reason"
            because = f"the last {each.failures} servers failed to start{words}"
            evidence = {"log": str(each.log), "failures": each.failures, "words": each.words}
            yield Finding(Verdict.FAIL, because, evidence, f"see {each.log} and server.log beside it", each.name)


def _waiting(seen: Observed) -> Iterator[Finding]:
    if isinstance(seen.files.servers, Unknown):
        yield unknown(seen.files.servers.reason, AS_ROOT)
        return
    for each in seen.files.servers.value:
        if each.waiting:
            who = ", ".join(f"pid {pid} (uid {uid})" for pid, uid in each.waiting)
            because = f"{who} is blocked in CUDA's initialisation until the clients of another uid have exited"
            evidence = {"log": str(each.log), "waiting": [{"pid": pid, "uid": uid} for pid, uid in each.waiting]}
            remedy = "use one uid for each GPU"
            if seen.gpus.many_users == Known(value=True):
                remedy += ', or set daemon.users = "many", then: mpsctl reload, and mpsctl restart'
            yield Finding(Verdict.WARN, because, evidence, remedy, each.name)


def _clock(seen: Observed) -> Iterator[Finding]:
    if seen.files.ahead is not None and seen.files.ahead[1] > _LATE:
        path, seconds = seen.files.ahead
        because = f"{path} has a time stamp {seconds:.0f} s in the future: the clock was set back"
        evidence = {"path": str(path), "ahead": seconds, "now": seen.host.now.isoformat()}
        yield Finding(Verdict.WARN, because, evidence, "set the clock (timedatectl); leases are not affected")


CHECKS: Final = (
    Check(
        "pipe-path",
        "every socket path is short enough",
        "A control daemon whose socket path is too long exits with 1, without a message, and does not listen.",
        _pipe_path,
    ),
    Check(
        "traverse",
        "every uid can traverse the path to the pipe directories",
        "Servers run as their client's uid, cannot connect, and are restarted again and again; clients fail with 805.",
        _traverse,
        "opens a directory that belongs to mpsd",
    ),
    Check("directories", "mpsd's directories are private to mpsd", "mpsd refuses to start.", _directories),
    Check(
        "file-system",
        "mpsd's directories are on writable, local file systems that support ACLs",
        "mpsd refuses to start, or sockets do not work.",
        _file_system,
    ),
    Check(
        "disk",
        "there is free space for state, logs and sockets",
        "No lease can be granted, and no log can be written.",
        _disk,
    ),
    Check(
        "damaged", "mpsd could parse all of its stored files", "The contents of the file are lost to mpsd.", _damaged
    ),
    Check(
        "leftovers",
        "no pipe directory has a socket, FIFO or lock that no process uses",
        "Clients that find one run without MPS and without limits, and get no error.",
        _leftovers,
        "removes them if no mpsd is running",
    ),
    Check(
        "shared-memory",
        "no shared memory of servers that are gone is left",
        "The shared memory is occupied until the next boot.",
        _shared_memory,
        "removes it",
    ),
    Check(
        "server-start",
        "servers start",
        "Clients wait, then fail with CUDA_ERROR_MPS_CONNECTION_FAILED (805).",
        _server_start,
    ),
    Check(
        "waiting-uids",
        "no client waits for the clients of another uid to exit",
        "A control daemon serves one uid at a time: clients of the next uid hang in their first CUDA call.",
        _waiting,
    ),
    Check(
        "clock",
        "the clock was not set back",
        "Ages and expiries are displayed wrongly, and logs are out of order.",
        _clock,
    ),
)
"""In the order of the report."""
