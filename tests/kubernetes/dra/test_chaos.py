"""No lease leaks, doubles or ends before its container, for any death between Prepare and the container's end.

Pods with claims start and end on a node whose kubelet, driver, mpsd and containers are killed at random, also in the
middle of a step; some pods are deleted by force while no program is there to unprepare their claims. In CI there are a
few kills; by hand, as many as you set:

    MPSD_CHAOS_KILLS=500 [MPSD_CHAOS_SEED=1] pytest -n 0 -s tests/kubernetes/dra/test_chaos.py
"""

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import dice
from tests.chaos.test_chaos import KILLS, LAST_WORDS
from tests.fork_server import ForkServer
from tests.harness import wait_until
from tests.kubernetes.dra.cluster import opaque, result
from tests.kubernetes.dra.with_kubelet import WithKubelet
from tests.kubernetes.plugin.cluster import RefusedError, StandInPod
from tests.kubernetes.plugin.test_chaos import MOST, Chaos
from tests.node import Node

__all__ = ["dice"]

pytestmark = [
    pytest.mark.root("name control groups for others"),
    pytest.mark.thorough,
    pytest.mark.timeout(120 + 10 * KILLS),
]


@dataclass
class ClaimChaos(Chaos):
    """A source of pods with claims on a node, as far as the scheduler finds room, and of kills."""

    cluster: WithKubelet
    allocated: dict[str, int] = field(default_factory=dict)
    """By pod, the threads of its claim, which the scheduler counts until the pod is gone."""

    # -- pods ----------------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Have a claim allocated and a pod placed, and start it, as far as possible."""
        if len(self.cluster.pods) >= MOST:
            return
        self.done["pods"] += 1
        threads = self.dice.choice([10, 20, 30, 40])
        if sum(self.allocated.values()) + threads > 100:
            self.done["pending"] += 1
            return
        config = [opaque(user=0)] if self.dice.random() < 0.3 else []
        pod = self.cluster.pod(self.cluster.claim(result(str(threads), "8Gi"), config=config))
        self.allocated[pod.uid] = threads
        if self.dice.random() < 0.9:
            self.begin(pod)

    def begin(self, pod: StandInPod) -> None:
        """Start the container of a pod, unless the pod is ending; after a refusal kubelet tries again later."""
        if pod.uid not in self.cluster.ending:
            super().begin(pod)

    def restart(self) -> None:
        """Kill a container, or start one that could not be started before."""
        self.check()
        super().restart()

    def finish(self) -> None:
        """End a pod; it stays until kubelet can unprepare its claim, unless it is deleted by force."""
        if not self.cluster.pods:
            return
        self.check()
        pod = self.dice.choice(list(self.cluster.pods.values()))
        if pod in self.running:
            self.running.remove(pod)
        by_force = self.dice.random() < 0.3
        self.done["deleted by force" if by_force else "ended"] += 1
        self.end(pod, by_force=by_force)

    def end(self, pod: StandInPod, *, by_force: bool = False) -> None:
        """End a pod, as far as possible."""
        self.cluster.ending.add(pod.uid)
        if by_force:
            self.cluster.delete_by_force(pod)
        try:
            pod.delete()
        except (RefusedError, OSError) as refused:
            self.done["still there: " + str(refused)[:40]] += 1
            return
        self.allocated.pop(pod.uid)

    # -- what always holds ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that each running container has its lease, no claim has two, and the GPU is not overcommitted."""
        leases = self.leases()
        if leases is None:
            return
        living = {each["id"] for each in leases}
        for pod in self.running:
            assert pod.containers["main"].variables["MPSD_LEASE"] in living, (pod.uid, leases)
        claims = Counter(each["labels"]["kubernetes/claim"] for each in leases)
        assert set(claims.values()) <= {1}, claims
        granted = [each for each in leases if each["state"] != "waiting"]
        assert sum(each["active_thread_percentage"] for each in granted) <= 100

    def settle(self) -> None:
        """Check, with everything alive, that ending pods have ended, and only the other pods' leases are left."""
        self.mend()
        wait_until(self.all_gone, what="the pods to end that are to", deadline=60)

        def settled() -> bool:
            leases = self.leases() or []
            holds = {pod.uid: {each["id"] for each in self.cluster.held(pod)} for pod in self.running}
            right = all(holds[pod.uid] == {pod.containers["main"].variables["MPSD_LEASE"]} for pod in self.running)
            claims = {each.uid for pod in self.cluster.pods for each in self.cluster.of_pod[pod]}
            left = {each["labels"]["kubernetes/claim"] for each in leases} | self.cluster.stored().keys()
            return right and left <= claims and self.devices() <= claims

        wait_until(settled, what="leases, records and devices to be those of the pods", deadline=30)
        self.check()

    def all_gone(self) -> bool:
        """Try once more to end the ending pods, and return whether they are gone."""
        for pod in [each for each in self.cluster.pods.values() if each.uid in self.cluster.ending]:
            self.end(pod)
        return not self.cluster.ending & self.cluster.pods.keys()

    def devices(self) -> set[str]:
        names = (path.stem for path in (self.cluster.root / "cdi").glob("*.json"))
        return {name.partition("_")[2] for name in names}


