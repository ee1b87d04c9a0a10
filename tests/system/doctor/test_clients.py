"""Doctor's readers of processes with leases."""

import asyncio
import os

from mpsd.core.doctor.finding import ClientSeen
from mpsd.core.model import Known
from mpsd.system.doctor.proc import look
from mpsd.system.processes.foreign_reader import ForeignReader


def looked(pid: int) -> ClientSeen | None:
    async def read() -> ClientSeen | None:
        async with ForeignReader() as reader:
            return next(iter(await look([(pid, "lease-1", "GPU-1", 7)], reader)), None)

    return asyncio.run(read())


def test_a_process() -> None:
    """A process is read with its arguments and the relevant variables; an ended one is left out."""
    seen = looked(os.getpid())
    assert seen is not None
    assert (seen.pid, seen.lease, seen.gpu, seen.granted) == (os.getpid(), "lease-1", "GPU-1", 7)
    assert any("python" in argument or "pytest" in argument for argument in seen.arguments)
    assert isinstance(seen.variables, Known)
    assert all(name.startswith(("CUDA_", "XLA_", "TF_")) for name in seen.variables.value)
    assert looked(2**22 + 1) is None
