"""NVIDIA's own control daemon for the machine's first GPU, without mpsd; or the simulator's."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from mpsd.simulator.control import program as simulator
from mpsd.simulator.devices import VARIABLE
from tests.daemon.helpers import is_running
from tests.gpu import machine
from tests.harness import wait_until

LONG: Final = 10.0
"""Seconds without an answer after which a client, or a front-end, counts as hanging."""


class BareDaemon:
    """A control daemon in a private directory, in its `with` block."""

    def __init__(self, root: Path, *, gpu: str = "0", devices: Mapping[str, str] | None = None) -> None:
        """Prepare it for this GPU; `devices` are the variables by which a process finds simulated ones."""
        root.mkdir(exist_ok=True)
        self.root = root
        self.variables = {"CUDA_MPS_PIPE_DIRECTORY": str(root), "CUDA_VISIBLE_DEVICES": gpu, **(devices or {})}
        """The variables of its clients."""
        self._environment = {**os.environ, **self.variables, "CUDA_MPS_LOG_DIRECTORY": str(root)}
        self._program = [*simulator(gpus=devices[VARIABLE])] if devices else [str(machine.control())]

    def __enter__(self) -> Self:
        """Start it. Raises OSError if it ends instead of answering."""
        with (self.root / "out").open("ab") as log:
            # In a session of its own: it must not end with SIGINT, which a terminal sends to all, before its clients.
            self.process = subprocess.Popen(
                [*self._program, "-f"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            wait_until(self._answers, what="the control daemon to answer")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _answers(self) -> bool:
        if (status := self.process.poll()) is not None:
            said = (self.root / "out").read_text(errors="replace")[-300:]
            raise OSError(f"the control daemon ended with {status}: {said}")
        return "100" in self.ask("get_default_active_thread_percentage")

    def ask(self, text: str, seconds: float = LONG) -> str:
        """Send a command by NVIDIA's front-end, and return the answer. Raises TimeoutExpired after so many seconds."""
        done = subprocess.run(
            self._program,
            env=self._environment,
            input=f"{text}\n",
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return done.stdout.strip()

    @property
    def servers(self) -> list[int]:
        return [int(each) for each in self.ask("get_server_list").split() if each.isdigit()]

    def __exit__(self, *_: object) -> None:
        """End it and its servers, as NVIDIA specifies, and by force where that fails; keep its logs."""
        servers: list[int] = []
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.process.poll() is None:
                servers = self.servers
                self.ask("quit -t 5")
                self.process.wait(LONG)
        self.process.kill()
        self.process.wait()
        for server in servers:
            _end(server)
        machine.keep(self.root, f"bare-{self.root.name}", "out", "*.log")
        wait_until(lambda: not any(is_running(each) for each in servers), what="the servers to be gone", deadline=LONG)


def _end(server: int) -> None:
    """End a server that its control daemon left behind, if it still is one."""
    with contextlib.suppress(OSError):
        if b"mps-server" in Path(f"/proc/{server}/cmdline").read_bytes():
            os.kill(server, signal.SIGKILL)
