"""Programs as processes, for tests: they take commands as lines on stdin, and answer each with a line of JSON."""

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Final, Self

from tests.fork_server import ForkServer, PipedChild

_DEADLINE: Final = 30.0
"""Seconds for any answer: none should come near it."""


class DrivenProgram:
    """A process that prints one line first, then answers each line of its stdin; it ends with its `with` block.

    Every answer is a dict with `ok`, and with `error` and `code` if that is false.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        mpsctl: ForkServer | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        """Start it, with no CUDA_* variable except those of `environment`; with `mpsctl`, as `mpsctl COMMAND`.

        Its stderr is `stderr`, by default that of this process.
        """
        bare = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        variables = {**bare, **environment}
        self.process: subprocess.Popen[bytes] | PipedChild = (
            mpsctl.start_mpsctl(command, variables)
            if mpsctl is not None
            else subprocess.Popen(
                command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, bufsize=0
            )
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._hello: dict[str, Any] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def hello(self) -> dict[str, Any]:
        """The first line of the program.

        It comes once CUDA is initialised, and so not at all while MPS makes the client wait.
        """
        if self._hello is None:
            self._hello = self.answer()
        return self._hello

    @property
    def has_answered(self) -> bool:
        return bool(select.select([self._stdout], [], [], 0)[0])

    def tell(self, line: str) -> None:
        """Send it a line, without waiting for its answer."""
        assert self.hello["ok"], self.hello
        self._stdin.write(f"{line}\n".encode())

    def answer(self, deadline: float = _DEADLINE) -> dict[str, Any]:
        if not select.select([self._stdout], [], [], deadline)[0]:
            raise AssertionError(f"client {self.pid} did not answer within {deadline:g} s")
        line = self._stdout.readline()
        if not line:
            raise AssertionError(f"client {self.pid} ended with {self.process.wait(_DEADLINE)} instead of answering")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def do(self, line: str) -> dict[str, Any]:
        self.tell(line)
        return self.answer()

    def end(self) -> int:
        """Have it exit by itself, and return its status."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(b"exit\n")
        return self.process.wait(_DEADLINE)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End it by a signal, and return its status."""
        self.process.send_signal(number)
        return self.process.wait(_DEADLINE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.process:
            self.process.kill()
