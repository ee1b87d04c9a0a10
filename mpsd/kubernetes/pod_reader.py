"""What belongs to pods is read beside the threads of the program: no pod makes them wait for longer than a moment."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, ParamSpec, TypeVar

from mpsd.core.model import Reading
from mpsd.system.processes.foreign_reader import ForeignReader

P = ParamSpec("P")
T = TypeVar("T")

_MOMENT: Final = 0.25
"""Seconds that a thread waits for an answer; a read takes milliseconds."""


class PodReader:
    """A `ForeignReader` for threads, with a loop in a thread of its own. A pod has one request at a time."""

    def __init__(self) -> None:
        self._reader = ForeignReader()
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._asked: dict[str, Future[Reading[Any]]] = {}
        """By pod, the request that has not answered within a moment."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="reader", daemon=True)

    def ask(self, pod: str, question: Callable[P, T], *arguments: P.args, **none: P.kwargs) -> Reading[T] | None:
        """Call a function about a pod, and return its result; None until it has one, so that the caller asks again.

        Raises the OSError that the function raised.
        """
        with self._lock:
            if (
                self._thread.ident is None
            ):  # not before: the program blocks its signals first, and a thread inherits that
                self._thread.start()
            asked, wait = self._asked.get(pod), 0.0
            if asked is None:
                answer = self._reader.ask(f"pod {pod}", question, *arguments, **none)
                asked, wait = asyncio.run_coroutine_threadsafe(answer, self._loop), _MOMENT
                self._asked[pod] = asked
        try:
            found: Reading[T] = asked.result(wait)
        except TimeoutError:
            if not asked.done():
                return None
            found = asked.result()  # it has come just now
        finally:
            if asked.done():
                self._asked.pop(pod, None)
        return found
