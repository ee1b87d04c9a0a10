"""The deaths of one control daemon, kept on disk, so that neither a restart nor a crash of mpsd forgives them."""

import random
from dataclasses import asdict
from pathlib import Path

import msgspec

from mpsd.core.model import Unknown
from mpsd.core.settings import ControlDaemon
from mpsd.core.supervision.restart import Death, Decision, RestartPolicy, RestartVerdict, decide, recent
from mpsd.daemon.record import encoding
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import atomic_file, clock


class _File(msgspec.Struct, forbid_unknown_fields=True):
    boot_id: str
    deaths: list[Death]
    failed: str | None


class DeathTally:
    """The deaths that count, and the reason for giving up where that was decided."""

    def __init__(self, path: Path, log: Logger) -> None:
        self._path = path
        self._log = log
        self._deaths: tuple[Death, ...] = ()
        self.failed: str | None = None

    def load(self) -> None:
        """Read what an earlier mpsd noted in this boot; deaths before a reboot are forgiven.

        A file that is damaged is told of, and counts as none: it is mpsd's own, in its runtime directory, and forgiving
        a death harms nobody.
        """
        found = encoding.load(self._path, _File)
        if isinstance(found, Unknown):
            self._log.warning(EventName.FILE_DAMAGED, because=found.reason)
        elif found is not None and found.value.boot_id == clock.boot_id():
            self._deaths, self.failed = tuple(found.value.deaths), found.value.failed

    def count(self, how: str, settings: ControlDaemon) -> Decision:
        """Note a death, and say what follows from it and those before it."""
        now, policy = clock.monotonic(), RestartPolicy(deaths=settings.deaths, window=settings.death_window)
        deaths = (*recent(self._deaths, policy, now), Death(now, how))
        decision = decide(deaths, policy, now, random.random())  # noqa: S311 - jitter is no secret
        self._log.warning(EventName.DAEMON_DEATH, how=how, verdict=decision.verdict, delay=decision.delay)
        self._note(deaths, decision.because if decision.verdict is RestartVerdict.GIVE_UP else None)
        return decision

    def forget(self) -> None:
        """Forget the deaths, at an operator's word."""
        self._note((), None)

    def _note(self, deaths: tuple[Death, ...], failed: str | None) -> None:
        """Replace what is known; when it cannot be written, it is known all the same, and that is told."""
        self._deaths, self.failed = deaths, failed
        plain = {"boot_id": clock.boot_id(), "deaths": [asdict(death) for death in deaths], "failed": failed}
        try:
            atomic_file.write(self._path, encoding.to_json(plain))
        except OSError as error:
            self._log.error(EventName.DEATH_TALLY_NOT_STORED, because=str(error))
