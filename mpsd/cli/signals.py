"""Signals that end mpsctl, while something must be undone first."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final, NoReturn

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalledError(Exception):
    """A signal has arrived that ends mpsctl."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.strsignal(number))
        self.number = number
        self.exit_code = 128 + number
        """The exit status in a shell."""

    def end(self) -> NoReturn:
        """End by the signal, as without this handling."""
        signal.signal(self.number, signal.SIG_DFL)
        signal.raise_signal(self.number)
        os._exit(self.exit_code)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raise SignalledError for the first signal that ends mpsctl; a second one ends it at once.

    An ignored signal, as under nohup, stays ignored.
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
