"""A process that uses CUDA on a simulated GPU, and waits at the gate of a lease: `python gated_client.py`.

It prints a line with its pid, and then answers each line of its stdin:

- `init`: make a context; the answer has `mps`
- `put NAME VALUE`: set a variable of its own, which /proc/PID/environ never shows
- `gate LEASE PROCESSES WITHIN`: wait at the gate of a lease
- `keep`: have a child that keeps the connection to mpsd open when this process is killed, until stdin is closed
- `crowd SIZE LEASE PROCESSES WITHIN`: have so many children that make a context, in the environments of the lease's
  shares (SHARES), and wait at the gate; the answer has the distinct ends of their waits, each with its number
"""

import json
import os
import select
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.driven_program import DrivenProgram
from tests.node import Node


class GatedClient(DrivenProgram):
    """Such a process, in the environment of a lease."""

    def __init__(self, node: Node, environment: Mapping[str, str]) -> None:
        """Start it; it connects to MPS at `init`."""
        here = {"PYTHONPATH": str(Path(__file__).parent.parent), "MPSD_SOCKET": str(node.socket)}
        super().__init__([sys.executable, "-m", "tests.gated_client"], {**here, **environment})

    def init(self) -> dict[str, Any]:
        return self.do("init")

    def wait(self, lease: str, processes: int, within: float = 60) -> None:
        """Have it wait at a gate; `answer` has the end of that."""
        self.tell(f"gate {lease} {processes} {within}")


def _gate(client: Any, lease: str, processes: str, within: str) -> dict[str, Any]:
    from mpsd.core.errors import MpsdError  # noqa: PLC0415 - as below

    try:
        return {"ok": True, **client.gate(lease, int(processes), float(within))}
    except MpsdError as error:
        return {"ok": False, "error": error.detail, "code": error.code, "hint": error.hint}


def _keep() -> None:
    if os.fork() == 0:
        closed = select.poll()
        closed.register(0, 0)
        closed.poll()
        os._exit(0)


def _crowd(size: int, gate: list[str]) -> dict[str, Any]:
    """Have children at a gate, and return the distinct ends of their waits, each with its number."""
    shares, ends, (reads, writes) = json.loads(os.environ["SHARES"]), Counter[str](), os.pipe()
    for number in range(size):
        if os.fork() == 0:
            os.environ.update(shares[number % len(shares)])
            cuda, client = _made()
            cuda.current()
            os.write(writes, f"{json.dumps(_gate(client, *gate))}\n".encode())
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as said:
        ends.update(said)
    for _ in range(size):
        os.wait()
    return {"ok": True, "ends": [[json.loads(line), count] for line, count in ends.items()]}


def _made() -> tuple[Any, Any]:
    from mpsd.client.client import Client  # noqa: PLC0415 - the tests import this module for its class
    from mpsd.simulator.cuda_process import CudaProcess  # noqa: PLC0415 - as above

    return CudaProcess(), Client()


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


def main() -> None:
    cuda, client = _made()
    _say({"ok": True, "pid": os.getpid()})
    for line in sys.stdin:
        match line.split():
            case ["init"]:
                cuda.current()
                answer: dict[str, Any] = {"ok": True, "mps": cuda.server is not None}
            case ["put", name, value]:
                os.environ[name] = value
                answer = {"ok": True}
            case ["gate", *gate]:
                answer = _gate(client, *gate)
            case ["keep"]:
                client.status()
                _keep()
                answer = {"ok": True}
            case ["crowd", size, *gate]:
                answer = _crowd(int(size), gate)
            case _:
                break
        _say(answer)


if __name__ == "__main__":
    main()
