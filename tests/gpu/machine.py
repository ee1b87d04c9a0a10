"""The machine for the tests of a real GPU: whether it has everything they need, its clients, and a node on it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.driven_program import DrivenProgram
from tests.node import Node

REQUIRE: Final = "MPSD_REQUIRE_GPU"
CONTROL: Final = "nvidia-cuda-mps-control"

_ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = (sys.executable, "-m", "tests.gpu.client")
"""The command that starts a client, with this repository on PYTHONPATH."""

ENVIRONMENT: Final = {
    "PYTHONPATH": str(_ROOT),
    "CUDA_CACHE_DISABLE": "1",  # otherwise the driver's compiled code would stay behind in the home directory
}
_NOBODY: Final = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
"""For processes that run outside MPS, whatever uses the default pipe directory."""


def required() -> bool:
    """Return whether a test that needs a GPU fails where there is none, instead of being skipped."""
    return os.environ.get(REQUIRE, "") not in {"", "0"}


@cache
def missing() -> str | None:
    """Return what is missing here for the tests of a real GPU, or None when everything is there."""
    # In a separate process, since libcuda leaves threads and open files behind in the process that initialises it.
    probe = subprocess.run(
        [*PROGRAM, "--probe"],
        env={**os.environ, **ENVIRONMENT, **_NOBODY},
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if not probe.stdout:
        return f"libcuda.so.1 could not be tried: {probe.stderr.strip() or probe.returncode}"
    answer = json.loads(probe.stdout)
    if not answer["ok"]:
        return f"no GPU for CUDA here: {answer['error']}"
    if shutil.which(CONTROL) is None:
        return f"{CONTROL} is not in PATH"
    return None


def control() -> Path:
    """Return this machine's own control program."""
    found = shutil.which(CONTROL)
    assert found is not None, missing()
    return Path(found)


class Client(DrivenProgram):
    """A process that uses CUDA on a real GPU (see tests.gpu.client).

    Its first line has `gpu`, `cuda`, `multiprocessors`, `free` and `total`; or the reason why it has no context.
    """

    def busy(self, seconds: float) -> float:
        """Work for so many seconds, and return the rate."""
        answer = self.do(f"busy {seconds}")
        assert answer["ok"], answer
        rate: float = answer["rate"]
        return rate


def leased(node: Node, *, threads: float, memory: str) -> Client:
    """Start a client like a user, by `mpsctl run`, with a lease on the first GPU."""
    mpsctl = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket), "run", "--gpu", "0"]
    return Client([*mpsctl, "--threads", str(threads), "--memory", memory, "--", *PROGRAM], ENVIRONMENT)


def unadmitted(node: Node) -> Client:
    """Start a client that finds the first GPU's control daemon by itself, without a lease."""
    way = {"CUDA_MPS_PIPE_DIRECTORY": str(node.pipe_directory("gpu0"))}
    return Client(PROGRAM, {**ENVIRONMENT, **way, "CUDA_VISIBLE_DEVICES": first_gpu(node)["uuid"]})


def outside(node: Node) -> Client:
    """Start a client that runs outside MPS, on the whole of the first GPU."""
    return Client(PROGRAM, {**ENVIRONMENT, **_NOBODY, "CUDA_VISIBLE_DEVICES": first_gpu(node)["uuid"]})


def first_gpu(node: Node) -> dict[str, Any]:
    """Return the first GPU as the API has it."""
    found: dict[str, Any] = node.get("/v1/gpus").json["gpus"][0]
    return found


@contextlib.contextmanager
def running(root: Path, config: str = "") -> Iterator[Node]:
    """Start mpsd on this machine's GPUs, yield it, and end it with its control daemons and their servers."""
    node = Node(root=root, simulate=None, control=control(), config=config)
    try:
        yield node.start()
    finally:
        try:
            _quit(node)
        finally:
            node.clean_up()


def _quit(node: Node) -> None:
    """End mpsd, and have its control daemons end their servers as NVIDIA specifies: killing one may wedge a GPU."""
    if node.process is not None and node.process.poll() is None:
        node.end()
    for directory in (node.root / "run" / "mps").glob("gpu*"):
        node.front_end(directory.name, "quit -t 10\n")
