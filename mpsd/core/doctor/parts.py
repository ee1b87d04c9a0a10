"""The parts in MPS that a process can have, and where its clients look."""

from typing import Final

DAEMON: Final = "control daemon"
SERVER: Final = "server"
FRONT_END: Final = "front-end"
"""The parts in MPS that a process can have."""

UNREAD: Final = "process of MPS"
"""The part of a process that the kernel calls as NVIDIA's programs, and whose arguments are not known."""

MPSD: Final = "mpsd"

USUAL: Final = ("/tmp/nvidia-mps", "/run/nvidia-mps")  # noqa: S108 - where clients look
"""The default pipe directories where CUDA_MPS_PIPE_DIRECTORY is not set; only root from R615 on uses the second, with
protocol 3 (NVIDIA's documentation)."""
