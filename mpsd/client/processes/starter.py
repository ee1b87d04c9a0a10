"""The thread that starts the processes which end with this one.

The kernel ends such a process when the *thread* that started it ends (PR_SET_PDEATHSIG, prctl(2)), and a program may
call from a thread that is over soon. The starter's thread lives exactly as long as the process.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class _Starter:
    """The thread, and what it is to call."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="mpsd-starter", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.calls.get()()


_lock = threading.Lock()
_starters: list[_Starter] = []
"""The one starter of this process, or that of the process which this one was forked from, whose thread is not here."""


def start(call: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Return the result of a call that starts a process, which the starter's thread makes; or raise its error.

    An exception of the waiting thread itself, such as KeyboardInterrupt, leaves no process: `undo` ends it.
    """
    done: Future[T] = Future()

    def make() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            done.set_exception(error)

    def take_back(started: "Future[T]") -> None:
        if started.exception() is None:
            undo(started.result())

    _starter().calls.put(make)
    with contextlib.ExitStack() as interrupted:
        interrupted.callback(done.add_done_callback, take_back)
        result = done.result()
        interrupted.pop_all()
        return result


def _starter() -> _Starter:
    with _lock:
        if not _starters or _starters[0].pid != os.getpid():
            _starters[:] = [_Starter()]
        return _starters[0]


def _after_fork() -> None:
    """Replace a lock that another thread of the parent may have held at the fork."""
    global _lock  # noqa: PLW0603 - so does the standard library's logging
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
