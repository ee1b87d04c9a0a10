"""The state of a node for its cluster: labels to select it by, and an annotation, which `mpsctl cluster` shows. Pure.

A changed label makes the scheduler reconsider pods, so labels are coarse: free capacity counts in quarters of a GPU's
threads, and in powers of two of GiB. The annotation is exact. Neither decides where pods are placed: the scheduler
counts the resources or the ResourceSlice itself.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

from mpsd.core.units import MIB

if TYPE_CHECKING:
    from mpsd.core.kubernetes.devices import Gpu, Part

PROGRAM: Final = "mpsd-kubernetes"
"""The name of the container that writes all this."""

_QUARTER: Final = 250
"""A quarter of a GPU's threads, in tenths of a percent."""

_GIB: Final = 1024
"""A GiB in MiB."""

_LONGEST: Final = 63
"""Maximum characters of a label's value."""

_LONGEST_REASON: Final = 200


class ShareState(NamedTuple):
    """The share of a pod, or of any other lease, on a GPU."""

    pod: str
    """The uid of the pod; empty for a lease that no pod has."""
    tenths: int
    mebibytes: int


class GpuState(NamedTuple):
    gpu: "Gpu"
    shares: Sequence[ShareState]
    free: "Part"
    """The most that mpsd can still grant."""

    @property
    def granted(self) -> ShareState:
        """The sum of its shares."""
        return ShareState("", sum(each.tenths for each in self.shares), sum(each.mebibytes for each in self.shares))


def annotation_key(domain: str) -> str:
    return f"{domain}/state"


def count_label(domain: str) -> str:
    """Return the label that each node with mpsd has."""
    return f"{domain}/gpus"


def labels(domain: str, gpus: Iterable[GpuState], offers: str, branch: int | None) -> dict[str, str | None]:
    """Return the labels of a node; None for a label that it must not have."""
    found = list(gpus)
    usable = [each for each in found if not each.gpu.because]
    threads = max((min(each.free.tenths, 1000) for each in usable), default=0)
    memory = max((each.free.mebibytes for each in usable), default=0)
    models = sorted({each.gpu.model for each in found})
    wanted = {
        "gpus": f"{len(found)}",
        "healthy-gpus": f"{len(usable)}",
        "model": _value(models[0]) if len(models) == 1 else None,
        "driver-branch": None if branch is None else f"{branch}",
        "offers": offers,
        "free-threads": f"{threads // _QUARTER * 25}",
        "free-memory-gib": f"{_power_of_two(memory // _GIB)}",
    }
    return {f"{domain}/{name}": value for name, value in wanted.items()}


def described(gpus: Iterable[GpuState]) -> list[dict[str, object]]:
    """Return what a node's annotation has about its GPUs, by index."""
    return [
        {
            "uuid": each.gpu.uuid,
            "index": each.gpu.position,
            "model": each.gpu.model,
            "because": each.gpu.because[:_LONGEST_REASON],
            "threads": [each.granted.tenths / 10, each.gpu.tenths / 10],
            "memory": [each.granted.mebibytes, each.gpu.mebibytes],
            "shares": [[share.pod, share.tenths / 10, share.mebibytes] for share in sorted(each.shares)],
        }
        for each in sorted(gpus, key=lambda state: state.gpu.position)
    ]


def annotation(gpus: Sequence[Mapping[str, object]], at: datetime, due: float) -> str:
    """Return the annotation of a node with these described GPUs, in JSON.

    `at` is the time of writing, and `due` the number of seconds until it is written again at the latest.
    """
    state = {"version": 1, "at": at.isoformat(timespec="seconds"), "due": round(due), "gpus": gpus}
    return json.dumps(state, separators=(",", ":"))


def patch(domain: str, wanted: Mapping[str, str | None], state: str | None) -> dict[str, object]:
    """Return the patch that gives a Node these labels and this annotation; None removes one."""
    return {"metadata": {"labels": dict(wanted), "annotations": {annotation_key(domain): state}}}


def removal(domain: str) -> dict[str, object]:
    """Return the patch that removes all labels and the annotation."""
    return patch(domain, dict.fromkeys(labels(domain, (), "", None)), None)


def _power_of_two(number: int) -> int:
    return 1 << (number.bit_length() - 1) if number else 0


