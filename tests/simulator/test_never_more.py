"""Clients of leases in each mode, for each moment at which limits may bind: 100 runs of each mode and moment.

A quarter of that where a closed ceiling gives processes without a lease more than the smallest limits.

With any environment, no client has more than the table in docs/enforcement.md says; and in `anytime` no honest client
has less than its share, however late, often, or soon after another it comes.

The test is pure: the simulator's server, and the rules by which mpsd opens and closes it. Tests with real processes are
in tests/daemon.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Final, assert_never

import pytest
from msgspec import structs

from mpsd.core.enforcement.ceiling import (
    SMALLEST,
    UNLIMITED,
    Awaited,
    CeilingRules,
    ContextProof,
    ExpectedClients,
    awaited,
    each_process,
)
from mpsd.core.model import AttachedProcess, Lease, LeaseRequest, LeaseState, Limits, ProcessIdentity, Share
from mpsd.core.mps.limits import variables, widest_limits
from mpsd.core.mps_facts import Binds
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.settings import Attach
from mpsd.simulator.cuda import Pinned
from mpsd.simulator.server_state import Client, Context, Server, Start
from tests.core.admission.scenarios import asked
from tests.environments import any_environment

pytestmark = pytest.mark.thorough

THINGS: Final = ("grant", "connect", "connect", "context", "context", "exit", "reset", "release", "attach", "stray")
GPU: Final = "GPU-00000000-0000-4000-8000-000000000000"
RUNS: Final = 100
STEPS: Final = 30
WINDOW: Final = 10.0


def within(found: Pinned, limits: Limits) -> bool:
    """Return whether a client has at most these limits."""
    most = limits.pinned_device_mem_limit
    threads = round(found.percentage * 10) <= limits.active_thread_percentage.tenths
    return threads and (most is None or (found.memory is not None and found.memory <= most.bytes))


def reaches(found: Pinned, limits: Limits) -> bool:
    """Return whether a client has at least these limits."""
    least = limits.pinned_device_mem_limit
    assert least is not None
    threads = round(found.percentage * 10) >= limits.active_thread_percentage.tenths
    return threads and (found.memory is None or found.memory >= least.bytes)


@dataclass
class Process:
    """A process of a lease that has connected, and the numbers of its contexts."""

    identity: ProcessIdentity
    lease: str
    honest: bool
    contexts: list[int] = field(default_factory=list)


@dataclass
class Run:
    """A server, the leases with processes on it, and the time."""

    dice: random.Random
    attach: Attach
    closed: Limits
    server: Server
    binds: Binds
    expected: ExpectedClients = field(default_factory=ExpectedClients)
    leases: dict[str, Lease] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    proofs: dict[ProcessIdentity, ContextProof] = field(default_factory=dict)
    """NVML's last proof for each client."""
    now: float = 0.0
    pids: int = 1
    given: int = 0
    """The number of contexts made so far."""

    # -- what mpsd does ------------------------------------------------------------------------------------------------

    def settle(self) -> Limits:
        """Set the server to the current ceiling, as mpsd does before it answers a grant, and return the ceiling."""
        limits = self.expected.settle(CeilingRules(self.closed, self.attach, WINDOW), self.now).limits
        memory = limits.pinned_device_mem_limit
        self.server.answer("set_active_thread_percentage", [f"{limits.active_thread_percentage}"])
        self.server.answer("set_device_pinned_mem_limit", ["0", f"{memory.mebibytes if memory else 0}M"])
        return limits

    def part(self, lease: Lease) -> Limits:
        """Return the limits that each process of a lease should get."""
        return each_process(lease, lease.shares[0])

    def awaits(self, lease: Lease, *, anew: bool) -> None:
        """Update a lease, like LimitGates."""
        how_long = Awaited.ALWAYS
        if self.attach is Attach.STRICT:
            how_long = awaited(lease.request.processes, [*map(self.proof, lease.clients)])
        self.expected.expect(lease.id, self.part(lease), how_long, anew=anew)

    def change(self, lease: Lease, clients: Iterable[ProcessIdentity]) -> None:
        """Record the clients of a lease."""
        lease = self.leases[lease.id] = structs.replace(
            lease, attached=tuple(AttachedProcess(each, GPU) for each in clients)
        )
        self.awaits(lease, anew=True)

    # -- what clients do -----------------------------------------------------------------------------------------------

    def admitted(self, environment: dict[str, str]) -> Client:
        """Have a process with this environment initialise CUDA, and return it as the server has it."""
        self.pids += 1
        client = self.server.admit(self.pids, "", "", environment)
        assert isinstance(client, Client)
        return client

    def connect(self, lease: Lease) -> None:
        """Have a process of a lease connect, honest or not."""
        honest = self.dice.random() < 0.6
        part = self.part(lease)
        client = self.admitted(dict(variables(part)) if honest else any_environment(self.dice, part))
        process = Process(ProcessIdentity(client.pid, 1), lease.id, honest)
        self.processes.append(process)
        if client.bound is not None:
            self.check(process, client.bound)

    def make_context(self, process: Process) -> None:
        """Have a process make a context: the first, another, or one after a reset; check its limits."""
        context = self.server.context(process.identity.pid)
        assert isinstance(context, Context)
        process.contexts.append(context.number)
        self.given += 1
        if self.binds is Binds.CONTEXT:
            self.check(process, context.pinned)
        elif process.honest and self.attach is Attach.ANYTIME and process.lease in self.leases:
            assert reaches(context.pinned, self.part(self.leases[process.lease]))

    def reset(self, process: Process) -> None:
        """Have a process lose its contexts, as by a reset of its device."""
        while process.contexts:
            assert self.server.destroy(process.identity.pid, process.contexts.pop())

    def check(self, process: Process, found: Pinned) -> None:
        """Check that a process has at most what it may have, and at least what it should have."""
        assert within(found, self.most())
        lease = self.leases.get(process.lease)
        if lease is None or not process.honest:
            return  # a lease that has ended promises nothing
        assert within(found, self.part(lease))
        assert self.attach is not Attach.ANYTIME or self.expected.is_open_to(lease.id)
        if self.expected.is_open_to(lease.id):
            assert reaches(found, self.part(lease))

    def most(self) -> Limits:
        """Return the most that any client may get now, by the table of docs/enforcement.md."""
        match self.attach:
            case Attach.ANYTIME:
                living = [*self.leases.values()]
            case Attach.STRICT:
                living = [each for each in self.leases.values() if self.expected.is_open_to(each.id)]
                assert len(living) <= 1
                assert not any(self.expected.expects(each.id) for each in self.leases.values() if self.is_bound(each))
                return self.part(living[0]) if living else self.closed
            case _:
                assert_never(self.attach)
        return reduce(widest_limits, map(self.part, living), self.closed)

    def is_bound(self, lease: Lease) -> bool:
        """Return whether a lease has all its processes, and mpsd knows that the limits of each have bound."""
        full = lease.request.processes is not None and len(lease.clients) == lease.request.processes
        return full and all(self.proof(each) is ContextProof.SHOWN for each in lease.clients)

    def proof(self, client: ProcessIdentity) -> ContextProof:
        """Return the proof that mpsd has for a client: its place in the server's list, or memory that NVML shows."""
        is_enough = self.binds is Binds.CONNECT
        return ContextProof.SHOWN if is_enough else self.proofs.get(client, ContextProof.MISSING)

    # -- what happens --------------------------------------------------------------------------------------------------

    def grant(self) -> None:
        """Grant another lease."""
        threads = ActiveThreadPercentage(self.dice.randint(10, 1000))
        memory = PinnedDeviceMemLimit(self.dice.randint(10, 80 * 1024))
        lease = asked(LeaseRequest(threads, memory, processes=self.dice.choice([1, 1, 2, 3, None])))
        share = Share(GPU, "gpu0", threads, memory, {})
        lease = self.leases[lease.id] = structs.replace(lease, state=LeaseState.GRANTED, shares=(share,))
        self.awaits(lease, anew=True)
        self.settle()

    def look(self) -> None:
        """Read the GPU: the ceiling closes behind processes with memory."""
        tells = self.dice.random() < 0.8
        unknown = dict.fromkeys((each.identity for each in self.processes), ContextProof.UNKNOWN)
        known = {
            each.identity: ContextProof.SHOWN if each.contexts else ContextProof.MISSING for each in self.processes
        }
        there = known if tells else unknown
        self.proofs = {each: there[each] for lease in self.leases.values() for each in lease.clients}
        for lease in self.leases.values():
            self.awaits(lease, anew=False)

    def notice(self) -> None:
        """Have mpsd notice new processes."""
        for process in self.processes:
            lease = self.leases.get(process.lease)
            if lease is None or process.identity in lease.clients:
                continue
            if lease.request.processes is None or len(lease.clients) < lease.request.processes:
                self.change(lease, (*lease.clients, process.identity))

    def exit(self, process: Process) -> None:
        """Have a process exit, which its pidfd reports; in `anytime` another one comes before mpsd has looked."""
        self.processes.remove(process)
        self.server.left(process.identity.pid, said=True)
        if self.attach is Attach.ANYTIME and process.lease in self.leases:
            self.connect(self.leases[process.lease])
        lease = self.leases.get(process.lease)
        if lease is not None and process.identity in lease.clients:
            self.change(lease, (each for each in lease.clients if each != process.identity))

    def release(self, lease: Lease) -> None:
        """End a lease; its processes stay."""
        del self.leases[lease.id]
        self.expected.expect(lease.id, self.part(lease), Awaited.NOBODY)

    def step(self) -> None:
        """Carry out one random event of a node, and have mpsd look now and then."""
        self.now += self.dice.choice([0.0, 0.0, 0.1, WINDOW / 2, 2 * WINDOW])
        limits = self.settle()
        assert limits == self.most()
        self.happens(limits)
        if self.dice.random() < 0.5:
            self.notice()
        if self.dice.random() < 0.3:
            self.look()

    def happens(self, limits: Limits) -> None:
        """Carry out one of these events while these limits are open."""
        leases, processes = [*self.leases.values()], self.processes
        match self.dice.choice([*THINGS]):
            case "grant":
                self.grant()
            case "connect" if leases:
                self.connect(self.dice.choice(leases))
            case "context" if processes:
                self.make_context(self.dice.choice(processes))
            case "exit" if processes:
                self.exit(self.dice.choice(processes))
            case "reset" if processes:
                self.reset(self.dice.choice(processes))
            case "release" if leases:
                self.release(self.dice.choice(leases))
            case "attach" if leases:  # for a lease whose single turn has passed, or that is awaited anyway
                self.awaits(self.dice.choice(leases), anew=True)
            case _ if not any(self.expected.expects(each.id) for each in leases):
                assert limits == self.closed
                stray = self.admitted({}).pid
                context = self.server.context(stray)
                assert isinstance(context, Context)
                assert within(context.pinned, self.closed)
                self.server.left(stray, said=True)


DEFAULTS: Final = Limits(ActiveThreadPercentage(200), PinnedDeviceMemLimit(4 * 1024))


@pytest.mark.parametrize("closed", [SMALLEST, DEFAULTS, UNLIMITED], ids=["deny", "defaults", "allow"])
@pytest.mark.parametrize("binds", Binds)
@pytest.mark.parametrize("attach", Attach)
def test_runs(attach: Attach, binds: Binds, closed: Limits) -> None:
    """No client has more than the table says, and in `anytime` no honest client has less than its share."""
    given, runs = 0, RUNS if closed is SMALLEST else RUNS // 4
    for seed in range(runs):
        server = Server(1, Start((GPU,), 100.0, {}, priority=0, binds=binds), lambda _: None)
        server.begin()
        run = Run(random.Random(seed), attach, closed, server, binds)
        for _ in range(STEPS):
            run.step()
        given += run.given
    assert given > runs
