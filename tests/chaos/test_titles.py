"""Programs set titles at random moments, while strangers quit and stop control daemons: the right ones are named.

All programs have one holder, which has several leases on each GPU, so that a program's environment alone says to which
of them it belongs, and its title hides that. On the first GPU, each program keeps within its lease: none of them is
ever named in a violation, and none is ended. On the second one there are programs without a lease of their own that
take what they get: as soon as all programs together hold more than the leases have, that is a violation.

    MPSD_CHAOS_SECONDS=7200 pytest -n 0 -s tests/chaos/test_titles.py
"""

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

from mpsd.simulator.control import program as simulator
from tests.chaos.conftest import Start
from tests.chaos.test_chaos import LONG, for_seconds
from tests.daemon.helpers import GIB, stopped
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, outside, variables
from tests.titled_client import TITLED

pytestmark = [pytest.mark.chaos, LONG]

CONFIG: Final = """
[daemon]
answer_deadline = 1.0
probe_interval = 0.5
[violations]
memory = "terminate"
"""

SIZES: Final = (1, 1, 2, 4)
"""The memory of the leases on each GPU (GiB)."""

TITLES: Final = ("VLLM::EngineCore", "sglang::scheduler_TP0", "gunicorn: worker [app]", "t" * 4000)

HONEST, GREEDY = "gpu0", "gpu1"

SEEN: Final = 30.0
"""Seconds within which a violation is named: at the second of mpsd's readings of the GPUs."""


class Program(SimulatedClient):
    """A client that may set a title, and what it holds."""

    def __init__(self, node: Node, daemon: str, lease: dict[str, Any] | None, title: str, *, at_once: bool) -> None:
        own = lease["env"] if lease is not None else {}
        before = (*TITLED, "first" if at_once else "later", title)
        super().__init__({**variables(node, daemon), **own}, before=before, late=True)
        assert self.hello["ok"]  # from now on it knows what SIGUSR1 means
        self.daemon, self.lease = daemon, lease
        self.has_title = at_once
        self.held = 0
        self.most = GIB * 9 // 10 if lease is None else lease["pinned_device_mem_limit"] * 7 // 10

    def set_title(self) -> None:
        if not self.has_title:
            self.process.send_signal(signal.SIGUSR1)


