"""The objects of an upgrade, and how many nodes it may take at a time."""

from typing import Any, Final

import pytest

from mpsd.core.errors import InvalidRequestError
from mpsd.core.kubernetes import upgrade
from mpsd.core.kubernetes.upgrade import DaemonSet, State

OWNER: Final = DaemonSet("gpu", "mpsd", "uid", "a=b", 1, is_observed=True, on_delete=True, drains=True)


def of(uid: str = "uid", **more: Any) -> dict[str, Any]:
    return {"name": "one", "ownerReferences": [{"uid": uid, "controller": True}], **more}


@pytest.mark.parametrize(("text", "nodes"), [("1", 1), ("7", 7), ("1%", 10), ("5%", 50), ("100%", 999)])
def test_limit(text: str, nodes: int) -> None:
    """A percentage is rounded up."""
    assert upgrade.max_unavailable(text).of(999) == nodes
    assert upgrade.max_unavailable("1%").of(0) == 1


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "-1", "5 %", "1.5", "x", "\u0665"])
def test_no_limit(text: str) -> None:
    """Anything else is refused."""
    with pytest.raises(InvalidRequestError, match="neither a number of nodes from 1 nor a percentage"):
        upgrade.max_unavailable(text)


def test_revision_after_a_return() -> None:
    """The newest revision is the one with the highest number: a return to an earlier one gives that a new number."""
    found = [
        {"metadata": of(labels={"controller-revision-hash": "z"}), "revision": 2},
        {"metadata": of(labels={"controller-revision-hash": "a"}), "revision": 10},
        {"metadata": of("other", labels={"controller-revision-hash": "b"}), "revision": 11},
    ]
    assert upgrade.newest_revision(found, OWNER) == "a"
    assert upgrade.newest_revision([], OWNER) is None


def test_pod_that_waits_for_its_node() -> None:
    """A pod that is not bound yet is of the node that it was made for."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-1"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    made = {
        "metadata": of(labels={"controller-revision-hash": "new"}),
        "spec": {"affinity": {"nodeAffinity": required}},
    }
    (pod,) = upgrade.pods([made, {"metadata": of("other")}, {}, None], OWNER, "new")
    assert (pod.node, pod.state, pod.because) == ("node-1", State.STARTING, "it has not started")


@pytest.mark.parametrize(
    "found", [None, {}, {"metadata": {"name": 1}}, {"metadata": of(), "status": {"conditions": 1}}]
)
def test_other_forms(found: Any) -> None:
    """An object of another form is no DaemonSet, and no ready node."""
    assert upgrade.daemonsets([found]) == []
    assert upgrade.ready_nodes([found]) == set()
