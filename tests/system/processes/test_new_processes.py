"""New processes are found by their pids, each several times; older processes are not."""

import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable

from mpsd.system.processes import proc
from mpsd.system.processes.process_table import NewProcesses
from tests.harness import wait_until


def finder(new: NewProcesses, wanted: set[int]) -> Callable[[], bool]:
    """Return a function that looks until all of these are found; the machine may start others meanwhile."""
    found = list[int]()

    def look() -> bool:
        found.extend(new.look())
        assert max(Counter(found).values(), default=0) <= 5
        return wanted <= set(found)

    return look


def test_found() -> None:
    """Each process started since then is found, however many; an older one is not."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as before:
        new = NewProcesses()
        there = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(80)]
        look = finder(new, {each.pid for each in there})
        wait_until(look, what="all of them to be found")
        assert before.pid not in new.look()
        for each in (before, *there):
            each.communicate()


def test_found_again() -> None:
    """A process is found again after it has executed its program: only then it has that program's environment."""
    new = NewProcesses()
    script = 'read go; exec env LATE=1 sh -c "echo there; read over"'
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as late:
        assert late.stdin is not None
        assert late.stdout is not None
        wait_until(lambda: late.pid in new.look(), what="it to be found")
        late.stdin.write("go\n")
        late.stdin.flush()
        assert late.stdout.readline() == "there\n"
        looks = [late.pid in new.look() for _ in range(100)]
        assert looks.count(True) == 4
        late.stdin.close()


def test_threads_are_told_apart() -> None:
    """A thread also has a number and may be found; the process table recognises it as a thread."""
    new, done = NewProcesses(), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert thread.native_id is not None
    wait_until(finder(new, {thread.native_id}), what="the thread's number")
    assert proc.process_of_thread(thread.native_id) == os.getpid()
    done.set()
    thread.join()
