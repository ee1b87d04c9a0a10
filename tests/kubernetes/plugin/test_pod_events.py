"""Events about pods: `kubectl describe` shows what happens to a running container, and no pod can cause many."""

import contextlib
import io
import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mpsd.core.kubernetes import settings
from mpsd.core.settings import LogFormat
from mpsd.kubernetes.api_server import ApiServer as Client
from mpsd.kubernetes.api_server import place
from mpsd.kubernetes.log import Log
from mpsd.kubernetes.parts import program
from mpsd.kubernetes.pod_events import PodEvents, PodName, Reason
from mpsd.simulator.client import program as client
from tests.harness import wait_until
from tests.kubernetes.dra.api_server import ApiServer
from tests.kubernetes.dra.cluster import NODE
from tests.kubernetes.plugin.cluster import SLICE, StandIn, StandInPod
from tests.kubernetes.plugin.conftest import MakeCluster, account
from tests.simulated_clients import outside

HELD = Reason.LEASE_NOT_HELD


def written(server: ApiServer) -> list[Any]:
    with server.lock:
        return [each for each in server.written if each["kind"] == "Event"]


@pytest.mark.root("name control groups for others")
class TestFromThePlugin:
    def hidden(self, cluster: StandIn) -> StandInPod:
        """Start a pod whose program does not show its lease, as an unknown user."""
        pod = cluster.create({"main": {SLICE: 10}})
        assert cluster.plugin is not None
        container = pod.start("main", ("env", "-i", "sleep", "inf"), uid=1234, before=cluster.stop_plugin)
        wait_until(lambda: os.readlink(f"/proc/{container.process.pid}/exe").endswith("sleep"), what="the program")  # noqa: PTH115
        cluster.plugin.send_signal(signal.SIGCONT)
        wait_until(
            lambda: pod.uid in [each["pod"] for each in cluster.log("container_not_held")], what="the log to say so"
        )
        return pod

    def test_names_the_pod(self, make_cluster: MakeCluster, api_server: ApiServer) -> None:
        """The event is in the namespace of the pod, whose name kubelet tells."""
        pod = self.hidden(make_cluster(settings={**account(api_server), "REPORT": "never"}))
        (event,) = wait_until(lambda: written(api_server), what="an event")
        about = event["involvedObject"]
        assert (about["namespace"], about["name"], about["uid"]) == ("default", "pod-0", pod.uid)
        assert (event["reason"], event["source"]["host"]) == ("LeaseNotHeld", NODE)
        assert event["message"].startswith("container main: as which user the program")
        assert not api_server.asked("GET", NODE)

    def test_without_the_role(self, make_cluster: MakeCluster, api_server: ApiServer) -> None:
        """The log says once that the role is missing, and everything else works."""
        api_server.forbidden = frozenset({"POST"})
        cluster = make_cluster(settings=account(api_server))
        self.hidden(cluster)
        self.hidden(cluster)
        wait_until(lambda: len(api_server.asked("POST", "events")) > 1, what="two attempts")
        (lost,) = wait_until(lambda: cluster.log("pod_event_lost"), what="the log to say so")
        assert "cannot post" in lost["because"]
        pod = cluster.create({"main": {SLICE: 10}})
        pod.start("main")
        cluster.await_held(pod)

    def test_without_an_account(self, make_cluster: MakeCluster) -> None:
        """Where nobody gave the plugin an account, the log says that once."""
        cluster = make_cluster()
        self.hidden(cluster)
        self.hidden(cluster)
        (lost,) = cluster.log("pod_event_lost")
        assert "pod_events" in lost["because"]

    def test_of_a_lost_server(self, make_cluster: MakeCluster, api_server: ApiServer) -> None:
        """After the daemon's pod has died with its servers, the pod of their clients has an event, and no other pod."""
        cluster = make_cluster(settings={**account(api_server), "REPORT": "never"}, control=None)
        other, pod = (cluster.create({"main": {SLICE: 10}}) for _ in range(2))
        other.start("main")
        container = pod.start("main", client(), more=outside(cluster.node))
        assert container.process.stdout is not None
        server = json.loads(container.process.stdout.readline())["server"]
        pid = container.process.pid
        wait_until(lambda: [each["clients"] for each in cluster.held(pod)] == [[pid]], what="its client")
        daemon = cluster.node.daemons()["gpu0"]["pid"]
        cluster.node.end(signal.SIGKILL)
        os.kill(daemon, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
        cluster.node.start()
        (event,) = wait_until(lambda: written(api_server), what="an event")
        assert (event["involvedObject"]["uid"], event["reason"]) == (pod.uid, "ServerLost")
        assert "the MPS server of a process of this pod has ended" in event["message"]


class TestBounds:
    """The part by itself, with an API server over TLS."""

    @pytest.fixture
    def log(self) -> io.StringIO:
        return io.StringIO()

    @pytest.fixture
    def events(self, api_server: ApiServer, log: io.StringIO) -> Iterator[PodEvents]:
        """Yield the part, for pods that are all called `it`, except those without a name."""
        given = {"node": NODE, "api_server": api_server.url, "service_account": str(api_server.folder)}
        found = settings.parse("", {}, given)
        started = program(found, Log(LogFormat.JSON, log))
        events = PodEvents(
            started,
            Client(place(found, {}), started.ended),
            lambda pod: None if pod.startswith("nameless") else PodName("default", "it"),
        )
        thread = threading.Thread(target=events.run)
        thread.start()
        yield events
        started.ended.set()
        thread.join()
        started.reader._loop.close()

    def lost(self, log: io.StringIO) -> list[Any]:
        lines = map(json.loads, log.getvalue().splitlines())
        return [line for line in lines if line["event"] == "pod_event_lost"]

    def test_repeated(self, events: PodEvents, api_server: ApiServer, log: io.StringIO) -> None:
        """An event that was written is not written again."""
        for each in ("a", "a", "b", "a", "b"):
            events.warn("1", HELD, each)
        events.warn("2", HELD, "a")
        wait_until(lambda: len(written(api_server)) > 2, what="the events")
        found = [(each["involvedObject"]["uid"], each["message"]) for each in written(api_server)]
        assert found == [("1", "a"), ("1", "b"), ("2", "a")]
        assert not self.lost(log)

    def test_of_one_pod(self, events: PodEvents, api_server: ApiServer, log: io.StringIO) -> None:
        """A pod that causes ever new events takes none of another pod's."""
        for number in range(300):
            events.warn("loud", HELD, f"{number}")
        events.warn("quiet", HELD, "it")
        wait_until(lambda: len(written(api_server)) > 8, what="the events")
        uids = [each["involvedObject"]["uid"] for each in written(api_server)]
        assert uids == ["loud"] * 8 + ["quiet"]
        (lost,) = self.lost(log)
        assert "this pod has had 8 events" in lost["because"]

    def test_of_one_node(self, events: PodEvents, log: io.StringIO) -> None:
        """All pods of a node together have a bound, too."""
        for number in range(300):
            events.warn(f"nameless-{number}", HELD, "it")
        wait_until(lambda: len(self.lost(log)) == 257, what="256 events without a name, and one beyond the bound")
        (lost,) = (each for each in self.lost(log) if "this node has had 256 events" in each["because"])
        assert lost["pod"] == "nameless-256"

    def test_not_written(self, events: PodEvents, api_server: ApiServer, log: io.StringIO) -> None:
        """An event that cannot be written is lost with a line of the log, which has its message."""
        events.warn("nameless", HELD, "one")
        wait_until(lambda: self.lost(log), what="the first to be lost")
        api_server.refusal = 503
        events.warn("1", HELD, "two")
        wait_until(lambda: len(self.lost(log)) > 1, what="the second to be lost")
        assert [each["message"] for each in self.lost(log)] == ["one", "two"]
        assert not written(api_server)
