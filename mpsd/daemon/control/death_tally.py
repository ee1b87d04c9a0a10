"""The deaths of one control daemon, and its uids with pipe access, on disk: no restart of mpsd clears them."""

import random
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from mpsd.core.events import EventName
from mpsd.core.model import ProcessIdentity
from mpsd.core.settings import ControlDaemon
from mpsd.core.supervision.restart import Death, Decision, RestartPolicy, RestartVerdict, dated, decide, recent
from mpsd.core.supervision.suspects import Crash, LetIn, is_suspect
from mpsd.daemon.record.log import Logger
from mpsd.daemon.record.record import Record
from mpsd.system import acl, clock
from mpsd.system.rundir import DaemonPaths


class Ended(NamedTuple):
    """How a control daemon ended: in words, and by which signal if it was one."""

    how: str
    signal: str | None = None
    started: bool = True
    """Whether there was a process at all."""

    @property
    def cause(self) -> str:
        """The end in a word, as metrics count it."""
        return self.signal or ("exit" if self.started else "start")


class _LetIn(Struct, forbid_unknown_fields=True):
    process: ProcessIdentity
    let_in: LetIn


class LetInRecord:
    """The uids with pipe access to the running control daemon, at any time since it started."""

    def __init__(self, paths: DaemonPaths, crashed: Callable[[Crash], Collection[int]], log: Logger) -> None:
        """Take the paths; `crashed` records a crash, and returns the uids that are quarantined for it."""
        self._paths = paths
        self._crashed = crashed
        self._record = Record(paths.let_in, _LetIn, log)
        self._process: ProcessIdentity | None = None
        self.let_in = LetIn()

    def begin(self, process: ProcessIdentity) -> None:
        """Begin the record of a control daemon that was just started: no uid has pipe access yet."""
        self._process, self.let_in = process, LetIn()
        self._write()

    def resume(self, process: ProcessIdentity) -> None:
        """Restore an earlier mpsd's record of an adopted control daemon, and add the uids in its access list.

        Where there is no readable record, there may have been other uids.
        """
        stored = self._record.load()
        noted = stored.let_in if stored is not None and stored.process == process else None
        try:
            now = [each.who for each in acl.read(self._paths.control_socket) if each.tag == acl.Tag.USER]
        except OSError:
            now = []
        self._process, before = process, self.let_in
        found = (noted or LetIn(others=True)).and_({*now, *before.uids})
        self.let_in = found.and_(None) if before.everybody else found
        self._write()

    def note(self, uids: frozenset[int] | None) -> None:
        """Record the uids that have pipe access from now on, None for all; call it before they have access."""
        if (uids is None and not self.let_in.everybody) or (uids is not None and not uids <= {*self.let_in.uids}):
            self.let_in = self.let_in.and_(uids)
            self._write()

    def crashed(self, at: float) -> frozenset[int]:
        """Report a crash with the uids that had pipe access; return the uids that are quarantined for it."""
        return frozenset(self._crashed(Crash(self._paths.pipe_directory.name, at, self.let_in)))

    def _write(self) -> None:
        if self._process is not None:
            self._record.keep(_LetIn(self._process, self.let_in))


class _Tally(Struct, forbid_unknown_fields=True):
    deaths: tuple[Death, ...]
    failed: str | None


class DeathTally:
    """The deaths that count, and the reason for giving up where that was decided."""

    def __init__(self, path: Path, let_in: LetInRecord, log: Logger) -> None:
        self._record = Record(path, _Tally, log)
        self._let_in = let_in
        self._log = log
        self._deaths: tuple[Death, ...] = ()
        self.failed: str | None = None

    def load(self) -> None:
        """Read the record of an earlier mpsd of this boot; deaths before a reboot are forgiven.

        So are those of a damaged file, which is mpsd's own: a forgiven death harms no client.
        """
        found = self._record.load()
        if found is not None:
            self._deaths, self.failed = found.deaths, found.failed

    def count(self, ended: Ended, settings: ControlDaemon) -> Decision:
        """Note a death, and return the decision that follows from it and the earlier ones.

        A death that other users than root may have caused names them, and does not count towards giving up: they must
        not be able to disable the GPU. After a uid is quarantined for it, the deaths with that uid's access are
        forgotten.
        """
        now, policy = clock.monotonic(), RestartPolicy(deaths=settings.deaths, window=settings.death_window)
        jitter = random.random()  # noqa: S311 - it is no secret
        let_in = self._let_in.let_in if is_suspect(ended.signal) else LetIn()
        how = f"{ended.how}; {let_in} had pipe access" if let_in.anybody else ended.how
        death = Death(now, how, let_in.uids, counts=not let_in.anybody)
        deaths = (*recent(self._deaths, policy, now), death)
        decision = dated(decide(deaths, policy, now, jitter), deaths, now, clock.now())
        self._note(deaths, decision)
        if let_in.uids and (shut_out := self._let_in.crashed(now)):
            deaths = tuple(each for each in deaths if not shut_out & set(each.uids))
            named = ", ".join(f"uid {uid}" for uid in sorted(shut_out))
            decision = replace(decide(deaths, policy, now, jitter), because=f"{how}; quarantined for it: {named}")
            self._note(deaths, decision)
        self._log.warning(
            EventName.DAEMON_DEATH,
            how=how,
            cause=ended.cause,
            verdict=decision.verdict,
            delay=decision.delay,
            suspects=list(let_in.uids),
        )
        return decision

    def forget(self) -> None:
        """Forget the deaths, by an operator's command."""
        self._note((), None)

    def _note(self, deaths: tuple[Death, ...], decision: Decision | None) -> None:
        """Replace the record; where it cannot be written, mpsd still knows it."""
        gives_up = decision is not None and decision.verdict is RestartVerdict.GIVE_UP
        self._deaths, self.failed = deaths, decision.because if decision is not None and gives_up else None
        self._record.keep(_Tally(deaths, self.failed))
