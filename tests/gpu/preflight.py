"""A look at a machine with a GPU, in a minute: `python -m tests.gpu.preflight`.

It prints the machine's programs, modules and rights, and the raw answers of its control daemon: under 0.1 % and 1 MiB,
and with a client. It changes nothing, and names a program that is missing. With MPSD_GPU_SIMULATED=1 the simulator's
control daemon answers.
"""

import contextlib
import importlib.metadata
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.gpu import machine
from tests.gpu.bare import LONG
from tests.gpu.questions import CLOSED, Mps, do
from tests.gpu.table import Row, measured, print_measured, print_table, said

COMMANDS: Final = (
    "uname -a",
    "cat /proc/driver/nvidia/version",
    "ls -la /dev/nvidia* /dev/shm",
    "df -h /dev/shm /tmp /run",
    "mount | grep -E 'nvidia|cgroup|shm| / '",
    "grep -E 'Cap|Seccomp|NoNew|Uid' /proc/self/status",
    "sh -c 'ulimit -l; ulimit -n'",
    "ldconfig -p | grep -E 'libcuda.so|libnvidia-ml|ptxjit'",
    "ls -l /usr/local/nvidia /usr/local/nvidia/bin /usr/local/nvidia/lib64 /driver-root",
    "nvidia-smi",
    "nvidia-smi -q -d CLOCK,POWER,TEMPERATURE,ECC,COMPUTE",
)

MODULES: Final = ("click", "hypothesis", "msgspec", "pytest", "structlog")


def shown(command: str) -> str:
    """Return what a command prints, or why it printed nothing."""
    try:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=LONG, check=False)  # noqa: S602 - the commands above
    except subprocess.TimeoutExpired:
        return f"no answer within {LONG:g} s"
    return (done.stdout + done.stderr).rstrip() or f"nothing, status {done.returncode}"


def programs() -> Iterator[Row]:
    for name in (machine.CONTROL, machine.SERVER, "nvidia-smi"):
        yield name, shutil.which(name) or "not in PATH"
    if shutil.which(machine.CONTROL):
        yield f"{machine.CONTROL} -v", shown(f"{machine.CONTROL} -v")
    yield "Python", f"{sys.version.split()[0]}, {sys.executable}"
    for module in MODULES:
        try:
            yield f"module {module}", importlib.metadata.version(module)
        except importlib.metadata.PackageNotFoundError:
            yield f"module {module}", "not here"


def answers(root: Path) -> Iterator[Row]:
    """Yield the raw answers of the control daemon, and the lines of its logs about servers."""
    with Mps(root / "preflight") as mps:
        yield from asked(mps, ("help", "get_server_list", "get_default_device_pinned_mem_limit 0", "nothing"))
        for what, limits in (("0.1 % and 1 MiB", CLOSED), ("30 % and 1044 MiB", ("30", "1044M"))):
            yield f"{what} are set, and read back", mps.set(limits)
            yield from one_client(mps, f"under {what}")
    for name in ("out", "server.log", "control.log"):
        with contextlib.suppress(FileNotFoundError):
            lines = (root / "preflight" / name).read_text(errors="replace").splitlines()
            about = [line for line in lines if "server" in line.lower() and "Cmd:" not in line]
            yield from ((f"a line about servers in {name}", line) for line in about[-60:])


def asked(mps: Mps, questions: Sequence[str]) -> Iterator[Row]:
    for question in questions:
        yield f"> {question}", mps.asked(question)


def one_client(mps: Mps, what: str) -> Iterator[Row]:
    """Yield what a client gets, what its server answers meanwhile and afterwards, and what nvidia-smi shows."""
    begin = time.monotonic()
    with mps.client() as client:
        answer = do(client, "init", "create", "info", seconds=30)
        took = time.monotonic() - begin
        servers = mps.servers
        if not answer["ok"]:
            yield f"a client {what}", f"{said(answer)}, after {took:.1f} s; servers: {servers or 'none'}"
            return
        yield f"a client {what}", f"{mps.doubt(client)}{answer}, after {took:.1f} s; servers: {servers or 'none'}"
        for server in servers:
            names = ("get_server_status", "get_client_list", "get_active_thread_percentage", "get_device_client_list")
            yield from asked(mps, [f"{name} {server}" for name in names])
            yield from asked(mps, [f"get_device_pinned_mem_limit {server} 0", "ps"])
            yield (
                f"server {server}",
                shown(f"grep -E 'Uid|Cap|PPid' /proc/{server}/status; ls /proc/{server}/fd | wc -l"),
            )
        yield "nvidia-smi", shown("nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv")
        yield f"a client {what} allocates", f"{do(client, 'alloc-until-refused', seconds=30)}"
        yield f"a client {what} works", f"{do(client, 'busy 0.2')}"
        client.end()
    yield from asked(mps, [f"get_client_list {server}" for server in servers])


def main() -> int:
    for command in COMMANDS:
        print(f"\n$ {command}\n{shown(command)}", flush=True)
    print()
    print_table("here", programs())
    print()
    if not machine.simulated():
        for name in (machine.CONTROL, machine.SERVER):
            if shutil.which(name) is None:
                print(f"{name} is not in PATH, so MPS is not tried here")
                return 0
    return print_measured("answer", lambda root: measured("preflight", answers(root)))


if __name__ == "__main__":
    sys.exit(main())
