"""The compute modes that mpsd found on GPUs before it changed them, on disk from before the change until its end.

The file is in the state directory, because a service manager may remove the runtime directory with the service. It is
valid for one boot, since a reboot resets the modes (nvml.h). It is not synchronised to the disk: a loss of power resets
the modes, too.
"""

import contextlib
import json
from pathlib import Path

from mpsd.core.compute_mode import ComputeMode
from mpsd.system import atomic_file, clock


class SavedComputeModes:
    """The saved modes by GPU UUID. Its only writer is the process that holds the lock of the runtime directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_gpu: dict[str, ComputeMode] = {}

    def load(self) -> None:
        """Read the modes that were saved in this boot.

        Raises OSError, and ValueError for a file that does not parse.
        """
        raw = atomic_file.read(self.path)
        if raw is None:
            return
        file = json.loads(raw)
        match file:
            case {"boot_id": str(boot), "found": dict(found), **more} if not more:
                if boot == clock.boot_id():
                    self.by_gpu = {str(gpu): ComputeMode(mode) for gpu, mode in found.items()}
            case _:
                raise ValueError("it is not a record of compute modes")

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
            atomic_file.write(self.path, json.dumps({"boot_id": clock.boot_id(), "found": found}).encode())
        else:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        self.by_gpu = found


def aside(path: Path) -> Path:
    """Return the new path of a record that does not parse."""
    return path.with_suffix(".damaged")
