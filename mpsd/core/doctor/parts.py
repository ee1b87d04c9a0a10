"""The parts in MPS that a process can have."""

from typing import Final

DAEMON: Final = "control daemon"
SERVER: Final = "server"
FRONT_END: Final = "front-end"
"""The parts in MPS that a process can have."""

UNREAD: Final = "process of MPS"
"""The part of a process that the kernel calls as NVIDIA's programs, and whose arguments are not known."""

MPSD: Final = "mpsd"
