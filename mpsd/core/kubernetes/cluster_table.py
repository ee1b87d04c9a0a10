"""The table of `mpsctl cluster`: nodes, their GPUs, and the pods that have shares. Pure.

Its sources are the annotation that each node's `mpsd-kubernetes` writes to its Node, and the names of pods. Annotations
are treated as untrusted input: an error in one costs only that node its rows.
"""

import json
from collections.abc import Iterable, Mapping
from typing import TypedDict

from mpsd.core.kubernetes.node_state import ANNOTATION
from mpsd.core.units import MIB


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
    memory_granted: int
    memory_total: int
    pods: list[PodShare]


class NodeRow(TypedDict):
    name: str
    because: str
    """Why its GPUs are unknown; empty where they are known."""
    gpus: list[GpuRow]


def pod_names(found: Iterable[object]) -> dict[str, str]:
    """Return the names of pods by uid, from a list of Kubernetes objects."""
    names = {}
    for each in found:
        match each:
            case {"metadata": {"uid": str(uid), "namespace": str(namespace), "name": str(name)}}:
                names[uid] = f"{namespace}/{name}"
    return names


def nodes(found: Iterable[object], names: Mapping[str, str]) -> list[NodeRow]:
    """Return the nodes with an annotation of mpsd's, from a list of Kubernetes objects, sorted by name."""
    rows: list[NodeRow] = []
    for each in found:
        match each:
            case {"metadata": {"name": str(name), "annotations": {**notes}}} if ANNOTATION in notes:
                rows.append(_node(name, notes[ANNOTATION], names))
    return sorted(rows, key=lambda row: row["name"])


def _node(name: str, state: object, names: Mapping[str, str]) -> NodeRow:
    try:
        read = json.loads(state) if isinstance(state, str) else None
        if not isinstance(read, dict) or read.get("version") != 1:
            return {"name": name, "because": "its annotation is of another release of mpsd", "gpus": []}
        return {"name": name, "because": "", "gpus": [_gpu(each, names) for each in read["gpus"]]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"name": name, "because": f"its annotation {ANNOTATION} is damaged", "gpus": []}


def _gpu(state: Mapping[str, object], names: Mapping[str, str]) -> GpuRow:
    match state:
        case {
            "uuid": str(uuid),
            "index": int(index),
            "model": str(model),
            "because": str(because),
            "threads": int(threads) | float(threads),
            "memory": [int(granted), int(total)],
            "shares": [*shares],
        }:
            return {
                "uuid": uuid,
                "index": index,
                "model": model,
                "because": because,
                "threads_granted": threads,
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
