"""A stand-in for kubectl and its cluster: DaemonSets, their controller, and a kubelet on each node.

`rollout_program.py DIRECTORY ARGUMENT...` is kubectl. The cluster is a file in the directory, and changes by a step
with each list of pods: a deleted pod ends after as many steps as it has clients, the next pod is made in its place, and
is ready after a step. Nothing depends on time.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any, Final

NEW: Final = "new"
OLD: Final = "old"
UID: Final = "uid-of-mpsd"


def daemonset(name: str = "mpsd", uid: str = UID, **more: Any) -> dict[str, Any]:
    """Return a DaemonSet as kubectl has it."""
    container = {"name": "mpsd", "args": ["run", "--stop-daemons-on-exit"]}
    return {
        "metadata": {"namespace": "gpu", "name": name, "uid": uid, "generation": 2},
        "spec": {
            "selector": {"matchLabels": {"app.kubernetes.io/name": "mpsd"}},
            "updateStrategy": {"type": "OnDelete"},
            "template": {"spec": {"containers": [container]}},
        },
        "status": {"observedGeneration": 2, "desiredNumberScheduled": 0},
        **more,
    }


def pod(node: str, revision: str = OLD, **more: Any) -> dict[str, Any]:
    """Return a pod of the stand-in: one that is ready, and has `clients`."""
    return {"node": node, "name": f"mpsd-{node}-{revision}", "revision": revision, "owner": UID, "clients": 1, **more}


def cluster(*pods: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a cluster with these pods. `broken` has the nodes where no new pod becomes ready, and how it fails."""
    return {
        "daemonsets": [daemonset()], "wanted": [each["node"] for each in pods if each["owner"] == UID],
        "revisions": [[UID, 1, OLD], [UID, 2, NEW]], "pods": list(pods),
        "dead": [], "broken": {}, **more,
    }  # fmt: skip


def _as_pod(each: dict[str, Any]) -> dict[str, Any]:
    ready = each.get("is_ready", True) and "ending" not in each
    return {
        "metadata": {
            "name": each["name"], "labels": {"controller-revision-hash": each["revision"]},
            "ownerReferences": [{"uid": each["owner"], "controller": True}],
            **({"deletionTimestamp": "2026-11-28T00:00:00Z"} if "ending" in each else {}),
        },
        "spec": {"nodeName": each["node"], "terminationGracePeriodSeconds": 3600},
        "status": {
            "conditions": [{"type": "Ready", "status": f"{ready}"}],
            "containerStatuses": [{"name": "mpsd", "ready": ready, **each.get("container", {})}],
        },
    }  # fmt: skip


def _step(found: dict[str, Any]) -> None:
    """Take one step: of each kubelet, and of the controller of DaemonSets."""
    desired = {*found["wanted"]}
    for each in list(found["pods"]):
        if each["node"] in found["dead"]:
            continue
        if "ending" in each:
            each["ending"] -= 1
            if each["ending"] < 0:
                found["pods"].remove(each)
        elif each["revision"] != OLD and each["node"] not in found["broken"]:
            each["is_ready"] = True
    for node in (
        set() if found.get("stalled") else desired - {each["node"] for each in found["pods"] if each["owner"] == UID}
    ):
        failure = found["broken"].get(node, {})
        found["pods"].append(pod(node, found["revisions"][-1][2], is_ready=False, container=failure))


def _get(found: dict[str, Any], kind: str, words: list[str]) -> list[Any]:
    match kind:
        case "daemonsets":
            sets = found["daemonsets"]
            for each in sets:
                each["status"]["desiredNumberScheduled"] = len(found["wanted"])
            wanted = next((word.partition("metadata.name=")[2] for word in words if "metadata.name=" in word), "")
            return [each for each in sets if not wanted or each["metadata"]["name"] == wanted]
        case "controllerrevisions":
            return [
                {
                    "metadata": {"labels": {"controller-revision-hash": revision},
                                 "ownerReferences": [{"uid": owner, "controller": True}]},
                    "revision": number,
                } for owner, number, revision in found["revisions"]
            ]  # fmt: skip
        case "nodes":
            names = {each["node"] for each in found["pods"]}
            return [
                {"metadata": {"name": name},
                 "status": {"conditions": [{"type": "Ready", "status": f"{name not in found['dead']}"}]}}
                for name in sorted(names)
            ]  # fmt: skip
        case _:
            _step(found)
            return [_as_pod(each) for each in found["pods"]]


def _write(path: Path, found: dict[str, Any]) -> None:
    """Replace the file at once: others read it meanwhile, and mpsctl kills the kubectl that it was interrupted with."""
    made = path.with_suffix(".new")
    made.write_text(json.dumps(found))
    made.replace(path)


def main() -> None:
    """Be kubectl."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the cluster goes on, whatever ends kubectl
    directory, *words = sys.argv[1:]
    path = Path(directory) / "cluster.json"
    found = json.loads(path.read_text())
    with (Path(directory) / "called").open("a") as file:
        print(json.dumps(words), file=file)
    words = [word for word in words if not word.startswith("--context=")]
    if found.get("away", 0) > 0:
        found["away"] -= 1
        _write(path, found)
        sys.exit("The connection to the server was refused")
    if words[0] == "get":
        json.dump({"items": _get(found, words[1], words)}, sys.stdout)
    else:
        assert words[:2] == ["delete", "pods"]
        if found.get("forbidden"):
            sys.exit("Error from server (Forbidden): pods is forbidden")
        names = [word for word in words[2:] if not word.startswith("--")]
        for each in found["pods"]:
            if each["name"] in names:
                assert "ending" not in each, "a pod is deleted twice"
                each["ending"] = each["clients"]
    serving = {each["node"] for each in found["pods"] if each.get("is_ready", True) and "ending" not in each}
    with (Path(directory) / "unavailable").open("a") as file:
        print(len({each["node"] for each in found["pods"]} - serving - {*found["dead"]}), file=file)
    found.update(found.pop("then", {}) if words[0] == "delete" else {})
    _write(path, found)


if __name__ == "__main__":
    main()
