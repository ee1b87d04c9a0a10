"""Keeps every control daemon at what the leases need: open for those whose clients are to come, and closed behind them.

They are opened, and read back, before the grant is answered. In shared mode they are closed a moment later than they
could be, so that grants and releases that follow each other at once do not each cost a conversation.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Final

from mpsd.core.enforcement import ceiling
from mpsd.core.enforcement.ceiling import NEVER, CeilingRules, ExpectedClients
from mpsd.core.errors import DaemonNotReadyError
from mpsd.core.model import Lease, LeaseState, Limits
from mpsd.core.mps.limits import widest_limits
from mpsd.core.reload import LiveSettings
from mpsd.core.settings import Attach, Settings, Unadmitted
from mpsd.daemon.control.pipe_access import NodePipeAccess
from mpsd.daemon.control.supervisor import Supervisor
from mpsd.system import clock

_LINGER: Final = 0.2
"""Seconds for which limits may stay that nobody needs any more."""


@dataclass(slots=True)
class _Gate:
    """One control daemon, and who is to attach to it."""

    supervisor: Supervisor
    limits: Limits
    expected: ExpectedClients = field(default_factory=ExpectedClients)
    lower_at: float = NEVER
    """When limits that are wider than is needed are to be lowered."""
    until: float = NEVER
    """When what is needed changes by itself."""


class LimitGates:
    """The gates of all control daemons."""

    def __init__(self, settings: LiveSettings, pipe_access: NodePipeAccess) -> None:
        self._pipe_access = pipe_access
        self._gates: dict[str, _Gate] = {}
        self._changed = asyncio.Event()
        self._wakes = NEVER
        """When `run` looks again by itself."""
        self._moved = asyncio.Event()
        """Set, and replaced, whenever something was settled: whoever waits for a gate looks again."""
        self._waiting = 0
        """How many wait for that."""
        settings.follow(self._configure)

    def _configure(self, settings: Settings) -> None:
        self._rules, self._patience = rules(settings), 2 * settings.daemon.answer_deadline
        self._settle_all()

    def add(self, supervisor: Supervisor) -> None:
        """Take over what a control daemon is to give its clients."""
        self._gates[supervisor.name] = _Gate(supervisor, self._rules.closed)
        supervisor.limit(self._rules.closed)

    async def run(self) -> None:
        """Follow the clock and what the supervisors find, until cancelled."""
        while True:
            self._changed.clear()
            self._settle_all()
            self._moved.set()
            self._moved = asyncio.Event()
            self._wakes = min((min(each.lower_at, each.until) for each in self._gates.values()), default=NEVER)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self._wakes == NEVER else self._wakes - clock.monotonic()):
                    await self._changed.wait()

    def look(self) -> None:
        """Look again soon: something has changed about a control daemon."""
        self._changed.set()

    def follow(self, lease: Lease) -> None:
        """Wait for processes of a lease, or no more, by what it is now; its window begins anew."""
        left = 0 if lease.state is LeaseState.ENDED else lease.request.processes - len(lease.clients)
        for share in lease.shares:
            gate = self._gates.get(share.daemon)
            if gate is None:  # the GPU of a lease of an earlier mpsd may be gone
                continue
            if left > 0:
                limits = ceiling.each_process(lease, share)
                is_other = gate.expected.expect(lease.id, limits, some=bool(lease.clients), now=clock.monotonic())
            else:
                is_other = gate.expected.forget(lease.id)
            if lease.clients or self._rules.strict or (is_other and left > 0):
                self._settle(gate, linger=lease.state is not LeaseState.ACTIVE)  # behind a client, the door is shut
            elif is_other:  # whoever asks next may well need what this one leaves
                gate.lower_at = min(gate.lower_at, clock.monotonic() + _LINGER)
            self._wake_if_needed(gate)
        if lease.state is LeaseState.ENDED:
            self._pipe_access.close(lease)

    def _wake_if_needed(self, gate: _Gate) -> None:
        """It is settled already: those who wait look again, and the clock is followed anew where it has to be."""
        if self._waiting or gate.lower_at < self._wakes or gate.until < self._wakes:
            self._changed.set()

    def _is_open(self, lease: Lease) -> bool:
        """Tell whether a lease's clients can attach as it is: no turns, no window that has begun, no trouble."""
        if self._rules.strict or lease.clients:
            return False
        for share in lease.shares:  # at every grant: a generator would take twice as long
            if share.daemon in self._gates and self._gates[share.daemon].supervisor.trouble:
                return False
        return True

    async def open(self, lease: Lease) -> None:
        """Return when a lease's clients can attach: the way is open, and so are its limits, which were read back.

        Raises PipeAccessError, and DaemonNotReadyError when a control daemon does not get that far.
        """
        gates = [self._gates[share.daemon] for share in lease.shares if share.daemon in self._gates]
        renewing = [gate.supervisor.renew_for(lease.owner.uid) for gate in gates]
        if not any(renewing):
            self._pipe_access.open(lease)
            if self._is_open(lease):
                return  # as mostly
        gates.sort(key=lambda gate: gate.supervisor.name)
        for gate in gates:
            gate.expected.ask(lease.id)
        try:
            while True:
                for gate in gates:
                    await self._open(gate, lease.id)
                    gate.expected.hold(lease.id)
                    self._settle(gate)
                if all(gate.expected.is_open_to(lease.id) or not gate.expected.expects(lease.id) for gate in gates):
                    self._pipe_access.open(lease)
                    return
        finally:
            for gate in gates:
                gate.expected.answer(lease.id, some=bool(lease.clients), now=clock.monotonic())
                self._settle(gate)
                self._wake_if_needed(gate)

    async def _open(self, gate: _Gate, lease_id: str) -> None:
        supervisor, patience = gate.supervisor, None
        while gate.expected.expects(lease_id):
            is_open = gate.expected.is_open_to(lease_id)
            if not supervisor.trouble:
                if is_open:
                    return
                patience = None
            elif is_open and patience is None:
                patience = clock.monotonic() + self._patience
                if supervisor.snapshot().log_silent_since is not None:
                    supervisor.ask()
            # Its turn may pass meanwhile: what was not opened in time is not waited for turn after turn.
            if patience is not None and clock.monotonic() >= patience:
                raise self._not_ready(supervisor)
            self._waiting += 1
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if patience is None else patience - clock.monotonic()):
                        await self._moved.wait()
            finally:
                self._waiting -= 1

    @staticmethod
    def _not_ready(supervisor: Supervisor) -> DaemonNotReadyError:
        return DaemonNotReadyError(
            f"the limits of {supervisor.name} could not be opened: {supervisor.trouble}",
            hint="try again in a moment; for its state: mpsctl daemons",
            limit="health",
        )

    def _settle_all(self) -> None:
        for gate in self._gates.values():
            self._settle(gate)

    def _settle(self, gate: _Gate, *, linger: bool = True) -> None:
        """Have a control daemon hold what is needed: wider limits at once, narrower ones when they have lingered."""
        now = clock.monotonic()
        needed = gate.expected.settle(self._rules, now)
        gate.until = needed.until
        if needed.limits == gate.limits:
            gate.lower_at = NEVER
            return
        limits = needed.limits
        if linger and not self._rules.strict and now < gate.lower_at:
            limits = widest_limits(gate.limits, limits)
        gate.lower_at = NEVER if limits == needed.limits else min(gate.lower_at, now + _LINGER)
        if limits != gate.limits:
            gate.limits = limits
            gate.supervisor.limit(limits)


def rules(settings: Settings) -> CeilingRules:
    """Return what the settings say of attaching."""
    closed = {
        Unadmitted.DENY: ceiling.SMALLEST,
        Unadmitted.DEFAULTS: settings.default_limits,
        Unadmitted.ALLOW: ceiling.UNLIMITED,
    }[settings.unadmitted]
    return CeilingRules(
        closed, strict=settings.enforcement.attach is Attach.STRICT, window=settings.enforcement.attach_window
    )
