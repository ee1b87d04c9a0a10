"""Programs of one lease that run one after another and beside each other: each gets the lease's share, on a real node.

MPSD_RUNS says how many programs the random run has; MPSD_SEED sets another order of events.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.core.mps_facts import Binds
from mpsd.simulator.devices import VARIABLE
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, MIB
from tests.harness import wait_until
from tests.node import BINDS, Node
from tests.simulated_clients import SimulatedClient, gpus, leased

pytestmark = [pytest.mark.thorough, pytest.mark.enforcement]

RUNS: Final = int(os.environ.get("MPSD_RUNS", "20"))
SEED: Final = int(os.environ.get("MPSD_SEED", "0"))
MOST: Final = 3
"""Processes that a job of the random run starts at most, before it ends."""

_ONE_AFTER_ANOTHER: Final = """
import os, sys
from mpsd.simulator import client
read, write = os.pipe()
os.write(write, b"alloc 1MiB\\ncompute 0.01\\n")
os.close(write)
programs = int(sys.argv[1])
text = os.read(read, 1000)
for number in range(programs):
    pid = os.fork()
    if pid == 0:
        read, write = os.pipe()
        os.write(write, text)
        os.close(write)
        os.dup2(read, 0)
        status = client.main()
        sys.stdout.flush()
        os._exit(status)
    os.waitpid(pid, 0)
"""
"""Short programs, each of which connects as soon as the one before has ended."""


def strict(more: str) -> str:
    return f'[enforcement]\nattach = "strict"\n{more}'


def one_after_another(node: Node, programs: int) -> list[dict[str, Any]]:
    """Run short programs under one lease of a quarter, and return what each reports."""
    root = str(Path(__file__).parents[3])
    bare = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    mpsctl = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket), "run", "--threads", "25"]
    run = [*mpsctl, "--memory", "2GiB", "--gpu", "0", "--", sys.executable, "-c", _ONE_AFTER_ANOTHER]
    done = subprocess.run(
        [*run, str(programs)],
        env={**bare, VARIABLE: str(node.root / "run" / "simulated"), "PYTHONPATH": root},
        capture_output=True,
        check=True,
        timeout=60,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    return [each for each in said if "active_thread_percentage" in each]


def has_quarter(said: dict[str, Any]) -> bool:
    """Return whether a client has the quarter of its lease, under MPS."""
    return (said["mps"], said["active_thread_percentage"], said["pinned_device_mem_limit"]) == (True, 25.0, 2 * GIB)


def test_instant_successors(make_node: Start) -> None:
    """Of 30 short programs in a row each gets its share at once."""
    node = make_node(simulate=1, control=None, config="").start()
    found = one_after_another(node, 30)
    assert len(found) == 30
    assert [each for each in found if not has_quarter(each)] == []


def attributed(node: Node, clients: int) -> str:
    def look() -> str | None:
        (lease,) = node.get("/v1/leases").json["leases"]
        return lease["id"] if len(lease["clients"]) == clients else None

    found: str = wait_until(look, what=f"{clients} clients to be attributed; the log is {node.stderr}")
    return found


def in_force(node: Node) -> tuple[float, int]:
    """Return the limits that are in force, read back."""
    daemon = node.daemons()["gpu0"]
    limits = daemon["limits"]
    return (limits["active_thread_percentage"], limits["pinned_device_mem_limit"]) if daemon["verified"] else (0.0, 0)


OPEN, CLOSED = (25.0, 2 * GIB), (0.1, MIB)


_BESIDE: Final = """
import subprocess, sys
waits, client = ["sh", "-c", 'read go && exec "$@"', "sh"], sys.argv[1:]
processes = [subprocess.Popen(client, stdin=subprocess.PIPE, bufsize=0)]
for line in sys.stdin:
    if line.strip() == "another":
        processes.append(subprocess.Popen([*waits, *client], stdin=subprocess.PIPE, bufsize=0))
    else:
        processes[-1].stdin.write(line.encode())
"""
"""Holds a lease, starts a client, and starts another process on command; it passes all later lines to the latest one.

