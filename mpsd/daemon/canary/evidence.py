"""The evidence against a server, on disk: suspicions, and that it does not answer canaries.

It concerns one server of one control daemon, by pid, start time and boot: once one of them is gone, it is void.
"""

from pathlib import Path

from msgspec import Struct, structs

from mpsd.core.model import ProcessIdentity, Unknown
from mpsd.core.supervision.wedge import Examined, OpenSuspicion, Suspicion, Suspicions
from mpsd.daemon.record import encoding
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import atomic_file, clock, proc


class Processes(Struct, frozen=True, forbid_unknown_fields=True):
    """A control daemon and its server."""

    daemon: ProcessIdentity | None = None
    """None before it is known."""
    server: ProcessIdentity | None = None
    """None before it is known, and where there is none: the daemon can fail to serve its first client."""

    @property
    def is_gone(self) -> bool:
        """Whether one of them is gone; one that has ended serves no client, although it may not be reaped yet."""
        known = (each for each in (self.daemon, self.server) if each is not None)
        return any(proc.live_ticks(each.pid) != each.start_ticks for each in known)


class Unserved(Struct, frozen=True, forbid_unknown_fields=True):
    """The fact that a server does not answer canaries."""

    because: str
    wedged: bool
    """Whether that is proven."""


class Evidence(Struct, frozen=True, forbid_unknown_fields=True):
    """All evidence against the server of one control daemon. Times are seconds since boot."""

    against: Processes = Processes()
    unserved: Unserved | None = None
    suspicions: tuple[OpenSuspicion, ...] = ()
    examined: tuple[Examined, ...] = ()
    """The last examinations that uids caused, also of earlier servers."""


def report(suspicion: Suspicion, log: Logger) -> None:
    """Log a new suspicion."""
    log.info(EventName.SERVER_SUSPECT, cause=suspicion.cause, uid=suspicion.uid, because=suspicion.because)


class _File(Struct, forbid_unknown_fields=True):
    boot_id: str
    evidence: Evidence


class EvidenceRecord:
    """The file of one control daemon."""

    def __init__(self, path: Path, log: Logger) -> None:
        self._path = path
        self._log = log
        self._stored = Evidence()

    def load(self) -> Evidence:
        """Return the evidence of an earlier mpsd, without that against a server that is gone.

        A damaged file is logged, and counts as absent: a server that serves no client becomes suspect again.
        """
        found = encoding.load(self._path, _File)
        if isinstance(found, Unknown):
            self._log.warning(EventName.FILE_DAMAGED, because=found.reason)
        elif found is not None and found.value.boot_id == clock.boot_id():
            self._stored = found.value.evidence
        if self._stored.against.is_gone:
            return structs.replace(self._stored, against=Processes(), unserved=None, suspicions=())
        return self._stored

    def add(self, suspicion: Suspicion) -> None:
        """Add a suspicion, for the watch that loads this record next."""
        known = self.load()
        suspicions = Suspicions(known.suspicions, known.examined)
        if suspicions.add(suspicion, clock.since_boot()):
            self.keep(structs.replace(known, suspicions=suspicions.open))
            report(suspicion, self._log)

    def keep(self, evidence: Evidence) -> None:
        """Store the present evidence if it has changed; where that fails, this mpsd still applies it.

        It has to outlive mpsd, and not the machine, so it need not reach the disk.
        """
        if evidence == self._stored:
            return
        try:
            atomic_file.write(self._path, encoding.to_json(_File(clock.boot_id(), evidence)))
        except OSError as error:
            self._log.error(EventName.SERVER_RECORD_NOT_STORED, because=str(error))
        else:
            self._stored = evidence
