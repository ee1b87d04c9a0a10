"""No lease leaks, doubles or ends before its container, for any death between Allocate and the container's end.

Pods start and end on a node whose kubelet, plugin, mpsd and containers are killed at random, also in the middle of a
step. In CI there are a few kills; by hand, as many as you set:

    MPSD_CHAOS_KILLS=500 [MPSD_CHAOS_SEED=1] pytest -n 0 -s tests/kubernetes/plugin/test_chaos.py
"""

import contextlib
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.chaos.conftest import dice
from tests.chaos.test_chaos import KILLS, LAST_WORDS
from tests.control_groups import mounted
from tests.harness import wait_until
from tests.kubernetes.plugin.cluster import SLICE, RefusedError, StandIn, StandInPod
from tests.kubernetes.plugin.conftest import MakeCluster

__all__ = ["dice"]

pytestmark = [
    pytest.mark.root("name control groups for others"),
    pytest.mark.thorough,
    pytest.mark.timeout(120 + 10 * KILLS),
]

MOST = 6
"""Pods at a time: more than fit together."""


@dataclass
class Chaos:
    """A source of pods on a node, and of kills."""

    cluster: StandIn
    dice: random.Random
    running: list[StandInPod] = field(default_factory=list)
    """Pods whose container its runtime has started, and that has not ended."""
    done: Counter[str] = field(default_factory=Counter)
    timers: list[threading.Timer] = field(default_factory=list)
    struck: set[str] = field(default_factory=set)
    """The programs that are dead, or die in a moment."""

    # -- killing -------------------------------------------------------------------------------------------------------

    def strike(self) -> None:
        """Kill one or two of them, now or in a moment, in the middle of the next step."""
        for victim in self.dice.sample(["kubelet", "plugin", "mpsd"], self.dice.choice([1, 1, 1, 2, 3])):
            self.done[f"killed {victim}"] += 1
            self.done["kills"] += 1
            process = self.cluster.node.process if victim == "mpsd" else getattr(self.cluster, victim)
            if process is None or victim in self.struck:
                continue
            self.struck.add(victim)
            if self.dice.random() < 0.4:
                process.kill()
                continue
            timer = threading.Timer(self.dice.random() * 0.3, _kill, [os.pidfd_open(process.pid)])
            timer.start()
            self.timers.append(timer)

    def mend(self) -> None:
        """Start all dead programs, in any order, and wait for them."""
        for timer in self.timers:
            timer.join()
        self.timers.clear()
        for victim in self.dice.sample(["kubelet", "plugin", "mpsd"], 3):
            self.revive(victim)
        self.cluster.await_devices()

    def revive(self, victim: str) -> None:
        """Start one of them, if it was killed."""
        cluster = self.cluster
        if victim not in self.struck:
            return
        self.struck.remove(victim)
        process = cluster.node.process if victim == "mpsd" else getattr(cluster, victim)
        assert process is not None
        process.wait(10)
        if victim == "mpsd":
            cluster.node.process = None
            cluster.node.start()
        elif victim == "kubelet":
            cluster.start_kubelet()
        else:
            cluster.start_plugin()

    # -- pods ----------------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Have a pod admitted, and start it, as far as possible."""
        if len(self.cluster.pods) >= MOST:
            return
        self.done["pods"] += 1
        try:
            pod = self.cluster.create({"main": {SLICE: self.dice.choice([10, 20, 30, 40])}})
        except RefusedError as refused:
            self.done[_word(str(refused))] += 1
            return
        except OSError:
            self.done["kubelet died over it"] += 1
            return
        if self.dice.random() < 0.9:
            self.begin(pod)

    def begin(self, pod: StandInPod) -> None:
        """Start the container of a pod; after a refusal kubelet tries again later."""
        try:
            pod.start("main")
        except (RefusedError, OSError) as refused:
            self.done["not started: " + _word(str(refused))] += 1
            return
        self.running.append(pod)
        self.done["started"] += 1

    def restart(self) -> None:
        """Kill a container, or start one that could not be started before."""
        pods = list(self.cluster.pods.values())
        if not pods:
            return
        pod = self.dice.choice(pods)
        if pod in self.running:
            self.done["containers killed"] += 1
            self.done["kills"] += 1
            self.running.remove(pod)
            pod.containers.pop("main").end()
        self.begin(pod)

    def finish(self) -> None:
        """End a pod."""
        if self.cluster.pods:
            pod = self.dice.choice(list(self.cluster.pods.values()))
            if pod in self.running:
                self.running.remove(pod)
            pod.delete()
            self.done["ended"] += 1

    # -- what always holds ---------------------------------------------------------------------------------------------

    def leases(self) -> list[dict[str, Any]] | None:
        """Return the leases; None while mpsd is dead."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.cluster.leases()
        return None

    def check(self) -> None:
        """Check that each running container has its lease, once, and that the GPU has no more granted than it has."""
        leases = self.leases()
        if leases is None:
            return
        for pod in self.running:
            held = [each for each in leases if _holds(pod, each)]
            assert len(held) == 1, (pod.uid, held, leases)
        numbers = [int(each["labels"]["kubernetes/slice"], 16) for each in leases]
        for pod in self.running:
            (mine,) = (each["labels"]["kubernetes/slice"] for each in leases if _holds(pod, each))
            assert sum(bool(int(mine, 16) & each) for each in numbers) == 1, "the same devices twice"
        assert sum(each["active_thread_percentage"] for each in leases) <= 100

    def settle(self) -> None:
        """Check, with everything alive, that only pods known to kubelet have a lease, and each running one has."""
        self.mend()
        wanted = {pod.uid for pod in self.running}

        def settled() -> bool:
            leases = self.leases() or []
            known = {pod.uid for pod in self.cluster.pods.values()}
            with_claim = sum(each["holders"][0]["kind"] == "claim" for each in leases)
            holding = {uid for each in leases for uid in known if _holds_uid(uid, each)}
            idle = len(known) - len(wanted)
            others = len(leases) - with_claim - len(holding)
            return wanted <= holding and others == 0 and with_claim <= idle

        wait_until(settled, what="the leases to be those of the pods", deadline=20)
        self.check()


def _kill(descriptor: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    os.close(descriptor)


def _holds(pod: StandInPod, lease: dict[str, Any]) -> bool:
    return _holds_uid(pod.uid, lease)


def _holds_uid(uid: str, lease: dict[str, Any]) -> bool:
    return any((each.get("cgroup") or "").endswith(f"/pod{uid}") for each in lease["holders"])


def _word(text: str) -> str:
    """Return the kind of a refusal, for the final count."""
    for word in ("Available", "does_not_fit", "daemon_not_ready", "unreachable", "UNAVAILABLE", "endpoint not found"):
        if word in text:
            return word
    return text[:80]


def test_killed_at_any_moment(make_cluster: MakeCluster, dice: random.Random) -> None:
    """Leases follow their containers, whatever is killed, and nothing is left when the last pod has ended."""
    assert mounted("name=systemd") or mounted("cgroup2")
    cluster = make_cluster(settings={"ORPHAN_GRACE": "2", "WAIT": "4", "CLAIM_DEADLINE": "20"})
    chaos, begun = Chaos(cluster, dice), time.monotonic()
    try:
        while chaos.done["kills"] < KILLS:
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
    except AssertionError:
        for name in ("plugin.log", "kubelet.log"):
            sys.stdout.write(f"--- {name}\n{(cluster.root / name).read_text()[-LAST_WORDS:]}\n")
        raise
    finally:
        for timer in chaos.timers:
            timer.join()
        sys.stdout.write(f"{dict(chaos.done)}, {len(chaos.running)} running, {time.monotonic() - begun:.0f} s\n")
    chaos.mend()
    for pod in list(cluster.pods.values()):
        pod.delete()
    chaos.running.clear()
    wait_until(lambda: chaos.leases() == [], what="all leases to end", deadline=30)
    gpu = cluster.node.get("/v1/gpus").json["gpus"][0]
    assert (gpu["threads_granted"], gpu["memory_granted"]) == (0, 0)
    events = map(json.loads, cluster.node.get("/v1/events?after=0").body.splitlines())
    ends = Counter(each["lease"] for each in events if each["event"] == "lease_ended")
    assert ends
    assert set(ends.values()) == {1}
