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

CONNECTIONS = 128
"""Connections that the clients of a GPU share, 2 of each client where it does not set CUDA_DEVICE_MAX_CONNECTIONS.
Measured on 580 (H200, H100): with 8 each, 15 clients fit, and with 32 each, 3; the next context gets OUT_OF_MEMORY. So
120 fit and 128 do not. Mixed values and other drivers are not measured; NVIDIA only says that a higher value makes
fewer clients fit."""

CONTEXT_BYTES = 640 * 2**20
"""Memory that NVML may show of a client at its limit beyond that limit. The limit counts 145 to 517 MiB of a context
(580, H200); what NVML shows of it there is not measured."""

MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The variable of a client for its number of connections, from 1 to `MOST_CONNECTIONS`. Source: CUDA C++ Programming
Guide, "CUDA Environment Variables", and NVIDIA's page on the variables of MPS."""

MOST_CONNECTIONS = 32

DEFAULT_CONNECTIONS = 2
"""The connections of a client that does not set them. Source: as for `CLIENTS_R590`."""

CLIENT_PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
"""The variable with which a client starts with another priority. Source: NVIDIA, "Multi-Process Service", environment
variables."""

UNASKED = {CLIENT_PRIORITY: "0", "CUDA_MPS_PROTOCOL_VERSION": "2", "CUDA_MPS_SM_PARTITION": ""}
"""The variables of MPS that a program has only if its lease does: each with the value of a program without it, where
there is one. An inherited one is of another job or control daemon: mpsd's speak protocol 2, and have no partitions.
Source: NVIDIA's pages on the variables of MPS, and on protocol 3."""

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


def places(connections: int | None, clients_max: int) -> int:
    """Return how many places of a GPU for this many clients a client takes; None: it does not set its connections.

    The places share the connections, so a client takes as many as have its connections together.
    """
    return max(-(-(connections or 0) * clients_max // CONNECTIONS), 1)


def connections(text: str) -> int | None:
    """Return the connections that a client's variable asks for; None for no number, and the most for a greater one."""
    return min(int(text[:9]), MOST_CONNECTIONS) if text.isascii() and text.isdecimal() else None


def binds(driver_branch: int | None) -> Binds:
    """Return when the limits bind; a driver where that was not measured counts as the one that takes more care."""
    return Binds.CONNECT if driver_branch in CONNECTING_BINDS else Binds.CONTEXT
