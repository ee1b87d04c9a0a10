"""Doctor's readers of processes with leases: real processes, and control groups as files."""

import os
from pathlib import Path

from mpsd.core.doctor.observed_clients import MemoryGroup
from mpsd.core.model import Known
from mpsd.system.doctor.clients import look, look_at_all, memory_group


def group(root: Path, path: str, **files: str) -> Path:
    """Make a control group with these files."""
    there = root / path
    there.mkdir(parents=True)
    for name, text in files.items():
        (there / name.replace("_in_", "_in_").replace("memory_", "memory.", 1)).write_text(f"{text}\n")
    return there


def test_the_nearest_limit_counts(tmp_path: Path) -> None:
    """The nearest group with a limit counts, in either version of control groups."""
    first, second = tmp_path / "memory", tmp_path
    top = group(second, "pod", memory_max="1048576", memory_current="4096")
    group(second, "pod/a", memory_max="max", memory_current="1")
    assert memory_group("0::/pod/a\n", first, second) == MemoryGroup(str(top), 1048576, 4096)
    assert memory_group("0::/other\n", first, second) is None
    old = group(first, "job", memory_limit_in_bytes="2097152", memory_usage_in_bytes="5")
    assert memory_group("4:cpu:/x\n3:memory:/job\n", first, second) == MemoryGroup(str(old), 2097152, 5)
    group(first, "open", memory_limit_in_bytes="9223372036854771712")
    assert memory_group("3:memory:/open\n", first, second) is None


def test_no_path_of_another_namespace(tmp_path: Path) -> None:
    """A group outside the caller's namespace has no path here."""
    group(tmp_path, "secret", memory_max="1")
    assert memory_group("0::/../secret\n", tmp_path / "memory", tmp_path / "x") is None


def test_a_process() -> None:
    """A process is read with its arguments and the relevant variables; an ended one is left out."""
    seen = look(os.getpid(), "lease-1", gpu="GPU-1", granted=7, client=False)
    assert seen is not None
    assert (seen.pid, seen.lease, seen.gpu, seen.granted, seen.client) == (os.getpid(), "lease-1", "GPU-1", 7, False)
    assert any("python" in argument or "pytest" in argument for argument in seen.arguments)
    assert isinstance(seen.variables, Known)
    assert all(name.startswith(("CUDA_", "XLA_", "TF_")) for name in seen.variables.value)
    assert look_at_all([(2**22 + 1, "lease-1", "GPU-1", 7, True)]) == ()