@pytest.fixture
def cluster(short_tmp: Path, fork_server: ForkServer, kubernetes_fork_server: ForkServer) -> Iterator[WithKubelet]:
    """Yield a node with the driver whose kubelet is a process."""
    root = short_tmp / "d"
    root.mkdir()
    short_tmp.chmod(0o711)
    node = Node(root=root, simulate=1, fork_server=fork_server)
    cluster = WithKubelet(
        node, root / "kubelet", kubernetes_fork_server, settings={"WAIT": "4", "CLAIM_DEADLINE": "20"}
    )
    try:
        node.start()
        cluster.start()
        yield cluster
    finally:
        try:
            cluster.close()
        finally:
            node.clean_up()


def test_killed_at_any_moment(cluster: WithKubelet, dice: random.Random) -> None:
    """Leases follow their containers, whatever is killed, and nothing is left when the last pod has ended."""
    chaos, begun = ClaimChaos(cluster, dice), time.monotonic()
    try:
        while chaos.done["kills"] < KILLS or not chaos.done["started"]:
            act = dice.choice([chaos.create, chaos.create, chaos.create, chaos.restart, chaos.finish, chaos.strike])
            act()
            chaos.check()
            if act == chaos.strike and dice.random() < 0.7:
                dice.choice([chaos.create, chaos.restart, chaos.finish])()
            if dice.random() < 0.5:
                chaos.mend()
            if dice.random() < 0.1:
                chaos.settle()
        chaos.settle()
        for pod in list(cluster.pods.values()):
            chaos.end(pod)
        chaos.running.clear()
        wait_until(chaos.all_gone, what="the last pods to end", deadline=60)  # after a refusal kubelet tries again
        assert not cluster.pods
        cluster.await_nothing()
    except BaseException:
        for name in ("plugin.log", "kubelet.log"):
            sys.stdout.write(f"--- {name}\n{(cluster.root / name).read_text()[-LAST_WORDS:]}\n")
        raise
    finally:
        for timer in chaos.timers:
            timer.join()
        sys.stdout.write(f"{dict(chaos.done)}, {len(chaos.running)} running, {time.monotonic() - begun:.0f} s\n")
    gpu = cluster.node.get("/v1/gpus").json["gpus"][0]
    assert (gpu["threads_granted"], gpu["memory_granted"]) == (0, 0)
    events: list[dict[str, Any]] = [*map(json.loads, cluster.node.get("/v1/events?after=0").body.splitlines())]
    ends = Counter(each["lease"] for each in events if each["event"] == "lease_ended")
    assert ends
    assert set(ends.values()) == {1}
