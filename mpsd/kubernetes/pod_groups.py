"""The control group of a pod and its processes, by the kernel's facts."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from mpsd.core.errors import InvalidRequestError
from mpsd.core.kubernetes import pods
from mpsd.core.kubernetes.settings import Settings
from mpsd.core.model import Known
from mpsd.system import named_groups, proc, process_table
from mpsd.system.control_groups import OpenGroup


class Program(NamedTuple):
    """A process of a container, and its user."""

    pid: int
    uid: int
    gid: int


@contextlib.contextmanager
def group_of(pod: str, settings: Settings) -> Iterator[OpenGroup | None]:
    """Yield the control group of a pod; None where kubelet has not made it, or has removed it."""
    found = next(filter(None, map(_open, pods.groups(pod, settings.cgroup_root))), None)
    try:
        yield found
    finally:
        if found is not None:
            found.close()


def _open(path: str) -> OpenGroup | None:
    try:
        return named_groups.named(path)
    except InvalidRequestError:
        return None  # no group has this name


def path_of(pod: str, settings: Settings) -> str | None:
    """Return the path of a pod's control group; None where there is none."""
    with group_of(pod, settings) as found:
        return None if found is None else found.group.path


def is_populated(path: str) -> bool:
    """Tell whether a control group, or a group below it, has a process; True where that is unknown."""
    found = _open(path)
    if found is None:
        return False
    try:
        return found.is_populated()
    except OSError:
        return True
    finally:
        found.close()


def programs_with(pod: str, variable: str, value: str, settings: Settings) -> list[Program]:
    """Return the processes of a pod that were started with a variable of this value."""
    programs: list[Program] = []
    with group_of(pod, settings) as found:
        for pid in () if found is None else found.processes():
            if proc.environment_of(pid, variable.__eq__) == Known({variable: value}):
                user = process_table.user_of(pid)
                if user is not None:
                    programs.append(Program(pid, *user))
    return programs
