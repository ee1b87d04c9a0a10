"""The release of a lease that its user never sees, because mpsctl is killed before it could print the lease.

A lease that another process holds, such as the calling shell, does not end with mpsctl. mpsd itself ends a lease whose
caller is gone before its answer is sent. From then until mpsctl has printed its output, a guard process watches.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Final

from mpsd.client import Api
from mpsd.core.errors import MpsdError

_PRINTED: Final = b"."
_PAUSES: Final = (0.0, 0.1, 0.4, 1.5)
"""Seconds before each attempt to reach mpsd, which may be restarting."""


@contextlib.contextmanager
def released_unless_printed(api: Api, request_id: str) -> Iterator[None]:
    """Release the lease of a request if this process dies within the context, by any signal.

    A second process does that while the context lasts: the kernel reports the death to it, whereas no signal handler
    can run at SIGKILL. Where no process can be forked, there is no guard.
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
        os.close(reader)  # not before: a write without a reader would end this process
        if guard is not None:
            with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored, as it was when mpsctl was started
                os.waitpid(guard, 0)


def _watch(api: Api, request_id: str, reader: int) -> None:
    """Wait until the parent process has printed its output; if it is gone before, release its lease."""
    os.setsid()  # Ctrl-C and the hangup of a terminal must not reach the guard
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # a reader of mpsctl's output reads until all copies are closed
        os.dup2(nowhere, stream)
    api.close()  # mpsd notices the end of the caller when all copies are closed
    if os.read(reader, 1) == _PRINTED:
        return
    for pause in _PAUSES:
        time.sleep(pause)
        with contextlib.suppress(MpsdError, KeyError):
            for lease in api.leases()["leases"]:
                if lease["request_id"] == request_id:
                    api.release(lease["id"])
            return  # a request that mpsd reads later has no caller, and gets no lease
