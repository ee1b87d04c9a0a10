"""The tools of every test: waiting for a condition, and the check that nothing was left behind.

This is the only place in tests/ that may sleep (tests/gate/test_no_hopes.py), and it sleeps only between two checks.
"""

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.05

# -- waiting -----------------------------------------------------------------------------------------------------------


class _Wait:
    """One wait: its deadline, its subject, and the result of the last check."""

    def __init__(self, deadline: float, what: str) -> None:
        self._deadline = deadline
        self._what = what
        self._end = time.monotonic() + deadline
        self._pause = _FIRST_PAUSE

    def next_pause(self, last: object) -> float:
        """Return how long to sleep before the next check; raise AssertionError after the deadline."""
        __tracebackhide__ = True
        left = self._end - time.monotonic()
        if left <= 0:
            raise AssertionError(f"waited {self._deadline:g} s for {self._what}; the last look saw {last!r}")
        pause = min(self._pause, left)
        self._pause = min(self._pause * 1.5, _LONGEST_PAUSE)
        return pause


def wait_until(
    condition: Callable[[], T | None],
    *,
    what: str,
    deadline: float = 30.0,
    not_yet: tuple[type[Exception], ...] = (),
) -> T:
    """Check until `condition` returns a true value, and return that; AssertionError with the last result otherwise.

    Errors of the types in `not_yet` count as a negative check; every other error is the test's own failure.
    """
    __tracebackhide__ = True
    wait = _Wait(deadline, what)
    while True:
        last: object
        try:
            value = condition()
            if value:
                return value
            last = value
        except not_yet as error:
            last = error
        time.sleep(wait.next_pause(last))


async def eventually(condition: Callable[[], T | None], *, what: str, deadline: float = 30.0) -> T:
    """Wait like `wait_until`, inside a running event loop."""
    __tracebackhide__ = True
    wait = _Wait(deadline, what)
    while not (value := condition()):  # noqa: ASYNC110 - other processes make it true
        await asyncio.sleep(wait.next_pause(value))
    return value


# -- short private directories -----------------------------------------------------------------------------------------


def remove_tree(path: Path) -> None:
    """Remove a directory of a test, even if the test has removed its own permissions there."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError:
        for folder, names, _ in os.walk(path):
            for name in [".", *names]:
                with contextlib.suppress(OSError):
                    Path(folder, name).chmod(stat.S_IRWXU, follow_symlinks=False)
        shutil.rmtree(path, ignore_errors=True)


# -- processes, as /proc has them --------------------------------------------------------------------------------------


HANGING: Final = "hanging"
"""How the kernel calls a process of `tests/hanging.py`, of which nothing else can be read."""


@dataclass(frozen=True, slots=True)
class Running:
    """A process at the moment of one check."""

    pid: int
    parent: int
    start_ticks: int
    state: str
    command: str
    pipe_directory: str

    @property
    def zombie(self) -> bool:
        """Whether it has ended without having been reaped."""
        return self.state == "Z"

    @property
    def lost(self) -> bool:
        """Whether it will never disappear by itself: only the tests could reap it, and they have continued."""
        return self.zombie and self.parent == os.getpid()

    def __str__(self) -> str:
        """Return a description from which a reader finds what started it."""
        parent = "a child" if self.parent == os.getpid() else f"re-parented to {self.parent}"
        pipe = f", pipe directory {self.pipe_directory}" if self.pipe_directory else ""
        end = ", ended and never waited for" if self.zombie else ""
        return f"process {self.pid} ({parent}{pipe}{end}): {self.command}"


def pids() -> frozenset[int]:
    return frozenset(int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208 - twice in every test


def look_at(pid: int) -> Running | None:
    """Return a process; None if it is gone. Facts that another user's process hides are empty."""
    folder = f"/proc/{pid}"
    try:
        name, _, rest = _read(f"{folder}/stat").rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = rest.split()
    command = ""
    with contextlib.suppress(OSError):
        command = _claim(pid, "cmdline").replace("\0", " ").strip()
    return Running(
        pid=pid,
        parent=int(fields[1]),
        start_ticks=int(fields[19]),
        state=fields[0],
        command=command or name.partition("(")[2],
        pipe_directory=_pipe_directory(pid),
    )


