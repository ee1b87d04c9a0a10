"""The process that keeps a cluster: it starts it in private namespaces and control groups, and ends it.

It is a child of no test, and holds the reading end of a pipe: when no process has the other end any more, closed or
killed, it kills PID 1 of the cluster, and with that every process there; their mounts, interfaces and pids end with the
namespaces, and it removes the control groups.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.harness import wait_until

_NAMESPACES = ("--mount", "--propagation=private", "--net", "--ipc", "--uts", "--pid", "--mount-proc")


def groups(name: str) -> Iterator[Path]:
    """Yield the control group of this name in each hierarchy in which a kubelet makes groups."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ", 1)
        kind = after.split(" ", 1)[0]
        if kind == "cgroup" or (kind == "cgroup2" and before.split(" ")[4] == "/sys/fs/cgroup"):
            yield Path(before.split(" ")[4], name)


def _make_groups(name: str) -> None:
    for place in groups(name):
        place.mkdir()
        for file in ("cpuset.cpus", "cpuset.mems"):  # the only controller of version 1 that begins empty
            if (place / file).exists():
                (place / file).write_text((place.parent / file).read_text())


def _remove_groups(name: str) -> None:
    for place in groups(name):
        for folder, _, _ in os.walk(place, topdown=False):
            with contextlib.suppress(FileNotFoundError):
                Path(folder).rmdir()


def _gone(name: str) -> bool:
    """Remove the control groups, as far as the kernel has released them; return whether all are gone."""
    with contextlib.suppress(OSError):
        _remove_groups(name)
    return not any(place.exists() for place in groups(name))


def main() -> None:
    """Start a cluster by its name and the command of its PID 1; print the pids of the keeper and of PID 1."""
    name, *command = sys.argv[1:]
    try:
        _make_groups(name)
        # Each process ends with its parent: setpriv makes unshare do so, and unshare PID 1.
        cluster = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", "unshare", *_NAMESPACES, "--fork", "--kill-child=KILL", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
        print(os.getpid(), cluster.pid, flush=True)  # noqa: T201 - that is what it is asked
        os.close(sys.stdout.fileno())
        sys.stdin.read()
        children = Path(f"/proc/{cluster.pid}/task/{cluster.pid}/children")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in children.read_text().split():
                os.kill(int(pid), 9)  # unshare waits for it, and the kernel has it wait for all the others
        cluster.wait()
    finally:
        wait_until(lambda: _gone(name), what=f"the control groups {name} to be empty")


if __name__ == "__main__":
    main()
