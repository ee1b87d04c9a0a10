"""How much of a GPU Kubernetes can count on: what its pods have, and what mpsd can still grant. Pure.

Leases outside Kubernetes, clients without a lease, reservations and quotas take capacity that Kubernetes does not know
of. The device plugin therefore reports as many devices as unhealthy, and the driver publishes as much less: a pod that
does not fit stays `Pending`, with `Insufficient ...`, instead of being refused on the node again and again.

A change of capacity makes the scheduler look again at all waiting pods, and anybody with a lease can cause one. A
smaller capacity therefore counts at once, and a greater one when it has lasted.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final, NamedTuple

from mpsd.core.kubernetes import devices
from mpsd.core.kubernetes.devices import KINDS, Gpu, Kind, Numbers, Part
from mpsd.core.kubernetes.settings import Offer, Settings

LASTING: Final = 5.0
"""Seconds after which a greater capacity counts."""


class Use(NamedTuple):
    """The use of a GPU at one moment."""

    free: Part
    """The most that mpsd can still grant."""
    places: int
    """The client places that are left."""
    held: Part
    """What the claims of the driver have."""
    numbers: Mapping[Kind, Numbers]
    """The devices of the device plugin for which pods have leases."""


def counted(gpu: Gpu, use: Use, settings: Settings) -> dict[tuple[Kind, int], int]:
    """Return how many devices of each resource Kubernetes can count on; with the driver, how many steps.

    The resources share the GPU: what the pods of one have is not free for the others.
    """
    found = dict[tuple[Kind, int], int]()
    for variant, processes in enumerate(settings.processes):
        has_places = use.places >= (processes if isinstance(processes, int) else 1)
        free = use.free if has_places else Part(0, 0)
        if settings.resources is Offer.DRA:
            found |= {(kind, variant): number for kind, number in _steps(gpu, free, use.held, settings).items()}
        for kind in KINDS[settings.resources]:
            own = devices.numbers(kind, variant, gpu, settings)
            held = sum(number in own for number in use.numbers.get(kind, ()))
            found[kind, variant] = min(held + _fitting(kind, gpu, free, settings), len(own))
    return found


def _steps(gpu: Gpu, free: Part, held: Part, settings: Settings) -> dict[Kind, int]:
    steps = settings.thread_step, settings.memory_step.mebibytes
    left = gpu._replace(tenths=free.tenths + held.tenths, mebibytes=free.mebibytes + held.mebibytes)
    most = devices.steps_of(gpu, *steps)
    return {kind: min(number, most[kind]) for kind, number in devices.steps_of(left, *steps).items()}


def _fitting(kind: Kind, gpu: Gpu, free: Part, settings: Settings) -> int:
    """Return how many further devices of a kind fit into what is free."""

    def is_too_much(number: int) -> bool:
        part = devices.sum_of(kind, number, gpu, settings)
        return part.tenths > free.tenths or part.mebibytes > free.mebibytes

    return bisect_left(range(1, devices.count(kind, gpu, settings) + 1), x=True, key=is_too_much)


def healthy(kind: Kind, variant: int, gpu: Gpu, recorded: Numbers, settings: Settings) -> Numbers:
    """Return the healthy devices of a resource; `recorded` are those that kubelet's record has for pods.

    Devices of pods come first, those with leases and those that have none yet. The others follow by their numbers, so
    that pods that come and go change nothing.
    """
    every = devices.numbers(kind, variant, gpu, settings)
    own = gpu.numbers.get(kind, frozenset()).intersection(every) if not gpu.impaired else frozenset[int]()
    if gpu.because:
        return own
    others = sorted({*every} - own, key=lambda number: (number not in recorded, number))
    return own | {*others[: max(gpu.counts.get((kind, variant), len(every)) - len(own), 0)]}


class Level(NamedTuple):
    """A number that counts, and a greater one that has not lasted yet."""

    number: int
    least: int = 0
    """The least since the number became greater."""
    since: float | None = None

    def follow(self, found: int, now: float, lasting: float) -> "Level":
        """Return the level after this number was found."""
        if found <= self.number:
            return Level(found)
        least, since = (found, now) if self.since is None else (min(self.least, found), self.since)
        return Level(least) if now - since >= lasting else Level(self.number, least, since)
