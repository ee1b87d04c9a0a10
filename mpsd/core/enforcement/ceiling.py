"""How far the limits of a control daemon are open, and for whom. Pure.

A client gets the lesser of the server's limits at the moment when they bind, and of the limits in its own environment;
they cannot be changed afterwards. The moment is not documented: it may be when the process connects, or when it creates
a context, which may be minutes later, and may happen a second time. mpsd therefore keeps a server's limits at what the
leases need whose processes may still come, and lowers them behind a client only after its context is proven.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import reduce
from typing import Final

from msgspec import Struct

from mpsd.core.model import GpuUsage, Known, Lease, Limits, ProcessIdentity, Reading, Share, Unknown
from mpsd.core.mps.limits import widest_limits
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.settings import Attach, Settings, Unadmitted

SMALLEST: Final = Limits(ActiveThreadPercentage(1), PinnedDeviceMemLimit(1))
"""0.1 % reads back as 0.1, and less as 0.0; 1M is the least memory, and 0 would be none at all (measured, all four)."""

NEVER: Final = float("inf")
"""A moment that never comes."""

UNLIMITED: Final = Limits(ActiveThreadPercentage(1000), None)


@dataclass(frozen=True, slots=True)
class CeilingRules:
    """The operator's rules of attaching."""

    closed: Limits
    """The limits of a process that was not admitted."""
    attach: Attach
    window: float
    """Seconds of a turn in strict mode, and of the wait for the processes of a lease that do not come with its
    first."""

    @classmethod
    def of(cls, settings: Settings) -> "CeilingRules":
        """Return the rules that the settings contain."""
        closed = {
            Unadmitted.DENY: SMALLEST,
            Unadmitted.DEFAULTS: settings.default_limits,
            Unadmitted.ALLOW: UNLIMITED,
        }[settings.unadmitted]
        return cls(closed, settings.enforcement.attach, settings.enforcement.attach_window)


@dataclass(slots=True)
class _Slot:
    """In strict mode, the lease whose turn it is, and since when."""

    lease: str
    since: float
    held: bool = False
    """Whether the turn does not pass, because the lease waits for its turn on another GPU."""
    answered: bool = False
    """Whether the caller that waited for the turn got its answer. The turn then has begun, and a repeated request does
    not extend it."""


class Ceiling(Struct, frozen=True):
    """The maximum of the next client, and until when, where it can change by itself."""

    limits: Limits
    until: float = NEVER


