"""The cost of following a control daemon's log, and the time until a foreign command in it is answered."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from bench.service import bare_environment, running, start_bare
from bench.side_by_side import Figure, Result, in_turn

_COMMANDS: Final = 25_000
"""Queries in one conversation: each is a line, and each answer is one."""

_LINES: Final = 10_000
"""The number of lines for which the cost is printed."""

_QUESTION: Final = "get_default_active_thread_percentage"


def following(control: str, root: Path) -> Iterator[Result | Figure]:
    """Compare mpsd's cost of following, parsing and shortening a log with a reader that just reads.

    Also measure the time from the end of the front-end that set a foreign limit until the limit is undone and read
    back.
    """
    script = f"{_QUESTION}\n" * _COMMANDS
    environment = bare_environment(root / "bare")
    log = root / "bare" / "log" / "control.log"
    with log.open("ab") as output:
        daemon = start_bare(control, environment, output)

    def theirs() -> float:
        reader = subprocess.Popen(
            [sys.executable, "-m", "bench.tail", str(log), "Cmd:that-is-all"], stdout=subprocess.PIPE, text=True
        )
        assert reader.stdout is not None
        reader.stdout.readline()
        _say(control, environment, f"{script}that-is-all\n")
        lines, seconds = reader.communicate()[0].split()
        assert int(lines) >= 2 * _COMMANDS
        return float(seconds) / int(lines) * _LINES

    with running(control, root / "mpsd", 1, '[daemon]\nlog_size = "1MiB"\n') as service:
        theirs_of_it = {**environment, "CUDA_MPS_PIPE_DIRECTORY": str(service.root / "run" / "mps" / "gpu0")}
        mpsd = psutil.Process(service.process.pid)

        def ours() -> float:
            before = sum(mpsd.cpu_times()[:2])
            _say(control, theirs_of_it, script)
            service.has_read("gpu0")
            return (sum(mpsd.cpu_times()[:2]) - before) / (2 * _COMMANDS) * _LINES

        mine, bare = in_turn(ours, theirs, rounds=5)
        yield Result(f"following {_LINES} lines against a reader that just reads", mine, bare, at_most=40)

        waits = []
        for _ in range(9):
            time.sleep(1.1)  # out of step with mpsd's work once a second
            _say(control, theirs_of_it, "set_default_active_thread_percentage 10\n")
            before = time.perf_counter()
            service.next_event("limit_drift_ended")
            waits.append(time.perf_counter() - before)
    daemon.kill()
    daemon.wait()
    yield Figure("a stranger's limit is put back, at the latest after", 1000 * max(waits), 2000, "ms")


def _say(control: str, environment: dict[str, str], script: str) -> None:
    """Send a command in one front-end, again if mpsd's own front-end was being served."""
    for _ in range(100):
        said = subprocess.run([control], input=script, env=environment, capture_output=True, text=True, check=False)
        if said.stdout and not said.stdout.startswith("Cannot"):
            return
    raise AssertionError("the control daemon was never free")
