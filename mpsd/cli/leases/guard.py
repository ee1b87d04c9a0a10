"""What becomes of a lease whose user never hears of it, because mpsctl is killed before it could say its name.

A lease that another process is to hold, such as the calling shell, does not end with mpsctl. mpsd itself ends one whose
caller is gone before its answer is sent; between that and the last word that mpsctl prints, a guard watches.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Final

from mpsd.cli.api import Api
from mpsd.core.errors import MpsdError

_PRINTED: Final = b"."
_PAUSES: Final = (0.0, 0.1, 0.4, 1.5)
"""Seconds before each attempt to reach mpsd, which may be between two runs."""


@contextlib.contextmanager
def released_unless_printed(api: Api, request_id: str) -> Iterator[None]:
    """Have the lease of a request released if this process dies in here, by whichever signal.

    A second process does that, for the time being: the kernel tells it of the death, and no handler of a signal
    could run at SIGKILL. Where no process can be forked, there is none.
    """
    reader, writer = os.pipe()
    try:
        guard = os.fork()
    except OSError:
        guard = None
    if guard == 0:
        try:
            os.close(writer)
            _watch(api, request_id, reader)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.write(writer, _PRINTED)
        os.close(writer)
        os.close(reader)  # not before: without any reader the last word would be the end of this process, too
        if guard is not None:
            with contextlib.suppress(ChildProcessError):  # the caller left SIGCHLD ignored: nobody waits for it
                os.waitpid(guard, 0)


def _watch(api: Api, request_id: str, reader: int) -> None:
    """Wait until this process' parent has said its last word, or is gone; then release what it took out."""
    os.setsid()  # Ctrl-C, and the end of a terminal, are not for the guard
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # who reads what mpsctl prints reads until the last one closes it
        os.dup2(nowhere, stream)
    api.close()  # mpsd sees the caller go when the last one closes the connection
    if os.read(reader, 1) == _PRINTED:
        return
    for pause in _PAUSES:
        time.sleep(pause)
        with contextlib.suppress(MpsdError, KeyError):
            for lease in api.leases()["leases"]:
                if lease["request_id"] == request_id:
                    api.release(lease["id"])
            return  # a request that mpsd reads later has no caller any more, and gets no lease
