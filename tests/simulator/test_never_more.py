"""Whatever a client's environment says, it never has more than was open when it connected: 1,000 runs of each mode.

Pure: the simulator's server, and the rules by which mpsd opens and closes it. Real processes are in tests/daemon.
"""

import random
from dataclasses import dataclass, field
from functools import reduce
from typing import Final

from mpsd.core.enforcement.ceiling import SMALLEST, CeilingRules, ExpectedClients
from mpsd.core.model import Limits
from mpsd.core.mps.limits import widest_limits
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.units import GIB
from mpsd.simulator.cuda import Pinned
from mpsd.simulator.server_state import Client, Server, Start
from tests.environments import any_environment

GPU: Final = "GPU-00000000-0000-4000-8000-000000000000"
RUNS: Final = 1000
WINDOW: Final = 10.0


def within(found: Pinned, limits: Limits) -> bool:
    """Tell whether a client was pinned to no more than that."""
    most = limits.pinned_device_mem_limit
    assert most is not None
    threads = round(found.percentage * 10) <= limits.active_thread_percentage.tenths
    return threads and found.memory is not None and found.memory <= most.bytes


def _server() -> Server:
    server = Server(1, Start((GPU,), 100.0, {}, priority=0), lambda _: None)
    server.begin()
    return server


@dataclass
class Run:
    """A server, the leases that wait for their processes on it, and the time."""

    dice: random.Random
    strict: bool
    server: Server = field(default_factory=_server)
    attaching: ExpectedClients = field(default_factory=ExpectedClients)
    leases: dict[str, tuple[Limits, int]] = field(default_factory=dict)
    """By id: what each of its processes is to get, and how many are still to come."""
    now: float = 0.0
    pids: int = 1
    granted: int = 0
    attached: int = 0

    def settle(self) -> Limits:
        """Have the server give what is open now, as mpsd does before it answers a grant, and return it."""
        rules = CeilingRules(SMALLEST, strict=self.strict, window=WINDOW)
        limits = self.attaching.settle(rules, self.now).limits
        assert limits.pinned_device_mem_limit is not None
        self.server.answer("set_active_thread_percentage", [f"{limits.active_thread_percentage}"])
        self.server.answer("set_device_pinned_mem_limit", ["0", f"{limits.pinned_device_mem_limit.mebibytes}M"])
        return limits

    def grant(self) -> None:
        """Have one more lease wait for its processes."""
        limits = Limits(
            ActiveThreadPercentage(self.dice.randint(1, 1000)), PinnedDeviceMemLimit(self.dice.randint(1, 80 * 1024))
        )
        self.granted += 1
        name = f"lease-{self.granted}"
        self.leases[name] = (limits, self.dice.randint(1, 3))
        self.attaching.expect(name, limits, some=False, now=self.now)

    def connect(self, own: Limits) -> Pinned:
        """Have a client connect, with an environment of its own making."""
        environment = any_environment(self.dice, own)
        self.pids += 1
        client = self.server.admit(self.pids, "", "", environment)
        assert isinstance(client, Client)
        self.server.left(self.pids, said=True)
        return client.pinned

    def client(self, name: str) -> None:
        """Have a process of a lease come while it is open to it, and see what it has."""
        limits, left = self.leases[name]
        pending = [each for other, (each, _) in self.leases.items() if self.attaching.expects(other)]
        found = self.connect(limits)
        assert within(found, limits if self.strict else reduce(widest_limits, pending))
        self.attached += 1
        if left == 1:
            del self.leases[name]
            self.attaching.forget(name)
        else:
            self.leases[name] = (limits, left - 1)
            self.attaching.expect(name, limits, some=True, now=self.now)

    def step(self) -> None:
        """Do any of the things that happen on a node."""
        self.now += self.dice.choice([0.0, 0.1, WINDOW / 2, 2 * WINDOW])
        limits = self.settle()
        open_to = [name for name in self.leases if self.attaching.is_open_to(name)]
        match self.dice.choice(["grant", "client", "client", "client", "release", "attach", "stray"]):
            case "grant":
                self.grant()
            case "client" if open_to:
                self.client(self.dice.choice(open_to))
            case "release" if self.leases:
                name = self.dice.choice([*self.leases])
                del self.leases[name]
                self.attaching.forget(name)
            case "attach" if self.leases:  # of one whose window is over, or that waits anyway
                name = self.dice.choice([*self.leases])
                self.attaching.expect(name, self.leases[name][0], some=True, now=self.now)
            case "stray" if not any(self.attaching.expects(name) for name in self.leases):
                assert limits == SMALLEST
                assert within(self.connect(UNLIMITED), SMALLEST)


UNLIMITED: Final = Limits(ActiveThreadPercentage(1000), PinnedDeviceMemLimit(80 * GIB >> 20))


def test_strict() -> None:
    """In strict mode a client has no more than its own part, whatever its environment says."""
    assert run_all(strict=True) > RUNS


def test_shared() -> None:
    """In shared mode a client has no more than the largest that was waited for; nobody else has more than nothing."""
    assert run_all(strict=False) > RUNS


def run_all(*, strict: bool) -> int:
    """Make all runs, and return how many clients of leases there were."""
    attached = 0
    for seed in range(RUNS):
        run = Run(random.Random(seed), strict)
        for _ in range(30):
            run.step()
        attached += run.attached
    return attached
