"""How a process ended: the kernel's record for a process that is not mpsd's child, and a description in words."""

import fcntl
import os
import signal
import struct
from typing import Final

_INFO: Final = struct.Struct("=Q52xi")
"""The first version of `struct pidfd_info`, from which only the mask and the exit status are used."""

_GET_INFO: Final = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT: Final = 1 << 3
"""PIDFD_GET_INFO and PIDFD_INFO_EXIT. Source: linux/pidfd.h."""


def of_pidfd(pidfd: int) -> int | None:
    """Return the return code of a process that its parent has reaped; None where the kernel does not report it.

    Linux 6.15 and newer report it (measured on 6.18).
    """
    answer = bytearray(_INFO.size)
    _INFO.pack_into(answer, 0, _INFO_EXIT, 0)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, answer)
    except OSError:
        return None  # older kernels do not have this call
    mask, status = _INFO.unpack(answer)
    return os.waitstatus_to_exitcode(status) if mask & _INFO_EXIT else None


def describe(returncode: int | None) -> str:
    """Describe how a process ended, from a return code in the form of subprocess; None where it is unknown."""
    if returncode is None:
        return "ended in a way that is not known (it was adopted, so its status went to another parent)"
    name = signal_of(returncode)
    return f"killed by {name}" if name is not None else f"exited with status {returncode}"


def signal_of(returncode: int | None) -> str | None:
    """Return the name of the signal that ended a process; None for a process that exited, or where it is unknown."""
    if returncode is None or returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:  # the real-time signals between the first and the last have no name
        return f"signal {-returncode}"
