"""A thread for the calls to NVML, which block, and which hang beyond the reach of signals when a GPU locks up."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

T = TypeVar("T")

_BACKLOG: Final = 64
"""Maximum requests that wait for the thread: several for each GPU of the largest node (16)."""


class SilentError(Exception):
    """NVML did not answer within the deadline. The text is a sentence for users."""


class NvmlThread:
    """One thread that serves one request at a time, each with a deadline for its caller.

    It does not use concurrent.futures, because the interpreter joins such threads when it exits, and one that hangs in
    the driver would keep mpsd from ending. A daemon thread does not.
    """

    def __init__(self, name: str) -> None:
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Requests are numbered from 1 in the order asked. The thread alone writes `_served`, the event loop the others.
        self._questions = 0
        self._served = 0
        self._overdue = 0
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            request()
            self._served += 1

    async def ask(self, work: Callable[[], T], seconds: float) -> T:
        """Run `work` on the thread, and return its result or raise its error.

        Raises SilentError when that takes longer than `seconds`; at once while an earlier overdue request is still not
        served, or while too many requests wait.
        """
        if self._served < self._overdue:
            raise SilentError("NVML does not answer: a call hangs in the driver and has not returned yet")
        if self._questions - self._served >= _BACKLOG:
            raise SilentError(f"NVML is overloaded: {_BACKLOG} requests are waiting for it")
        answer: Future[T] = Future()
        self._questions += 1
        number = self._questions
        self._requests.put(partial(_answer, work, answer))
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            self._overdue = max(self._overdue, number)
            raise SilentError(f"NVML did not answer within {seconds:g} s: a call hangs in the driver") from None

    def finish(self, last: Callable[[], None]) -> None:
        """Run `last` after all earlier requests, and end the thread."""
        self._requests.put(last)
        self._requests.put(None)


def _answer(work: Callable[[], T], answer: "Future[T]") -> None:
    if not answer.set_running_or_notify_cancel():
        return  # The caller no longer waits.
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - raised where the caller awaits the answer
        answer.set_exception(error)
    else:
        answer.set_result(result)
