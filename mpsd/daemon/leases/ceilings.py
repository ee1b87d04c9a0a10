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
    Awaited,
    CeilingRules,
    ContextProof,
    ExpectedClients,
    awaited,
    context_proof,
    each_process,
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
        """The living leases, by id, as of the last `follow`."""
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
        self._moved = asyncio.Event()
        """Set, and replaced, each time that the ceilings were adjusted: callers that wait for them check again."""
        self._waiting = 0
        """The number of callers that wait for that."""
        settings.follow(self._configure)

    def _configure(self, settings: Settings) -> None:
        self._rules, self._patience = CeilingRules.of(settings), 2 * settings.daemon.answer_deadline
        for lease in self._leases.values():
            self._await(lease, anew=False)
        self._adjust_all()
        self._changed.set()

    def add(self, supervisor: Supervisor) -> None:
        """Take charge of the ceiling of a control daemon, also for the leases that it has already."""
        self._ceilings[supervisor.name] = _DaemonCeiling(supervisor, self._rules.closed)
        supervisor.limits.keep_in_force(keeps=True)  # until the leases are restored
        supervisor.limits.want(self._rules.closed)
        for lease in self._leases.values():
            if any(share.daemon == supervisor.name for share in lease.shares):
                self._await(lease, anew=True)

    async def run(self) -> None:
        """Follow the clock and the findings of the supervisors until cancelled."""
        while True:
            self._changed.clear()
            self._adjust_all()
            self._moved.set()
            self._moved = asyncio.Event()
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

    def follow(self, lease: Lease) -> None:
        """Expect processes of a lease with a holder, or stop expecting them, by its present state.

        In strict mode, a single turn comes again.
        """
        if lease.state is LeaseState.ENDED or lease.closing:
            self._leases.pop(lease.id, None)
        else:
            self._leases[lease.id] = lease
        self._await(lease, anew=True)
        if lease.state is LeaseState.ENDED:
            self._pipe_access.close(lease)

    def forget(self, lease: Lease) -> None:
        """Stop expecting processes of a lease that is a claim again, and remove the pipe access of its uid."""
        self.follow(structs.replace(lease, state=LeaseState.ENDED))

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
            self._await(lease, anew=False)
        misses = ContextProof.MISSING in self._proofs.values()
        if misses and self._read_at == NEVER and self._pause <= _LAST_READING:
            self._read_at, self._pause = clock.monotonic() + self._pause, 2 * self._pause
        self._changed.set()

    def _await(self, lease: Lease, *, anew: bool) -> None:
        now = clock.monotonic()
        for share in lease.shares:
            ceiling = self._ceilings.get(share.daemon)
            if ceiling is None:  # the GPU of a lease of an earlier mpsd may be gone
                continue
            how_long = self._awaited(lease, ceiling)
            if (
                anew
                and how_long is Awaited.ALWAYS
                and self._rules.attach is Attach.STRICT
                and lease.clients_on(share.gpu)
            ):
                self._read_soon(now)
            limits = None if how_long is Awaited.NOBODY else each_process(lease, share)
            if limits is None:
                is_other = ceiling.expected.forget(lease.id)
            else:
                is_other = ceiling.expected.expect(lease.id, limits, how_long, anew=anew)
            if anew:  # otherwise the caller adjusts all ceilings
                self._adjust_for(ceiling, limits, now, is_other=is_other)

    def _adjust_for(self, ceiling: _DaemonCeiling, limits: Limits | None, now: float, *, is_other: bool) -> None:
        """Have a ceiling follow one lease, which needs `limits`; None: it needs none any more.

        `is_other`: no other lease needs the same.
        """
        # 1. In strict mode each lease has its own turn, whatever the others need.
        # 2. A lease that needs no more than others changes nothing.
        # 3. Limits that only an ended lease needed stay for a moment, since the next request may need them.
        # 4. Limits that an earlier lease left, and that this one needs, stay: no other lease needs wider ones.
        # 5. What is missing is opened at once.
        if self._rules.attach is Attach.STRICT:
            self._adjust(ceiling)
        elif not is_other:
            pass
        elif limits is None:
            ceiling.lower_at = min(ceiling.lower_at, now + _LINGER)
        elif limits == ceiling.limits:
            ceiling.lower_at = NEVER
        else:
            self._adjust(ceiling)
        self._wake_if_needed(ceiling)

    def _read_soon(self, now: float) -> None:
        """Read the GPUs soon for the memory of a client that has just attached."""
        self._pause = 2 * _FIRST_READING
        self._read_at = min(self._read_at, now + _FIRST_READING)
        self._changed.set()

    def _awaited(self, lease: Lease, ceiling: _DaemonCeiling) -> Awaited:
        if lease.state is LeaseState.ENDED or lease.closing:
            return Awaited.NOBODY
        if self._rules.attach is Attach.ANYTIME:
            return Awaited.ALWAYS
        gpu = ceiling.supervisor.gpu
        attached = [each for each in lease.attached if each.gpu == gpu.uuid]
        if self._is_bound_once_listed(ceiling):
            proofs = [ContextProof.SHOWN for _ in attached]
        else:
            new = ContextProof.UNKNOWN if gpu.uuid in self._unreadable else ContextProof.MISSING
            proofs = [self._proofs.get(each, new) for each in attached]
        return awaited(lease.request.processes, proofs)

    def _is_bound_once_listed(self, ceiling: _DaemonCeiling) -> bool:
        """Tell whether a client that the server lists, and that thus has connected, has its limits for good."""
        return ceiling.supervisor.limits_bind is Binds.CONNECT

    def _wake_if_needed(self, ceiling: _DaemonCeiling) -> None:
        """Wake `run` if callers wait, or if its next check must be earlier; the ceiling is adjusted already."""
        if self._waiting or ceiling.lower_at < self._wakes or ceiling.until < self._wakes:
            self._changed.set()

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
        doubts = None
        try:
            while True:
                for ceiling in ceilings:
                    await self._open(ceiling, lease.id, until)
                    ceiling.expected.keep_slot(lease.id)
                    self._adjust(ceiling)
                if all(
                    ceiling.expected.is_open_to(lease.id) or not ceiling.expected.expects(lease.id)
                    for ceiling in ceilings
                ):
                    if doubts is None:  # later ones do not count
                        found = (ceiling.supervisor.unanswered_doubts() for ceiling in ceilings)
                        doubts = [each for each in found if each is not None]
                    if all(is_answered() for is_answered in doubts):
                        self._pipe_access.open(lease)
                        return
                    await self._move(None)
        finally:
            there = self._leases.get(lease.id, lease)
            for ceiling in ceilings:
                ceiling.expected.answer(lease.id, self._awaited(there, ceiling), now=clock.monotonic())
                self._adjust(ceiling)
                self._wake_if_needed(ceiling)

    @contextlib.asynccontextmanager
    async def opened_for_canary(self, name: str, limits: Limits) -> AsyncIterator[None]:
        """Keep a control daemon open this far for a canary, with the limits read back, until the context is left.

        Raises DaemonNotReadyError, and TimeoutError where its turn does not come.
        """
        ceiling = self._ceilings[name]
        ceiling.expected.expect(_CANARY, limits, Awaited.ALWAYS)
        self._adjust(ceiling)
        try:
            async with asyncio.timeout(_CANARY_PATIENCE):
                await self._open(ceiling, _CANARY)
            yield
        finally:
            ceiling.expected.forget(_CANARY)
            ceiling.lower_at = 0.0  # the limits that only the canary had are lowered at once
            self._adjust(ceiling)
            self._changed.set()

    async def _open(self, ceiling: _DaemonCeiling, lease_id: str, until: float = 0.0) -> None:
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
                patience = None  # the end of a client takes as long as its work on the GPU, and is no fault
            elif is_open and patience is None:
                patience = max(clock.monotonic() + self._patience, until)
                if supervisor.snapshot().log_silent_since is not None:
                    supervisor.questions.ask()
            # The turn may pass meanwhile: the caller does not wait turn after turn for limits that come too late.
            if patience is not None and clock.monotonic() >= patience:
                because = f"the limits of {supervisor.name} could not be opened: {trouble}"
                hint = "try again in a moment; for its state: mpsctl daemons"
                raise DaemonNotReadyError(because, hint=hint, limit="health")
            await self._move(patience)

    async def _move(self, until: float | None) -> None:
        """Wait until the ceilings were adjusted again, or until this time."""
        self._waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if until is None else until - clock.monotonic()):
                    await self._moved.wait()
        finally:
            self._waiting -= 1

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
