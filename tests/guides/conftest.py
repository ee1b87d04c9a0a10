"""A simulated node as the guides assume it: mpsctl is a command, and train.py is a program that uses a GPU.

Stand-ins replace the frameworks that a guide starts, and Slurm's srun, which starts its arguments.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from mpsd.simulator.client import program
from mpsd.simulator.devices import VARIABLE
from tests.fork_server import ForkServer
from tests.guides.blocks import ROOT
from tests.harness import remove_tree
from tests.node import Node, running

_PROGRAM: Final = f"""
import json, subprocess, sys
done = subprocess.run({program()!r}, input="compute 0.01\\nexit 0\\n", capture_output=True, text=True)
answers = [json.loads(line) for line in done.stdout.splitlines()]
print("mps" if answers[0].get("mps") else "outside MPS: " + str(answers[0]))
sys.exit(0 if answers[0].get("mps") and all(each["ok"] for each in answers) else 1)
"""
"""A user's program: it computes for a moment on a simulated GPU, and fails if it is not a client of MPS."""

_numbers = count(1)


@dataclass
class Workplace:
    """The shell of a user on a simulated node."""

    node: Node
    directory: Path
    environment: dict[str, str]

    def run(self, script: str, **options: str) -> "subprocess.CompletedProcess[str]":
        """Run a script by bash, which ends at the first failing command, and end everything that it started."""
        command = ["bash", "--norc", "-e", "-c", script]
        process = subprocess.Popen(
            command, cwd=self.directory, env={**self.environment, **options}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=50)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="module")
def shared_node(private_root: Path, fork_server: ForkServer) -> Iterator[Node]:
    root = private_root / f"g{next(_numbers)}"
    root.mkdir(mode=0o711)
    yield from running(root=root, fork_server=fork_server)
    remove_tree(root)


@pytest.fixture
def workplace(shared_node: Node, short_tmp: Path) -> Iterator[Workplace]:
    """Return a user's shell on the node, without leases; leases that a block leaves are released, and holds end."""
    short_tmp.chmod(0o711)
    programs, directory = short_tmp / "bin", short_tmp / "work"
    for each in (programs, directory):
        each.mkdir(mode=0o755)
    _write(programs / "mpsctl", f"#!{sys.executable}\nfrom mpsd.cli.main import main\nmain()\n")
    _write(programs / "mpsd", f"#!{sys.executable}\nfrom mpsd.__main__ import main\nmain()\n")
    _write(programs / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    _write(directory / "train.py", _PROGRAM)
    for framework in ("jupyter", "vllm"):
        _write(programs / framework, f"#!{sys.executable}\n{_PROGRAM}")
    _write(programs / "srun", '#!/bin/sh\nSLURM_JOB_ID=1 exec "$@"\n')
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "MPSD_"))}
    environment = {
        **inherited,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(directory),
        "MPSD_SOCKET": str(shared_node.socket),
        VARIABLE: str(shared_node.root / "run" / "simulated"),
    }
    yield Workplace(shared_node, directory, environment)
    for lease in shared_node.leases():
        shared_node.request("DELETE", f"/v1/leases/{lease['id']}")
    for name in ("gpu0", "gpu1"):
        shared_node.request("POST", f"/v1/daemons/{name}/resume", {})
        shared_node.wait_for_state(name, "ready")
    shared_node.end_servers()


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def lease(shared_node: Node) -> Callable[[], str]:
    return lambda: str(shared_node.lease(threads=10, ttl=600, name="a-name")["id"])
