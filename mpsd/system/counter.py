"""The last of a series of numbers that was given, in a small file of its own, so that none is ever given twice."""

import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mpsd.system import clock

_CLOSED: Final = "-" * 36
"""Stands in the place of a boot's identity in a file whose writer ended in order."""

_SLOT: Final = 128
"""Bytes from one of the two places in the file to the other: while one is written, the other is whole."""


@dataclass(frozen=True, slots=True)
class _Note:
    """What is written at a time: how many were written before, the number, and under which boot."""

    order: int
    last: int
    boot: str

    def encoded(self) -> bytes:
        fields = f"{self.order:020d} {self.last:020d} {self.boot}".encode()
        return b"%b %08x\n" % (fields, zlib.crc32(fields))


class Counter:
    """A number that only grows, overwritten in place: that costs one system call, and needs no room on a full disk.

    What was noted survives mpsd's death at any instant, and a reboot in order; after a power cut it may be too small.
    """

    def __init__(self, path: Path) -> None:
        """Read what an earlier mpsd noted. Raises OSError when the file can be neither opened nor made."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        raw = os.pread(self._file, 2 * _SLOT, 0)
        notes = [note for note in (_decode(raw[:_SLOT]), _decode(raw[_SLOT:])) if note is not None]
        latest = max(notes, key=lambda note: note.order, default=None)
        self._order = 0 if latest is None else latest.order
        self.last = 0 if latest is None else latest.last
        """The last number that is known to have been given; 0 when none is."""
        self.certain = latest.boot in {clock.boot_id(), _CLOSED} if latest is not None else not raw
        """Whether no higher one can have been given."""
        self.note(self.last)
        os.fsync(self._file)

    def note(self, last: int) -> None:
        """Note the last number that was given, before anybody is told of it. Raises OSError."""
        self.last = last
        self._write(clock.boot_id())

    def _write(self, boot: str) -> None:
        self._order += 1
        os.pwrite(self._file, _Note(self._order, self.last, boot).encoded(), self._order % 2 * _SLOT)

    def close(self) -> None:
        """Note that it ended in order, so that after a reboot the number can be trusted, and close the file."""
        with suppress(OSError):  # then it did not end in order, and is not trusted after a reboot
            self._write(_CLOSED)
            os.fsync(self._file)
        os.close(self._file)


def _decode(raw: bytes) -> _Note | None:
    """Return what was written, or None when it is not as it was written."""
    line = raw.partition(b"\n")[0]
    fields = line.split(b" ")
    if len(fields) != 4 or not (fields[0].isdigit() and fields[1].isdigit()):  # noqa: PLR2004 - with its checksum
        return None
    note = _Note(int(fields[0]), int(fields[1]), fields[2].decode(errors="replace"))
    return note if note.encoded() == line + b"\n" else None
