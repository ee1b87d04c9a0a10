"""Simulated GPUs as files for all processes of a node: the memory that each process holds, and each GPU's faults.

A directory stands for the node's GPUs, with a subdirectory for each GPU, by UUID. It has a file for each process with a
context there, and files for the GPU's faults. As with a real driver, the memory of a process is free once it is gone.

The same directory has the settings of the simulated driver, each in a file (`Setting`), which a server reads when it
starts. For a node, the path of the directory is <runtime_dir>/simulated.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.units import GIB

MEMORY: Final = 80 * GIB
"""Bytes of each simulated GPU."""

VARIABLE: Final = "MPSD_SIMULATED_GPUS"
"""Names the directory to a client, as /dev/nvidia* shows a real GPU: outside MPS it has no other source."""


FAULTS: Final = "faults"
"""The file with the reports of all GPUs of a node, the oldest first: a UUID and an Xid per line."""

_COMPUTE_MODE: Final = "compute_mode"
"""The file of a GPU with its compute mode, if that was ever set."""


class Kind(StrEnum):
    """The NVML list of a process: as a client of MPS (`M+C` in nvidia-smi), or as any other process (`C`)."""

    COMPUTE = "Compute"
    MPS_COMPUTE = "MPSCompute"


class Held(NamedTuple):
    """The memory that a process holds on a GPU, in bytes, and the kind of its use."""

    memory: int
    kind: Kind


def start_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot, or None when there is no such process (proc(5))."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(b")")[2].split()[19])


class Device:
    """One simulated GPU."""

    def __init__(self, directory: Path, uuid: str) -> None:
        self.uuid = uuid
        self._path = directory / uuid

    def create(self) -> None:
        """Make its directory, for processes of every uid to use; an existing one stays unchanged."""
        with contextlib.suppress(FileExistsError):
            self._path.mkdir(parents=True)
            self._path.chmod(0o1777)
            (self._path / "lock").touch()
            (self._path / "lock").chmod(0o666)

    # -- memory --

    def hold(self, pid: int, memory: int, kind: Kind, ticks: int | None = None) -> bool:
        """Record that a process holds this many bytes in all; False where the GPU does not have them.

        `ticks` is its start time, for a process in a container that has another `pid` outside. It sees none of the
        other processes, and so their memory does not count for it.
        """
        with self._locked():
            others = sum(held.memory for each, held in self.processes().items() if each != pid)
            if others + memory > MEMORY:
                return False
            new = self._path / f"{pid}.new"
            new.write_text(f"{ticks or start_ticks(pid)} {memory} {kind}\n", encoding="utf-8")
            new.rename(self._path / str(pid))
            return True

    def release(self, pid: int) -> None:
        """Record that a process holds nothing any more, as when its context ends before it does."""
        (self._path / str(pid)).unlink(missing_ok=True)

    def processes(self) -> dict[int, Held]:
        """Return what each living process holds, by pid."""
        found: dict[int, Held] = {}
        for path in self._path.iterdir():
            if not path.name.isdecimal():
                continue
            with contextlib.suppress(FileNotFoundError):  # the memory was released meanwhile
                ticks, memory, kind = path.read_text(encoding="utf-8").split()
                if start_ticks(int(path.name)) == int(ticks):
                    found[int(path.name)] = Held(int(memory), Kind(kind))
        return found

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._path / "lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # -- faults and settings, for tests and demonstrations --

    @property
    def lost(self) -> bool:
        """Whether the GPU has fallen off the bus, so that all calls to it fail."""
        return (self._path / "lost").exists()

    def lose(self) -> None:
        """Make the GPU fall off the bus."""
        (self._path / "lost").touch()

    def recover(self) -> None:
        """Bring the GPU back, as after a reset."""
        (self._path / "lost").unlink(missing_ok=True)

    @property
    def compute_mode(self) -> ComputeMode:
        try:
            return ComputeMode((self._path / _COMPUTE_MODE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return ComputeMode.DEFAULT

    def set_compute_mode(self, mode: ComputeMode) -> None:
        """Set its compute mode, as `nvidia-smi -c` does; existing contexts stay."""
        new = self._path / f"{_COMPUTE_MODE}.{os.getpid()}"
        new.write_text(mode, encoding="utf-8")
        new.rename(self._path / _COMPUTE_MODE)

    @property
    def available(self) -> bool:
        """Whether its compute mode allows a process without a context to make one."""
        match self.compute_mode:
            case ComputeMode.PROHIBITED:
                return False
            case ComputeMode.EXCLUSIVE_PROCESS:
                return not self.processes()
            case _:
                return True

    def setting(self, which: "Setting") -> str | None:
        """Return a setting of the simulated driver; None where it was not set."""
        return setting(self._path.parent, which)

    def report(self, xid: int) -> None:
        """Report a fault, by its number in NVIDIA's list of Xids."""
        with (self._path.parent / FAULTS).open("a", encoding="utf-8") as faults:
            faults.write(f"{self.uuid} {xid}\n")


def there(directory: Path) -> list[Device]:
    """Return the GPUs of a directory in the order of their UUIDs, which is the order of their indices."""
    return [Device(directory, path.name) for path in sorted(directory.glob("GPU-*"))]


class Setting(StrEnum):
    """A setting of the simulated driver, by the name of its file. Servers that start from then on have it."""

    BINDS = "binds"
    """The moment in which their limits bind, as `Binds` has it; without the file, when a client connects."""
    CONTEXT_MEMORY = "context_memory"
    """The bytes that a context takes of its memory limit; without the file, none.

    The limit covers CUDA's own part of the memory, whose size NVIDIA does not document: 145 to 517 MiB with 25 to 100 %
    of the threads (measured on 580, an H200), 23 MiB on a T4 (535, by others).
    """
    OUTLIVES = "outlives"
    """With this file, a server serves its clients to their end when its control daemon dies.

    By default it ends within a moment, and its clients' contexts with it: measured on 580, other drivers are unknown.
    """
    INTEGRATED = "integrated"
    """With this file, a node that starts has GPUs that share the memory of their host, of which NVML tells nothing."""
    NO_MPS_ATTRIBUTE = "no_mps_attribute"
    """With this file, CUDA does not tell a process whether it uses MPS (CU_DEVICE_ATTRIBUTE_MPS_ENABLED)."""


def setting(directory: Path, which: Setting) -> str | None:
    """Return the content of a setting; None where it was not set."""
    try:
        return (directory / which).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def set_setting(directory: Path, which: Setting, value: str = "yes") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / which).write_text(f"{value}\n", encoding="utf-8")
