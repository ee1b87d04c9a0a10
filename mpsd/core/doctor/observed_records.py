"""The observations about the history and the metrics: the store of the history, the TCP listener, and the file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mpsd.core.model import Reading, Unknown

_NOT_LOOKED: Final = Unknown("it was not checked")


@dataclass(frozen=True, slots=True)
class StoreSeen:
    """The file of the history."""

    path: Path
    kind: str | None
    """`file`, another kind of file, or None where there is nothing."""
    owner: int = 0
    directory_owner: int = 0
    mode: int = 0
    bytes: int = 0
    """The size of the file and its write-ahead log."""
    age: float = 0.0
    """Seconds since the last write to either of them."""
    is_sqlite: Reading[bool] = _NOT_LOOKED
    """Whether it begins as a file of SQLite, or is empty."""


@dataclass(frozen=True, slots=True)
class ListenerSeen:
    """The TCP listener for Prometheus, from this caller's view."""

    address: str
    """The address that the caller connected to."""
    refused: str = ""
    """Why the metrics of mpsd could not be read there; empty where they could."""


@dataclass(frozen=True, slots=True)
class TextfileSeen:
    """The file for node_exporter that a systemd unit writes."""

    unit: str
    path: Path
    timer: str
    """The state of the unit's timer, such as `active`."""
    unfit: str = ""
    """Why no file can be written to its directory; empty where one can."""
    age: float | None = None
    """Seconds since the file was written; None where there is none."""


@dataclass(frozen=True, slots=True)
class RecordsSeen:
    """The history and the metrics."""

    store: Reading[StoreSeen] = _NOT_LOOKED
    trouble: Reading[str] = _NOT_LOOKED
    """The reason why mpsd cannot store samples now; empty if it can."""
    listener: Reading[ListenerSeen | None] = _NOT_LOOKED
    """None without `metrics.listen`."""
    textfile: Reading[TextfileSeen | None] = _NOT_LOOKED
    """None where systemd has no unit that writes one."""


UNSEEN: Final = RecordsSeen()
