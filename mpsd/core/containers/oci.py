"""The data that an OCI runtime gives a container's hook: the container's state, configuration, and future user.

Source: the OCI runtime specification, runtime.md (state) and config.md (process, mounts). At createRuntime, the process
of the container is the runtime's own and still root: it becomes `process.user` when it starts the container's program.
"""

import json
from collections.abc import Mapping
from typing import Final, NamedTuple

from mpsd.core.errors import InvalidRequestError

STATE_BYTES: Final = 1024 * 1024
"""The maximum size: a state has some hundred bytes, and the annotations of the container."""

CONFIGURATION_BYTES: Final = 16 * 1024 * 1024

_NOT_A_RUNTIME: Final = "this command is for container runtimes, which call it; see docs/container.md"


class State(NamedTuple):
    """A container that is being created: its pid, as the runtime sees it, and the directory of its configuration."""

    pid: int
    bundle: str


class Container(NamedTuple):
    """The future program of a container: its uid and gid inside the container, its variables and its mounts."""

    uid: int
    gid: int
    variables: Mapping[str, str]
    mounts: Mapping[str, str]
    """The source of each mount by its destination; of several mounts on one destination, the last."""


def state(raw: bytes) -> State:
    """Read the state that a runtime writes to a hook's stdin. Raises InvalidRequestError."""
    try:
        found = json.loads(raw)
        pid, bundle = found["pid"], found["bundle"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidRequestError(
            "stdin is not the state of a container: it has no pid and bundle", hint=_NOT_A_RUNTIME
        ) from None
    if type(pid) is not int or pid <= 0 or not isinstance(bundle, str) or not bundle.startswith("/"):
        raise InvalidRequestError(
            f"the state of the container names pid {pid!r} and bundle {bundle!r}", hint=_NOT_A_RUNTIME
        )
    return State(pid, bundle)


def container(raw: bytes) -> Container:
    """Read the configuration of a container, config.json in its bundle. Raises InvalidRequestError."""
    try:
        found = json.loads(raw)
        process = found["process"]
        user = process.get("user", {})  # the default user is root
        uid, gid = user.get("uid", 0), user.get("gid", 0)
        variables = dict(each.split("=", 1) for each in process.get("env") or () if "=" in each)
        mounts = {each["destination"]: each.get("source", "") for each in found.get("mounts") or ()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidRequestError(
            "the configuration of the container has no process, or is not as the OCI runtime specification has it",
            hint=_NOT_A_RUNTIME,
        ) from None
    if type(uid) is not int or type(gid) is not int:
        raise InvalidRequestError(f"the container's process has uid {uid!r} and gid {gid!r}", hint=_NOT_A_RUNTIME)
    return Container(uid, gid, variables, mounts)


def outside(id_map: str, inside: int) -> int | None:
    """Convert an id of a user namespace to the id outside it; None if it is not mapped.

    `id_map` is the text of /proc/PID/uid_map or gid_map. Source: user_namespaces(7). Each line has the first id inside,
    the first id outside, and the number of ids.
    """
    for line in id_map.splitlines():
        first, beyond, count = map(int, line.split())
        if first <= inside < first + count:
            return beyond + inside - first
    return None
