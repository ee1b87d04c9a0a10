"""Nothing is left of a program's processes and leases when one is killed, or a call interrupted, at any line."""

import random
from pathlib import Path
from typing import Final

import pytest

from tests.client.scripts import Script, started_by, wait_until_free
from tests.harness import wait_until
from tests.node import Node

TRACED: Final = """
import signal

LINE, VICTIM = int(os.environ["KILL_AT"]), os.environ["KILL"]
count = 0

def kill():
    if VICTIM == "caller":
        os.kill(os.getpid(), signal.SIGKILL)
    if VICTIM == "wait":
        signal.raise_signal(signal.SIGINT)
        return
    children = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            children += map(int, file.read().split())
    if children:
        os.kill(children[-1], signal.SIGKILL)

def trace(frame, event, _):
    global count
    if "/mpsd/client/" not in frame.f_code.co_filename:
        return None
    count += event == "line"
    if count == LINE and event == "line":
        kill()
    return trace

def double(x):
    return 2 * x

@mpsd.process(fraction=0.1)
def triple(x):
    return 3 * x

def program():
    with mpsd.spawn(["sleep", "1000"], fraction=0.1) as process:
        process.poll()

def pool():
    with mpsd.Pool(2, fraction=0.1) as pool:
        list(pool.map(double, [1, 2]))

def attempt(function, *arguments):
    try:
        function(*arguments)
    except (mpsd.MpsdError, OSError, RuntimeError, KeyboardInterrupt) as error:  # BrokenProcessPool is a RuntimeError
        print(repr(error), file=sys.stderr)
"""

MAIN: Final = {
    "spawn": "attempt(program)",
    "pool": "attempt(pool)",
    "process": "attempt(triple, 1)",
}


def run(folder: Path, node: Node, name: str, victim: str, line: int) -> int:
    """Run a program whose client is killed at this line, counted from its start; return the lines that it ran."""
    marker = f"MPSD_TEST_MARKER=killed-{name}-{victim}-{line}"
    text = f"""
        import mpsd.client.processes.pool, mpsd.client.processes.program, mpsd.client.watcher, mpsd.core.units
        import multiprocessing.resource_tracker
        sys.settrace(trace)
        threading.settrace(trace)
        {MAIN[name]}
        sys.settrace(None)
        threading.settrace(None)
        tell(count, os.getpid(), multiprocessing.resource_tracker._resource_tracker._pid)
        sys.stdin.read(1)
        """
    variables = {"KILL_AT": f"{line}", "KILL": victim, **dict([marker.split("=")])}
    count = 0
    with Script(folder, node, text, before=TRACED, environment=variables) as script:
        if victim == "caller" and line:
            assert script.end()[0] == -9
        else:
            count, *own = script.hear()
            if victim == "child":
                wait_until(lambda: {*started_by(marker)} <= {*own}, what="its processes to end", deadline=30)
                wait_until_free(node)
            assert script.end()[0] == 0
    wait_until(lambda: not started_by(marker), what="all processes to end", deadline=30)
    wait_until_free(node)
    return int(count)


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["caller", "child", "wait"])
@pytest.mark.parametrize("name", [*MAIN])
def test_killed_anywhere(node: Node, short_tmp: Path, name: str, victim: str) -> None:
    """SIGKILL of the caller or of its last child, and Ctrl-C, leave no process and no lease, at any of these lines."""
    total = run(short_tmp, node, name, victim, 0)
    assert total > 100
    chosen = random.Random(f"{name} {victim}")
    for line in sorted(chosen.sample(range(1, total), 10)):
        run(short_tmp, node, name, victim, line)


def test_interrupted_before_the_end_begins(node: Node, short_tmp: Path) -> None:
    """Ctrl-C where a block begins to end its program: it is ended, and nobody waits for it."""
    text = """
        import signal

        def trace(frame, event, _):
            if frame.f_code.co_name == "end" and frame.f_code.co_filename.endswith("/program.py"):
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)

        try:
            with mpsd.spawn(["sleep", "1000"], fraction=0.1):
                sys.settrace(trace)
        except KeyboardInterrupt:
            tell("interrupted")
        """
    with Script(short_tmp, node, text) as script:
        assert script.hear() == ["interrupted"]
        assert script.end()[0] == 0
    wait_until_free(node)