class Titles:
    """The programs on a node, and the steps of chaos."""

    def __init__(self, node: Node, dice: random.Random) -> None:
        self.node, self.dice = node, dice
        self.programs: list[Program] = []
        self.leases = {
            daemon: [
                node.lease(gpu=daemon.removeprefix("gpu"), threads=10, memory=f"{size}GiB", ttl=None) for size in SIZES
            ]
            for daemon in (HONEST, GREEDY)
        }

    def here(self, daemon: str) -> list[Program]:
        return [each for each in self.programs if each.daemon == daemon]

    # -- steps ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a program with a free lease; on the second GPU, perhaps one without."""
        daemon = self.dice.choice([HONEST, GREEDY])
        used = [each.lease["id"] for each in self.here(daemon) if each.lease is not None]
        free = [each for each in self.leases[daemon] if each["id"] not in used]
        lease = self.dice.choice(free) if free else None
        if daemon == GREEDY and self.dice.random() < 0.5:
            lease = None
        if lease is None and (daemon == HONEST or len(self.here(daemon)) > 8):
            return
        program = Program(self.node, daemon, lease, self.dice.choice(TITLES), at_once=self.dice.random() < 0.4)
        if program.init().get("mps") and program.context()["ok"]:
            self.programs.append(program)
        else:  # its control daemon was just ended: outside MPS, it would have the whole GPU
            with program:
                pass

    def title(self) -> None:
        if self.programs:
            self.dice.choice(self.programs).set_title()

    def allocate(self) -> None:
        if self.programs:
            program = self.dice.choice(self.programs)
            more = self.dice.randrange(program.most)
            if program.held + more <= program.most and program.alloc(f"{more // 2**20}MiB")["ok"]:
                program.held += more // 2**20 * 2**20

    def end(self) -> None:
        if self.programs:
            self._end(self.dice.choice(self.programs), kill=self.dice.random() < 0.5)

    def _end(self, program: Program, *, kill: bool = False) -> None:
        self.programs.remove(program)
        with program:
            if not kill:
                program.end()

    def quit(self) -> None:
        """Have a stranger end a control daemon that has no clients at the moment."""
        daemon = self.dice.choice([HONEST, GREEDY])
        for program in self.here(daemon):
            self._end(program)
        self.node.front_end(daemon, "quit\n")

    def kill_mpsd(self) -> None:
        self.node.end(self.dice.choice([signal.SIGKILL, signal.SIGTERM]))
        if self.dice.random() < 0.5:
            self.title()
        self.node.start(ready=False)

    def stop(self) -> None:
        """Stop a control daemon, a server, or a program, for a moment."""
        daemon = self.node.daemons()[self.dice.choice([HONEST, GREEDY])]
        pids = [daemon["pid"], *(each["pid"] for each in daemon["servers"]), *(each.pid for each in self.programs)]
        with suppress(ProcessLookupError):  # it has ended
            if pid := self.dice.choice(pids):
                with stopped(pid):
                    for _ in range(self.dice.randrange(300)):
                        self.node.get("/healthz")

    def own_mps(self) -> None:
        """Have a job on the second GPU start an MPS of its own: its client is named for that."""
        lease = self.dice.choice(self.leases[GREEDY])
        with TemporaryDirectory(prefix="own-", dir=self.node.root) as own:
            directories = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), own)
            job = {**outside(self.node), **lease["env"], **directories}
            command = [*simulator(555, str(self.node.root / "run" / "simulated")), "-f"]
            with subprocess.Popen(command, env={**os.environ, **job}, stdout=-3, stderr=-3) as daemon:
                try:
                    wait_until((Path(own) / "control").exists, what="the job's own control daemon")
                    with SimulatedClient(job) as client:
                        assert client.hello["mps"]
                        wait_until(lambda: self._is_named(lease, client.pid), what="its client to be named")
                finally:
                    daemon.kill()

    def _is_named(self, lease: dict[str, Any], pid: int) -> bool:
        self.node.get(f"/v1/leases/{lease['id']}/verify")  # which reads the GPUs
        found = self.node.get("/v1/status").json["violations"]
        return any(each["kind"] == "outside" and each["pid"] == pid for each in found)

    # -- what holds ----------------------------------------------------------------------------------------------------

    def violations(self, daemon: str) -> list[dict[str, Any]]:
        ids = {each["id"] for each in self.leases[daemon]}
        pids = {each.pid for each in self.here(daemon)}
        found = self.node.get("/v1/status").json["violations"]
        return [each for each in found if each["lease"] in ids or each["pid"] in pids]

    def check(self) -> None:
        """Wait until all serve again, and check who is named and who was ended."""
        try:
            wait_until(lambda: self.node.get("/readyz").status == 200, what="mpsd to be ready", deadline=60)
        except AssertionError as error:
            raise AssertionError(f"{self.node.get('/v1/status').json['reasons']}") from error
        for program in self.here(HONEST):
            assert program.process.poll() is None, f"{program.pid} was ended; the log is {self.node.stderr}"
        has = sum(SIZES) * GIB
        for program in [each for each in self.here(GREEDY) if each.process.poll() is not None]:
            self._end(program, kill=True)  # it was one of those that hold more than they may
        if sum(each.held for each in self.here(GREEDY)) > has:
            wait_until(lambda: self.violations(GREEDY), what="a violation of the greedy", deadline=SEEN)
        found = self.violations(HONEST)
        assert not found, f"{found}; the log is {self.node.stderr}"

    def close(self) -> None:
        for each in self.programs:
            with each:
                pass


def test_titles(start: Start, dice: random.Random) -> None:
    """Whatever is hidden, nobody within the leases is named or ended, and nobody beyond them is missed."""
    node = start(simulate=2, config=CONFIG)
    chaos = Titles(node, dice)
    steps = {"start": 8, "title": 4, "allocate": 8, "end": 3, "quit": 1, "kill_mpsd": 1, "stop": 1, "own_mps": 1}
    goes_on = for_seconds()
    try:
        while goes_on():
            for _ in range(dice.randint(1, 12)):
                (step,) = dice.choices([*steps], [*steps.values()])
                sys.stdout.write(f"{step} ")
                getattr(chaos, step)()
            chaos.check()
            sys.stdout.write(f"-> {len(chaos.programs)} programs\n")
    finally:
        chaos.close()
