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
from collections.abc import Mapping, Sequence
from multiprocessing import parent_process, popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from typing import Any

from mpsd.client.environment import with_variables
from mpsd.client.processes.become import end_with
from mpsd.client.processes.starter import start


class _Launched(popen_spawn_posix.Popen):
    """A worker that is executed in the environment of its lease."""

    _fds: list[int]
    """The descriptors that the worker gets, those of its queues among them."""

    def _launch(self, process: "Worker") -> None:
        tracker = resource_tracker.getfd()
        assert tracker is not None  # noqa: S101 - it runs
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
            with contextlib.ExitStack() as interrupted:
                interrupted.callback(_end, self.pid)
                with open(order, "wb", closefd=False) as file:
                    file.write(content.getbuffer())
                interrupted.pop_all()
        finally:
            self.finalizer = util.Finalize(self, _close, (sentinel, order))
            _close(to_worker, of_worker)


def _close(*descriptors: int | None) -> None:
    for each in descriptors:
        if each is not None:
            os.close(each)


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

    def __init__(self, variables: Mapping[str, str], **options: Any) -> None:  # noqa: ANN401 - multiprocessing's own
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
    """A context of `multiprocessing` whose processes get the variables of a lease, on the GPU that has the fewest."""

    def __init__(self) -> None:
        super().__init__()
        self.environments: Sequence[Mapping[str, str]] = ({},)
        """The variables on each GPU."""
        self.all: list[Worker] = []
        """The workers that live, or are gone for another reason than that their work was done."""

    def Process(self, **options: Any) -> Worker:  # type: ignore[override]  # noqa: ANN401, N802 - multiprocessing's own
        self.all[:] = [each for each in self.all if each.exitcode != 0]
        of_living = [each.variables for each in self.all if each.is_alive()]
        worker = Worker(min(self.environments, key=of_living.count), **options)
        self.all.append(worker)
        return worker
