"""The evidence on disk against a server that serves no client, or may serve none; the next mpsd refuses it too.

It concerns one server of one control daemon, by pid, start time and boot: once one of them is gone, the evidence is
void.
"""

from pathlib import Path

from msgspec import Struct

from mpsd.core.model import ProcessIdentity, Unknown
from mpsd.daemon.record import encoding
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import atomic_file, clock, proc


class Unserved(Struct, frozen=True, forbid_unknown_fields=True):
    """The facts about a server that does not answer canaries."""

    daemon: ProcessIdentity
    server: ProcessIdentity | None
    """None for a control daemon that had no server, and did not serve the client for which it started one."""
    because: str
    wedged: bool
    """Whether that is proven."""

    @property
    def is_gone(self) -> bool:
        """Whether the control daemon or the server is gone."""
        about = (self.daemon,) if self.server is None else (self.daemon, self.server)
        return any(proc.start_ticks(each.pid) != each.start_ticks for each in about)


class _File(Struct, forbid_unknown_fields=True):
    boot_id: str
    unserved: Unserved


class UnservedRecord:
    """The file of one control daemon; it exists only while there is evidence against the daemon's server."""

    def __init__(self, path: Path, log: Logger) -> None:
        self._path = path
        self._log = log

    def load(self) -> Unserved | None:
        """Return the evidence of an earlier mpsd against a server that still runs.

        A damaged file is logged, and counts as absent: a server that serves no client becomes suspect again.
        """
        found = encoding.load(self._path, _File)
        if isinstance(found, Unknown):
            self._log.warning(EventName.FILE_DAMAGED, because=found.reason)
        elif found is not None and found.value.boot_id == clock.boot_id() and not found.value.unserved.is_gone:
            return found.value.unserved
        return None

    def keep(self, unserved: Unserved | None) -> None:
        """Store the present evidence; where that fails, mpsd still applies it for its own lifetime."""
        try:
            if unserved is None:
                self._path.unlink(missing_ok=True)
            else:
                atomic_file.write(self._path, encoding.to_json(_File(clock.boot_id(), unserved)))
        except OSError as error:
            self._log.error(EventName.SERVER_RECORD_NOT_STORED, because=str(error))