def below(directory: Path) -> list[Running]:
    """Return the running processes whose pipe directory is below this directory."""
    found = [look_at(pid) for pid in pids() if _pipe_directory(pid).startswith(f"{directory}/")]
    return [process for process in found if process is not None and not process.zombie]


def _claim(pid: int, file: str) -> str:
    """Return a file of a process that the process can delay; empty for one that does so (`tests/hanging.py`)."""
    return "" if _read(f"/proc/{pid}/comm") == f"{HANGING}\n" else _read(f"/proc/{pid}/{file}")


def _pipe_directory(pid: int) -> str:
    """Return the value of CUDA_MPS_PIPE_DIRECTORY in a process's environment; empty where it has or shows none."""
    environment = ""
    with contextlib.suppress(OSError):
        environment = _claim(pid, "environ")
    _, found, rest = f"\0{environment}".partition("\0CUDA_MPS_PIPE_DIRECTORY=")
    return rest.partition("\0")[0] if found else ""


def _read(path: str) -> str:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - for each process in most tests: pathlib takes 3 times as long
        return file.readall().decode("utf-8", errors="surrogateescape")


def kill(process: Running) -> None:
    """End exactly this process, and reap it if it is a child."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            now = look_at(process.pid)
            if now is not None and now.start_ticks == process.start_ticks:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
    if process.parent == os.getpid():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, 0)


# -- leaks -------------------------------------------------------------------------------------------------------------

_KNOWN_PLACES: Final = (
    ("/tmp", ("mpsd", "nvidia-mps")),  # NVIDIA's default pipe directory is /tmp/nvidia-mps
    ("/run", ("mpsd",)),
    ("/dev/shm", ("mpsd",)),
    ("/var/lib", ("mpsd",)),
    ("/var/log", ("mpsd", "nvidia-mps")),
)
"""Paths that mpsd, or a control daemon without its environment, writes to when a test forgot to set another."""

PLANTED: Final = ("mpsd-leaked-",)
"""The beginning of files that tests/gate/test_leaks.py leaves behind on purpose."""

LOOKS_FOR_PLANTED: Final = "MPSD_TESTS_LOOK_FOR_PLANTED"
"""Set for the runs of pytest in tests, to the name of the file that this run must find; other runs plant others."""

BROWSER: Final = "--remote-debugging-pipe"
"""The argument by which the browsers of tests are known (tests/browser.py)."""

_GRACE: Final = 0.5 if os.environ.get(LOOKS_FOR_PLANTED) else 2.0
"""Seconds for a process or a descriptor that is about to be gone: after `quit`, a process is gone within a few
milliseconds. The runs that have planted leaks wait for each of them."""


def _entries(folder: str, prefixes: tuple[str, ...]) -> Iterator[str]:
    with contextlib.suppress(OSError):
        names = os.listdir(folder)  # noqa: PTH208 - twice in every test
        planted = os.environ.get(LOOKS_FOR_PLANTED)
        found = (name for name in names if name.startswith(prefixes))
        yield from (f"{folder}/{name}" for name in found if name == planted or not name.startswith(PLANTED))


def _descriptors(pid: int | str = "self") -> dict[int, str]:
    """Return the target of each descriptor of a process, as far as permitted."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor of this very listing is closed by now
                found[int(link.name)] = os.readlink(link)  # noqa: PTH115 - most of these are no paths
    return found


