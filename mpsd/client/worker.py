"""The processes of a pool: Python's own of the `spawn` method, in the environment of a lease, which end with this one.

The environment is there when a worker is executed. `multiprocessing` knows no environment of a process: its worker has
this program's, and imports the program's main module, and with it perhaps CUDA, before any initializer runs. So the
one method that executes a worker, `Popen._launch`, is replaced here; it is the same in Python 3.11 to 3.14 but for the
call that takes an environment.
"""

import contextlib
import io
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing import parent_process, popen_spawn_posix, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, reduction, set_spawning_popen
from typing import Any

from mpsd.client.become import end_with
from mpsd.client.environment import with_variables
from mpsd.client.starter import start


class _Launched(popen_spawn_posix.Popen):
    """A worker that is executed in the environment of its lease."""

    def _launch(self, process: "Worker") -> None:
        tracker = resource_tracker.getfd()
        self._fds.append(tracker)
        content = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), content)
            reduction.dump(process, content)
        finally:
            set_spawning_popen(None)
        sentinel, of_worker = os.pipe()  # ends with the worker
        to_worker, order = None, None
        try:
            to_worker, order = os.pipe()
            command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=to_worker)
            descriptors = {*self._fds, to_worker, of_worker}
            environment = with_variables(os.environ, process.variables)
            self.pid = start(lambda: _execute(command, descriptors, environment), _end)
            self.sentinel = sentinel
            with open(order, "wb", closefd=False) as file:  # noqa: PTH123 - a descriptor
                file.write(content.getbuffer())
        finally:
            kept = [each for each in (sentinel, order) if each is not None]
            self.finalizer = util.Finalize(self, util.close_fds, kept)
            util.close_fds(*(each for each in (to_worker, of_worker) if each is not None))


def _execute(command: list[str], descriptors: set[int], environment: Mapping[str, str]) -> int:
    # A descriptor that is duplicated onto itself stays open in the new program, and in no other that a thread starts.
    kept = [(os.POSIX_SPAWN_DUP2, each, each) for each in sorted(descriptors)]
    return os.posix_spawn(spawn.get_executable(), command, environment, file_actions=kept)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


class Worker(SpawnProcess):
    """A worker of a pool; `variables` are those of its lease."""

    def __init__(self, variables: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        self.variables = variables

    def __getstate__(self) -> dict[str, object]:
        """Return what the worker gets: it has the variables already."""
        return {**self.__dict__, "variables": {}}

    def run(self) -> None:
        """Run in the worker: end with the parent from now on, or at once where it is gone."""
        parent = parent_process()
        assert parent is not None and parent.pid is not None  # noqa: S101, PT018 - it is a child
        end_with(parent.pid)
        super().run()

    @staticmethod
    def _Popen(process_obj: "Worker") -> _Launched:  # type: ignore[override]  # noqa: N802 - multiprocessing's name
        return _Launched(process_obj)


class Workers(SpawnContext):
    """A context of `multiprocessing` whose processes get the variables that a function returns for each."""

    def __init__(self, variables: Callable[[], Mapping[str, str]]) -> None:
        super().__init__()
        self.all: list[Worker] = []
        """The workers that were started, and have not been forgotten."""
        self._variables = variables

    def Process(self, **options: Any) -> Worker:  # type: ignore[override]  # noqa: N802 - the name of multiprocessing's
        worker = Worker(self._variables(), **options)
        self.all.append(worker)
        return worker
