"""Keeps the ceiling of every control daemon at what the leases need: open while processes may come, closed otherwise.

mpsd raises it, and reads it back, before it answers the grant. It lowers it a moment later than it could, so that
grants and releases in quick succession do not each cost a conversation.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from msgspec import structs

from mpsd.core.enforcement.ceiling import (
    NEVER,
    CeilingRules,
    ContextProof,
    Expected,
    ExpectedClients,
    context_proof,
    each_process,
    expected_in_turns,
)
from mpsd.core.errors import DaemonNotReadyError
from mpsd.core.model import AttachedProcess, GpuUsage, Lease, LeaseState, Limits, ProcessIdentity, Reading, Unknown
from mpsd.core.mps.limits import widest_limits
from mpsd.core.mps_facts import Binds
from mpsd.core.reload import LiveSettings
from mpsd.core.settings import Attach, Settings
from mpsd.core.signal import Signal
from mpsd.daemon.control.pipe_access import NodePipeAccess
from mpsd.daemon.control.supervisor import Supervisor
from mpsd.daemon.leases.completeness import Completeness
from mpsd.system import clock

_LINGER: Final = 0.2
"""Seconds for which limits may stay that no lease needs any more."""

_FIRST_READING: Final = 0.5
"""Seconds from the arrival of a client to a reading of the GPUs for its memory; each further wait is twice as long."""

_LAST_READING: Final = 8.0
"""The longest of these waits. After it, the GPUs are read only as often as usual."""

_CANARY: Final = "canary"
"""The id of mpsd's own client among the leases; no lease has this id."""

_CANARY_PATIENCE: Final = 60.0
"""Seconds that a canary waits for its turn."""


@dataclass(slots=True)
class _DaemonCeiling:
    """The ceiling of one control daemon, and the leases whose processes will attach to it."""

    supervisor: Supervisor
    limits: Limits
    expected: ExpectedClients = field(default_factory=ExpectedClients)
    lower_at: float = NEVER
    """The time at which limits that are wider than needed will be lowered."""
    until: float = NEVER
    """The time at which the needed limits change without an event."""


