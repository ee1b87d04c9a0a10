"""The compute modes that mpsd found on GPUs before it changed them: on disk before the change, and until it is undone.

They are kept in the state directory, because a service manager may remove the runtime directory with the service. They
count for this boot alone, since a reboot resets the mode (nvml.h). So they need not be forced to the disk either: who
loses power loses the mode with it.
"""

import contextlib
import json
from pathlib import Path

from mpsd.core.compute_mode import ComputeMode
from mpsd.system import atomic_file, clock


class SavedComputeModes:
    """The modes by the UUIDs of their GPUs. One writer: who holds the lock of the runtime directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_gpu: dict[str, ComputeMode] = {}

    def load(self) -> None:
        """Read what was written down in this boot. Raises OSError, and ValueError for what cannot be understood."""
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
        """Rename a file that cannot be understood, for a person to look at, and return where it is. Raises OSError."""
        return self.path.rename(aside(self.path))

    def note(self, gpu: str, mode: ComputeMode) -> None:
        """Write a GPU's mode down, unless one is. Raises OSError, and then nothing has changed."""
        if gpu not in self.by_gpu:
            self._write({**self.by_gpu, gpu: mode})

    def forget(self, gpu: str) -> None:
        """Strike a GPU's mode out. Raises OSError, and then nothing has changed."""
        self._write({each: mode for each, mode in self.by_gpu.items() if each != gpu})

    def _write(self, found: dict[str, ComputeMode]) -> None:
        if found:
            atomic_file.write(self.path, json.dumps({"boot_id": clock.boot_id(), "found": found}).encode())
        else:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        self.by_gpu = found


def aside(path: Path) -> Path:
    """Return where a record is put that cannot be understood."""
    return path.with_suffix(".damaged")
