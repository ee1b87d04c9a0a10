"""Control daemons on a node with mpsd: which one is mpsd's, and what another one means. Pure.

The doctor's checks and the violations of leases judge by this alone.
"""

from collections.abc import Collection
from enum import Enum, auto
from pathlib import Path
from typing import Final, NamedTuple

COMM: Final = "nvidia-cuda-mps"
"""The kernel's name for both of NVIDIA's programs, cut to 15 bytes. Source: proc(5), /proc/PID/comm."""

USUAL: Final = ("/tmp/nvidia-mps", "/run/nvidia-mps")  # noqa: S108 - where clients look
"""The default pipe directories where CUDA_MPS_PIPE_DIRECTORY is not set; only root from R615 on uses the second, with
protocol 3 (NVIDIA's documentation)."""


class Whose(Enum):
    """Whose a control daemon is, by its process and its pipe directory."""

    MPSD = auto()
    """It is one of mpsd's."""
    FOREIGN = auto()
    """It is on a directory of mpsd's, and not mpsd's: both compete for the directory."""
    USUAL = auto()
    """It is on a directory that clients use by default."""
    OTHER = auto()
    """It is on a directory of its own: its clients share GPUs with mpsd's, and mpsd neither counts nor limits them."""


def is_mpsds(directory: str, runtime_dir: Path) -> bool:
    """Tell whether a pipe directory is one of mpsd's."""
    return Path(directory).parent == runtime_dir / "mps"


def whose(pid: int, directory: str, ours: Collection[int], runtime_dir: Path, *, apart: bool = False) -> Whose:
    """Judge a control daemon. `ours` are the pids of mpsd's, and `apart` tells that it is in another container."""
    # 1. Its process alone makes it mpsd's: any other one can be on the same directory.
    # 2. In another container, the same path is another directory.
    if pid in ours:
        return Whose.MPSD
    if is_mpsds(directory, runtime_dir) and not apart:
        return Whose.FOREIGN
    return Whose.USUAL if (directory or USUAL[0]) in USUAL else Whose.OTHER


def described(pid: int, uid: int | None, directory: str) -> str:
    """Describe a control daemon, for a sentence."""
    return f"pid {pid} (uid {uid}) is a control daemon on {directory}"


class OtherDaemon(NamedTuple):
    """A control daemon that is not mpsd's, and has a server on a GPU of mpsd's."""

    pid: int
    uid: int | None
    directory: str
    """Its pipe directory; empty where that cannot be read."""
    servers: frozenset[int]
    """The pids of its servers on that GPU."""
    lease: str = ""
    """The lease in whose environment or family it was started."""
    starter: int = 0
    """The process that started it; 0 where that is gone."""

    def __str__(self) -> str:
        """Describe it and its origin, for a sentence."""
        by = f"process {self.starter}" if self.starter else "a process that has ended"
        origin = f", which {by} of lease {self.lease} started" if self.lease else ""
        return described(self.pid, self.uid, self.directory or "a directory that mpsd cannot read") + origin
