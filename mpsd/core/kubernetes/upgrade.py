"""The upgrade of mpsd on the nodes of a cluster: the state of each node's pod, and which pods are replaced next. Pure.

The objects are those of the API server. A pod is replaced by its deletion: it drains its node's GPUs, for at most its
grace period, and the DaemonSet (`OnDelete`) then makes a pod of its newest revision. Nothing is stored about an upgrade
but the pods themselves, so that the next call continues an interrupted one.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from mpsd.core.errors import InvalidRequestError
from mpsd.core.units import briefly

SELECTOR: Final = "app.kubernetes.io/name=mpsd"
"""The label of mpsd's DaemonSets in the manifests and the chart."""

_DRAINS: Final = "--stop-daemons-on-exit"
"""The argument by which mpsd waits for its clients when its pod ends. No other software's DaemonSet has it."""

_HASH: Final = "controller-revision-hash"
"""The label of a pod and of a ControllerRevision that names the revision. Source: Kubernetes, apps/v1."""

_GRACE: Final = 30
"""Seconds that a pod has for its end by default. Source: Kubernetes, `terminationGracePeriodSeconds`."""


class DaemonSet(NamedTuple):
    namespace: str
    name: str
    uid: str
    labels: str
    """A selector of its pods."""
    desired: int
    """How many nodes it wants a pod on."""
    is_observed: bool
    """Whether its newest revision exists."""
    on_delete: bool
    """Whether its pods are replaced by their deletion alone."""
    drains: bool
    """Whether its pods wait for their clients."""

    def __str__(self) -> str:
        """Name it as the option does."""
        return f"{self.namespace}/{self.name}"


class State(StrEnum):
    """The state of a node's pod."""

    OLD = "old"
    """Of an earlier revision."""
    ENDING = "ending"
    """Deleted: it waits for its clients."""
    STARTING = "starting"
    """Of the newest revision, and not ready."""
    UPGRADED = "upgraded"


class Pod(NamedTuple):
    node: str
    name: str
    state: State
    is_ready: bool
    grace: int
    """Seconds that its end may take."""
    because: str
    """Why it is not ready, in kubelet's words."""
    has_crashed: bool
    """Whether a container of it ends again and again."""


def daemonsets(found: Iterable[object]) -> list[DaemonSet]:
    """Return the DaemonSets of a list of objects."""
    sets = []
    for each in found:
        labels = _at(each, "spec", "selector", "matchLabels")
        containers = _list(_at(each, "spec", "template", "spec", "containers"))
        generation, seen = _at(each, "metadata", "generation"), _at(each, "status", "observedGeneration")
        match each:
            case {
                "metadata": {"namespace": str(namespace), "name": str(name), "uid": str(uid)},
                "status": {"desiredNumberScheduled": int(desired)},
            } if isinstance(labels, dict):
                sets.append(
                    DaemonSet(
                        namespace=namespace,
                        name=name,
                        uid=uid,
                        labels=",".join(f"{key}={value}" for key, value in labels.items()),
                        desired=desired,
                        is_observed=seen == generation,
                        on_delete=_at(each, "spec", "updateStrategy", "type") == "OnDelete",
                        drains=any(_DRAINS in _list(_at(one, "args")) for one in containers),
                    )
                )
    return sets


def newest_revision(found: Iterable[object], owner: DaemonSet) -> str | None:
    """Return the hash of the newest revision, from a list of ControllerRevisions."""
    revisions = [
        (_at(each, "revision"), _at(each, "metadata", "labels", _HASH)) for each in found if _is_of(each, owner)
    ]
    known = [(number, value) for number, value in revisions if isinstance(number, int) and isinstance(value, str)]
    return max(known)[1] if known else None


def pods(found: Iterable[object], owner: DaemonSet, revision: str) -> list[Pod]:
    """Return the pods of a DaemonSet, and of no other, sorted by node."""
    own = [
        _pod(each, name, revision)
        for each in found
        if isinstance(name := _at(each, "metadata", "name"), str) and _is_of(each, owner)
    ]
    return sorted(own)


def ready_nodes(found: Iterable[object]) -> set[str]:
    """Return the names of the nodes whose kubelet works, from a list of Nodes."""
    return {
        name
        for each in found
        if isinstance(name := _at(each, "metadata", "name"), str) and _conditions(each).get("Ready") == "True"
    }


class MaxUnavailable(NamedTuple):
    """How many nodes may be unavailable: a number of nodes, or a percentage of them."""

    number: int
    is_percentage: bool

    def of(self, desired: int) -> int:
        """Return the number of nodes; a percentage is rounded up as Kubernetes does."""
        return (math.ceil(desired * self.number / 100) or 1) if self.is_percentage else self.number


def max_unavailable(text: str) -> MaxUnavailable:
    """Parse a number of nodes, or a percentage. Raises InvalidRequestError."""
    match = re.fullmatch(r"([1-9][0-9]?|100)%|([1-9][0-9]{0,5})", text, re.ASCII)
    if match is None:
        raise InvalidRequestError(
            f"{briefly(text)} is neither a number of nodes from 1 nor a percentage up to 100 %", hint="such as 1, or 5%"
        )
    return MaxUnavailable(int(match[1] or match[2]), is_percentage=match[1] is not None)


