"""The compute modes that mpsd found on GPUs before it changed them, on disk from before the change until its end.

The file is in the state directory, because a service manager may remove the runtime directory with the service. It is
valid for one boot, since a reboot resets the modes (nvml.h). It is not synchronised to the disk: a loss of power resets
the modes, too.
"""

from pathlib import Path

from msgspec import Struct

from mpsd.core.compute_mode import ComputeMode
from mpsd.system import clock
from mpsd.system.files import encoding


class _File(Struct, forbid_unknown_fields=True):
    boot_id: str
    found: dict[str, ComputeMode]


class SavedComputeModes:
    """The saved modes by GPU UUID. Its only writer is the process that holds the lock of the runtime directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_gpu: dict[str, ComputeMode] = {}

    def load(self) -> None:
        """Read the modes that were saved in this boot.

        Raises OSError, and DamagedError.
        """
        file = encoding.read(self.path, _File)
        if file is not None and file.boot_id == clock.boot_id():
            self.by_gpu = file.found

    def set_aside(self) -> Path:
        """Rename a file that does not parse, so that an operator can inspect it; return its new path.

        Raises OSError.
        """
        return self.path.rename(aside(self.path))

    def note(self, gpu: str, mode: ComputeMode) -> None:
        """Save a GPU's mode, unless one is saved. Raises OSError and then changes nothing."""
        if gpu not in self.by_gpu:
            self._write({**self.by_gpu, gpu: mode})

    def forget(self, gpu: str) -> None:
        """Remove a GPU's mode from the record. Raises OSError and then changes nothing."""
        self._write({each: mode for each, mode in self.by_gpu.items() if each != gpu})

    def _write(self, found: dict[str, ComputeMode]) -> None:
        if found:
            encoding.store(self.path, _File(clock.boot_id(), found))
        else:
            self.path.unlink(missing_ok=True)
        self.by_gpu = found


def aside(path: Path) -> Path:
    """Return the new path of a record that does not parse."""
    return path.with_suffix(".damaged")
