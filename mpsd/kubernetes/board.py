"""The current state of the GPUs, for the threads that report it.

One thread writes it, and the others wait for changes.
"""

import threading
from collections.abc import Callable, Iterator, Mapping

from mpsd.core.kubernetes.devices import Gpu


class Board:
    """The GPUs that are offered, and whether new work may start on them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._gpus: Mapping[str, Gpu] = {}
        self._version = 0

    @property
    def gpus(self) -> Mapping[str, Gpu]:
        """The GPUs by UUID; the returned mapping does not change."""
        return self._gpus

    def put(self, gpus: Mapping[str, Gpu]) -> bool:
        """Replace the GPUs, and return whether they changed."""
        with self._changed:
            if gpus == self._gpus:
                return False
            self._gpus = dict(gpus)
            self._version += 1
            self._changed.notify_all()
            return True

    def await_gpus(self, seconds: float) -> None:
        """Wait until mpsd has reported its GPUs, at most this long: a program that has just started knows none."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._gpus), seconds)

    def wake(self) -> None:
        """Make all waiting threads check their conditions again."""
        with self._changed:
            self._changed.notify_all()

    def changes(self, is_over: Callable[[], bool], every: float | None = None) -> Iterator[Mapping[str, Gpu]]:
        """Yield the GPUs: at first, after each change, and after this many seconds without one, until `is_over`."""
        shown = -1
        while True:
            with self._changed:
                self._changed.wait_for(lambda: is_over() or self._version != shown, every)  # noqa: B023 - called here
                if is_over():
                    return
                shown, gpus = self._version, self._gpus
            yield gpus
