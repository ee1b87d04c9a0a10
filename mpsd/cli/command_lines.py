"""The command lines of processes: of the caller's own, and for root of all. Any other is not the caller's to see."""

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mpsd.core.sanitize import plain, text

if TYPE_CHECKING:
    from mpsd.client import answer_types

_MOST: Final = 4096
"""Bytes that are read of a command line."""

_PATIENCE: Final = 0.1
_LONGEST: Final = 0.5
"""Seconds for one of them, and for all: a process can make the reader of its command line wait for ever."""


def of_clients(clients: "Iterable[answer_types.Client]") -> dict[int, str]:
    """Return the command lines of clients by pid, as far as this process may see them and can read them in time.

    A pid may mean another process here than for mpsd, in a container for example, or by now: its user and its name,
    as mpsd reports them, must be those that it has here.
    """
    found, own, until = dict[int, str](), os.geteuid(), time.monotonic() + _LONGEST
    for client in clients:
        if own in {0, client["uid"]} and (left := until - time.monotonic()) > 0:
            # A thread that waits is left behind: it ends with mpsctl.
            reader = threading.Thread(target=_read, args=(client, found), daemon=True)
            reader.start()
            reader.join(min(left, _PATIENCE))
    return dict(found)


def _read(client: "answer_types.Client", found: dict[int, str]) -> None:
    directory = Path(f"/proc/{client['pid']}")
    try:
        name = plain(text((directory / "comm").read_bytes().removesuffix(b"\n")))
        if directory.stat().st_uid == client["uid"] and name == client["name"]:
            with (directory / "cmdline").open("rb") as opened:
                found[client["pid"]] = plain(text(opened.read(_MOST).rstrip(b"\0").replace(b"\0", b" ")))
    except OSError:  # it is gone, or hidden: its name remains
        pass
