"""Claims that are taken, put back, released and repeated while other requests change them."""

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, event
from tests.daemon.leases.holding import ANN, SMALL, add, ended, shown
from tests.daemon.leases.line import Call
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables

pytestmark = pytest.mark.thorough


@pytest.fixture
def node(make_node: Start) -> Node:
    """Start a node that detects an unresponsive control daemon soon."""
    return make_node(simulate=1, control=None, config=BRISK + ('users = "many"\n' if os.geteuid() == 0 else "")).start()


def ask(node: Node, **more: Any) -> Any:
    return node.request("POST", "/v1/leases", {**SMALL, **more})


def claimed(node: Node, **more: Any) -> dict[str, Any]:
    """Request a lease by a claim, and return it."""
    answer = ask(node, **{"holder": {"claim": {}}, **more})
    assert answer.status == 201, answer.body
    found: dict[str, Any] = answer.json
    return found


def take(node: Node, lease: dict[str, Any], pid: int) -> Any:
    return add(node, lease, pid=pid, token=lease["env"]["MPSD_LEASE_TOKEN"])


def kinds(node: Node, lease: dict[str, Any]) -> list[str]:
    return [each["kind"] for each in shown(node, lease)["holders"]]


def code(answer: Any) -> tuple[int, str]:
    """Return the status and the code of a refusal."""
    return answer.status, answer.json["code"]


@contextmanager
def unresponsive(node: Node) -> Iterator[None]:
    """Make the control daemon unresponsive, so that mpsd can open nothing."""
    daemon = node.daemons()["gpu0"]["pid"]
    os.kill(daemon, signal.SIGSTOP)
    try:
        node.wait_for_state("gpu0", "unresponsive")
        yield
    finally:
        os.kill(daemon, signal.SIGCONT)


