"""A simulated control daemon with simulated GPUs, without mpsd, for tests of what is behind its pipe."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from mpsd.core.mps_facts import Binds
from mpsd.simulator.control import program
from mpsd.simulator.devices import VARIABLE, Device, Setting, set_setting
from tests.contract.subjects import Bench, Subject
from tests.harness import wait_until
from tests.simulated_clients import SimulatedClient

GPU: Final = "GPU-00000000-0000-4000-8000-000000000000"
PERCENTAGE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


class GpuBench(Bench):
    """A bench with a simulated GPU; processes started on it end with it."""

    def __init__(self, root: Path, branch: int) -> None:
        self.device = Device(root / "g", GPU)
        self.device.create()
        super().__init__(Subject("simulator", branch, program(branch, str(root / "g"))), root)
        self._clients = ExitStack()

    def client(self, *before: str, **variables: str) -> SimulatedClient:
        """Start a client of this daemon, with these additional variables; `before` is a command that becomes it."""
        return self._clients.enter_context(SimulatedClient({**self._variables, **variables}, before=before))

    def late_client(self) -> SimulatedClient:
        """Start a client that has not initialised CUDA yet."""
        return self._clients.enter_context(SimulatedClient(self._variables, late=True))

    @property
    def _variables(self) -> dict[str, str]:
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), VARIABLE: str(self.root / "g")}

    def binds(self, moment: Binds) -> None:
        """Make the limits of servers that start from now on bind at this moment."""
        set_setting(self.root / "g", Setting.BINDS, moment)

    def server(self) -> int:
        """Start a server for the user of the tests, and return its pid when it is ready."""
        server = self.start_server(os.geteuid())
        self.wait_for_log(f"NEW SERVER {server}: Ready")
        return server

    def wait_for_log(self, line: str) -> None:
        wait_until(lambda: line in self.log(), what=f"{line!r} in the log")

    def ask(self, *commands: str) -> list[str]:
        return self.front_end(*commands).printed

    def server_log(self) -> list[str]:
        return [line.partition("] ")[2] for line in (self.logs / "server.log").read_text().splitlines()]

    def close(self) -> None:
        self._clients.close()
        super().close()
