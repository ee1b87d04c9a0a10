"""Checks of the files on the disk: mpsd's directories, their space, and leftovers of control daemons."""

from collections.abc import Iterator
from typing import Final

from mpsd.core.doctor.finding import AS_ROOT, Check, Finding, Means, Mend, Verdict, unknown
from mpsd.core.doctor.observed import Observed, PipeDirectorySeen
from mpsd.core.model import Known, Unknown
from mpsd.core.units import MIB, format_size

_LITTLE: Final = 64 * MIB
"""Free bytes below which a log of NVIDIA's, or a store of mpsd's, may soon run out of space."""

_FEW: Final = 100
"""Free inodes below which files may soon not be made."""


def _elsewhere(seen: Observed) -> Iterator[Finding]:
    """Yield those of mpsd's directories that were not inspected, because the paths lead elsewhere here."""
    for path in seen.files.apart:
        because = f"{path} is a different directory for mpsd and for mpsctl, since one of them is in a container"
        yield unknown(because, "run mpsctl doctor where mpsd runs", subject=str(path))


def _directories(seen: Observed) -> Iterator[Finding]:
    yield from _elsewhere(seen)
    for because, remedy in seen.files.unfit:
        yield Finding(Verdict.FAIL, because, {}, remedy)


def _disk(seen: Observed) -> Iterator[Finding]:
    yield from _elsewhere(seen)
    for each in seen.files.space:
        if each.read_only and not seen.host.uid:  # the mount of any other caller says nothing about mpsd's
            because = f"{each.path} is on a file system that is mounted read-only"
            remedy = f"mount -o remount,rw, or find out why: dmesg; findmnt -T {each.path}"
            yield Finding(Verdict.FAIL, because, {"path": str(each.path)}, remedy, str(each.path))
            continue
        few = each.free_files is not None and each.free_files < _FEW
        if each.free >= _LITTLE and not few:
            continue
        left = f"{each.free_files} files" if few else format_size(each.free // 1024 * 1024)
        because = f"only {left} are left on the file system of {each.path}: leases and logs need space"
        evidence = {"path": str(each.path), "free": each.free, "free_files": each.free_files}
        verdict = Verdict.FAIL if each.free == 0 or each.free_files == 0 else Verdict.WARN
        remedy = f"free space: du -xh {each.path} | sort -h | tail"
        yield Finding(verdict, because, evidence, remedy, str(each.path))


def _on(seen: Observed, directory: PipeDirectorySeen) -> list[int] | None:
    """Return the processes of MPS on a pipe directory; None where that is uncertain."""
    if isinstance(seen.processes, Unknown) or not seen.host.first_pid_namespace:
        return None
    hidden = [each for each in seen.processes.value if isinstance(each.variables, Unknown) and each.part != "mpsd"]
    if hidden:
        return None
    return [each.pid for each in seen.processes.value if each.pipe_directory == str(directory.path)]


def _leftovers(seen: Observed) -> Iterator[Finding]:
    holder = seen.service.lock_holder
    if isinstance(holder, Known) and holder.value is not None:
        yield unknown(
            f"pid {holder.value} holds mpsd's lock and does not answer: it may be starting a control daemon",
            "see check mpsd",
        )
        return
    for directory in seen.files.own:
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
                " this directory run without MPS"
            )
            paths = tuple(str(directory.path / each) for each in entries)
            remedy = "mpsctl doctor --fix; the next control daemon there replaces them, too"
            evidence = {"path": str(directory.path), "entries": list(entries)}
            yield Finding(Verdict.WARN, because, evidence, remedy, directory.name, Mend(Means.REMOVE, paths))


CHECKS: Final = (
    Check(
        "directories",
        "mpsd could start with its directories: their paths, owners, modes and file systems",
        "mpsd refuses to start; where a running one has them, servers of other uids cannot connect.",
        _directories,
    ),
    Check(
        "disk",
        "there is free space for state, logs and sockets",
        "No lease can be granted, and no log can be written.",
        _disk,
    ),
    Check(
        "leftovers",
        "no pipe directory has a socket, FIFO or lock that no process uses",
        "Clients that find one run without MPS and without limits, and get no error.",
        _leftovers,
        "removes them",
        unwatched=True,
    ),
)
"""In the order of the report."""