class Watch:
    """The state at one moment, to be compared with a later one.

    `ours` are the directories below which this run of the tests writes: a process that names one of them belongs to it,
    whatever its parent is by now. `private` is the one of them that contains only short-lived directories.
    """

    def __init__(self, ours: Iterable[Path], private: Path) -> None:
        self._ours = tuple(f"{path}" for path in ours)
        self._private = f"{private}"
        self._pids = pids()
        self._descriptors = Counter(_descriptors().values())
        self._files = self._look_for_files()

    def leaks(self) -> tuple[list[str], list[Running]]:
        """Return what was left behind, one line each, and the processes among that."""
        lines, processes = self._look()
        if not lines:
            return lines, processes
        gc.collect()  # objects that only waited for the collector close now, with their own ResourceWarning
        end = time.monotonic() + _GRACE
        lines, processes = self._look()
        # A thread of gRPC closes its descriptors some time after the channel; a lost process never ends by itself.
        while lines and not (processes and all(each.lost for each in processes)) and time.monotonic() < end:
            time.sleep(_FIRST_PAUSE)
            lines, processes = self._look()
        return lines, processes

    def _look(self) -> tuple[list[str], list[Running]]:
        processes = self._new_processes()
        lines = [*map(str, processes), *self._new_descriptors(), *self._new_files()]
        return lines, processes

    def _new_processes(self) -> list[Running]:
        found = [process for pid in sorted(pids() - self._pids) if (process := look_at(pid)) is not None]
        return [
            process
            for process in found
            if (self._descends(process) or self._names_ours(process))
            and not self._is_a_shared_nodes(process)
            and not self._is_a_shared_browsers(process)
        ]

    def _is_a_shared_nodes(self, process: Running) -> bool:
        """Return whether it is a control daemon or the reader of an mpsd that existed before, and still exists.

        If several tests share a node, its mpsd replaces a control daemon for the next user of it, and starts a reader
        when it needs one.
        """
        is_mpsds = process.command.endswith((" -f", " -f -multiuser-server", "reader_program"))
        return process.parent in self._pids and process.parent != os.getpid() and is_mpsds

    def _is_a_shared_browsers(self, process: Running | None) -> bool:
        """Tell whether it is a process of a browser that was there before: that starts and ends them as it likes."""
        while process is not None and process.parent not in {1, os.getpid()}:
            process = look_at(process.parent)
        return process is not None and process.pid in self._pids and BROWSER in process.command

    def _descends(self, process: Running | None) -> bool:
        while process is not None and process.parent > 1:
            if process.parent == os.getpid():
                return True
            process = look_at(process.parent)
        return False

    def _names_ours(self, process: Running) -> bool:
        return any(process.pipe_directory.startswith(path) or path in process.command for path in self._ours)

    def _new_descriptors(self) -> Iterator[str]:
        left = Counter(self._descriptors)
        for number, target in sorted(_descriptors().items()):
            if left[target] > 0:
                left[target] -= 1
            else:
                yield f"file descriptor {number}: {target}{_socket_name(target)}"

    def _look_for_files(self) -> frozenset[str]:
        known = (path for folder, prefixes in _KNOWN_PLACES for path in _entries(folder, prefixes))
        return frozenset((*known, *_entries(self._private, ("",))))

    def _new_files(self) -> Iterator[str]:
        for path in sorted(self._look_for_files() - self._files):
            if path.startswith(self._private) or not _in_use_elsewhere(path):
                yield f"file {path}"

    def remove_private_files(self) -> None:
        """Remove files left in the private directory, so that they are reported once."""
        for path in self._look_for_files() - self._files:
            if path.startswith(self._private):
                if Path(path).is_dir():
                    remove_tree(Path(path))
                else:
                    Path(path).unlink(missing_ok=True)


def _socket_name(target: str) -> str:
    """Return the name of the unix socket with this inode."""
    if not target.startswith("socket:["):
        return ""
    inode = target.removeprefix("socket:[").removesuffix("]")
    for line in _read("/proc/net/unix").splitlines()[1:]:
        fields = line.split()
        if fields[6] == inode:
            return f" (a unix socket{f' at {fields[7]}' if fields[7:] else ''})"
    return ""


def _in_use_elsewhere(path: str) -> bool:
    """Return whether another user of this machine, who runs mpsd beside the tests, has made this file."""
    for pid in pids() - {os.getpid()}:
        process = look_at(pid)
        if process is None:
            continue
        names = (process.command, process.pipe_directory, *_descriptors(pid).values())
        if any(path in name for name in names):
            return True
    return False