class Awaited(NamedTuple):
    """Something that an upgrade waits for."""

    lacks: str
    """What is not so yet, as a sentence."""
    because: str
    grace: int
    """Seconds that it may take beside the time that every step has."""
    is_hopeless: bool
    about: str
    """The object that kubectl describes."""


class Rollout(NamedTuple):
    """The state of an upgrade."""

    owner: DaemonSet
    revision: str
    pods: Sequence[Pod]
    nodes: Collection[str]
    """The nodes whose kubelet works. The others are left alone: a pod there would never end."""

    def there(self, *states: State) -> list[Pod]:
        """Return the pods in these states, on nodes whose kubelet works."""
        return [each for each in self.pods if each.state in states and each.node in self.nodes]

    @property
    def away(self) -> list[str]:
        """The other nodes, as far as they are not upgraded."""
        return [each.node for each in self.pods if each.node not in self.nodes and each.state is not State.UPGRADED]

    @property
    def missing(self) -> int:
        """How many nodes have no pod."""
        return max(self.owner.desired - len({each.node for each in self.pods}), 0)

    @property
    def is_complete(self) -> bool:
        return not self.missing and not self.there(State.OLD, State.ENDING, State.STARTING)

    def next_pods(self, most: int) -> list[Pod]:
        """Return the pods to delete now, so that at most `most` nodes are without a ready mpsd.

        1. Being replaced are the nodes whose pod ends, starts, or does not exist yet.
        2. Old pods that are not ready come next: their nodes are without one already.
        3. Ready ones follow while, with all of these, fewer than `most` nodes are without one.
        """
        replaced = self.missing + len(self.there(State.ENDING, State.STARTING))
        old = self.there(State.OLD)
        ready, unready = ([each for each in old if each.is_ready is wanted] for wanted in (True, False))
        return [*unready[: max(most - replaced, 0)], *ready[: max(most - replaced - len(unready), 0)]]

    def awaited(self) -> list[Awaited]:
        """Return what has to follow by itself."""
        found = [
            Awaited(f"pod {each.name} on {each.node} has not ended", "", each.grace, False, f"pod/{each.name}")
            for each in self.there(State.ENDING)
        ]
        found += [
            Awaited(
                f"pod {each.name} on {each.node} is not ready", each.because, 0, each.has_crashed, f"pod/{each.name}"
            )
            for each in self.there(State.STARTING)
        ]
        if self.missing:
            # Another node each time, where many are replaced: the time counts from the last node that was upgraded.
            lacks = f"{self.missing} of {self.owner.desired} nodes have no pod"
            done = f"{len(self.there(State.UPGRADED))} are upgraded"
            found.append(Awaited(f"{lacks}, while {done}", "", 0, False, f"daemonset/{self.owner.name}"))
        return found


# -- fields of objects -------------------------------------------------------------------------------------------------


def _at(found: object, *path: str) -> object:
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _list(found: object) -> list[object]:
    return found if isinstance(found, list) else []


def _is_of(found: object, owner: DaemonSet) -> bool:
    owners = _list(_at(found, "metadata", "ownerReferences"))
    return any(_at(each, "uid") == owner.uid and _at(each, "controller") is True for each in owners)


def _conditions(found: object) -> dict[object, object]:
    return {_at(each, "type"): _at(each, "status") for each in _list(_at(found, "status", "conditions"))}


def _pod(found: object, name: str, revision: str) -> Pod:
    is_ready = _conditions(found).get("Ready") == "True"
    if _at(found, "metadata", "deletionTimestamp") is not None:
        state = State.ENDING
    elif _at(found, "metadata", "labels", _HASH) != revision:
        state = State.OLD
    else:
        state = State.UPGRADED if is_ready else State.STARTING
    grace = _at(found, "spec", "terminationGracePeriodSeconds")
    containers = _list(_at(found, "status", "containerStatuses"))
    reasons = [reason for each in containers if (reason := _reason(each))]
    return Pod(
        node=_node(found),
        name=name,
        state=state,
        is_ready=is_ready,
        grace=grace if isinstance(grace, int) else _GRACE,
        because="" if is_ready else "; ".join(reasons) or f"{_at(found, 'status', 'message') or 'it has not started'}",
        has_crashed=any(_at(each, "state", "waiting", "reason") == "CrashLoopBackOff" for each in containers),
    )


def _node(found: object) -> str:
    """Return the node of a pod; before the scheduler has bound it, the one that the DaemonSet made it for."""
    if isinstance(name := _at(found, "spec", "nodeName"), str):
        return name
    required = _at(found, "spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    for term in _list(_at(required, "nodeSelectorTerms")):
        for field in _list(_at(term, "matchFields")):
            match field:
                case {"key": "metadata.name", "values": [str(value)]}:
                    return value
    return ""


def _reason(container: object) -> str:
    """Return why a container is not ready, with the last words of its program; empty where it is."""
    if _at(container, "ready") is True:
        return ""
    waiting = _at(container, "state", "waiting")
    words = [_at(waiting, "reason")]
    if ended := _at(container, "state", "terminated") or _at(container, "lastState", "terminated"):
        words += [f"ended with status {_at(ended, 'exitCode')}", _at(ended, "message")]
    else:
        words.append(_at(waiting, "message"))
    said = ", ".join(f"{each}".strip() for each in words if each)
    return f"{_at(container, 'name')}: {said or 'not ready'}"
