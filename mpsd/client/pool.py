"""A process pool whose workers share one lease, and functions of which each call has a process and a lease."""

import contextlib
import functools
import importlib
import os
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final, ParamSpec, TypeVar

from mpsd.client.lease import Lease
from mpsd.client.worker import Worker, Workers
from mpsd.core.errors import InvalidRequestError, MpsdError

P = ParamSpec("P")
T = TypeVar("T")


class _Result(Future[T]):
    """A future of a pool, whose error about a worker that is gone says what mpsd knows."""

    pool: "Pool"

    def result(self, timeout: float | None = None) -> T:
        try:
            return super().result(timeout)
        except BrokenProcessPool as error:
            self.pool.explain(error)
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        if isinstance(error, BrokenProcessPool):
            self.pool.explain(error)
        return error


class Pool(ProcessPoolExecutor):
    """A `concurrent.futures.ProcessPoolExecutor` whose workers share one lease, which ends with them.

        with mpsd.Pool(4, fraction=0.5, wait="10m") as pool:
            results = list(pool.map(work, range(100)))

    The lease is for `max_workers` processes in equal parts; with `gpus`, they are divided over its GPUs. `request` is as
    for `mpsd.lease`, and so are the errors. A worker has the variables of the lease from its first instruction on; this
    process stays outside, and holds the lease. Workers are started by the method `spawn`: as there, the function and its
    arguments are pickled, and a program's own work is below `if __name__ == "__main__":`.

    `shutdown`, or the end of the block, releases the lease once the workers have ended. When this process is gone, even
    by SIGKILL, the workers end at once, and the lease ends. When a worker is gone, BrokenProcessPool says what mpsd
    knows about that.
    """

    def __init__(
        self,
        max_workers: int,
        *,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        max_tasks_per_child: int | None = None,
        **request: Any,
    ) -> None:
        if "processes" in request:
            raise InvalidRequestError(
                "the lease of a pool is for as many processes as the pool has workers",
                hint="leave processes out: mpsd.Pool(4, ...)",
                limit="processes",
            )
        self._workers = Workers(self._variables_of_next)
        super().__init__(
            max_workers, self._workers, initializer, initargs, max_tasks_per_child=max_tasks_per_child
        )
        self.lease = Lease(**request, processes=-(-max_workers // (request.get("gpus") or 1)))
        self._explained = ""
        self.lease.open()
        self._finalizer = weakref.finalize(self, _release_after, self.lease, self._workers.all)
        self._finalizer.atexit = False  # the lease ends with this process
