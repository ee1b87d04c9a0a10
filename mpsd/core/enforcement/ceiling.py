"""How far the limits of a control daemon are open, and for whom. Pure.

A client gets the lesser of the server's limits at the moment when they bind, and of the limits in its own environment;
they cannot be changed afterwards. On driver 580 they bind when the process connects (measured). Where that was not
measured, it may be when it creates a context, which may be minutes later and may happen a second time: mpsd then lowers
the limits behind a client only after its context is proven.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import reduce
from typing import Final

from msgspec import Struct

from mpsd.core.model import GpuUsage, Known, Lease, Limits, ProcessIdentity, ReadBack, Reading, Share, Unknown
from mpsd.core.mps.commands import words
from mpsd.core.mps.limits import (
    EVERYTHING,
    LIMITS,
    NOTHING,
    narrower,
    narrowest_read_back,
    wider,
    widest_limits,
    widest_read_back,
)
from mpsd.core.quantities import ActiveThreadPercentage, Bounds, Opened, PinnedDeviceMemLimit
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
    """Seconds of a turn in strict mode."""

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


class Expected(Enum):
    """How long processes of a lease are expected, for which the ceiling stays open."""

    ALWAYS = auto()
    """As long as the lease lives, or until more is known; in strict mode, turn after turn."""
    ONCE = auto()
    """For a single turn. Processes that come later must request another (`mpsctl attach`)."""
    NOT = auto()
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


def expected_in_turns(processes: int | None, proofs: Sequence[ContextProof]) -> Expected:
    """Return how long strict mode expects processes of a living lease on a GPU, given the proof of each client there.

    `processes` is the number of clients that the lease may have on the GPU; None: any number.
    """
    # 1. Without a client, the first one may come at any time. A client without a context gets the limits of the moment
    #    when it makes one, and so has to have its lease's part until then, whatever is known about the others.
    if not proofs or ContextProof.MISSING in proofs:
        return Expected.ALWAYS
    # 2. Where NVML cannot tell, or further clients may come, there is no evidence to wait for: one turn has to do.
    if ContextProof.UNKNOWN in proofs or processes is None or len(proofs) < processes:
        return Expected.ONCE
    # 3. All of its clients have their limits for good.
    return Expected.NOT


class ExpectedClients:
    """The leases of one control daemon whose processes are still expected, in the order of their turns.

    `expected_in_turns` decides how long each is expected in strict mode. A lease that is always expected gets its turn
    again and again. One that is expected once gets a single turn, and its later processes must request another.
    """

    def __init__(self) -> None:
        self._expected: dict[str, Limits] = {}
        self._sizes: dict[Limits, int] = {}
        """The number of leases for each size of limits: thousands of leases usually request the same few sizes."""
        self._once: set[str] = set()
        """The leases that are forgotten at the end of their turn."""
        self._asking: set[str] = set()
        """The leases for which a caller waits until the ceiling is open: their single turn begins only then."""
        self._slot: _Slot | None = None

    def expect(self, lease_id: str, limits: Limits, how_long: Expected, *, anew: bool = True) -> bool:
        """Expect processes of a lease, or stop expecting them; a single turn that has passed comes again if `anew`.

        Return whether the limits may have to change; they do not where other leases get the same limits.
        """
        is_over = how_long is Expected.ONCE and not anew and lease_id not in self._expected
        if is_over or how_long is Expected.NOT:
            return self.forget(lease_id)
        alike = 1
        if lease_id not in self._expected:
            self._expected[lease_id] = limits
            alike = self._sizes.get(limits, 0)
            self._sizes[limits] = alike + 1
        if how_long is Expected.ALWAYS:
            self._once.discard(lease_id)
        elif lease_id not in self._asking:
            self._once.add(lease_id)
        return not alike

    def ask(self, lease_id: str) -> None:
        """Keep a lease from being forgotten while a caller waits until the ceiling is open."""
        self._once.discard(lease_id)
        self._asking.add(lease_id)

    def keep_slot(self, lease_id: str) -> None:
        """Keep the turn of a lease from passing while the lease waits for its turn on another GPU.

        A lease takes its turns on several GPUs in the order of the GPUs, so that no two leases wait for each other.
        """
        if self._slot is not None and self._slot.lease == lease_id and not self._slot.answered:
            self._slot.held = True

    def answer(self, lease_id: str, how_long: Expected, *, now: float) -> None:
        """Let the turn of a lease begin: the caller gets its answer now."""
        self._asking.discard(lease_id)
        if how_long is Expected.ONCE and self.expects(lease_id):
            self._once.add(lease_id)
        if self._slot is not None and self._slot.lease == lease_id and not self._slot.answered:
            self._slot = _Slot(lease_id, now, answered=True)

    def forget(self, lease_id: str) -> bool:
        """Stop expecting processes of a lease that has all of them or has ended; return the same as `expect`."""
        limits = self._expected.pop(lease_id, None)
        if limits is None:
            return False
        self._once.discard(lease_id)
        left = self._sizes.pop(limits) - 1
        if left:
            self._sizes[limits] = left
        return not left

    def expects(self, lease_id: str) -> bool:
        """Tell whether processes of a lease are expected."""
        return lease_id in self._expected

    def is_open_to(self, lease_id: str) -> bool:
        """Tell whether processes of a lease may attach now, by the last `ceiling`."""
        return self.expects(lease_id) and (self._slot is None or self._slot.lease == lease_id)

    def ceiling(self, rules: CeilingRules, now: float) -> Ceiling:
        """Return how far the ceiling is open now."""
        if rules.attach is Attach.STRICT:
            return self._strictly(rules, now)
        self._slot = None
        return Ceiling(reduce(widest_limits, self._sizes, rules.closed))

    def _strictly(self, rules: CeilingRules, now: float) -> Ceiling:
        slot = self._slot
        # 1. A turn ends with its time, unless it is held. A single turn is over for good; any other lease goes behind
        #    all others.
        # 2. A turn that no caller waited for ends as soon as one waits for that of another lease, and comes again: a
        #    lease whose processes are late, or never come, delays nobody twice.
        # 3. Where no turn is left, or its lease has all its processes, the next lease in order gets one, those first
        #    for which a caller waits.
        # 4. Where no lease is expected, the ceiling is closed.
        waited_for = [each for each in self._expected if each in self._asking]
        if slot is not None and slot.lease in self._expected and not slot.held:
            is_over = now >= slot.since + rules.window
            yields = bool(waited_for) and not slot.answered and slot.lease not in self._asking
            if is_over and slot.lease in self._once:
                self.forget(slot.lease)
            elif is_over or yields:
                self._expected[slot.lease] = self._expected.pop(slot.lease)
            slot = None if is_over or yields else slot
        if slot is None or slot.lease not in self._expected:
            first = next((each for each in (*waited_for, *self._expected) if each in self._expected), None)
            slot = None if first is None else _Slot(first, now)
        self._slot = slot
        if slot is None:
            return Ceiling(rules.closed)
        return Ceiling(self._expected[slot.lease], NEVER if slot.held else slot.since + rules.window)


# -- the limits that were open to a client -----------------------------------------------------------------------------

# They are bounds, since they cannot be known exactly.

ANYTHING: Final = Bounds(NOTHING, EVERYTHING)
"""The bounds where nothing is known."""

_PID: Final = re.compile(r"[0-9]{1,10}")


def widened(one: Bounds, other: Bounds) -> Bounds:
    """Return the bounds that contain both."""
    return Bounds(narrowest_read_back(one.least, other.least), widest_read_back(one.most, other.most))


def between(last: Bounds | None, now: ReadBack, foreign: Bounds) -> Bounds | None:
    """Return the bounds of the limits between two conversations with a server; None: the first are unknown.

    `last` contains the limits at the first conversation, `now` those at the second. `foreign` contains the bounds
    within which commands of others set the limits meanwhile.
    """
    return None if last is None else widened(widened(last, Bounds(now, now)), foreign)


def by_commands(commands: Iterable[str], server: int, *, fresh: bool) -> Bounds:
    """Return the bounds of the limits that commands of others set on a server, even for a moment.

    Without such commands the bounds are empty: from everything down to nothing. The defaults of the daemon apply to a
    server that is `fresh`. A value that mpsd would not write itself counts as any value, because only MPS knows what it
    makes of it (`-1G` is 16 EiB, measured).
    """
    least, most = EVERYTHING, NOTHING
    for command in commands:
        name, *arguments = words(command) or [""]
        for limit in LIMITS:
            if name == limit.default_setter and fresh:
                given = limit.foreign(arguments)
            elif name == limit.server_setter and arguments and _may_be(arguments[0], server):
                given = limit.foreign(arguments[1:])
            else:
                continue
            most = limit.put(most, wider(limit.found(most), given))
            least = limit.put(least, narrower(limit.found(least), 0 if given is None else given))
    return Bounds(least, most)


def _may_be(pid: str, server: int) -> bool:
    """Tell whether a word in a command may be this server; only a different number excludes it."""
    return _PID.fullmatch(pid) is None or int(pid) == server


def any_of(limits: Iterable[ReadBack]) -> Bounds | None:
    """Return the bounds of limits of which any may have been in force; None where there are none."""
    each = [Bounds(one, one) for one in limits]
    return reduce(widened, each) if each else None


def opened(known: Opened | None, meanwhile: Bounds | None, *, new: bool) -> Opened | None:
    """Return the limits that were open to a client: `known` before, or for a `new` one, those since it connected."""
    if new:
        return None if meanwhile is None else Opened(meanwhile, meanwhile)
    return None if known is None else replace(known, since=widened(known.since, meanwhile or ANYTHING))


def continued(known: Opened | None, now: Opened | None, *, has_context: bool) -> Opened | None:
    """Return what was open to a client by `known`, at an earlier check, and by `now`; None: that is unknown.

    A client that had a context at the earlier check (`has_context`) has no less than was open by then, since a later
    fall of the ceiling can only apply to its later contexts.
    """
    if known is None:
        return None
    since = widened(known.since, now.since if now is not None else ANYTHING)
    if not has_context:
        return Opened(known.connecting, since)
    least = known.since.least
    later = narrowest_read_back(known.later or least, since.least)
    return Opened(known.connecting, Bounds(least, since.most), later if later != least else None)


# -- the uids that may reach a control daemon --------------------------------------------------------------------------


def admitted(
    unadmitted: Unadmitted, holders: Collection[int], own: int, quarantined: Collection[int] = ()
) -> frozenset[int] | None:
    """Return the uids that are admitted beside root and mpsd's own uid; None for all uids.

    `holders` are the uids that hold a lease on the daemon's GPU now; those that are `quarantined` are not admitted.
    """
    return frozenset(holders) - {0, own, *quarantined} if unadmitted is Unadmitted.DENY else None
