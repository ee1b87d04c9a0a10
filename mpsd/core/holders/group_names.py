"""The names that users know for a control group: the unit or the container in its path. Pure.

The names are for output only. Any user who may make control groups can choose the names of others, so a name is no
evidence.
"""

import re
from typing import Final, NamedTuple

from mpsd.core.model import Holder, HoldingGroup

_ID: Final = r"(?P<id>[0-9a-f]{64})"

_SCOPE: Final = re.compile(rf"(?:[a-z0-9]+(?:-containerd)?)-{_ID}\.scope\Z")
"""`docker-ID.scope`, `libpod-ID.scope`, `crio-ID.scope`, `cri-containerd-ID.scope`: containers with systemd scopes."""

_BARE: Final = re.compile(rf"(?:(?:libpod|crio)-)?{_ID}\Z")
"""A container below `docker`, `libpod_parent` or `kubepods`, whose runtime makes control groups itself."""

_POD: Final = re.compile(
    r"(?:kubepods(?:-[a-z]+)?-)?pod(?P<pod>[0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?\Z"
)

_UNIT: Final = re.compile(r"[A-Za-z0-9:_.\\@-]{1,250}\.(?:service|scope|slice|socket|mount|swap)\Z")
"""Source: systemd.unit(5)."""

_SHORT: Final = 12
"""The number of digits of a container's id that runtimes show."""


class GroupName(NamedTuple):
    """The names in the path of a control group; each is empty where the path has none."""

    unit: str = ""
    container: str = ""
    """The first 12 digits of its id."""
    pod: str = ""
    """The uid that Kubernetes gave it."""

    def facts(self) -> dict[str, str]:
        """Return the names that are present, by their kind."""
        return {name: value for name, value in self._asdict().items() if value}


def name_of(path: str) -> GroupName:
    """Return the names in a path, the innermost of each kind; a unit counts only outside containers."""
    unit = container = pod = ""
    for part in path.split("/"):
        if found := _POD.match(part):
            pod, unit = found["pod"].replace("_", "-"), ""
        elif found := _SCOPE.match(part) or _BARE.match(part):
            container, unit = found["id"][:_SHORT], ""
        elif not (container or pod) and _UNIT.match(part) and (not part.endswith(".slice") or not unit):
            unit = part
    return GroupName(unit, container, pod)


def facts_of(holder: Holder) -> dict[str, str]:
    """Return the fields of an event about a control group that holds a lease; empty for any other holder."""
    if not isinstance(holder, HoldingGroup):
        return {}
    return {"cgroup": holder.group.path, **name_of(holder.group.path).facts()}
