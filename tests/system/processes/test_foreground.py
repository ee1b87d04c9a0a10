"""A program in the foreground: exit status, signals, output."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from mpsd.system.processes import foreground
from tests.harness import wait_until

_RUN: Final = """
import os, sys
from mpsd.system.processes import foreground
sys.exit(foreground.run(sys.argv[1:], os.environ))
"""
_OUTPUT: Final = """
import os, sys
from mpsd.system.processes import foreground
sys.exit(foreground.output(sys.argv[1:], os.environ)[0])
"""
_REPORTS: Final = """
import json, os, signal, sys
print(json.dumps({"pid": os.getpid(), "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, []))}), flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("script", "expected"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137), ("kill -TERM $$", 143)]
)
def test_exit_status(script: str, expected: int) -> None:
    """The caller gets the program's exit status; for a signal it is the status that a shell uses."""
    done = subprocess.run([sys.executable, "-c", _RUN, "sh", "-c", script], check=False, timeout=30)
    assert done.returncode == expected


@pytest.mark.parametrize("program", [_RUN, _OUTPUT], ids=["run", "output"])
def test_ignored_children(program: str) -> None:
    """A caller that ignores SIGCHLD still gets the end of this child."""
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    command = [sys.executable, "-c", ignoring, sys.executable, "-c", program, "sh", "-c", "exit 3"]
    assert subprocess.run(command, check=False, timeout=30).returncode == 3


def test_not_found() -> None:
    """A missing program raises the system's error."""
    with pytest.raises(FileNotFoundError):
        foreground.run(["/nobody-here"], os.environ)


def test_signals() -> None:
    """Signals are passed to the program, which starts with the original signal handlers."""
    command = [sys.executable, "-c", _RUN, sys.executable, "-c", _REPORTS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        hello = json.loads(program.stdout.readline())
        assert hello["pid"] != program.pid
        assert hello["mask"] == 0
        # The program may not have set its handler yet, and would die of the signal.
        wait_until(lambda: _catches(hello["pid"], signal.SIGTERM), what="the program to wait for SIGTERM")
        program.send_signal(signal.SIGTERM)
        assert program.wait(30) == 7


def _catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    (caught,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> number - 1 & 1)


def test_output() -> None:
    """The program's output is returned without the final newline, together with its end."""
    assert foreground.output(["sh", "-c", "echo one; echo two; exit 4"], os.environ) == (4, "one\ntwo")
    assert foreground.output(["sh", "-c", "printf '\\377'"], os.environ) == (0, "\\xff")
