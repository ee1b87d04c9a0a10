"""A refusal in words for the author of a pod. Pure.

kubelet shows them in an event of the pod, and its author has neither mpsctl nor a view of mpsd's leases: the words name
pods, and say what a manifest or an operator of the cluster can change. kubelet prints them as a format string, so they
have no percent sign.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from mpsd.core import health
from mpsd.core.errors import CapacityError, DoesNotFitError, MpsdError, QuotaError, UnreachableError
from mpsd.core.kubernetes.devices import Part
from mpsd.core.units import MIB, format_size

_LEASE: Final = re.compile(r"lease-[0-9a-f]{10}")

_LARGEST: Final = 3
"""Maximum pods that a refusal names."""

_OPERATOR: Final = "ask an operator of the cluster: the log of mpsd-kubernetes on this node says more"
_LATER: Final = f"it is tried again; if that does not help, {_OPERATOR}"
_LESS: Final = "request less, or another node; what others have is free again when they have ended"
_USER: Final = "request another node, or wait until the pods of the other user have ended"
_CLOSED: Final = "request another node: only an operator can change it"


class Taken(NamedTuple):
    """What a pod has of the GPU that a refusal is about."""

    pod: str
    """NAMESPACE/NAME, or the uid where the name is unknown; empty for what no pod has."""
    part: Part


def told(error: MpsdError, pods: Mapping[str, str], taken: Sequence[Taken] = ()) -> str:
    """Return a refusal, with the names of pods instead of those of their leases, and who has what is missing."""
    detail = _LEASE.sub(lambda found: f"the share of {_pod(pods.get(found[0], ''))}", error.detail)
    said = [f"{_pod(each.pod)} has {_amount(each.part)}" for each in _largest(taken)]
    text = f"{'; '.join([detail, *said])} [{error.code}]; {_hint(error)}"
    return text.replace(" %", "%").replace("%", " percent")


def _hint(error: MpsdError) -> str:
    """Return what the author of a pod can do: the hint of an answer of mpsd's is for users of mpsctl."""
    if isinstance(error, CapacityError) and error.limit in health.LIMITS:
        return _CLOSED
    if not error.is_answer and not isinstance(error, UnreachableError):
        return error.hint
    if isinstance(error, DoesNotFitError | QuotaError):
        return _USER if error.limit == "user" else _LESS
    return _LATER if isinstance(error, CapacityError | UnreachableError) else _OPERATOR


def _pod(name: str) -> str:
    return f"pod {name}" if name else "a user outside Kubernetes"


def _largest(taken: Sequence[Taken]) -> list[Taken]:
    """Return what the largest pods have, the parts of each summed up, and what no pod has."""
    sums = dict[str, Part]()
    for pod, part in taken:
        has = sums.get(pod, Part(0, 0))
        sums[pod] = Part(has.tenths + part.tenths, has.mebibytes + part.mebibytes)
    ordered = sorted((Taken(*each) for each in sums.items()), key=lambda each: (each.part, each.pod), reverse=True)
    return [each for each in ordered if each.pod][:_LARGEST] + [each for each in ordered if not each.pod]


def _amount(part: Part) -> str:
    return f"{part.percent:g} % and {format_size(part.mebibytes * MIB)}"