def _value(text: str) -> str | None:
    """Return a text as the value of a label; None where no valid character is left."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:_LONGEST].strip("-_.") or None


# -- the table of `mpsctl cluster` -------------------------------------------------------------------------------------
#
# Nodes, their GPUs, and the pods that have shares, from the annotations of the nodes and the names of pods. Annotations
# are treated as untrusted input: an error in one costs only that node its rows.


class PodShare(TypedDict):
    pod: str
    """NAMESPACE/NAME; the uid where the name is unknown; empty where no pod has the share."""
    threads: float
    memory: int
    """Bytes."""


class GpuRow(TypedDict):
    uuid: str
    index: int
    model: str
    because: str
    """Why no new work may start on it; empty where it may."""
    threads_granted: float
    threads_total: float
    memory_granted: int
    memory_total: int
    pods: list[PodShare]


class NodeRow(TypedDict):
    name: str
    because: str
    """Why its GPUs are unknown; empty where they are known."""
    ready: bool
    """Whether Kubernetes calls the node ready."""
    at: str | None
    """When mpsd-kubernetes wrote this; None where it did not say."""
    stale: bool
    """Whether it should have written it again since."""
    gpus: list[GpuRow]


_UNLABELLED: Final = (
    "mpsd runs there, and writes no labels: see nodeLabels of the chart, or the overlay device-plugin-labels"
)
_ENDING: Final = "mpsd's pod is ending there, and has removed its labels"

_LATE: Final = 2
"""How many times the promised seconds have to pass until a report is stale: the API server may have been away."""


def pod_names(found: Iterable[object]) -> dict[str, str]:
    """Return the names of pods by uid, from a list of Kubernetes objects."""
    names = {}
    for each in found:
        match each:
            case {"metadata": {"uid": str(uid), "namespace": str(namespace), "name": str(name)}}:
                names[uid] = f"{namespace}/{name}"
    return names


def nodes(domain: str, found: Iterable[object], pods: Sequence[object], now: datetime) -> list[NodeRow]:
    """Return the nodes with mpsd, sorted by name, from lists of Kubernetes objects.

    They are those with an annotation of mpsd's, and those where a pod of mpsd runs without it.
    """
    rows, key, names = dict[str, NodeRow](), annotation_key(domain), pod_names(pods)
    for each in found:
        match each:
            case {"metadata": {"name": str(name), "annotations": {**notes}}} if key in notes:
                rows[name] = _node(name, key, notes[key], names, now)
                rows[name]["ready"] = _is_ready(each)
    for each in pods:
        match each:
            case {"metadata": {**metadata}, "spec": {"nodeName": str(name), "containers": [*containers]}}:
                if any(isinstance(one, dict) and one.get("name") == PROGRAM for one in containers):
                    because = _ENDING if "deletionTimestamp" in metadata else _UNLABELLED
                    rows.setdefault(name, _without(name, because))
    return sorted(rows.values(), key=lambda row: row["name"])


def offering(found: Iterable[object], resources: Collection[str]) -> list[NodeRow]:
    """Return the nodes that offer one of these resources, for a caller who may not see pods."""
    rows = list[NodeRow]()
    for each in found:
        match each:
            case {"metadata": {"name": str(name)}, "status": {"allocatable": {**amounts}}}:
                if any(amounts.get(one, "0") != "0" for one in resources):
                    rows.append(_without(name, _UNLABELLED))
    return sorted(rows, key=lambda row: row["name"])


def _without(name: str, because: str) -> NodeRow:
    return {"name": name, "because": because, "ready": True, "at": None, "stale": False, "gpus": []}


def _is_ready(node: object) -> bool:
    """Tell whether a Node is ready; one that does not say is."""
    match node:
        case {"status": {"conditions": [*conditions]}}:
            return not any(
                isinstance(each, dict) and each.get("type") == "Ready" and each.get("status") != "True"
                for each in conditions
            )
    return True


def _node(name: str, key: str, state: object, names: Mapping[str, str], now: datetime) -> NodeRow:
    try:
        read = json.loads(state) if isinstance(state, str) else None
        if not isinstance(read, dict) or read.get("version") != 1:
            return _without(name, "its annotation is of another release of mpsd")
        row = _without(name, "")
        row["gpus"] = [_gpu(each, names) for each in read["gpus"]]
        if "at" in read:  # earlier ones did not say
            age = (now - datetime.fromisoformat(read["at"])).total_seconds()
            row["at"], row["stale"] = read["at"], age > _LATE * read["due"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return _without(name, f"its annotation {key} is damaged")
    return row


def _gpu(state: Mapping[str, object], names: Mapping[str, str]) -> GpuRow:
    match state:
        case {
            "uuid": str(uuid),
            "index": int(index),
            "model": str(model),
            "because": str(because),
            "threads": [int(threads) | float(threads), int(all_threads) | float(all_threads)],
            "memory": [int(granted), int(total)],
            "shares": [*shares],
        }:
            return {
                "uuid": uuid,
                "index": index,
                "model": model,
                "because": because,
                "threads_granted": threads,
                "threads_total": all_threads,
                "memory_granted": granted * MIB,
                "memory_total": total * MIB,
                "pods": [_share(each, names) for each in shares],
            }
        case _:
            raise ValueError("a GPU has another form")


def _share(share: object, names: Mapping[str, str]) -> PodShare:
    match share:
        case [str(pod), int(threads) | float(threads), int(memory)]:
            return {"pod": names.get(pod, pod), "threads": threads, "memory": memory * MIB}
        case _:
            raise ValueError("a share has another form")
