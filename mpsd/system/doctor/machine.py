"""The machine from the calling user's view: namespaces, /dev/shm, the kernel's log, and what may deny access."""

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from mpsd.core.doctor.finding import HostSeen, LogLine, SharedMemoryPlace
from mpsd.core.model import Known, Reading, Unknown
from mpsd.system import clock
from mpsd.system.host import host_environment

T = TypeVar("T")

# -- readings ----------------------------------------------------------------------------------------------------------

# The other readers of this room use these, too.


_TAIL: Final = 1024 * 1024
"""Bytes that are read from the end of a log."""


def denied(path: Path | str, error: OSError) -> Unknown:
    return Unknown(f"{path} cannot be read by uid {os.geteuid()}: {error.strerror}")


def reading(path: Path, read: Callable[[], T]) -> Reading[T]:
    """Return what is read of a file, or why that cannot be done."""
    try:
        return Known(read())
    except OSError as error:
        return denied(path, error)


def last_lines(path: Path) -> list[str]:
    """Return the lines at the end of a log; the first may be a part of one. Raises OSError."""
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
        return log.read(_TAIL).decode("utf-8", errors="replace").splitlines()


# -- the machine -------------------------------------------------------------------------------------------------------

_MOST: Final = 100_000
"""Maximum number of records of the kernel's log that are read; its buffer holds fewer."""

_AUDITED: Final = re.compile(r"msg=audit\(([0-9]{1,12}\.[0-9]{1,6}):")

_RECORD: Final = 8192
"""Maximum size of a record, in bytes. Source: Documentation/ABI/testing/dev-kmsg."""


def look(variables: Mapping[str, str]) -> HostSeen:
    """Inspect the machine. `variables` is the caller's own environment, as far as MPS and mpsd use it."""
    namespace = Path("/proc/self/ns/pid")
    return HostSeen(
        uid=os.geteuid(),
        variables=variables,
        kernel=os.uname().release,
        first_pid_namespace=namespace.stat().st_ino == host_environment.FIRST_PID_NAMESPACE,
        shared_memory=_shared_memory(host_environment.SHARED_MEMORY),
        logs={"kernel": kernel_log(Path("/dev/kmsg")), "audit": audit_log(Path("/var/log/audit/audit.log"))},
        devices={path: _mode(path) for path in _devices(Path("/dev"))},
    )


def _shared_memory(path: Path) -> Reading[SharedMemoryPlace]:
    try:
        found, room = path.stat(), os.statvfs(path)
        kind = host_environment.file_system(path)
    except OSError as error:
        return Unknown(f"{path}: {error.strerror}")
    return Known(
        SharedMemoryPlace(
            file_system=kind,
            bytes=room.f_blocks * room.f_frsize,
            free=room.f_bavail * room.f_frsize,
            mode=found.st_mode & 0o7777,
            read_only=bool(room.f_flag & os.ST_RDONLY),
            device=found.st_dev,
        )
    )


def kernel_log(path: Path) -> Reading[tuple[LogLine, ...]]:
    """Return the lines of the kernel's log, as far as its buffer reaches; each read returns one record."""
    lines: list[LogLine] = []
    now = clock.monotonic()  # the clock of the kernel's timestamps, which are in microseconds
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return denied(path, error)
    try:
        for _ in range(_MOST):
            try:
                record = os.read(descriptor, _RECORD)
            except BrokenPipeError:
                continue  # the record was overwritten before it was read; the next one is available
            if not record:
                break
            head, _, text = record.decode("utf-8", errors="replace").splitlines()[0].partition(";")
            lines.append(LogLine(max(0.0, now - int(head.split(",")[2]) / 1e6), text))
    except BlockingIOError:
        pass  # the end of the log
    except OSError as error:
        return denied(path, error)
    finally:
        os.close(descriptor)
    return Known(tuple(lines))


def audit_log(path: Path) -> Reading[tuple[LogLine, ...]]:
    """Return the lines at the end of auditd's log, each with its own time."""
    now = clock.now().timestamp()
    try:
        texts = last_lines(path)
    except FileNotFoundError:
        return Known(())
    except OSError as error:
        return denied(path, error)
    stamped = ((_AUDITED.search(text), text) for text in texts)
    return Known(tuple(LogLine(max(0.0, now - float(found[1])), text) for found, text in stamped if found is not None))


def _devices(directory: Path) -> list[Path]:
    """Return the device files that a server needs: two of the driver's own, and one for each GPU that has one."""
    numbered = sorted(path for path in directory.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal())
    return [directory / "nvidiactl", directory / "nvidia-uvm", *numbered]


def _mode(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.stat().st_mode & 0o7777
    return None
