"""The violations of a pod's lease in the words of an event: what happened, and what to write in the manifest. Pure.

A pod's author has neither mpsctl nor pids of the node. mpsd's sentence has the numbers, and mpsd's hint, which is for
users of the node, is left out.
"""

from typing import Final, NamedTuple

from mpsd.core.kubernetes import devices
from mpsd.core.kubernetes.devices import KINDS
from mpsd.core.kubernetes.settings import Offer, Settings
from mpsd.core.model import ViolationKind
from mpsd.core.mps_facts import MAX_CONNECTIONS
from mpsd.core.settings import OnViolation


class PodViolation(NamedTuple):
    """A violation of a lease, by mpsd's event or list."""

    kind: str
    pid: int
    lease: str
    because: str
    policy: str = OnViolation.REPORT


_OWN: Final = "leave CUDA_VISIBLE_DEVICES and CUDA_MPS_* out of its `env` and of its image"

_REMEDIES: Final = {
    ViolationKind.LIMITS: _OWN,
    ViolationKind.OUTSIDE: f"{_OWN}, start no MPS of its own, and restart the container",
    ViolationKind.SHORT: "restart the container",
    ViolationKind.USER: "run all processes of the container as one user (runAsUser)",
    ViolationKind.LINGERS: "restart the container",
    ViolationKind.QUARANTINED: "ask the administrator of the node",
}


def message(violation: PodViolation, user: str, settings: Settings) -> str:
    """Return the text for the user of a share, such as `container main`. It is the same for each process alike."""
    because = violation.because.replace(f"lease {violation.lease}", "its share")
    if violation.kind != ViolationKind.MEMORY:  # of which each process is ended, and told of, by itself
        because = because.replace(f"process {violation.pid} ", "a process ")
    match violation.kind:
        case ViolationKind.PROCESSES:
            because += "; each process has the limits of one, and those too many count as used until they end"
            remedy = f"{_several(settings)}, or start fewer"
        case ViolationKind.MEMORY:
            if violation.policy == OnViolation.TERMINATE:
                because += ", and mpsd ends it"
            remedy = "request more of the GPU, or have each process allocate less, as by the fraction of its framework"
        case ViolationKind.CONNECTIONS:
            remedy = f"leave {MAX_CONNECTIONS} out of its `env` and of its image"
            if settings.resources is Offer.DRA:
                remedy += ", or set the parameter `connections` of its claim"
        case _:
            remedy = next((text for kind, text in _REMEDIES.items() if kind == violation.kind), "restart the container")
    return f"{user}: {because}; {remedy}" if user else f"{because}; {remedy}"


def _several(settings: Settings) -> str:
    """Return how a manifest declares several processes."""
    if settings.resources is Offer.DRA:
        return "set the parameter `processes` of its claim"
    names = [
        devices.resource_name(kind, settings, variant)
        for variant in range(1, len(settings.processes))
        for kind in KINDS[settings.resources]
    ]
    if names:
        return f"request a resource for several processes ({', '.join(names)})"
    return "ask the administrator for a resource for several processes (`processes` of mpsd-kubernetes)"
