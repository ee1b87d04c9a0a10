"""Processes die while leases come and go: once the node has settled, its limits are those that the living leases need.

The test reads the limits with the control daemon's front-end, not through mpsd. It uses NVIDIA's front-end on NVIDIA's
control daemons, whose servers do not start without a GPU, so that there are only defaults; and the simulator's on a
simulated node, whose servers have their own limits and clients.

MPSD_RUNS says how many steps each run takes; MPSD_SEED repeats the run of a seed that was printed.
"""

import contextlib
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import pytest

from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, MIB, branches, kill
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon
from tests.simulated_clients import WAITS, SimulatedClient, variables

pytestmark = [pytest.mark.enforcement, pytest.mark.thorough]

STEPS: Final = int(os.environ.get("MPSD_RUNS", "16"))
BETWEEN: Final = 4
"""The most steps before the node may settle."""
MOST: Final = 5
"""The most leases at a time; so many always fit."""

CONFIG: Final = """
[daemon]
death_window = 0.1
"""
"""No death counts for long, so that the next start is not delayed."""

Limits = tuple[str, ...]
"""An active thread percentage, and a memory limit if the driver has one, as a front-end prints them."""


class Holder(SimulatedClient):
    """A process that holds a lease, and becomes a client on command."""

    def __init__(self, node: Node, threads: int, memory: int) -> None:
        """Start it in the environment that it will have as a client: percent of the threads, and GiB."""
        own = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{threads}", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={memory}G"}
        super().__init__({**variables(node), **own}, before=WAITS)
        self.went = False

    def go(self) -> None:
        """Have it connect to the GPU, without waiting until it has."""
        self._stdin.write(b"\n")
        self.went = True


@dataclass(frozen=True)
class Held:
    """A lease: the percent and GiB of each of its processes, and its holder if that can be a client."""

    threads: int
    memory: int
    holder: Holder | None


