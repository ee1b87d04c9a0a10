"""Simulated clients of MPS as processes, for tests: started, given commands, and ended."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mpsd.simulator.client import program
from mpsd.simulator.devices import VARIABLE, Device, there
from tests.driven_program import DrivenProgram
from tests.fork_server import ForkServer
from tests.node import Node

WAITS: Final = ("sh", "-c", 'read go || exit 0; exec "$@"', "sh")
"""Becomes the command that follows on a line of stdin: so it can hold a lease before it looks for a GPU."""


class SimulatedClient(DrivenProgram):
    """A process that uses CUDA on a simulated GPU (see mpsd.simulator.client).

    Its first line has `mps`, `server`, `gpu`, `active_thread_percentage`, `pinned_device_mem_limit`, and more; that of
    a late one has its pid alone.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        before: Sequence[str] = (),
        late: bool = False,
        mpsctl: ForkServer | None = None,
    ) -> None:
        """Start it, with no CUDA_* variable except those of `environment`; `before` is a command that becomes it.

        With `mpsctl`, `before` are the arguments of mpsctl.

        A late one initialises CUDA, and makes a context, on command, or when it needs one.
        """
        super().__init__([*before, *program(late=late)], environment, mpsctl=mpsctl)

    def init(self) -> dict[str, Any]:
        """Initialise CUDA, which connects it to MPS."""
        return self.do("init")

    def context(self) -> dict[str, Any]:
        """Make another context; the answer has its limits, as `hello` has those of the first."""
        return self.do("context")

    def alloc(self, size: str) -> dict[str, Any]:
        return self.do(f"alloc {size}")

    def free(self, size: str = "") -> dict[str, Any]:
        """Free device memory; all of it if no size is given."""
        return self.do(f"free {size}")

    def compute(self, seconds: float) -> dict[str, Any]:
        """Do as much work as the whole GPU does in these seconds; the answer has the seconds that it took."""
        return self.do(f"compute {seconds}")

    def launch(self, seconds: float) -> None:
        """Launch a kernel with as much work as the whole GPU does in this time; `answer` has its end."""
        assert self.do(f"launch {seconds}")["ok"]

    def loop(self, seconds: float) -> None:
        """Launch such kernels, one after the other, until the next command, or until an error ends it."""
        assert self.do(f"loop {seconds}")["ok"]

    def sync(self) -> dict[str, Any]:
        return self.do("sync")

    def fault(self) -> dict[str, Any]:
        return self.do("fault")


def gpus(node: Node) -> list[Device]:
    """Return the simulated GPUs of a node, in the order of their indices."""
    return there(node.root / "run" / "simulated")


def variables(node: Node, name: str = "gpu0") -> dict[str, str]:
    """Return the environment of a process that finds a node's GPUs, and this control daemon on them."""
    return {**outside(node), "CUDA_MPS_PIPE_DIRECTORY": str(node.pipe_directory(name))}


def outside(node: Node) -> dict[str, str]:
    """Return the environment of a process that finds a node's GPUs, and no control daemon."""
    return {VARIABLE: str(node.root / "run" / "simulated"), "CUDA_MPS_PIPE_DIRECTORY": str(node.root / "nobody-here")}


def leased(node: Node, *arguments: str, within: Sequence[str] = (), late: bool = False) -> SimulatedClient:
    """Start a client like a user, by `mpsctl run` with these arguments: with a lease, in the lease's environment.

    `within` is the command that has the lease, if that is not the client, and starts or becomes it.
    """
    mpsctl = node.mpsctl_command("run", *arguments, "--")
    environment = {VARIABLE: str(node.root / "run" / "simulated"), "PYTHONPATH": str(Path(__file__).parent.parent)}
    if node.fork_server is not None:
        return SimulatedClient(environment, before=(*mpsctl[3:], *within), late=late, mpsctl=node.fork_server)
    return SimulatedClient(environment, before=(*mpsctl, *within), late=late)
