"""A thread for the calls to NVML, which block, and which hang where no signal reaches them when a GPU locks up."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

T = TypeVar("T")

_BACKLOG: Final = 64
"""Requests that may wait for the thread: each GPU of the largest node (16), several times over."""


class SilentError(Exception):
    """NVML has not answered, and nobody waits for it any longer. Its text says so to a person."""


class NvmlThread:
    """One thread, one request at a time, each with a deadline for whoever asked.

    It is no executor of concurrent.futures, because the interpreter joins their threads when it exits, and one that is
    stuck in the driver would keep mpsd from ending. A daemon thread is left behind.
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
        """Do `work` on the thread, and return what it returns or raise what it raises.

        Raises SilentError when that takes longer than `seconds`; at once while an earlier request that did so is still
        not served, or too many wait.
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
        """Do `last` when all that was asked is done, and end the thread."""
        self._requests.put(last)
        self._requests.put(None)


def _answer(work: Callable[[], T], answer: "Future[T]") -> None:
    if not answer.set_running_or_notify_cancel():
        return  # Nobody waits for it any longer.
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - nothing is handled here: it is raised where the answer is awaited
        answer.set_exception(error)
    else:
        answer.set_result(result)
