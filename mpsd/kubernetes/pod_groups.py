"""The control group of a pod and its processes, by the kernel's facts."""

import contextlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from mpsd.core.errors import InvalidRequestError, NotPermittedError
from mpsd.core.kubernetes import pods
from mpsd.core.kubernetes.settings import Settings
from mpsd.core.model import Known, Unknown
from mpsd.system import clock
from mpsd.system.processes import named_groups, proc
from mpsd.system.processes.control_groups import OpenGroup

_EXECUTES: Final = 1.0
"""Seconds within which a container's process has executed the container's program."""

_UNSEEN: Final = Unknown("a process of the pod is not in the pid namespace of mpsd-kubernetes")


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


def programs_with(pod: str, variable: str, value: str, settings: Settings, held_by: int | None) -> list[Program]:
    """Return the processes of a pod that were started with a variable of this value.

    Raises NotPermittedError where there is none, but a process of another user than `held_by` may be one: which
    variables it has is unknown.
    """
    programs: list[Program] = []
    because = ""
    with group_of(pod, settings) as found:
        for pid in () if found is None else found.processes():
            match _UNSEEN if pid == 0 else proc.environment_of(pid, variable.__eq__):
                case Known(variables) if variables.get(variable) == value:
                    user = proc.effective_user(pid)
                    if user is not None:
                        programs.append(Program(pid, *user))
                case Unknown(reason) if not _may_execute(pid) and proc.effective_uid(pid) != held_by:
                    because = reason
    if because and not programs:
        raise NotPermittedError(
            f"as which user the program of a container in pod {pod} runs is unknown: {because}",
            hint="run mpsd-kubernetes in the host's pid namespace with the capabilities of its manifest, and see its"
            " AppArmor profile; or name the user in advance: `uid`, or `user` in a claim",
            limit="environment",
        )
    return programs


def _may_execute(pid: int) -> bool:
    """Tell whether a process is so young that it may be executing a program: it then has no environment for a while."""
    ticks = proc.start_ticks(pid)
    return ticks is not None and clock.since_boot() - clock.since_boot(ticks) < _EXECUTES
