"""The process that keeps a machine: it boots it in private control groups, and ends it together with its owner.

It is a child of no test, and holds the reading end of a pipe: when no process has the other end any more, closed or
killed, it has the machine power off, and removes the control groups.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_SECONDS: Final = 20.0
"""Deadline for a machine to power off; it takes a fraction of a second."""


_OF_SLURM: Final = frozenset({"freezer", "devices"})
"""The hierarchies of version 1 in which Slurm makes groups: a machine sees its own part of them, and mounts it."""


def groups(name: str) -> Iterator[Path]:
    """Yield a control group of this name in each hierarchy in which systemd or Slurm makes groups, beside our own.

    Two machines in the same group would take each other's units for their own: systemd-nspawn itself makes a group
    `payload` in the one that it is started in.
    """
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ", 1)
        kind, _, options = after.split(" ", 2)
        wanted = {"name=systemd", *_OF_SLURM} & {*options.split(",")} if kind == "cgroup" else set()
        if kind == "cgroup2" or wanted:
            yield Path(before.split(" ")[4], own["".join(wanted)].lstrip("/"), name)


def _enter(places: Sequence[Path]) -> None:
    for place in places:
        (place / "cgroup.procs").write_text(f"{os.getpid()}")


def main() -> None:
    """Boot a machine by its name and the arguments of systemd-nspawn.

    Print the pids of the keeper and of systemd-nspawn.
    """
    name, *arguments = sys.argv[1:]
    places = list(groups(name))
    for place in places:
        place.mkdir()
    try:
        machine = subprocess.Popen(
            ["systemd-nspawn", f"--machine={name}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            preexec_fn=lambda: _enter(places),  # noqa: PLW1509 - there are no threads here
        )
        print(os.getpid(), machine.pid, flush=True)  # noqa: T201 - that is what it is asked
        os.close(sys.stdout.fileno())
        sys.stdin.read()
        machine.terminate()
        try:
            machine.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            machine.kill()
            machine.wait()
    finally:
        for place in places:
            for folder, _, _ in os.walk(place, topdown=False):
                with contextlib.suppress(FileNotFoundError):
                    Path(folder).rmdir()


if __name__ == "__main__":
    main()
