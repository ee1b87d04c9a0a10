"""Control groups that a request names: by a path, by a process in the group, or by a systemd unit."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import islice
from typing import Final

from mpsd.core.errors import InvalidRequestError
from mpsd.system.processes.control_groups import (
    SYSTEMD,
    UNIFIED,
    Hierarchy,
    Membership,
    OpenGroup,
    UnseenHierarchyError,
    hierarchies,
    open_at,
)

MOST_ENTRIES: Final = 4096
"""Maximum directory entries, files included, that are read to find a user's unit. A unit of the system may take 16
times as many, since no user can make slices there. Reading a slice takes as long as 32 entries. A user's unit thus
takes 4 ms at most (measured)."""

_LONGEST: Final = 4096
"""Maximum characters of a path."""


def named(path: str) -> OpenGroup:
    """Open the group that a path names, in the form of /proc/PID/cgroup or with its mount point in front.

    Where several hierarchies have such a group, the first one with processes wins, otherwise the first one whose kernel
    counters show whether processes came and went. Raises InvalidRequestError, and OSError when no descriptor is free.
    """
    seen = _seen()
    if not path.startswith("/") or ".." in path.split("/") or len(path) > _LONGEST:
        raise _unknown(path, "it is not an absolute path of a control group")
    inner, wanted, base = path, seen, ""
    for hierarchy in sorted(seen, key=lambda each: -len(each.point.parts)):
        if path == str(hierarchy.point) or path.startswith(f"{hierarchy.point}/"):
            inner, wanted, base = path[len(str(hierarchy.point)) :], [hierarchy], hierarchy.base
            break
    else:
        if path.startswith("/sys/fs/cgroup/"):
            inner = path.removeprefix("/sys/fs/cgroup")
    inner = "/" + "/".join(part for part in inner.split("/") if part not in {"", "."})
    if inner == "/":
        raise _unknown(path, "it is the whole hierarchy, as far as mpsd sees it")
    unseen: list[UnseenHierarchyError] = []
    with ExitStack() as opened:
        found = [opened.enter_context(closing(each)) for each in _each_at(wanted, f"{base}{inner}", unseen)]
        if not found:
            places = ", ".join(str(each.point) for each in wanted)
            because = f"there is none of this path where mpsd runs, below {places}"
            raise _unknown(path, str(unseen[0]) if unseen else because)
        populated = (each for each in found if each.is_populated())
        counted = (each for each in found if each.cpu_time() is not None)
        return next(populated, next(counted, found[0])).duplicate()


def _each_at(seen: Iterable[Hierarchy], path: str, unseen: list[UnseenHierarchyError]) -> Iterator[OpenGroup]:
    """Yield the group at a path in each hierarchy that has one, and collect the hierarchies where that is unknown."""
    for hierarchy in seen:
        try:
            found = open_at(hierarchy, path)
        except UnseenHierarchyError as error:
            unseen.append(error)
        else:
            if found is not None:
                yield found


def of_process(pid: int) -> OpenGroup:
    """Open the group of a process. The caller holds its pidfd, and must check afterwards that the process still lives.

    systemd's hierarchy comes first, then the unified one, then the controllers'; the first in which the process is in a
    group below the root counts. Raises InvalidRequestError, and OSError when no descriptor is free.
    """
    seen = _seen()
    for name, path in Membership(pid, seen).own():
        hierarchy = next(each for each in seen if each.name == name)
        _check_text(path)
        try:
            found = open_at(hierarchy, path)
        except UnseenHierarchyError as error:
            raise _unknown(path, str(error)) from error
        if found is None:
            continue
        with closing(found):
            if (name, path) in Membership(pid, seen).own():
                return found.duplicate()
    raise InvalidRequestError(
        f"process {pid} is in no control group but the top of each hierarchy, as far as mpsd sees them",
        hint="name the process without its group, or put it into a control group first",
        limit="cgroup",
    )


_BY_PATH: Final = "name its control group (--cgroup PATH): systemctl show -p ControlGroup UNIT"


def of_unit(name: str, uid: int) -> OpenGroup:
    """Open the group of a systemd unit: of the system for root, otherwise of the user's own manager.

    Only slices that belong to root, or to that user, are searched. In other places a user may be able to make control
    groups and name them like a unit. No other user can make groups in such a slice, although systemd may have given the
    unit's own group to its user (Delegate=). Raises InvalidRequestError, and OSError when no descriptor is free.
    """
    top = "/" if not uid else f"/user.slice/user-{uid}.slice/user@{uid}.service"
    name = name if "." in name else f"{name}.service"
    found: list[OpenGroup] = []
    with ExitStack() as opened:
        # Where both versions are mounted, version 2 has the unit too, and reports more about it.
        for hierarchy in sorted(_seen(), key=lambda each: each.name != UNIFIED):
            if hierarchy.name in {SYSTEMD, UNIFIED} and not found:
                if hierarchy.base:
                    because = f"where mpsd runs, only control groups below {hierarchy.base} are mounted, and no slice"
                    raise _no_holder(name, because, _BY_PATH)
                try:
                    groups = (open_at(hierarchy, path) for path in _units(hierarchy, top, name, uid))
                    several = (opened.enter_context(closing(each)) for each in groups if each is not None)
                    found = [*islice(several, 2)]
                except UnseenHierarchyError as error:
                    raise _unknown(name, str(error)) from error
        if len(found) == 1:
            return found[0].duplicate()
    because = "there are several of this name" if found else "it has no control group: it does not run"
    raise _no_holder(name, because, _BY_PATH if found else "start it first")


def _no_holder(unit: str, because: str, hint: str) -> InvalidRequestError:
    return InvalidRequestError(f"the unit {unit} cannot hold a lease: {because}", hint=hint, limit="unit")


def _units(hierarchy: Hierarchy, top: str, name: str, uid: int) -> Iterator[str]:
    waiting = deque([top.rstrip("/")])
    left = MOST_ENTRIES if uid else 16 * MOST_ENTRIES
    while waiting:
        at = waiting.popleft()
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(f"{hierarchy.point}{at}") as entries:
            for each in entries:
                left -= 32 if each.name.endswith(".slice") else 1
                if left < 0:
                    raise _no_holder(name, "there are too many control groups to look for it", _BY_PATH)
                if each.name == name and each.is_dir(follow_symlinks=False):
                    yield f"{at}/{each.name}"
                elif each.name.endswith(".slice") and _is_group_of(each, uid):
                    waiting.append(f"{at}/{each.name}")


def _is_group_of(entry: "os.DirEntry[str]", uid: int) -> bool:
    with suppress(FileNotFoundError):  # the directory was removed meanwhile
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == uid
    return False


def _seen() -> list[Hierarchy]:
    seen = hierarchies()
    if not seen:
        raise InvalidRequestError(
            "mpsd sees no control groups: none of their hierarchies is mounted where it runs",
            hint="mount /sys/fs/cgroup into mpsd's container, read-only, or name a process",
            limit="cgroup",
        )
    return seen


def _check_text(path: str) -> None:
    """Raise InvalidRequestError for a path that cannot be stored, shown and sent as text."""
    if any(not each.isprintable() for each in path):
        raise _unknown(ascii(path), "its name has characters that cannot be shown")


def _unknown(path: str, because: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the control group {path} cannot hold a lease: {because}",
        hint="name one as /proc/PID/cgroup has it, on the host and not in a container",
        limit="cgroup",
    )
