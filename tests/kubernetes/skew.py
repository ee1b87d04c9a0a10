"""mpsd of another release, for mpsd-kubernetes: the socket of a real one, with other answers or other requests.

No release is tagged yet, so that nothing of the past can be run. What the promises of docs/upgrades.md permit a release
to change is put into the messages of this one.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

Change = Callable[[Any], Any]
"""Returns a message of the other release."""

MORE: Final = "of_a_later_release"
"""A field that this release does not know."""

_KEPT: Final = {"env", "labels"}
"""Objects whose keys are names of users, not of fields."""


def with_more(message: Any) -> Any:
    """Return a message with such a field in each of its objects."""
    if isinstance(message, list):
        return [with_more(each) for each in message]
    if not isinstance(message, dict):
        return message
    more = {name: each if name in _KEPT else with_more(each) for name, each in message.items()}
    return {**more, MORE: {"list": [1]}}


def without(*names: str) -> Change:
    """Return a change that leaves fields of these names out."""

    def change(message: Any) -> Any:
        if isinstance(message, list):
            return [change(each) for each in message]
        if not isinstance(message, dict):
            return message
        return {name: change(each) for name, each in message.items() if name not in names}

    return change


def _same(message: Any) -> Any:
    return message


@contextlib.contextmanager
def skewed(mpsd: Path, place: Path, *, answer: Change = _same, request: Change = _same) -> Iterator[Path]:
    """Yield the socket of an mpsd whose answers, and the requests to which, are changed."""
    path = place / "skewed.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):  # the listener is closed
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=_relay, args=(connection, mpsd, answer, request), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield path
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _relay(caller: socket.socket, mpsd: Path, answer: Change, request: Change) -> None:
    """Pass the messages of a connection on, until one of both leaves."""
    with caller, socket.socket(socket.AF_UNIX) as callee, contextlib.suppress(OSError, EOFError):
        callee.connect(str(mpsd))
        with (
            caller.makefile("rb") as asks, callee.makefile("wb") as asked,
            callee.makefile("rb") as answers, caller.makefile("wb") as answered,
        ):  # fmt: skip
            while True:
                _pass(asks, asked, request)
                _pass(answers, answered, answer)


def _pass(source: BinaryIO, target: BinaryIO, change: Change) -> None:
    """Pass one message of HTTP on."""
    first, *fields = iter(lambda: _line(source), b"")
    headers = {name.strip().lower(): value.strip() for name, _, value in (each.partition(b":") for each in fields)}
    if headers.get(b"transfer-encoding") == b"chunked":
        target.write(b"\r\n".join([first, *fields, b"", b""]))
        target.flush()
        while size := int(_line(source), 16):
            data = b"".join(_changed(each, change) + b"\n" for each in source.read(size).splitlines())
            _line(source)
            target.write(b"%x\r\n%s\r\n" % (len(data), data))
            target.flush()
        _line(source)
        target.write(b"0\r\n\r\n")
    else:
        body = source.read(int(headers.get(b"content-length", b"0")))
        data = _changed(body, change)
        kept = [each for each in fields if not each.lower().startswith(b"content-length")]
        length = [b"Content-Length: %d" % len(data)] if b"content-length" in headers else []
        target.write(b"\r\n".join([first, *kept, *length, b"", data]))
    target.flush()


def _line(source: BinaryIO) -> bytes:
    line = source.readline()
    if not line:
        raise EOFError
    return line.rstrip(b"\r\n")


def _changed(body: bytes, change: Change) -> bytes:
    return json.dumps(change(json.loads(body))).encode() if body.strip() else body
