"""The holders of a lease: processes, control groups, or a claim that a holder will take. Pure.

The names that users know for a control group, the unit or the container in its path, are no evidence: any user who may
make control groups can choose the names of others. They are for output, and widen a quarantine to a whole container.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from mpsd.core.errors import InvalidRequestError
from mpsd.core.model import Claim, Holder, HoldingGroup, HoldingProcess, Lease, ProcessIdentity, Who

MOST: Final = 64
"""Maximum holders of a lease at a time: mpsd needs a descriptor for each."""

MOST_ADDED: Final = 512
"""Maximum holders that all leases of a user have beyond their first ones: mpsd reads each of them again and again."""


def processes(lease: Lease) -> Iterator[ProcessIdentity]:
    """Yield the processes that hold a lease."""
    return (each.identity for each in lease.holders if isinstance(each, HoldingProcess))


def groups(lease: Lease) -> Iterator[HoldingGroup]:
    """Yield the control groups that hold a lease."""
    return (each for each in lease.holders if isinstance(each, HoldingGroup))


def bound_to(lease: Lease) -> tuple[Holder | Claim, ...]:
    """Return what a lease is bound to: its holders, or its claim."""
    return lease.holders if lease.claim is None else (lease.claim,)


def said(holder: Holder | Claim) -> str:
    """Describe this holder, for use after the words "its holder"."""
    match holder:
        case HoldingProcess():
            return f"pid {holder.identity.pid}"
        case HoldingGroup():
            return f"control group {holder.group.path}"
        case Claim():
            return "a claim" if holder.uid is None else f"a claim for uid {holder.uid}"


def processes_said(pids: Sequence[int]) -> str:
    """Describe one or more processes by their pids."""
    return f"process {pids[0]}" if len(pids) == 1 else f"processes {', '.join(map(str, pids))}"


def all_said(lease: Lease) -> str:
    """Describe the holders of a lease, as the subject of a sentence."""
    first, *others = map(said, bound_to(lease))
    return f"its holder, {first}" if not others else f"its holders, {', '.join((first, *others))}"


def are_same(one: Holder, other: Holder) -> bool:
    """Tell whether two holders are the same process or control group."""
    match one, other:
        case HoldingProcess(), HoldingProcess():
            return one.identity == other.identity
        case HoldingGroup(), HoldingGroup():
            first, second = one.group, other.group
            return (first.hierarchy, first.inode) == (second.hierarchy, second.inode)
    return False


def with_another(lease: Lease, holder: Holder, leases: Iterable[Lease], *, replace: bool) -> tuple[Holder, ...]:
    """Return the holders of a lease after a further one was added, or has replaced all others.

    Raises InvalidRequestError where there would be too many, for the lease or for its owner; `leases` are all leases.
    """
    others = () if replace else tuple(each for each in lease.holders if not are_same(each, holder))
    if len(others) >= MOST:
        raise InvalidRequestError(
            f"lease {lease.id} has {len(others)} holders, the maximum",
            hint="hand it over instead: mpsctl hand-over",
            limit="holders",
        )
    uid = lease.owner.uid
    added = sum(len(each.holders[1:]) for each in leases if each.owner.uid == uid)
    if not replace and len(others) == len(lease.holders) and added >= MOST_ADDED:
        raise InvalidRequestError(
            f"the leases of uid {uid} have {added} holders beyond their first ones, and {MOST_ADDED} is the maximum",
            hint="let a control group hold the lease, with all of its processes (--cgroup, --unit)",
            limit="holders",
        )
    return (*others, holder)


def without(lease: Lease, gone: Holder) -> tuple[Holder, ...]:
    """Return the holders of a lease without one that is gone; the last holder stays, for output."""
    left = tuple(each for each in lease.holders if not are_same(each, gone))
    return left or lease.holders


# -- the names of control groups ---------------------------------------------------------------------------------------

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


def group_name(path: str) -> GroupName:
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


def service_first(path: str) -> str:
    """Return what precedes the command by which a process in a control group ends, where a service may have started it.

    systemd starts such a process again. It is the outermost service of systemd, or of a user's systemd: whoever runs
    in it may choose the names of the groups below. Empty outside services, and in containers and pods.
    """
    name = group_name(path)
    manager, units = "systemctl", [each for each in path.split("/") if each.endswith(".service") and _UNIT.match(each)]
    if units and units[0].startswith("user@"):
        manager, units = "systemctl --user", units[1:]
    if name.container or name.pod or not units or units[0] == "mpsd.service":
        return ""
    unit = shlex.quote(units[0])
    return f"if {unit} started it, which starts it again: {manager} disable --now {unit}; otherwise: "


def origin(holder: Holder) -> str:
    """Return the control group of the pod, container or unit of a holder; empty for a process outside containers.

    It is the outermost group that is named like a pod or container, so that root in there cannot leave it for a group
    of its own making.
    """
    return outermost(holder.group.path if isinstance(holder, HoldingGroup) else holder.container)


def outermost(path: str) -> str:
    """Return the outermost group in a path that is named like a pod or container, or the whole path."""
    if not path:
        return ""
    parts = path.split("/")
    ends = (number for number, part in enumerate(parts, 1) if any(each.match(part) for each in (_POD, _SCOPE, _BARE)))
    return "/".join(parts[: next(ends, None)])


def origins(lease: Lease) -> set[str]:
    """Return the control groups that a lease came from."""
    return {group for each in lease.holders if (group := origin(each))}


def is_within(path: str, group: str) -> bool:
    """Tell whether a path is that of a control group, or of one below it."""
    return path == group or path.startswith(f"{group}/")


def who_said(who: Who) -> str:
    """Name a uid or a control group."""
    return f"control group {who}" if isinstance(who, str) else f"uid {who}"


def pardon_of(who: Who) -> str:
    """Return the command that lifts a quarantine."""
    return f"mpsctl pardon {shlex.quote(str(who))}"


def group_facts(holder: Holder | Claim) -> dict[str, str]:
    """Return the fields of an event about a control group that holds a lease; empty for any other holder."""
    if not isinstance(holder, HoldingGroup):
        return {}
    return {"cgroup": holder.group.path, **group_name(holder.group.path).facts()}
