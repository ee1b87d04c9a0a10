"""The last number of a series that was given out, in a small file of its own, so that no number is given out twice."""

import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mpsd.system import clock

_CLOSED: Final = "-" * 36
"""Replaces the boot id in the file when its writer ended in order."""

_SLOT: Final = 128
"""Bytes between the two slots of the file: while one is written, the other stays whole."""


@dataclass(frozen=True, slots=True)
class _Note:
    """One record: the number of records before it, the last number given out, and the boot id."""

    order: int
    last: int
    boot: str

    def encoded(self) -> bytes:
        fields = f"{self.order:020d} {self.last:020d} {self.boot}".encode()
        return b"%b %08x\n" % (fields, zlib.crc32(fields))


class Counter:
    """A number that only grows and is overwritten in place, which costs one system call and no space on a full disk.

    A noted number survives the death of mpsd at any instant and an orderly reboot. After a power cut the stored number
    may be too small.
    """

    def __init__(self, path: Path) -> None:
        """Read the number that an earlier mpsd noted. Raises OSError when the file can neither be opened nor made."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        raw = os.pread(self._file, 2 * _SLOT, 0)
        notes = [note for note in (_decode(raw[:_SLOT]), _decode(raw[_SLOT:])) if note is not None]
        latest = max(notes, key=lambda note: note.order, default=None)
        self._order = 0 if latest is None else latest.order
        self.last = 0 if latest is None else latest.last
        """The highest number that is known to have been given out; 0 when there is none."""
        self.certain = latest.boot in {clock.boot_id(), _CLOSED} if latest is not None else not raw
        """Whether no higher number can have been given out."""
        self.note(self.last)
        os.fsync(self._file)

    def note(self, last: int) -> None:
        """Note the last number before any caller sees it. Raises OSError."""
        self.last = last
        self._write(clock.boot_id())

    def _write(self, boot: str) -> None:
        self._order += 1
        os.pwrite(self._file, _Note(self._order, self.last, boot).encoded(), self._order % 2 * _SLOT)

    def close(self) -> None:
        """Record an orderly end, so that the number can be trusted after a reboot, and close the file."""
        with suppress(OSError):  # without the record, the number is not trusted after a reboot
            self._write(_CLOSED)
            os.fsync(self._file)
        os.close(self._file)


def _decode(raw: bytes) -> _Note | None:
    """Return the record of a slot, or None when it is damaged or empty."""
    line = raw.partition(b"\n")[0]
    fields = line.split(b" ")
    if len(fields) != 4 or not (fields[0].isdigit() and fields[1].isdigit()):  # noqa: PLR2004 - with its checksum
        return None
    note = _Note(int(fields[0]), int(fields[1]), fields[2].decode(errors="replace"))
    return note if note.encoded() == line + b"\n" else None
