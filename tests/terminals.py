"""A program on a terminal, as a user sees it."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Self

import pyte

_DEADLINE: Final = 25.0
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?=>]*[A-Za-z]|\x1b[=>]|\x1b\(.|\x1b\][^\x07]*\x07|\r")


class Terminal:
    """A terminal with a program on it, which is the leader of its session."""

    def __init__(self, process: "subprocess.Popen[bytes]", terminal: int) -> None:
        self.process = process
        self._terminal = terminal
        self.raw = ""

    @classmethod
    @contextlib.contextmanager
    def running(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        columns: int = 80,
        lines: int = 24,
    ) -> Iterator[Self]:
        """Run a program on a terminal; it, and everything left in its session, ends with this context."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        process = subprocess.Popen(
            command,
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env={**environment, "TERM": "xterm"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - one call of the kernel
        )  # fmt: skip
        os.close(theirs)
        try:
            yield cls(process, ours)
        finally:
            os.close(ours)  # this hangs up the terminal
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    @property
    def text(self) -> str:
        """All output so far, without cursor movements and colours."""
        return _CONTROL.sub("", self.raw)

    def wait_for(self, pattern: str, *, behind: int = 0) -> "re.Match[str]":
        """Wait until it shows a match, and return that: `behind` is where to begin the search."""
        end = time.monotonic() + _DEADLINE
        while (found := re.compile(pattern, re.MULTILINE).search(self.text, behind)) is None:
            assert self._read(end), f"no {pattern!r} in:\n{self.text}"
        return found

    def wait_for_screen(self, is_wanted: Callable[[list[str]], bool]) -> None:
        """Wait until the lines of the screen are as they should be."""
        end = time.monotonic() + _DEADLINE
        while not is_wanted(self.screen):
            assert self._read(end), "not so:\n" + "\n".join(self.screen)

    @property
    def screen(self) -> list[str]:
        """The lines of the screen, after all output so far."""
        lines, columns, *_ = struct.unpack("HHHH", fcntl.ioctl(self._terminal, termios.TIOCGWINSZ, bytes(8)))
        screen = pyte.Screen(columns, lines)
        pyte.Stream(screen).feed(self.raw)
        return [line.rstrip() for line in screen.display]

    def wait_for_the_end(self) -> int:
        end = time.monotonic() + _DEADLINE
        while self._read(end):
            pass
        return self.process.wait(timeout=_DEADLINE)

    def _read(self, end: float) -> bool:
        if not select.select([self._terminal], [], [], max(end - time.monotonic(), 0))[0]:
            return False
        try:
            received = os.read(self._terminal, 65536)
        except OSError:  # EIO: no process has it open any more
            return False
        self.raw += received.decode(errors="replace")
        return bool(received)
