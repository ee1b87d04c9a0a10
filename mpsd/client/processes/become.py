"""Becomes a program under a lease: takes the lease as its holder, then executes the program, with the same pid.

`python -I -S become.py DESCRIPTOR` runs in the process that `mpsd.spawn` starts. Its order comes on that socket as
JSON, and ends where the caller closes its side. It answers with a line for the lease, and with one for the error that
kept it from the program; the end of the answers without an error says that the program runs.

The interpreter ignores the environment and site-packages, and starts in half the time.
"""

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Final, NoReturn, TypedDict

_LOOK: Final = 1.0
"""Seconds between two looks for the caller, while the request waits."""

_PR_SET_PDEATHSIG: Final = 1
"""From linux/prctl.h."""


class Order(TypedDict):
    """The program that the process is to become. Text that the kernel reads as bytes is in Latin-1, byte for byte."""

    arguments: list[str]
    environment: dict[str, str]
    request: dict[str, object] | None
    """None: it takes no lease."""
    wait: float
    """Seconds, or infinite."""
    socket: str
    trusted: list[int]
    parent: int | None
    """The pid of the parent with which the program ends; None: it may outlive its parent."""


def command(descriptor: int) -> list[str]:
    """Return the command line that starts this, wherever mpsd is installed."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(descriptor)]  # noqa: PTH100 - not yet resolved


def encoded(text: str | bytes | os.PathLike[str]) -> str:
    """Return the bytes of a text for the kernel, as an order has them."""
    return os.fsencode(text).decode("latin-1")


def end_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent, whose pid is the argument, is gone.

    A program that this process executes ends likewise, unless it changes its user (prctl(2)); a process that it starts
    does not.
    """
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the end of this process cannot be tied to that of its parent")
    if os.getppid() != parent:  # it was gone before
        signal.raise_signal(signal.SIGKILL)


class _Caller:
    """The caller's side of the socket."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # it closes when the program is executed
        self._socket = socket.socket(fileno=descriptor)

    def order(self) -> Order:
        pieces = []
        while piece := self._socket.recv(64 * 1024):
            pieces.append(piece)
        order: Order = json.loads(b"".join(pieces))
        return order

    def tell(self, **answer: object) -> None:
        """Send a line. Raises BrokenPipeError where nobody waits for it."""
        self._socket.sendall(json.dumps(answer).encode() + b"\n", socket.MSG_NOSIGNAL)

    def look(self) -> float:
        """End this process where its caller is gone, and return the seconds until the next look."""
        poll = select.poll()
        poll.register(self._socket, 0)  # POLLHUP, which needs no request: both directions are closed
        if poll.poll(0):
            os._exit(0)
        return _LOOK


def _check(order: Order) -> None:
    """Raise OSError where the program is not there, or may not be executed, before a lease is waited for."""
    name = order["arguments"][0].encode("latin-1")
    path = order["environment"].get("PATH", os.defpath).encode("latin-1")
    places = [name] if b"/" in name else [os.path.join(each, name) for each in path.split(b":")]  # noqa: PTH118 - bytes
    there = [each for each in places if os.path.exists(each)]  # noqa: PTH110 - bytes
    if not there:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if not any(os.access(each, os.X_OK) and os.path.isfile(each) for each in there):  # noqa: PTH113 - bytes
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _execute(order: Order, variables: Mapping[str, str]) -> NoReturn:
    """Become the program. Raises OSError where that fails."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program would inherit that
        signal.signal(number, signal.SIG_DFL)
    given = [each.encode("latin-1") for each in order["arguments"]]
    environment = {name.encode("latin-1"): value.encode("latin-1") for name, value in variables.items()}
    os.execvpe(given[0], given, environment)  # noqa: S606 - that is what it is for


def _become(order: Order, caller: _Caller) -> None:
    from mpsd.client.client import Client
    from mpsd.client.environment import environment, with_variables
    from mpsd.client.waiting import Progress, take
    from mpsd.core.errors import MpsdError

    class Watching(Progress):
        is_reached = False

        def look(self) -> float:
            return caller.look()

        def lose(self, error: MpsdError, *, answered: bool) -> None:  # noqa: ARG002 - the wait's own
            self.is_reached = self.is_reached or answered

    progress = Watching()
    try:
        if order["parent"] is not None:
            end_with(order["parent"])
        _check(order)
        if order["request"] is None:
            caller.tell(lease={})
            _execute(order, order["environment"])
        with Client(order["socket"], trusted=order["trusted"]) as api:
            lease = take(api, order["request"], wait=order["wait"], progress=progress)
            try:
                own = {name: encoded(value) for name, value in environment(api, lease, share=0).items()}
                caller.tell(lease=lease)
                _execute(order, with_variables(order["environment"], own))
            finally:  # it is not the program, and the lease ends with this process in any case
                with contextlib.suppress(MpsdError):
                    api.release(lease["id"])
    except MpsdError as error:
        members = ("code", "detail", "hint", "limit", "status", "retryable", "is_answer")
        found = {each: getattr(error, each) for each in members}
        more = {"socket": getattr(error, "socket", None), "is_reached": progress.is_reached}
        caller.tell(error=found | more)
    except OSError as error:
        caller.tell(errno=error.errno)


def run() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback, as of a program
    caller = _Caller(int(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError):
        _become(caller.order(), caller)


if __name__ == "__main__":
    sys.path[0:0] = [__file__.rpartition("/mpsd/")[0]]
    run()
