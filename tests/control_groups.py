"""Control groups for tests: made, joined by processes, and removed."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import wait_until


def mounted(hierarchy: str) -> Path | None:
    """Return where a hierarchy of control groups is mounted and accessible to this process."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        place, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind == hierarchy or hierarchy in options.split(","):
            return Path(place.split()[4])
    return None


@contextlib.contextmanager
def control_group(hierarchy: str, name: str) -> Iterator[Path]:
    """Make a control group, and remove it when all of its processes have ended."""
    top = mounted(hierarchy)
    if top is None or not os.access(top, os.W_OK):
        pytest.skip(f"no control group can be made in {hierarchy} here")
    group = top / f"{name}-{os.getpid()}.scope"
    group.mkdir()
    try:
        yield group
    finally:
        if group.exists():
            wait_until(lambda: not (group / "cgroup.procs").read_text(), what=f"all in {group} to have ended")
            group.rmdir()


def joins(group: Path) -> tuple[str, ...]:
    """Return a command prefix that joins a control group, and becomes the command that follows."""
    return "sh", "-c", 'echo $$ >"$0" && exec "$@"', str(group / "cgroup.procs")
