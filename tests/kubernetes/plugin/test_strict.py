"""Pods of one GPU under `attach = "strict"`: each start waits for the turns of others, within kubelet's deadline."""

import json
import signal
from typing import Any

import pytest

from mpsd.simulator.client import program
from tests.kubernetes.plugin.cluster import SLICE, RefusedError
from tests.kubernetes.plugin.conftest import MakeCluster
from tests.kubernetes.plugin.test_hook import HOOK, hello
from tests.simulated_clients import outside

pytestmark = [pytest.mark.root("name control groups for others"), pytest.mark.thorough]

STRICT = '[enforcement]\nattach = "strict"\n'

CONTAINED = ("unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
"""As in a container: NVML names the program by another pid than its own."""


def test_three_pods(make_cluster: MakeCluster) -> None:
    """Each gets exactly its share: a turn ends with the client, whose memory NVML shows by its pid outside."""
    cluster = make_cluster(control=None, config=f'{STRICT}[daemon]\nusers = "many"\n', settings=HOOK)
    assert cluster.plugin is not None
    for threads, uid, contained in ((10, None, CONTAINED), (50, None, CONTAINED), (30, 1001, ())):
        pod = cluster.create({"main": {SLICE: threads}})
        how: Any = {"uid": uid, "may_read": True, "more": outside(cluster.node), "before": cluster.stop_plugin}
        container = pod.start("main", (*contained, *program()), **how)
        assert hello(container) == (True, threads)
        cluster.plugin.send_signal(signal.SIGCONT)


def test_a_pod_that_is_late(make_cluster: MakeCluster) -> None:
    """While a container has its turn, another is refused in time, in words for its author, and starts afterwards."""
    cluster = make_cluster(control=None, config=STRICT, durations={"mpsd.kubernetes.mpsd_client._ANSWER": 1.0})
    late, other = cluster.create({"main": {SLICE: 50}}), cluster.create({"main": {SLICE: 10}})
    container = late.start("main", program(late=True), more=outside(cluster.node))
    with pytest.raises(RefusedError, match=r"waits for its turn to use GPU .* kubelet tries again by itself"):
        other.start("main")
    assert container.process.stdin is not None
    assert container.process.stdout is not None
    container.process.stdout.readline()
    container.process.stdin.write("context\n")
    container.process.stdin.flush()
    assert json.loads(container.process.stdout.readline())["active_thread_percentage"] == 50
    for _ in range(2):  # the container, and the one that replaces it
        started = other.start("main", program(), more=outside(cluster.node))
        assert hello(started) == (True, 10)
        started.end()