class TestTaking:
    """A claim while the control daemon is being opened to its taker."""

    def test_asked_again_meanwhile(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """A repeated request has the outcome of the first."""
        lease = claimed(node)
        with ThreadPoolExecutor() as pool:
            with unresponsive(node):
                first = pool.submit(take, node, lease, sleeper.pid)
                wait_until(lambda: kinds(node, lease) == ["process"], what="the claim to be taken")
                more = [pool.submit(take, node, lease, sleeper.pid) for _ in range(3)]
                answers = [each.result() for each in (first, *more)]
                assert [code(each) for each in answers] == [(409, "daemon_not_ready")] * 4
                assert kinds(node, lease) == ["claim"]
            wait_until(lambda: take(node, lease, sleeper.pid).status == 200, what="it to be taken later")
        assert kinds(node, lease) == ["process"]

    def test_renewed_meanwhile(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """A claim that is put back keeps the time to live that it was given meanwhile."""
        lease = claimed(node, ttl=100)
        with unresponsive(node), ThreadPoolExecutor() as pool:
            first = pool.submit(take, node, lease, sleeper.pid)
            wait_until(lambda: kinds(node, lease) == ["process"], what="the claim to be taken")
            renewed = node.request("POST", f"/v1/leases/{lease['id']}/renew", {"ttl": 5000})
            assert renewed.status == 200, renewed.body
            assert code(first.result()) == (409, "daemon_not_ready")
            assert kinds(node, lease) == ["claim"]
            ends = [datetime.fromisoformat(each["expires"]) for each in (lease, shown(node, lease))]
            assert ends[1] - ends[0] > timedelta(hours=1)

    def test_handed_over_meanwhile(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """A claim that was handed over meanwhile belongs to its new holders, and is not put back."""
        lease = claimed(node)
        with unresponsive(node), ThreadPoolExecutor() as pool:
            first = pool.submit(take, node, lease, sleeper.pid)
            wait_until(lambda: kinds(node, lease) == ["process"], what="the claim to be taken")
            assert add(node, lease, pid=os.getpid(), replace=True).status == 200
            assert first.result().status == 409
            assert [each["pid"] for each in shown(node, lease)["holders"]] == [os.getpid()]
        assert node.events("lease_claim_returned") == []
        assert code(take(node, lease, sleeper.pid)) == (409, "already_claimed")

    def test_released_meanwhile(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """A claim that was released meanwhile has no holder, and the answer says that it has ended."""
        lease = claimed(node)
        with unresponsive(node), ThreadPoolExecutor() as pool:
            first = pool.submit(take, node, lease, sleeper.pid)
            wait_until(lambda: kinds(node, lease) == ["process"], what="the claim to be taken")
            assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
            assert first.result().status in {404, 409}
        event(node, "lease_ended", lease=lease["id"])
        assert node.events("lease_claim_returned") == []


class TestRepeated:
    """A request for a claim that is repeated with its request_id."""

    def test_after_it_was_taken(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """The request is answered with the same lease until that lease has ended, also by the next mpsd."""
        asked: dict[str, Any] = {"holder": {"claim": {}}, "request_id": "job-7"}
        lease = claimed(node, **asked)
        assert claimed(node, **asked)["id"] == lease["id"]
        assert code(ask(node, request_id="job-7")) == (422, "request_id_reused")
        assert take(node, lease, sleeper.pid).status == 200
        for _ in range(2):
            again = claimed(node, **asked)
            assert (again["id"], again["env"], kinds(node, lease)) == (lease["id"], lease["env"], ["process"])
            assert code(ask(node, request_id="job-7")) == (422, "request_id_reused")
            node.end(signal.SIGKILL)
            node.start()
        assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
        assert claimed(node, **asked)["id"] != lease["id"]

    @needs_root
    def test_taken_by_another_user(self, node: Node) -> None:
        """The request_id belongs to the user that made the request; the user that took the claim has its own."""
        asked: dict[str, Any] = {"holder": {"claim": {}}, "request_id": "job-7"}
        lease = claimed(node, **asked)
        with calling(node.socket, uid=ANN) as ann:
            path, token = f"/v1/leases/{lease['id']}/holders", lease["env"]["MPSD_LEASE_TOKEN"]
            assert ann.request("POST", path, {"token": token}).status == 200
            own = ann.admit(**SMALL, request_id="job-7")
            assert (own.status, own.json["id"] != lease["id"]) == (201, True), own.body
            again = claimed(node, **asked)
            assert (again["id"], again["owner"]["uid"]) == (lease["id"], ANN)


@needs_root
def test_who_requested_it(node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
    """A lease says whether an administrator claimed it, whoever holds it later, also after a restart of mpsd."""
    with calling(node.socket, uid=ANN) as ann:
        own = ann.admit(**SMALL).json
        theirs = claimed(node, holder={"claim": {"uid": 0}}, threads=10)
        path = f"/v1/leases/{own['id']}/holders"
        assert node.request("POST", path, {"claim": {}, "replace": True}).status == 200
        assert take(node, theirs, sleeper.pid).status == 200
        assert [kinds(node, each) for each in (own, theirs)] == [["claim"], ["process"]]
        for _ in range(2):
            assert [shown(node, each)["claimed_for"] for each in (own, theirs)] == [None, 0]
            node.end(signal.SIGKILL)
            node.start()


class TestEnds:
    """The reasons given for a claim that ends, and for one that was not granted yet."""

    def test_time_to_live(self, node: Node) -> None:
        """A claim whose time to live ends first gives that as the reason."""
        lease = claimed(node, ttl=1)
        wait_until(lambda: shown(node, lease)["state"] == "ended", what="the lease to end")
        because = "its time to live of 1 s has expired before its claim was taken"
        assert shown(node, lease)["because"] == because
        assert event(node, "lease_claim_expired", lease=lease["id"])["because"] == because

    def test_waits(self, node: Node) -> None:
        """A claim that waits in the queue gets no holder, and the answer says that it waits."""
        first = claimed(node, threads=100)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(ask, node, threads=100, holder={"claim": {}}, wait=60)
            (queued,) = wait_until(
                lambda: [each for each in node.get("/v1/leases").json["leases"] if each["state"] == "waiting"],
                what="a claim to wait",
            )
            for asked in ({"pid": os.getpid()}, {"claim": {}, "replace": True}):
                refused = add(node, queued, **asked)
                assert code(refused) == (404, "not_found")
                assert refused.json["detail"].startswith(f"lease {queued['id']} still waits in the queue")
            assert node.request("DELETE", f"/v1/leases/{first['id']}").status == 204
            assert waiting.result().status == 201


class TestReleasedUnlessTaken:
    """A lease that is released only if no process has taken it."""

    def test_untaken(self, node: Node) -> None:
        """The release ends a claim, also one that waits in the queue; a second release succeeds too."""
        lease = claimed(node, threads=100)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(ask, node, threads=100, holder={"claim": {}}, wait=60)
            queued = wait_until(
                lambda: [each for each in node.get("/v1/leases").json["leases"] if each["state"] == "waiting"],
                what="a claim to wait",
            )
            for each in (queued[0], lease):
                for _ in range(2):
                    assert node.request("DELETE", f"/v1/leases/{each['id']}?untaken=true").status == 204
                assert shown(node, each)["state"] == "ended"
            assert waiting.result().status == 409

    def test_taken(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """A claim that was taken is not released, also while the control daemon is being opened to its holder."""
        lease = claimed(node)
        with ThreadPoolExecutor() as pool:
            with unresponsive(node):
                first = pool.submit(take, node, lease, sleeper.pid)
                wait_until(lambda: kinds(node, lease) == ["process"], what="the claim to be taken")
                assert code(node.request("DELETE", f"/v1/leases/{lease['id']}?untaken=true")) == (
                    409,
                    "already_claimed",
                )
                assert first.result().status == 409
            wait_until(lambda: take(node, lease, sleeper.pid).status == 200, what="it to be taken later")
        assert code(node.request("DELETE", f"/v1/leases/{lease['id']}?untaken=true")) == (409, "already_claimed")
        assert kinds(node, lease) == ["process"]
        wrong = node.request("DELETE", f"/v1/leases/{lease['id']}?untaken=1")
        assert (wrong.status, shown(node, lease)["state"]) == (422, "granted")


class TestClaimedAgain:
    """A lease that becomes a claim again until its next holder takes it."""

    @pytest.mark.enforcement
    def test_under_a_client_that_has_just_attached(self, make_node: Start) -> None:
        """A client keeps its lease unchanged, also when mpsd has not seen the client yet."""
        node = make_node(simulate=1, control=None, config="[daemon]\nprobe_interval = 3600.0\n").start()
        lease = ask(node, pid=os.getpid()).json
        own = {**variables(node), **{name: str(each) for name, each in lease["env"].items()}}
        with SimulatedClient(own) as client:
            assert client.hello["mps"]
            assert code(add(node, lease, claim={}, replace=True)) == (409, "already_claimed")
            assert kinds(node, lease) == ["process"]

    def test_one_for_anybody(self, node: Node) -> None:
        """A claim for any user stays a claim for any user; the new deadline applies."""
        lease = claimed(node)
        before = shown(node, lease)["holders"][0]
        again = add(node, lease, claim={"deadline": 3000}, replace=True)
        assert again.status == 200, again.body
        (after,) = again.json["holders"]
        assert (before.get("uid"), after.get("uid")) == (None, None)
        assert after["deadline"] > before["deadline"]


def test_its_caller_does_not_come_back(make_node: Start, sleeper: "subprocess.Popen[bytes]") -> None:
    """A claim whose caller hung up is its taker's: it does not end with the time that it is kept for the caller."""
    node = make_node(simulate=1, control=None, config="[admission]\nhang_up_grace = 0.5\n").start()
    first = ask(node, threads=100).json

    def waits(name: str, threads: int) -> tuple[Call, str]:
        asked = {**SMALL, "threads": threads, "holder": {"claim": {}}, "wait": None, "request_id": name, "name": name}
        call = Call(node.socket, "POST", "/v1/leases", asked)
        (lease,) = wait_until(
            lambda: [each["id"] for each in node.leases() if each["name"] == name], what=f"{name} to wait"
        )
        return call, lease

    call, taken = waits("taken", 25)
    call.hang_up()
    assert node.request("DELETE", f"/v1/leases/{first['id']}").status == 204
    lease = wait_until(
        lambda: found if (found := node.get(f"/v1/leases/{taken}").json)["state"] == "granted" else None,
        what="it to be granted",
    )
    assert take(node, lease, sleeper.pid).status == 200
    call, later = waits("later", 100)
    call.hang_up()
    assert ended(node, {"id": later}).endswith("did not come back")
    assert shown(node, lease)["state"] == "granted"
