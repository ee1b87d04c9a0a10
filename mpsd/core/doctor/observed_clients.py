"""Observations about the processes that have leases."""

from collections.abc import Mapping
from dataclasses import dataclass

from mpsd.core.model import Reading


@dataclass(frozen=True, slots=True)
class ViolationAnswer:
    """An open violation in the answer of a running mpsd."""

    kind: str
    pid: int
    because: str
    hint: str


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """The nearest control group above a process that limits its memory."""

    path: str
    limit: int
    """Bytes of the node's own memory; CUDA's host memory counts towards it."""
    used: int


@dataclass(frozen=True, slots=True)
class ClientSeen:
    """A process that holds a lease on a GPU, or is a client of one."""

    pid: int
    lease: str
    gpu: str
    """The UUID of the GPU."""
    granted: int
    """Bytes of memory that the lease has on that GPU."""
    arguments: tuple[str, ...]
    variables: Reading[Mapping[str, str]]
    """Its environment at its start, as far as CUDA and frameworks use it."""
    group: Reading[MemoryGroup | None]
    """None: no control group limits its memory."""
    frameworks: frozenset[str] = frozenset()
    """The framework libraries that it has loaded, as far as that can be read."""
    client: bool = True
    """Whether it is a client of MPS, and so has contexts."""
