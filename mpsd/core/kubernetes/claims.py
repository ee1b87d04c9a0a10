"""The leases of pods, as mpsd has them, and what is next about each by what kubelet and the kernel say. Pure.

mpsd stores each lease before it is granted, so the lease itself is the record of what a container got: its labels say
which devices it is for, and its holder which pod. There is no second record that could say something else.

A label is chosen by whoever asks for a lease. So a lease counts only where an administrator alone can have made it so:
one that is held by a claim, or by the control group of a pod.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple, TypeAlias

from mpsd.core.kubernetes import devices, pods
from mpsd.core.kubernetes.checkpoint import Container
from mpsd.core.kubernetes.devices import Kind, Numbers
from mpsd.core.kubernetes.settings import Settings

_LABEL: Final = "kubernetes/"


class Claimed(NamedTuple):
    """A lease for a container."""

    lease: str
    gpu: str
    numbers: Mapping[Kind, Numbers]
    pod: str | None
    """The uid of the pod whose control group holds it; None while it is a claim."""
    group: str
    age: float
    """Seconds since it was granted."""
    left: float
    """Seconds until the claim ends."""
    uid: int = 0
    """Whose it is."""
    has_clients: bool = False

    def overlaps(self, gpu: str, kind: Kind, numbers: Numbers) -> bool:
        """Tell whether it is for any of these devices."""
        return self.gpu == gpu and not numbers.isdisjoint(self.numbers.get(kind, frozenset()))

    def is_for(self, container: Container) -> bool:
        """Tell whether it is for just what a container has."""
        return self.gpu == container.gpu and self.numbers == container.numbers


def labels(numbers: Mapping[Kind, Numbers]) -> dict[str, str]:
    """Return the labels that say which devices a lease is for."""
    return {f"{_LABEL}{kind}": devices.encode(each) for kind, each in numbers.items()}


ROOT: Final = 0
"""The uid that most containers run as, and for which a lease is held until another one is seen."""


def user_of(uids: Collection[int]) -> int:
    """Return the user of a container's program, by those of its processes: some start as root and become another."""
    others = {*uids} - {ROOT}
    return min(others) if len(others) == 1 or ROOT not in uids else ROOT


class Holder(NamedTuple):
    """What holds a lease, as far as it matters here."""

    kind: str
    group: str
    deadline: str | None


def claimed(
    lease: str, gpu: str, label: Mapping[str, str], *, granted: str, holders: Sequence[Holder], now: datetime
) -> Claimed | None:
    """Return a lease as one for a container; None for any other."""
    numbers = {kind: devices.decode(label[f"{_LABEL}{kind}"]) for kind in Kind if f"{_LABEL}{kind}" in label}
    known = {kind: each for kind, each in numbers.items() if each}
    if not known or len(known) < len(numbers):
        return None
    age = (now - datetime.fromisoformat(granted)).total_seconds()
    for each in holders:
        if each.kind == "claim":
            left = (datetime.fromisoformat(each.deadline) - now).total_seconds() if each.deadline else 0.0
            return Claimed(lease, gpu, known, None, "", age, left)
        pod = pods.pod_of(each.group) if each.kind == "cgroup" else None
        if pod is not None:
            return Claimed(lease, gpu, known, pod, each.group, age, 0.0)
    return None


# -- what is next ------------------------------------------------------------------------------------------------------


class Release(NamedTuple):
    """End a lease; one that is a claim only if nobody takes it first."""

    lease: str
    is_claim: bool
    because: str


class Renew(NamedTuple):
    """Give a claim more time."""

    lease: str


class Open(NamedTuple):
    """Have a lease taken by the pod of its container for the user of the container's program, once that runs."""

    lease: str
    container: Container
    uid: int | None
    """For whom it is held by the pod already; None while it is a claim."""


Action: TypeAlias = Release | Renew | Open


def next_actions(
    leases: Iterable[Claimed],
    containers: Sequence[Container],
    is_populated: Callable[[str], bool],
    settings: Settings,
) -> list[Action]:
    """Return what is next about each lease.

    A lease that a pod holds ends with the pod's control group, which mpsd sees by itself. It ends earlier where kubelet
    has given the pod up, and no process of it is left: a group may outlive both for as long as a volume is being
    unmounted. A claim lives while kubelet lists its devices for a container, from a moment after it was made.
    """
    actions: list[Action] = []
    for each in leases:
        owner = next((container for container in containers if each.is_for(container)), None)
        if each.pod is not None:
            if (owner is None or owner.pod != each.pod) and not is_populated(each.group):
                because = (
                    f"kubelet lists no container of pod {each.pod} with these devices, and no process of it is left"
                )
                actions.append(Release(each.lease, is_claim=False, because=because))
            elif owner is not None and settings.uid is None and not each.has_clients:
                actions.append(Open(each.lease, owner, each.uid))
        elif owner is not None:
            if each.left < settings.claim_deadline / 2:
                actions.append(Renew(each.lease))
            actions.append(Open(each.lease, owner, None))
        elif each.age > settings.orphan_grace:
            because = (
                f"kubelet does not list its devices for a container {settings.orphan_grace:g} s after they were given"
            )
            actions.append(Release(each.lease, is_claim=True, because=because))
    return actions
