"""A process pool whose workers share one lease, and functions of which each call has a process and a lease."""

import contextlib
import functools
import importlib
import inspect
import operator
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar, Unpack, cast

from mpsd.client.lease import Lease, Options
from mpsd.client.processes.ends import end_clients
from mpsd.client.processes.worker import Worker, Workers
from mpsd.core.errors import InvalidRequestError, MpsdError

P = ParamSpec("P")
T = TypeVar("T")


_ANSWER: Final = 5.0
"""Seconds for each answer of mpsd about a worker that is gone."""

_REAPED: Final = 5.0
"""Seconds for the executor to end and reap the workers beside one that is gone."""

_LOOK: Final = 0.01
"""Seconds between two looks whether they are."""


class _Result(Future[T]):
    """A future of a pool, whose error about a worker that is gone says what mpsd knows of it."""

    knowledge: "_Knowledge"

    def result(self, timeout: float | None = None) -> T:
        try:
            return super().result(timeout)
        except BrokenProcessPool as error:
            self.knowledge.explain(error)
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        if isinstance(error, BrokenProcessPool):
            self.knowledge.explain(error)
        return error


class Pool(ProcessPoolExecutor):
    """A `concurrent.futures.ProcessPoolExecutor` whose workers share one lease, which ends with them.

        def work(number):
            return number**2

        if __name__ == "__main__":
            with mpsd.Pool(4, fraction=0.5, wait="10m") as pool:
                print(sum(pool.map(work, range(100))))

    The lease is for `max_workers` processes in equal parts, and with `gpus` they are divided over its GPUs; the other
    arguments are those of `mpsd.lease`, and of the executor. A worker has the variables of the lease before it imports
    anything. This process holds the lease and stays outside. Workers start by the method `spawn`: a function and its
    arguments are pickled, and a program that makes a Pool does so below the `if` of the example.

    The lease ends once the workers have ended, after `shutdown` or the `with` block. When this process is gone, be it
    by SIGKILL, the workers end at once, and the lease with them. When a worker is gone, BrokenProcessPool says what
    mpsd knows about it. The constructor raises the errors of `Lease.open`.
    """

    def __init__(
        self,
        max_workers: int,
        *,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        max_tasks_per_child: int | None = None,
        **request: Unpack[Options],
    ) -> None:
        if odd := request.keys() & {"processes", "pid"}:
            raise InvalidRequestError(
                "the lease of a pool is held by this process, for as many processes as the pool has workers",
                hint=f"leave out {min(odd)}",
            )
        max_workers, gpus = operator.index(max_workers), request.get("gpus")
        workers = Workers()
        super().__init__(max_workers, workers, initializer, initargs, max_tasks_per_child=max_tasks_per_child)
        request["processes"] = -(-max_workers // (gpus if isinstance(gpus, int) and gpus > 0 else 1))
        self.lease = Lease(**request).open(sets_environment=False)
        """The lease of the workers."""
        workers.environments = self.lease.environments or workers.environments
        self._knowledge = _Knowledge(self.lease, workers.all)
        self._release = weakref.finalize(self, _release_in_background, self._knowledge)
        self._release.atexit = False  # the lease ends with this process
        self._maker = os.getpid()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a worker call a function, as ProcessPoolExecutor does."""
        try:
            future = super().submit(function, *args, **kwargs)
        except BrokenProcessPool as error:
            self._knowledge.explain(error)
            raise
        self._knowledge.end_beside_a_dead_one()
        future.__class__ = _Result  # the executor makes it itself, and its threads set it
        cast("_Result[T]", future).knowledge = self._knowledge
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as inherited
        """End the workers after what was submitted, and then the lease; without `wait`, in the background."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        self._knowledge.is_joined = self._knowledge.is_joined or wait
        if not wait:
            self._release()  # once, as all calls of it
        elif released := self._release():
            released.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Shut down, after what was submitted; on KeyboardInterrupt at once, as `end` does."""
        if isinstance(error, KeyboardInterrupt) and self._maker == os.getpid():
            self.end()
        return super().__exit__(kind, error, traceback)

    def end(self) -> None:
        """End the workers and the lease at once: mpsd ends their work on the GPU, which spares their neighbours."""
        super().shutdown(wait=False, cancel_futures=True)
        self._knowledge.end()
        self.shutdown(wait=True, cancel_futures=True)


class _Knowledge:
    """The workers of a lease, and what mpsd and the kernel know about those that are gone."""

    def __init__(self, lease: Lease, workers: Sequence[Worker]) -> None:
        self._lease = lease
        self._workers = workers
        self._lock = threading.Lock()
        self._why = ""
        self.is_joined = False
        """Whether the executor has waited for the workers that it knows."""
        self._seen = 0
        """The number of workers at the last look for a dead one."""

    def explain(self, error: BrokenProcessPool) -> None:
        """Add to an error, once, why workers are gone."""
        with self._lock:
            self._why = self._why or _why(self._lease, self._workers)
            if self._why not in str(error):
                error.args = (f"{error} What is known: {self._why}",)

    def end(self) -> None:
        """End the work of the workers on the GPU, and then the workers."""
        with self._lock:
            self._why = self._why or "the pool was ended"
        if self._lease.id:
            end_clients(self._lease)
        self._kill()

    def _kill(self) -> None:
        for each in self._workers:
            if each.pid is not None:
                each.kill()

    def end_beside_a_dead_one(self) -> None:
        """End the workers where one is dead, after a start of another.

        Python 3.11's executor ends those that it knows, and then waits for all, for ever for one that started meanwhile
        (https://github.com/python/cpython/issues/94777 and 105829).
        """
        if len(self._workers) == self._seen:
            return
        self._seen = len(self._workers)
        started = [each for each in self._workers if each.pid is not None]
        dead = wait([each.sentinel for each in started], timeout=0)
        if any(each.sentinel in dead and _status(each) for each in started):
            self._kill()

    def release(self) -> None:
        """Release the lease once the workers have ended; a forked child has neither."""
        if not self._lease.is_held_here:
            return
        if self.is_joined:
            self._kill()  # one that the executor does not know: its start was interrupted
        for each in self._workers:
            with contextlib.suppress(ValueError):  # it was never started
                wait([each.sentinel])
        with self._lock:  # what ended a worker, and not this release, is why
            if not self._why and any(each.exitcode for each in self._workers):
                self._why = _why(self._lease, self._workers)
        with contextlib.suppress(MpsdError):  # it ends with this process
            self._lease.close()


def _release_in_background(knowledge: _Knowledge) -> threading.Thread:
    """Release a lease in a thread, which KeyboardInterrupt does not reach, and return the thread."""
    thread = threading.Thread(target=knowledge.release, name="mpsd-release", daemon=True)
    thread.start()
    return thread


def _why(lease: Lease, workers: Sequence[Worker]) -> str:
    """Say how the first workers ended, and what mpsd knows about that."""
    gone = [each for each in workers if _status(each)]  # the executor ends the others by SIGTERM
    gone = [each for each in gone if each.exitcode != -signal.SIGTERM] or gone
    said = ", and ".join(f"process {each.pid} {_ended(each.exitcode)}" for each in gone)
    said = said or "no worker exited with another status than 0, as after an initializer that failed"
    try:
        facts = [*dict.fromkeys(_facts(lease, {each.pid for each in workers}))]
    except MpsdError as error:
        return f"{said}; what mpsd knows about it is unknown: {error.detail}"
    if facts:
        return f"{said}; mpsd: {'; '.join(facts)}"
    return said if lease.is_whole_gpu else f"{said}; mpsd did not end it, and {lease.id} lives"


def _status(worker: Worker) -> int | None:
    """Return the exit status of a worker that is gone, which another thread may be about to take from the kernel."""
    end = time.monotonic() + _REAPED
    while worker.exitcode is None and time.monotonic() < end:
        time.sleep(_LOOK)
    return worker.exitcode


def _ended(status: int | None) -> str:
    if status is None or status >= 0:
        return f"exited with {status}"
    return f"was ended by {signal.Signals(-status).name}"


_TELLING: Final = frozenset({"violation", "client_ended", "lease_clients_lost", "lease_expired"})
"""The kinds of events that may explain the end of a worker."""


def _facts(lease: Lease, pids: Collection[int | None]) -> Iterator[str]:
    """Yield what mpsd has done to a lease and its processes, and their violations. Raises MpsdError."""
    if lease.is_whole_gpu:
        return
    with lease.client.another(deadline=_ANSWER) as client:
        for _, event in client.events(0, follow=False):
            about: dict[str, object] = {**event}
            if event["event"] in _TELLING and (about.get("lease") == lease.id or about.get("pid") in pids):
                yield f"{about.get('because')}"
        answer = client.lease(lease.id)
    yield from (each["because"] for each in answer["violations"])
    if answer["state"] == "ended":
        yield f"{lease.id} has ended: {answer['because']}"


# -- functions ---------------------------------------------------------------------------------------------------------

_functions: Final[dict[tuple[str, str], Callable[..., object]]] = {}
"""The functions of `process`, by module and qualified name: there, the name has the function that calls a process."""


def process(**request: Unpack[Options]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have each call of a function run in a process of its own, under a lease of its own.

        @mpsd.process(fraction=0.25, wait="10m")
        def memory():
            return mpsd.current().memory

        if __name__ == "__main__":
            print(memory())

    The arguments of the decorator are those of `mpsd.lease`. A call waits for the lease, the process and its result;
    calls in several threads run at once. The function is found by its name, in a module or in the program, and its
    arguments and its result are pickled, as for Pool. An exception of the function is raised here, with its traceback
    as the cause; a process that is gone without a result raises BrokenProcessPool. An exception of the waiting thread,
    such as KeyboardInterrupt, ends the process. Raises the errors of `Lease.open`, before anything ran; the decorator
    raises those of `mpsd.lease`, and TypeError for a coroutine function, or for a thing without a name, as a `partial`.
    """
    Lease(**request)  # a mistake in the arguments is one of this line, and not of some later call

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        if not hasattr(function, "__qualname__") or inspect.iscoroutinefunction(function):
            raise TypeError(f"@mpsd.process is for a function that has a name and is no coroutine, not {function!r}")
        place = function.__module__, function.__qualname__
        _functions[place] = function

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            future = None
            with Pool(1, **request) as pool:
                try:
                    future = pool.submit(_call, place, args, kwargs)
                    return cast("T", future.result())
                finally:
                    if future is None or not future.done():  # it was interrupted
                        pool.end()

        return call

    return decorate


def _call(place: tuple[str, str], args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Call a function of `process`, in its process."""
    module, name = place
    importlib.import_module(module)
    # A program's main module has another name in the processes that multiprocessing starts.
    own = ("__mp_main__", name) if module == "__main__" and place not in _functions else place
    if own not in _functions:
        raise InvalidRequestError(
            f"{module}.{name} is not found in a process of its own",
            hint="decorate a function of a module, or of a program in a file, at its outermost level",
        )
    return _functions[own](*args, **kwargs)
