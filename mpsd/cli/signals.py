"""Signals that end mpsctl, while there is something to undo first."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final, NoReturn

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalledError(Exception):
    """A signal came that is to end mpsctl."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.strsignal(number))
        self.number = number
        self.exit_code = 128 + number
        """What a shell makes of it."""

    def end(self) -> NoReturn:
        """End by it, as without any of this."""
        signal.signal(self.number, signal.SIG_DFL)
        signal.raise_signal(self.number)
        os._exit(self.exit_code)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raise SignalledError for the first signal that comes to end it; the next one does, whatever there is to undo.

    What is ignored, as under nohup, stays ignored.
    """
    found = {number: signal.getsignal(number) for number in _ENDING}
    before = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(number: int, _: FrameType | None) -> NoReturn:
        put_back()
        raise SignalledError(number)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        put_back()
