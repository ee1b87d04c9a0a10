"""Doctor's readers of processes with leases."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from mpsd.core.doctor.finding import ClientSeen
from mpsd.core.model import Known, Unknown
from mpsd.system.doctor.proc import look
from mpsd.system.processes.foreign_reader import ForeignReader


def looked(pid: int) -> ClientSeen | None:
    async def read() -> ClientSeen | None:
        async with ForeignReader() as reader:
            return next(iter(await look([(pid, "lease-1", "GPU-1", 7, {})], reader)), None)

    return asyncio.run(read())


def test_a_process() -> None:
    """A process is read with its arguments and the relevant variables; an ended one is left out."""
    seen = looked(os.getpid())
    assert seen is not None
    assert (seen.pid, seen.lease, seen.gpu, seen.granted) == (os.getpid(), "lease-1", "GPU-1", 7)
    assert any("python" in argument or "pytest" in argument for argument in seen.arguments)
    assert isinstance(seen.variables, Known)
    assert all(name.startswith(("CUDA_", "XLA_", "TF_", "JAX_")) for name in seen.variables.value)
    assert looked(2**22 + 1) is None


TITLE = """
import ctypes, subprocess, sys
if "child" not in sys.argv:
    subprocess.run([sys.executable, sys.argv[0], "child"])
    sys.exit()
with open("/proc/self/stat", "rb") as file:
    fields = file.read().rpartition(b")")[2].split()
for first, title in ((45, b"VLLM::EngineCore"), (47, b"")):
    begin, end = int(fields[first]), int(fields[first + 1])
    ctypes.memmove(begin, title.ljust(end - begin, b"\\0"), end - begin)
print("titled", flush=True)
sys.stdin.read()
"""


def test_a_title(tmp_path: Path) -> None:
    """A process that has written a title over its arguments is read with those of the process that started it."""
    (tmp_path / "vllm").write_text(TITLE)
    command = [sys.executable, f"{tmp_path}/vllm", "serve", "--gpu-memory-utilization", "0.9"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"titled\n"
        (pid,) = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        seen = looked(int(pid))
        assert started.stdin is not None
        started.stdin.close()
    assert seen is not None
    assert (seen.arguments[0], any(seen.arguments[1:])) == ("VLLM::EngineCore", False)
    assert seen.ancestors[0] == tuple(command)
    assert isinstance(seen.variables, Unknown)
