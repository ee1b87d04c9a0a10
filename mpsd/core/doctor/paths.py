"""Checks of the files on the disk: mpsd's directories, their space, and leftovers of control daemons."""

from collections.abc import Iterator
from typing import Final

from mpsd.core.doctor.finding import AS_ROOT, Finding, Means, Mend, Verdict, check, fail, unknown, unread
from mpsd.core.doctor.observed import Observed, PipeDirectorySeen, known
from mpsd.core.doctor.processes import MPSD
from mpsd.core.model import Unknown
from mpsd.core.units import MIB, format_size

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


@check(
    "disk",
    "there is free space for state, logs and sockets",
    "No lease can be granted, and no log can be written.",
)
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


CHECKS: Final = (_directories, _disk, _leftovers)
"""In the order of the report."""
