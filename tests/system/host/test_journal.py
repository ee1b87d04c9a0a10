"""Entries for the journal: every byte of a value arrives, no value forges a field, and errors do not stop mpsd."""

import os
import select
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

import pytest

from mpsd.core.events import EventName
from mpsd.core.settings import LogFormat
from mpsd.daemon.record import log as logs
from mpsd.daemon.record.log import MESSAGE_IDS
from mpsd.system.host.journal import Journal, entry, is_behind


class Heard:
    """A socket in place of the journal's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = Journal(str(path))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(5)

    def entry(self) -> dict[str, str]:
        """Return the fields of the next entry, decoded from the protocol."""
        data, fields = self._socket.recv(1 << 20), {}
        while data:
            head, _, data = data.partition(b"\n")
            name, equals, value = head.partition(b"=")
            if not equals:
                size = int.from_bytes(data[:8], "little")
                value, data = data[8 : 8 + size], data[8 + size + 1 :]
            fields[name.decode()] = value.decode()
        return fields

    def waits(self) -> bool:
        """Return whether there is an entry to read."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        """Stop receiving."""
        self.journal.close()
        self._socket.close()


@pytest.fixture
def heard(short_tmp: Path) -> Iterator[Heard]:
    """Yield such a socket."""
    heard = Heard(short_tmp / "journal")
    yield heard
    heard.close()


def logger(heard: Heard, form: LogFormat = LogFormat.AUTO, stream: TextIO = sys.stderr) -> logs.Logger:
    """Return a logger whose stream leads to that journal."""
    return logs.configure(form, None, stream, journal=heard.journal)


def test_fields(heard: Heard) -> None:
    """An event has its id and its priority, and each fact as a field beside the readable text."""
    logger(heard).warning(
        EventName.VIOLATION, lease="lease-1", daemon="gpu0", pid=7, because="it holds more", kinds=["a", "b"]
    )
    assert heard.entry() == {
        "MESSAGE": 'violation lease=lease-1 daemon=gpu0 pid=7 because="it holds more" kinds="[\\"a\\",\\"b\\"]"',
        "MESSAGE_ID": MESSAGE_IDS[EventName.VIOLATION],
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "mpsd",
        "MPSD_EVENT": "violation",
        "MPSD_LEASE": "lease-1",
        "MPSD_DAEMON": "gpu0",
        "MPSD_PID": "7",
        "MPSD_BECAUSE": "it holds more",
        "MPSD_KINDS": '["a","b"]',
    }


def test_nothing_is_forged(heard: Heard) -> None:
    """Values that others chose create no field and move no cursor."""
    logger(heard).info(EventName.FOREIGN_COMMAND, command="x\nPRIORITY=0\x1b[2J\u202e")
    entry = heard.entry()
    assert entry["PRIORITY"] == "6"
    assert entry["MPSD_COMMAND"] == "x\\nPRIORITY=0\\x1b[2J\\u202e"
    assert all(value.isprintable() for value in entry.values())


def test_lines(heard: Heard) -> None:
    """A value of several lines, such as a traceback, arrives unchanged."""
    log = logger(heard)
    log.defect(EventName.API_DEFECT, ZeroDivisionError("a\nb"), path="/x")
    entry = heard.entry()
    assert entry["PRIORITY"] == "3"
    assert entry["MESSAGE"].startswith("api_defect path=/x\nZeroDivisionError: a\n")


def test_long_values(heard: Heard) -> None:
    """A value is cut where it would fill the datagram; the other values are complete."""
    logger(heard).info(EventName.FOREIGN_COMMAND, command="ä" * 1_000_000, daemon="gpu0")
    entry = heard.entry()
    assert entry["MPSD_COMMAND"].endswith("ä...")
    assert len(entry["MPSD_COMMAND"].encode()) <= 8 * 1024
    assert entry["MPSD_DAEMON"] == "gpu0"


def test_explicit_form_decides(heard: Heard) -> None:
    """With an explicit format, lines are written to the stream, journal or not."""
    with TemporaryFile("w+", encoding="utf-8") as stream:
        logger(heard, LogFormat.JSON, stream).info(EventName.GPU_FOUND, index=0)
        stream.seek(0)
        assert '"event":"gpu_found"' in stream.read()


def test_journal_is_gone(short_tmp: Path) -> None:
    """Without a journal, or with one that accepts nothing, only the lines are lost."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(f"{short_tmp}/deaf")
        for name in ("nobody", "deaf"):
            journal = Journal(f"{short_tmp}/{name}")
            for _ in range(2000):
                journal.write(entry({"MESSAGE": "x" * 1000}))
            journal.close()


def test_what_was_lost_is_told(heard: Heard) -> None:
    """After entries that the journal did not accept, the next accepted one is preceded by the number lost."""
    log = logger(heard)
    while not log.lost:
        log.info(EventName.GPU_FOUND, index=0)
    log.info(EventName.GPU_FOUND, index=1)
    assert log.lost == 2
    while heard.waits():
        assert heard.entry()["MPSD_INDEX"] == "0"
    log.info(EventName.GPU_FOUND, index=2)
    gap = heard.entry()
    assert (gap["MPSD_EVENT"], gap["MPSD_LINES"], gap["PRIORITY"]) == ("log_lines_lost", "2", "4")
    assert heard.entry()["MPSD_INDEX"] == "2"


def test_behind(short_tmp: Path) -> None:
    """Only the very stream that the variable names is the journal's, since the variable may have been inherited."""
    with (short_tmp / "stderr").open("w") as stream:
        found = os.fstat(stream.fileno())
        assert is_behind(stream.fileno(), f"{found.st_dev}:{found.st_ino}")
        assert not is_behind(stream.fileno(), f"{found.st_dev}:{found.st_ino + 1}")
        assert not is_behind(stream.fileno(), "")
