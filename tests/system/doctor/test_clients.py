"""Doctor's readers of processes with leases."""

import os

from mpsd.core.model import Known
from mpsd.system.doctor.proc import look


def test_a_process() -> None:
    """A process is read with its arguments and the relevant variables; an ended one is left out."""
    seen = look(os.getpid(), "lease-1", gpu="GPU-1", granted=7)
    assert seen is not None
    assert (seen.pid, seen.lease, seen.gpu, seen.granted) == (os.getpid(), "lease-1", "GPU-1", 7)
    assert any("python" in argument or "pytest" in argument for argument in seen.arguments)
    assert isinstance(seen.variables, Known)
    assert all(name.startswith(("CUDA_", "XLA_", "TF_")) for name in seen.variables.value)
    assert look(2**22 + 1, "lease-1", gpu="GPU-1", granted=7) is None
