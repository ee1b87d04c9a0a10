"""The evidence against a server that serves nobody, or may not, on disk: the next mpsd admits nobody to it either.

It is about one server of one control daemon, by pid, start time and boot: where one of them is gone, it counts for
nothing.
"""

from pathlib import Path

from msgspec import Struct

from mpsd.core.model import ProcessIdentity, Unknown
from mpsd.daemon.record import encoding
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import atomic_file, clock, proc


class Unserved(Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a server that does not answer canaries."""

    daemon: ProcessIdentity
    server: ProcessIdentity | None
    """None for a control daemon that had no server, and would not serve who started one."""
    because: str
    wedged: bool
    """Whether that is proven."""

    @property
    def is_gone(self) -> bool:
        """Whether the control daemon, or the server, is gone."""
        about = (self.daemon,) if self.server is None else (self.daemon, self.server)
        return any(proc.start_ticks(each.pid) != each.start_ticks for each in about)


class _File(Struct, forbid_unknown_fields=True):
    boot_id: str
    unserved: Unserved


class UnservedRecord:
    """The file of one control daemon; there is none while nothing speaks against its server."""

    def __init__(self, path: Path, log: Logger) -> None:
        self._path = path
        self._log = log

    def load(self) -> Unserved | None:
        """Return what an earlier mpsd noted of a server that is still there.

        A file that is damaged is logged, and counts as none: a server that serves nobody becomes suspect again.
        """
        found = encoding.load(self._path, _File)
        if isinstance(found, Unknown):
            self._log.warning(EventName.FILE_DAMAGED, because=found.reason)
        elif found is not None and found.value.boot_id == clock.boot_id() and not found.value.unserved.is_gone:
            return found.value.unserved
        return None

    def keep(self, unserved: Unserved | None) -> None:
        """Store what is known now; where it cannot be, it holds all the same for as long as mpsd lives."""
        try:
            if unserved is None:
                self._path.unlink(missing_ok=True)
            else:
                atomic_file.write(self._path, encoding.to_json(_File(clock.boot_id(), unserved)))
        except OSError as error:
            self._log.error(EventName.SERVER_RECORD_NOT_STORED, because=str(error))
