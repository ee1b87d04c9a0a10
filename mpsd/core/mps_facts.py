"""Facts about MPS and the hardware that it runs on, each with its source."""

from enum import StrEnum
from typing import Final


class Binds(StrEnum):
    """The moment in which a server's limits bind a client.

    The documents only say that "clients created afterwards" have a server's limits. They do not say whether a client is
    a process that called cuInit, or a context of it, and NVIDIA's logs name clients by pid *and* context.
    """

    CONNECT = "connect"
    """When the process initialises CUDA, which connects it; all of its contexts get the limits of that moment."""
    CONTEXT = "context"
    """When the process makes a context, which may be much later, and again with each context."""


CONNECTING_BINDS: Final = frozenset({580})
"""The driver branches on which the limits were measured to bind when a client connects: both limits, before its first
and its second context and at a reset, raised, lowered or closed (580.159.04 on an H200, nine of nine)."""

MINIMUM_COMPUTE_CAPABILITY = (3, 5)
"""MPS needs compute capability 3.5. Source: NVIDIA, "Multi-Process Service", section "Limitations"."""

VOLTA = (7, 0)
"""V100 is compute capability 7.0, the first with Volta MPS. Source: NVIDIA, CUDA C++ Programming Guide, "Compute
Capabilities". (NVIDIA's own device plugin compares with 7.5 and so takes V100 for older than it is.)"""

CLIENTS_BEFORE_VOLTA = 16
"""Client contexts per device before Volta. Source: NVIDIA, "Multi-Process Service", "Volta MPS"."""

CLIENTS_VOLTA = 48
"""Client contexts per device on Volta and later, up to driver 580 (CUDA 13.0). Source: as above. On 580 they are 48
with CUDA_DEVICE_MAX_CONNECTIONS unset or 2, 15 with 8, and 3 with 32 (measured on an H200)."""

CLIENTS_R590 = 60
"""Client contexts per device from driver 590 (CUDA 13.1) on, with CUDA_DEVICE_MAX_CONNECTIONS=2, which MPS sets by
itself; with a higher value, fewer fit. Source: NVIDIA MPS documentation, release 590 on."""

R590 = 590
"""The first driver branch with `CLIENTS_R590`."""

SOCKET_PATH_BYTES = 107
"""The longest path of a unix socket: sizeof(sun_path) less the terminating NUL. Source: unix(7)."""

CONTROL_PATH_BYTES = 106
"""The longest path of a control daemon's socket. A daemon that needs a longer one prints nothing, exits with status 1
and does not listen (measured, all four versions: with `-f`, the pipe directory may have 87 bytes, and not 88)."""

SERVER_END = 2.0
"""Seconds after the death of a control daemon within which its server ends, and its clients' contexts with it: one
second at most (measured on 580, five of five; other drivers are not measured)."""

LONGEST_SOCKET_NAME = "control_privileged"
"""The longest name of the sockets that a control daemon binds in its pipe directory (measured, all four versions)."""


def binds(driver_branch: int | None) -> Binds:
    """Return when the limits bind; a driver where that was not measured counts as the one that takes more care."""
    return Binds.CONNECT if driver_branch in CONNECTING_BINDS else Binds.CONTEXT
