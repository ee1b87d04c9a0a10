"""What is known of the processes that have leases when the checks of them are made."""

from collections.abc import Mapping
from dataclasses import dataclass

from mpsd.core.model import Reading


@dataclass(frozen=True, slots=True)
class ViolationAnswer:
    """A violation that a running mpsd says is open."""

    kind: str
    pid: int
    because: str
    hint: str


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """The nearest control group above a process that limits its memory."""

    path: str
    limit: int
    """Bytes of the node's own memory, which CUDA's host memory counts against."""
    used: int


@dataclass(frozen=True, slots=True)
class ClientSeen:
    """A process that holds a lease on a GPU, or is a client of one."""

    pid: int
    lease: str
    gpu: str
    """The UUID of the GPU."""
    granted: int
    """Bytes of memory that the lease has there."""
    arguments: tuple[str, ...]
    variables: Reading[Mapping[str, str]]
    """Its environment, as it was started with, as far as CUDA and frameworks look at it."""
    group: Reading[MemoryGroup | None]
    """None: no control group limits its memory."""
    frameworks: frozenset[str] = frozenset()
    """The libraries of frameworks that it has loaded, as far as that can be read."""
    client: bool = True
    """Whether it is a client of MPS, and so has contexts."""