The other process becomes a client at its first line.
"""


def test_closes_behind_a_context(make_node: Start) -> None:
    """Where the moment of binding is unknown, a turn ends once NVML shows memory of the client."""
    node = make_node(simulate=1, control=None, config=strict('limits_bind = "context"\n')).start()
    with leased(node, "--threads", "25", "--memory", "2GiB", within=(sys.executable, "-c", _BESIDE)) as holder:
        assert has_quarter(holder.hello)
        lease = attributed(node, 1)
        if not gpus(node)[0].processes()[holder.hello["pid"]].memory:
            node.request("GET", f"/v1/leases/{lease}/verify")  # this request reads the GPUs
            assert in_force(node) == OPEN
        assert holder.alloc("1MiB")["ok"]
        node.request("GET", f"/v1/leases/{lease}/verify")
        wait_until(lambda: in_force(node) == CLOSED, what=f"the ceiling to close; the log is {node.stderr}")
        holder.tell("exit")
        wait_until(lambda: in_force(node) == OPEN, what=f"the ceiling to open; the log is {node.stderr}")
        holder.tell("another")
        holder.tell("go")
        assert has_quarter(holder.answer())


def test_closes_behind_a_connection(make_node: Start) -> None:
    """Where limits bind at the connection, a turn ends as soon as the server lists the client, without a context."""
    node = make_node(simulate=1, control=None, config=strict('limits_bind = "connect"\n')).start()
    with leased(node, "--threads", "25", "--memory", "2GiB", late=True) as holder:
        assert holder.do("init")["ok"]
        attributed(node, 1)
        wait_until(lambda: in_force(node) == CLOSED, what=f"the ceiling to close; the log is {node.stderr}")
        if BINDS is Binds.CONNECT:  # what the setting promises
            assert holder.context()["active_thread_percentage"] == 25.0


def test_where_nvml_cannot_tell(make_node: Start) -> None:
    """Where a GPU cannot be read, the ceiling closes behind a client at the end of one turn."""
    config = strict('attach_window = 0.5\nlimits_bind = "context"\n')
    node = make_node(simulate=1, control=None, config=config).start()
    with leased(node, "--threads", "25", "--memory", "2GiB") as holder:
        assert has_quarter(holder.hello)
        lease = attributed(node, 1)
        gpus(node)[0].lose()
        node.request("GET", f"/v1/leases/{lease}/verify")
        wait_until(lambda: in_force(node) == CLOSED, what=f"the ceiling to close; the log is {node.stderr}")
        gpus(node)[0].recover()
        holder.end()


@dataclass
class Job:
    """A lease, its holder, and the share that each of its processes must have."""

    holder: SimulatedClient
    threads: float
    memory: int
    processes: int = 1

    @classmethod
    def granted(cls, node: Node, dice: random.Random) -> "Job":
        """Request a lease of any size, for any number of processes, and start the first of them at once."""
        processes = dice.choice([1, 1, 2, 3, None])
        threads, memory = dice.randint(1, 70), dice.randint(1, 4096)
        whole = processes or 1
        asked = ("--threads", f"{threads * whole / 10}", "--memory", f"{memory * whole}MiB")
        many = ("--processes", "any" if processes is None else f"{processes}")
        beside = (sys.executable, "-c", _BESIDE)
        return cls(leased(node, *asked, *many, "--gpu", "0", within=beside), threads / 10, memory * MIB)

    def check(self, said: dict[str, Any]) -> None:
        """Check that a process has exactly its share."""
        assert said["ok"], said
        found = said.get("mps", True), said["active_thread_percentage"], said["pinned_device_mem_limit"]
        assert found == (True, self.threads, self.memory)

    def another(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Start one more process, beside the others or after them; `meanwhile` passes before it becomes a client."""
        self.processes += 1
        self.holder.tell("another")
        meanwhile()
        self.holder.tell("go")
        self.check(self.holder.answer())

    def take(self, step: str, restart: Callable[[], None]) -> None:
        """Take a step, and check each process and context that it makes."""
        match step:
            case "another":
                self.another()
            case "leave":  # and another starts in the next moment
                self.holder.tell("exit")
                self.another()
            case "restart":  # of mpsd, before a process that is there becomes a client
                self.another(meanwhile=restart)
            case "context":
                self.check(self.holder.context())
            case "reset":
                assert self.holder.do("reset")["ok"]
                self.check(self.holder.context())

    def end(self) -> None:
        """End the holder and all processes that it started."""
        with self.holder:
            self.holder.kill()


@pytest.mark.timeout(60 + 2 * RUNS)
def test_honest_programs(make_node: Start) -> None:
    """In `anytime` every context of an honest process has exactly its share, whatever comes and goes beside it."""
    dice = random.Random(SEED)
    node = make_node(simulate=1, control=None, config="").start()
    jobs, checked = list[Job](), 0

    def restarted() -> None:
        node.end(signal.SIGKILL)
        node.start()

    try:
        while checked < RUNS:
            step = dice.choice(["grant", "another", "another", "leave", "end", "read", "context", "reset", "restart"])
            if step == "grant" and len(jobs) < 4:
                jobs.append(Job.granted(node, dice))
                jobs[-1].check(jobs[-1].holder.hello)
                checked += 1
            elif step == "end" and jobs:
                jobs.pop(dice.randrange(len(jobs))).end()
            elif step == "read":
                node.get("/v1/gpus")
            elif jobs and step != "grant":
                job = dice.choice(jobs)
                job.take(step, restarted)
                checked += 1
                if job.processes > MOST:  # those beyond its lease take room from the next lease
                    jobs.remove(job)
                    job.end()
    finally:
        for job in jobs:
            job.end()