@dataclass
class Scene:
    """A node on which the steps happen, and the leases that should exist."""

    node: Node
    dice: random.Random
    clients: bool
    """Whether servers start, and clients attach to them."""
    memory: bool = True
    """Whether the driver limits memory."""
    daemon: int = 0
    """The pid of the last control daemon."""
    held: dict[str, Held] = field(default_factory=dict)
    others: list[Holder] = field(default_factory=list)
    """Holders whose lease was released and which still run."""

    # -- what happens --------------------------------------------------------------------------------------------------

    def happens(self) -> None:
        """Carry out one random step."""
        (step,) = self.dice.choices(*zip(*self._possible().items(), strict=True))
        sys.stdout.write(f"{step.__name__} ")
        step()

    def _possible(self) -> dict[Callable[[], None], int]:
        """Return the possible steps, each with its weight."""
        possible = {self.kill_daemon: 2, self.restart: 2}
        if len(self.held) < MOST:
            possible |= {self.grant: 5}
        if self.held:
            possible |= {self.release: 1 if self.clients else 3}
        if not self.clients:
            return possible | {self.start_server: 1}
        possible |= {self.kill_servers: 2} | ({self.leave: 1} if self.held else {})
        return possible | ({self.attach: 5} if self._waiting() else {})

    def grant(self) -> None:
        """Grant a lease, to a process that can become its client where clients are possible."""
        threads, memory, processes = self.dice.randint(1, 9), self.dice.randint(1, 3), self.dice.choice([1, 1, 2])
        asked = {"threads": threads * processes, "memory": memory * processes * GIB, "processes": processes, "gpu": "0"}
        holder = Holder(self.node, threads, memory) if self.clients else None
        answer = self.node.request("POST", "/v1/leases", {**asked, "pid": holder.pid if holder is not None else None})
        if answer.status == 201:
            self.held[answer.json["id"]] = Held(threads, memory, holder)
            return
        # The control daemon was killed a moment ago, or its servers cannot start.
        assert answer.json["code"] == "daemon_not_ready", answer.body
        if holder is not None:
            end(holder, signal.SIGKILL)

    def release(self) -> None:
        """End a lease; its holder keeps running."""
        lease = self.dice.choice([*self.held])
        assert self.node.request("DELETE", f"/v1/leases/{lease}").status == 204
        holder = self.held.pop(lease).holder
        self.others += [holder] if holder is not None else []

    def attach(self) -> None:
        """Have a holder become a client."""
        self.dice.choice(self._waiting()).go()

    def leave(self) -> None:
        """End a holder, and with it its lease."""
        holder = self.held.pop(self.dice.choice([*self.held])).holder
        assert holder is not None
        end(holder, self.dice.choice([signal.SIGKILL, signal.SIGTERM]))

    def start_server(self) -> None:
        """Have a server start, which fails without a GPU."""
        self.node.ask("gpu0", f"start_server -uid {self.dice.choice([os.geteuid(), 61001])}")

    def kill_servers(self) -> None:
        """Kill every server, also the servers of a dead control daemon."""
        for server in self.node.daemons()["gpu0"]["servers"]:
            kill_if_there(server["pid"])

    def kill_daemon(self) -> None:
        """Kill the control daemon, or, while mpsd is down, the one that it had."""
        if self.node.process is not None:
            self.daemon = self.node.daemons()["gpu0"]["pid"] or self.daemon
        kill_if_there(self.daemon)

    def restart(self) -> None:
        """Stop mpsd and start it again; another step may happen in between."""
        self.daemon = self.node.daemons()["gpu0"]["pid"] or self.daemon
        self.node.end(self.dice.choice([signal.SIGKILL, signal.SIGTERM]))
        without_mpsd = self._possible().keys() & {self.kill_daemon, self.attach, self.leave}
        meanwhile = self.dice.choice([None, *sorted(without_mpsd, key=lambda each: each.__name__)])
        if meanwhile is not None:
            sys.stdout.write(f"({meanwhile.__name__}) ")
            meanwhile()
        self.node.start(ready=False)

    def _waiting(self) -> list[Holder]:
        """Return the holders that have not become clients yet."""
        return [each.holder for each in self.held.values() if each.holder is not None and not each.holder.went]

    def close(self) -> None:
        """End all processes."""
        for each in (*(each.holder for each in self.held.values()), *self.others):
            if each is not None:
                end(each, signal.SIGKILL)

    # -- what is so then -----------------------------------------------------------------------------------------------

    def settles(self) -> None:
        """Wait until nothing is pending, and compare the limits in force with those that the leases need."""
        for lease, each in tuple(self.held.items()):
            if each.holder is not None and each.holder.went and not each.holder.hello["ok"]:
                # The server or the control daemon was killed while the process connected; the process and its lease
                # have ended.
                end(each.holder, signal.SIGKILL)
                del self.held[lease]
        wanted, found = wait_until(self._settled, what=f"it to settle; the log is {self.node.stderr}", deadline=30)
        sys.stdout.write(f"-> {' '.join(wanted)}\n")
        assert found == {wanted}, f"{self.held}; the log is {self.node.stderr}"

    def _settled(self) -> tuple[Limits, set[Limits]] | None:
        """Return the limits that the leases need and those that a front-end reads; None while anything is pending."""
        before = self._said()
        if before is None:
            return None
        found, clients = self._read()
        wanted, known, _ = before
        is_known = clients <= known | {each.pid for each in self.others}
        return (wanted, found) if is_known and self._said() == before else None

    def _said(self) -> tuple[Limits, set[int], int] | None:
        """Return the limits by the leases, their clients, and the pid of the control daemon that should have them.

        None while mpsd is not ready.
        """
        leases = {each["id"]: each for each in self.node.get("/v1/leases").json["leases"]}
        daemon = self.node.daemons()["gpu0"]
        if leases.keys() != self.held.keys() or daemon["state"] != "ready" or not daemon["verified"]:
            return None
        threads = max((float(each.threads) for each in self.held.values()), default=0.1)
        memory = max((each.memory * GIB for each in self.held.values()), default=MIB)
        wanted = {"active_thread_percentage": threads, "pinned_device_mem_limit": memory if self.memory else None}
        if daemon["limits_wanted"] != wanted:
            return None
        limits = f"{threads:.1f}", f"{memory // GIB}G" if self.held else "1M"
        clients = {pid for each in leases.values() for pid in each["clients"]}
        return limits[: 1 + self.memory], clients, daemon["pid"]

    def _read(self) -> tuple[set[Limits], set[int]]:
        """Read the defaults and the limits of each server, and the pids of its clients."""
        limits = {self._limits("get_default_active_thread_percentage", "get_default_device_pinned_mem_limit 0")}
        clients: set[int] = set()
        for server in self.node.ask("gpu0", "get_server_list"):
            limits.add(
                self._limits(f"get_active_thread_percentage {server}", f"get_device_pinned_mem_limit {server} 0")
            )
            clients.update(map(int, self.node.ask("gpu0", f"get_client_list {server}")))
        return limits, clients

    def _limits(self, *commands: str) -> Limits:
        return tuple(self.node.ask("gpu0", "\n".join(commands[: 1 + self.memory])))


def end(holder: Holder, number: signal.Signals) -> None:
    """End a process by a signal, if it has not ended."""
    with holder:
        holder.kill(number)


def kill_if_there(pid: int) -> None:
    """Kill a process that may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        kill(pid)


def run(scene: Scene) -> None:
    """Carry out all steps, a few at a time, and check that the node settles each time."""
    left = STEPS
    scene.settles()
    while left:
        together = min(left, scene.dice.randint(1, BETWEEN))
        for _ in range(together):
            scene.happens()
        scene.settles()
        left -= together
    while scene.held:
        scene.release()
    scene.settles()


@pytest.fixture
def dice() -> random.Random:
    """Return random numbers of MPSD_SEED, or of a new seed; pytest prints the seed of a run that fails."""
    seed = int(os.environ.get("MPSD_SEED") or random.getrandbits(32))
    sys.stdout.write(f"MPSD_SEED={seed}\n")
    return random.Random(seed)


@pytest.mark.timeout(60 + 2 * STEPS)
@pytest.mark.parametrize("real", branches())
def test_defaults(make_node: Start, dice: random.Random, real: RealDaemon) -> None:
    """The defaults settle on NVIDIA's control daemons."""
    node = make_node(simulate=1, control=real.control, config=CONFIG).start()
    run(Scene(node, dice, clients=False, memory=real.branch >= 495))


@pytest.mark.timeout(60 + 2 * STEPS)
def test_servers(make_node: Start, dice: random.Random) -> None:
    """The limits of servers settle on a simulated node with clients."""
    scene = Scene(make_node(simulate=1, control=None, config=CONFIG).start(), dice, clients=True)
    try:
        run(scene)
    finally:
        scene.close()