class Ceilings:
    """The ceilings of all control daemons, and the leases that they are open for."""

    def __init__(self, settings: LiveSettings, pipe_access: NodePipeAccess, completeness: Completeness) -> None:
        self.stale = Signal[()]()
        """The GPUs have to be read, for the memory of clients."""
        self._pipe_access = pipe_access
        self._completeness = completeness
        self._ceilings: dict[str, _DaemonCeiling] = {}
        self._leases: dict[str, Lease] = {}
        """The living leases, by id, as they were last noted."""
        self._unreadable: frozenset[str] = frozenset()
        """The GPUs that could not be read at the last reading."""
        self._proofs: dict[AttachedProcess, ContextProof] = {}
        """The context proofs of the clients at the last reading of NVML."""
        self._read_at = NEVER
        """The time of the next reading of the GPUs for the memory of clients."""
        self._pause = _FIRST_READING
        self._changed = asyncio.Event()
        self._wakes = NEVER
        """The time of the next check by `run`."""
        self._adjusted = asyncio.Event()
        """Set, and replaced, each time that the ceilings were adjusted: callers that wait for them check again."""
        self._waiting = 0
        """The number of these callers."""
        settings.follow(self._configure)

    def _configure(self, settings: Settings) -> None:
        self._rules, self._patience = CeilingRules.of(settings), 2 * settings.daemon.answer_deadline
        for lease in self._leases.values():
            self._expect(lease, anew=False)
        self._adjust_all()
        self._changed.set()

    def add(self, supervisor: Supervisor) -> None:
        """Take charge of the ceiling of a control daemon, also for the leases that it has already."""
        self._ceilings[supervisor.name] = _DaemonCeiling(supervisor, self._rules.closed)
        supervisor.limits.keep_in_force(keeps=True)  # until the leases are restored
        supervisor.limits.want(self._rules.closed)
        for lease in self._leases.values():
            if any(share.daemon == supervisor.name for share in lease.shares):
                self._expect(lease, anew=True)

    async def run(self) -> None:
        """Adjust the ceilings by the clock and the findings of the supervisors, until cancelled."""
        while True:
            self._changed.clear()
            self._adjust_all()
            self._adjusted.set()
            self._adjusted = asyncio.Event()
            if self._read_at <= clock.monotonic():
                self._read_at = NEVER
                self.stale.send()
            wakes = (min(each.lower_at, each.until) for each in self._ceilings.values())
            self._wakes = min(self._read_at, *wakes, NEVER)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self._wakes == NEVER else self._wakes - clock.monotonic()):
                    await self._changed.wait()

    def check_soon(self) -> None:
        """Check again soon: the state of a control daemon has changed."""
        self._changed.set()

    # -- expected processes -------------------------------------------------------------------------------------------

    def note(self, lease: Lease) -> None:
        """Expect processes of a lease with a holder, or stop expecting them, by its present state.

        In strict mode, a single turn comes again.
        """
        if lease.state is LeaseState.ENDED or lease.closing:
            self._leases.pop(lease.id, None)
        else:
            self._leases[lease.id] = lease
            self._pipe_access.note(lease)
        self._expect(lease, anew=True)
        if lease.state is LeaseState.ENDED:
            self._pipe_access.close(lease)

    def forget(self, lease: Lease) -> None:
        """Stop expecting processes of a lease that is a claim again, and remove the pipe access of its uid."""
        self.note(structs.replace(lease, state=LeaseState.ENDED))

    def take_reading(
        self, usages: Mapping[str, Reading[GpuUsage]], listed: Mapping[ProcessIdentity, AbstractSet[str]]
    ) -> None:
        """Process new readings of the GPUs, by UUID; `listed` has the GPUs whose servers list each client.

        In strict mode the turn of a lease ends with the proof that the limits of all of its clients have bound.
        """
        self._unreadable = frozenset(gpu for gpu, usage in usages.items() if isinstance(usage, Unknown))
        if self._rules.attach is Attach.ANYTIME:
            return
        attached = [lease for lease in self._leases.values() if lease.attached]
        listing = {
            ceiling.supervisor.gpu.uuid for ceiling in self._ceilings.values() if self._is_bound_once_listed(ceiling)
        }
        self._proofs = {
            each: context_proof(each.process, usages.get(each.gpu))
            if each.gpu in listed.get(each.process, ())
            else ContextProof.MISSING
            for lease in attached
            for each in lease.attached
            if each.gpu not in listing
        }
        for lease in attached:
            self._expect(lease, anew=False)
        misses = ContextProof.MISSING in self._proofs.values()
        if misses and self._read_at == NEVER and self._pause <= _LAST_READING:
            self._read_at, self._pause = clock.monotonic() + self._pause, 2 * self._pause
        self._changed.set()

    def _expect(self, lease: Lease, *, anew: bool) -> None:
        """Expect processes of a lease on each of its GPUs for as long as `_how_long` says.

        With `anew` the lease itself has changed: a single turn that has passed comes again, and the ceilings are
        adjusted; otherwise the caller adjusts all of them.
        """
        for share in lease.shares:
            ceiling = self._ceilings.get(share.daemon)
            if ceiling is None:  # the GPU of a lease of an earlier mpsd may be gone
                continue
            how_long = self._how_long(lease, ceiling)
            is_other = ceiling.expected.expect(lease.id, each_process(lease, share), how_long, anew=anew)
            if not anew:
                continue
            # In strict mode each lease has its own turn, and the turn of its new client ends with the memory that NVML
            # shows. Otherwise a lease that needs no more than others changes nothing.
            is_strict = self._rules.attach is Attach.STRICT
            if is_strict and how_long is Expected.ALWAYS and lease.clients_on(share.gpu):
                self._pause = 2 * _FIRST_READING
                self._read_at = min(self._read_at, clock.monotonic() + _FIRST_READING)
                self._changed.set()
            if is_strict or is_other:
                self._adjust(ceiling)
            self._wake_if_needed(ceiling)

    def _how_long(self, lease: Lease, ceiling: _DaemonCeiling) -> Expected:
        if lease.state is LeaseState.ENDED or lease.closing:
            return Expected.NOT
        if self._rules.attach is Attach.ANYTIME:
            return Expected.ALWAYS
        gpu = ceiling.supervisor.gpu.uuid
        attached = [each for each in lease.attached if each.gpu == gpu]
        if self._is_bound_once_listed(ceiling):
            proofs = [ContextProof.SHOWN for _ in attached]
        else:
            new = ContextProof.UNKNOWN if gpu in self._unreadable else ContextProof.MISSING
            proofs = [self._proofs.get(each, new) for each in attached]
        return expected_in_turns(lease.request.processes, proofs)

    def _is_bound_once_listed(self, ceiling: _DaemonCeiling) -> bool:
        """Tell whether a client that the server lists, and that thus has connected, has its limits for good."""
        return ceiling.supervisor.limits_bind is Binds.CONNECT

    # -- opening ------------------------------------------------------------------------------------------------------

    async def open(self, lease: Lease, until: float = 0.0) -> None:
        """Return when a lease's clients can attach: its uid has pipe access, and its limits are open and read back.

        Its caller waits `until` this time at least, on the monotonic clock, as for a server that starts.
        """
        if lease.id not in self._leases or self._open_at_once(lease):
            return  # a claim expects no process
        ceilings = [self._ceilings[share.daemon] for share in lease.shares if share.daemon in self._ceilings]
        ceilings.sort(key=lambda ceiling: ceiling.supervisor.name)
        for ceiling in ceilings:
            ceiling.expected.ask(lease.id)
        try:
            await self._open_all(ceilings, lease.id, until)
            self._pipe_access.open(lease)
        finally:
            there = self._leases.get(lease.id, lease)
            for ceiling in ceilings:
                ceiling.expected.answer(lease.id, self._how_long(there, ceiling), now=clock.monotonic())
                self._adjust(ceiling)
                self._wake_if_needed(ceiling)

    def _open_at_once(self, lease: Lease) -> bool:
        """Admit a lease's uid, and tell whether its clients can attach now, which is the usual case.

        They can where there are no turns, no trouble, and no unanswered doubt. Raises PipeAccessError.
        """
        is_open, is_replaced = self._rules.attach is Attach.ANYTIME, False
        for share in lease.shares:
            ceiling = self._ceilings.get(share.daemon)
            if ceiling is not None:
                supervisor = ceiling.supervisor
                is_replaced = supervisor.replacement.replace_for(lease.owner.uid) or is_replaced
                is_open = is_open and supervisor.unanswered_doubts() is None and not supervisor.trouble
        if is_replaced:
            return False
        self._pipe_access.open(lease)
        return is_open

    async def _open_all(self, ceilings: list[_DaemonCeiling], lease_id: str, until: float) -> None:
        """Wait until a lease has its turn on all of its GPUs at once, and the doubts of that moment are answered."""
        # 1. The turns are taken in the order of the GPUs, and each is kept until the last one has come.
        # 2. A turn can be lost nevertheless, as by a reload: then they are taken again.
        # 3. Doubts about the control daemons that come up after that do not count.
        doubts = None
        while True:
            for ceiling in ceilings:
                await self._open_one(ceiling, lease_id, until)
                ceiling.expected.keep_slot(lease_id)
                self._adjust(ceiling)
            if any(each.expected.expects(lease_id) and not each.expected.is_open_to(lease_id) for each in ceilings):
                continue
            if doubts is None:
                found = (ceiling.supervisor.unanswered_doubts() for ceiling in ceilings)
                doubts = [each for each in found if each is not None]
            if all(is_answered() for is_answered in doubts):
                return
            await self._wait_for_adjustment()

    @contextlib.asynccontextmanager
    async def opened_for_canary(self, name: str, limits: Limits) -> AsyncIterator[None]:
        """Keep a control daemon open this far for a canary, with the limits read back, until the context is left.

        Raises DaemonNotReadyError, and TimeoutError where its turn does not come.
        """
        ceiling = self._ceilings[name]
        ceiling.expected.expect(_CANARY, limits, Expected.ALWAYS)
        self._adjust(ceiling)
        try:
            async with asyncio.timeout(_CANARY_PATIENCE):
                await self._open_one(ceiling, _CANARY)
            yield
        finally:
            ceiling.expected.forget(_CANARY)
            ceiling.lower_at = 0.0  # the limits that only the canary had are lowered at once
            self._adjust(ceiling)
            self._changed.set()

    async def _open_one(self, ceiling: _DaemonCeiling, lease_id: str, until: float = 0.0) -> None:
        # 1. Open and without trouble: the clients can attach.
        # 2. An end of a client keeps the pipe busy for as long as its work takes. That is no fault: wait without bound.
        # 3. Open, but the limits cannot be verified: wait for the patience that a caller has, and refuse then.
        # 4. Not open yet: another lease has its turn, which has a bound of its own.
        supervisor, patience = ceiling.supervisor, None
        while ceiling.expected.expects(lease_id):
            is_open = ceiling.expected.is_open_to(lease_id)
            trouble = supervisor.trouble_for_canary if lease_id == _CANARY else supervisor.trouble
            if not trouble:
                if is_open:
                    return
                patience = None
            elif supervisor.pipe.waits_for:
                patience = None  # the end of a client may take as long as its work on the GPU, and is no fault
            elif is_open and patience is None:
                patience = max(clock.monotonic() + self._patience, until)
                if supervisor.snapshot().log_silent_since is not None:
                    supervisor.questions.ask()
            # The turn may pass meanwhile: the caller does not wait turn after turn for limits that come too late.
            if patience is not None and clock.monotonic() >= patience:
                because = f"the limits of {supervisor.name} could not be opened: {trouble}"
                hint = "try again in a moment; for its state: mpsctl daemons"
                raise DaemonNotReadyError(because, hint=hint, limit="health")
            await self._wait_for_adjustment(patience)

    async def _wait_for_adjustment(self, until: float | None = None) -> None:
        """Wait until the ceilings were adjusted again, or until this time."""
        self._waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if until is None else until - clock.monotonic()):
                    await self._adjusted.wait()
        finally:
            self._waiting -= 1

    # -- adjusting ----------------------------------------------------------------------------------------------------

    def _adjust_all(self) -> None:
        for ceiling in self._ceilings.values():
            ceiling.supervisor.limits.keep_in_force(
                keeps=not self._completeness.is_complete(ceiling.supervisor.gpu.uuid)
            )
            self._adjust(ceiling)

    def _adjust(self, ceiling: _DaemonCeiling) -> None:
        """Set the needed limits: wider ones at once, narrower ones after they have lingered."""
        now = clock.monotonic()
        needed = ceiling.expected.ceiling(self._rules, now)
        ceiling.until = needed.until
        limits = needed.limits
        if self._rules.attach is not Attach.STRICT and now < ceiling.lower_at:
            limits = widest_limits(ceiling.limits, limits)
        ceiling.lower_at = NEVER if limits == needed.limits else min(ceiling.lower_at, now + _LINGER)
        if limits != ceiling.limits:
            ceiling.limits = limits
            ceiling.supervisor.limits.want(limits)

    def _wake_if_needed(self, ceiling: _DaemonCeiling) -> None:
        """Wake `run` if callers wait, or if its next check must be earlier; the ceiling is adjusted already."""
        if self._waiting or ceiling.lower_at < self._wakes or ceiling.until < self._wakes:
            self._changed.set()
