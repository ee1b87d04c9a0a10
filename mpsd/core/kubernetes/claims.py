"""The leases of pods in mpsd, and the next action for each, from the facts of kubelet and the kernel. Pure.

mpsd stores each lease before it is granted, so the lease itself is the record of a container's share: its labels name
its devices, and its holder the pod. No second record can contradict it.

The requester of a lease chooses its labels, and any user may name a control group like a pod's. A lease therefore
counts only if an administrator claimed it, by mpsd's own record, and while it is a claim or the control group of a pod
holds it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple, TypeAlias

from mpsd.core.kubernetes import devices, pods
from mpsd.core.kubernetes.devices import Container, Kind, Numbers
from mpsd.core.kubernetes.settings import Settings
from mpsd.core.roles import RESERVED

ROOT: Final = 0
"""The uid of most containers; a lease is held for it until another uid is seen."""


class Held(NamedTuple):
    """A lease, and how it is held."""

    lease: str
    pod: str | None
    """The uid of the pod whose control group holds it; None while it is a claim."""
    group: str
    left: float
    """Seconds until the claim ends."""
    uid: int
    """The uid of its owner."""
    has_clients: bool
    lost: int = 0
    """The number of its clients that live on without a server."""
    others: tuple[str, ...] = ()
    """The control groups of further pods that hold it: those that share a claim."""


def held(lease: Mapping[str, object], now: datetime, settings: Settings) -> Held | None:
    """Return how a lease, as mpsd answers it, is held.

    None for a lease that is no pod's: no administrator claimed it, or it has another holder than a pod.
    """
    root = str(settings.cgroup_root)
    match lease:
        case {
            "id": str(name),
            "owner": {"uid": int(uid)},
            "claimed_for": int(),
            "clients": [*clients],
            "holders": [*holders],
        }:
            lost, groups = lease.get("lost", []), list[str]()
            for each in holders:
                match each:
                    case {"kind": "claim", **more}:
                        deadline = more.get("deadline")
                        end = datetime.fromisoformat(deadline) if isinstance(deadline, str) else now
                        return Held(name, None, "", (end - now).total_seconds(), uid, bool(clients))
                    case {"kind": "cgroup", "cgroup": str(group)} if pods.pod_of(group, root) is not None:
                        groups.append(group)
            if groups:
                first, *others = groups
                count = len(lost) if isinstance(lost, list) else 0
                return Held(name, pods.pod_of(first, root), first, 0.0, uid, bool(clients), count, tuple(others))
    return None


class Claimed(NamedTuple):
    """A lease for a container."""

    held: Held
    gpu: str
    numbers: Mapping[Kind, Numbers]
    age: float
    """Seconds since it was granted."""

    def overlaps(self, gpu: str, kind: Kind, numbers: Numbers) -> bool:
        """Tell whether it is for any of these devices."""
        return self.gpu == gpu and not numbers.isdisjoint(self.numbers.get(kind, frozenset()))

    def is_for(self, container: Container) -> bool:
        """Tell whether it is for exactly the devices of a container."""
        return self.gpu == container.gpu and self.numbers == container.numbers


def labels(numbers: Mapping[Kind, Numbers]) -> dict[str, str]:
    """Return the labels that name the devices of a lease."""
    return {f"{RESERVED}{kind}": devices.encode(each) for kind, each in numbers.items()}


def user_of(uids: Collection[int]) -> int:
    """Return the user of a container's program, from the uids of its processes.

    Some programs start as root and then become another user.
    """
    others = {*uids} - {ROOT}
    return min(others) if len(others) == 1 or ROOT not in uids else ROOT


def devices_of(labels: Mapping[str, str]) -> dict[Kind, Numbers] | None:
    """Return the devices that a lease is for, by its labels; None for any other lease."""
    numbers = {kind: devices.decode(labels[f"{RESERVED}{kind}"]) for kind in Kind if f"{RESERVED}{kind}" in labels}
    known = {kind: each for kind, each in numbers.items() if each}
    return known if known and len(known) == len(numbers) else None


# -- what is next ------------------------------------------------------------------------------------------------------


class Release(NamedTuple):
    """End a lease; if it is a claim, only if no holder takes it first."""

    held: Held
    because: str


class Renew(NamedTuple):
    """Extend a claim."""

    held: Held


class Open(NamedTuple):
    """Give a lease to the pod of its container, for the user of the container's program, once that runs."""

    held: Held
    container: Container


Action: TypeAlias = Release | Renew | Open


def next_actions(
    leases: Iterable[Claimed],
    containers: Sequence[Container],
    *,
    is_populated: Callable[[str], bool],
    has_group: Callable[[str], bool],
    settings: Settings,
) -> list[Action]:
    """Return the next action for each lease.

    A control group may outlive its pod and all processes while a volume is being unmounted. A claim lives while kubelet
    lists its devices for a container whose pod has a control group; this is checked only some time after the claim was
    made. The group matters because it is the first thing that a pod gets, and kubelet's record still lists deleted
    pods.
    """
    actions: list[Action] = []
    for each in leases:
        found = [container for container in containers if each.is_for(container)]
        # 1. No pod has it yet: as long as it is a claim, kubelet's record and the pod's control group decide.
        # 2. Its pod is still recorded: the program's user may have to get it, unless the settings name the user, or
        #    clients run already.
        # 3. kubelet has given its pod up, and no process of the pod is left: it ends. Otherwise it ends with the pod's
        #    control group, which mpsd sees by itself.
        held = each.held
        if held.pod is None:
            actions += _of_claim(each, found, has_group, settings)
        elif own := [container for container in found if container.pod == held.pod]:
            if settings.uid is None and not held.has_clients:
                actions += [Open(held, container) for container in own]
        elif not is_populated(held.group):
            actions.append(Release(held, f"kubelet has given up pod {held.pod}, and no process of it is left"))
    return actions


def _of_claim(
    claim: Claimed, owners: Sequence[Container], has_group: Callable[[str], bool], settings: Settings
) -> Iterator[Action]:
    """Yield the next action for a claim; a container of a pod has the devices of its init containers too."""
    if claim.age > settings.orphan_grace and not any(has_group(owner.pod) for owner in owners):
        because = f"kubelet has not listed its devices for a container within {settings.orphan_grace:g} s"
        if owners:
            because = f"pod {owners[0].pod} has no control group"
        yield Release(claim.held, because)
        return
    if owners and claim.held.left < settings.claim_deadline / 2:
        yield Renew(claim.held)
    for owner in owners:
        yield Open(claim.held, owner)