def each_process(lease: Lease, share: Share) -> Limits:
    """Return the limits of each client process of a lease on one of its GPUs: its part, rounded down.

    Where the lease may have any number of processes, each gets the whole share.
    """
    processes = lease.request.processes
    if processes is None or processes == 1:
        return Limits(share.threads, share.memory)
    return Limits(
        ActiveThreadPercentage(share.threads.tenths // processes),
        PinnedDeviceMemLimit(share.memory.mebibytes // processes),
    )


class Awaited(Enum):
    """How long the ceiling stays open for the processes of a lease."""

    ALWAYS = auto()
    """As long as the lease lives, or until more is known."""
    WINDOW = auto()
    """For the window, from the last moment that gave a reason for it."""
    NOBODY = auto()
    """Not at all."""


class ContextProof(Enum):
    """Whether NVML shows memory of a client on the GPU whose server lists it, which proves that it has a context there.

    A client in a server's list is no such proof: it may create its first context, or another one, later.
    """

    SHOWN = auto()
    MISSING = auto()
    UNKNOWN = auto()
    """The GPU cannot be read, or NVML does not report the memory of the process."""


def context_proof(client: ProcessIdentity, usage: Reading[GpuUsage] | None) -> ContextProof:
    """Return whether NVML shows memory of a client on a GPU whose server lists it, by the last reading of that GPU."""
    if not isinstance(usage, Known):
        return ContextProof.UNKNOWN
    process = usage.value.processes.get(client.pid)
    if process is None:
        return ContextProof.MISSING
    if isinstance(process.memory, Unknown):
        return ContextProof.UNKNOWN
    return ContextProof.SHOWN if process.memory.value else ContextProof.MISSING


def awaited(processes: int | None, attach: Attach, proofs: Sequence[ContextProof]) -> Awaited:
    """Return how long mpsd expects processes of a living lease on a GPU, given the context proof of each client there.

    `processes` is the number of clients that the lease may have on the GPU; None: any number.
    """
    if attach is Attach.ANYTIME or not proofs or ContextProof.MISSING in proofs:
        return Awaited.ALWAYS
    may_have_more = processes is None or len(proofs) < processes
    return Awaited.WINDOW if ContextProof.UNKNOWN in proofs or may_have_more else Awaited.NOBODY


class ExpectedClients:
    """The leases of one control daemon whose processes are still expected, in the order of their turns.

    `awaited` decides how long each is expected. In strict mode, a lease that is always expected gets its turn again and
    again. A lease with a window gets a single turn, and its later processes must request another.
    """

    def __init__(self) -> None:
        self._expected: dict[str, Limits] = {}
        self._sizes: dict[Limits, int] = {}
        """The number of leases for each size of limits: thousands of leases usually request the same few sizes."""
        self._since: dict[str, float] = {}
        """The leases that have a window, and since when; the earliest first."""
        self._asking: set[str] = set()
        """The leases for which a caller waits until the ceiling is open: their windows begin only then."""
        self._slot: _Slot | None = None

    def expect(self, lease_id: str, limits: Limits, how_long: Awaited, *, now: float, anew: bool = True) -> bool:
        """Expect processes of a lease, or stop expecting them; a window begins now or, unless `anew`, continues.

        Return whether the limits may have to change; they do not where other leases get the same limits.
        """
        is_over = how_long is Awaited.WINDOW and not anew and lease_id not in self._expected
        if is_over or how_long is Awaited.NOBODY:
            return self.forget(lease_id)
        alike = 1
        if lease_id not in self._expected:
            self._expected[lease_id] = limits
            alike = self._sizes.get(limits, 0)
            self._sizes[limits] = alike + 1
        if how_long is Awaited.ALWAYS:
            self._since.pop(lease_id, None)
        elif (anew or lease_id not in self._since) and lease_id not in self._asking:
            self._since.pop(lease_id, None)
            self._since[lease_id] = now
        return not alike

    def ask(self, lease_id: str) -> None:
        """Keep the window of a lease from running out while a caller waits until the ceiling is open."""
        self._since.pop(lease_id, None)
        self._asking.add(lease_id)

    def hold(self, lease_id: str) -> None:
        """Keep the turn of a lease from passing while the lease waits for its turn on another GPU.

        A lease takes its turns on several GPUs in the order of the GPUs, so that no two leases wait for each other.
        """
        if self._slot is not None and self._slot.lease == lease_id and not self._slot.answered:
            self._slot.held = True

    def answer(self, lease_id: str, how_long: Awaited, *, now: float) -> None:
        """Let the window of a lease, if it has one, and its turn begin: the caller gets its answer now."""
        self._asking.discard(lease_id)
        if how_long is Awaited.WINDOW and self.expects(lease_id):
            self._since.pop(lease_id, None)
            self._since[lease_id] = now
        if self._slot is not None and self._slot.lease == lease_id and not self._slot.answered:
            self._slot = _Slot(lease_id, now, answered=True)

    def forget(self, lease_id: str) -> bool:
        """Stop expecting processes of a lease that has all of them or has ended; return the same as `expect`."""
        limits = self._expected.pop(lease_id, None)
        if limits is None:
            return False
        self._since.pop(lease_id, None)
        left = self._sizes.pop(limits) - 1
        if left:
            self._sizes[limits] = left
        return not left

    def expects(self, lease_id: str) -> bool:
        """Tell whether processes of a lease are expected."""
        return lease_id in self._expected

    def expects_for_good(self, lease_id: str) -> bool:
        """Tell whether processes of a lease are expected without a window at the end of which they no longer are."""
        return lease_id in self._expected and lease_id not in self._since

    def is_open_to(self, lease_id: str) -> bool:
        """Tell whether processes of a lease may attach now, by the last `settle`."""
        return self.expects(lease_id) and (self._slot is None or self._slot.lease == lease_id)

    def settle(self, rules: CeilingRules, now: float) -> Ceiling:
        """Return how far the ceiling is open now."""
        if rules.attach is Attach.STRICT:
            return self._strictly(rules, now)
        self._slot = None
        while self._since and next(iter(self._since.values())) + rules.window <= now:
            self.forget(next(iter(self._since)))
        ends = next(iter(self._since.values())) + rules.window if self._since else NEVER
        return Ceiling(reduce(widest_limits, self._sizes, rules.closed), ends)

    def _strictly(self, rules: CeilingRules, now: float) -> Ceiling:
        slot = self._slot
        if slot is not None and slot.lease in self._expected and not slot.held and now >= slot.since + rules.window:
            if slot.lease in self._since:
                self.forget(slot.lease)
            else:  # the lease gets another turn, after all others
                self._expected[slot.lease] = self._expected.pop(slot.lease)
            slot = None
        if slot is None or slot.lease not in self._expected:
            first = next(iter(self._expected), None)
            slot = None if first is None else _Slot(first, now)
        self._slot = slot
        if slot is None:
            return Ceiling(rules.closed)
        return Ceiling(self._expected[slot.lease], NEVER if slot.held else slot.since + rules.window)
