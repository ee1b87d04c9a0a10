"""Unleased clients count against what is granted, and against their users' quotas: no process takes a GPU unnoticed."""

import signal
from typing import Any

import pytest

from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, event
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import WAITS, SimulatedClient, gpus, leased, variables

pytestmark = [pytest.mark.enforcement, pytest.mark.thorough]

THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
ALLOW = '[enforcement]\nunadmitted = "allow"\n'
BOB = 2721


def gpu(node: Node) -> tuple[float, int, int]:
    found = node.get("/v1/status").json["gpus"][0]
    return found["threads_unleased"], found["memory_unleased"] // GIB, found["clients_unleased"]


def refused(node: Node, limit: str, **asked: Any) -> str:
    """Request a lease that must be refused because of this limit, and return the reason."""
    answer = node.request("POST", "/v1/leases", asked)
    assert (answer.status, answer.json["limit"]) == (409 if "." not in limit else 403, limit), answer.body
    return str(answer.json["detail"])


def read(node: Node, lease: dict[str, Any]) -> None:
    """Have mpsd read the GPUs now, and not within ten seconds; `lease` is one that has not ended."""
    assert node.get(f"/v1/leases/{lease['id']}/verify").status == 200


def sees(node: Node, threads: float, memory: int, clients: int) -> None:
    wait_until(lambda: gpu(node) == (threads, memory, clients), what="it to be counted", deadline=20)


def test_counted(make_node: Start) -> None:
    """Until it ends, an unleased client counts with the share that its environment names and its memory."""
    node = make_node(simulate=1, control=None, config=ALLOW).start()
    with SimulatedClient({**variables(node), THREADS: "60"}) as client:
        client.alloc("40GiB")
        with calling(node.socket) as caller:
            lease = caller.admit(threads=1, memory=GIB).json
            read(node, lease)
            assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
        sees(node, 60.0, 40, 1)
        assert "1 client without a lease counts as 60 % and 40GiB" in refused(node, "threads", threads=50, memory=GIB)
        refused(node, "memory", threads=10, memory=40 * GIB)
        with calling(node.socket) as caller, SimulatedClient({**variables(node), THREADS: "nonsense"}) as other:
            fits = caller.admit(threads=39.9, memory=30 * GIB)
            assert fits.status == 201
            assert other.hello["mps"]
            sees(node, 60.1, 40, 2)
            assert node.get(f"/v1/leases/{fits.json['id']}").json["state"] == "granted"
    sees(node, 0.0, 0, 0)
    assert node.request("POST", "/v1/leases", {"threads": 60, "memory": 40 * GIB}).status == 201


def test_waited_for(make_node: Start) -> None:
    """A request can wait for what an unleased client uses, since that may end: it is never refused as impossible."""
    node = make_node(simulate=1, control=None, config=ALLOW).start()
    with SimulatedClient({**variables(node), THREADS: "60"}) as client:
        sees(node, 60.0, 0, 1)
        with calling(node.socket) as caller:
            answer = caller.admit(fraction=1.0)
            assert (answer.status, answer.json["code"]) == (409, "does_not_fit")
            assert client.end() == 0
            assert caller.admit(fraction=1.0, wait=30).status == 201


@pytest.mark.parametrize("ends", ["released", "expired"])
def test_left_behind(make_node: Start, ends: str) -> None:
    """The share of an ended lease's clients is not granted again at any moment before they are gone."""
    node = make_node(simulate=1, control=None, config="").start()
    asked = {"threads": 60, "memory": 60 * GIB}
    with calling(node.socket) as caller:
        lease = node.request("POST", "/v1/leases", asked).json
        with SimulatedClient({**variables(node), **lease["env"]}) as client:
            assert client.hello["ok"]
            event(node, "client_attributed", client=client.hello["pid"])
            client.alloc("50GiB")  # NVML has not been read since this allocation
            if ends == "released":
                assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
            else:
                assert node.request("POST", f"/v1/leases/{lease['id']}/renew", {"ttl": 0.001}).status == 200
                event(node, "lease_ended", lease=lease["id"])
            assert gpu(node)[0] == 60.0
            answer = caller.admit(threads=10, memory=60 * GIB)
            assert (answer.status, answer.json["limit"]) == (409, "memory")
            sees(node, 60.0, 50, 1)
            assert caller.admit(**asked).status == 409
        assert caller.admit(**asked, wait=30).status == 201


def test_left_behind_with_limits_of_its_own(make_node: Start) -> None:
    """A client that set its limits itself counts with its former part of the threads for the rest of its life."""
    node = make_node(simulate=1, control=None, config="").start()
    asked = {"threads": 60, "memory": 60 * GIB}
    with calling(node.socket) as caller:
        with SimulatedClient(variables(node), before=WAITS) as client:
            lease = node.request("POST", "/v1/leases", {**asked, "pid": client.pid}).json
            assert client.process.stdin is not None
            client.process.stdin.write(b"\n")
            event(node, "client_attributed", client=client.hello["pid"])
            client.alloc("1GiB")
            assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
            sees(node, 60.0, 1, 1)
            answer = caller.admit(threads=50, memory=GIB)
            assert (answer.status, answer.json["limit"]) == (409, "threads")
        assert caller.admit(**asked, wait=30).status == 201


def test_left_behind_and_restarted(make_node: Start) -> None:
    """A client that its lease left behind counts for the next mpsd as before, and a waiting request does not get it."""
    node = make_node(simulate=1, control=None, config="").start()
    asked = {"threads": 60, "memory": 60 * GIB}
    with SimulatedClient(variables(node), before=WAITS) as client:
        lease = node.request("POST", "/v1/leases", {**asked, "pid": client.pid}).json
        assert client.process.stdin is not None
        client.process.stdin.write(b"\n")
        event(node, "client_attributed", client=client.hello["pid"])
        assert client.alloc("50GiB")["ok"]
        assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
        node.end(signal.SIGKILL)  # the end of the lease was answered, so all that follows from it is on disk
        node.start()
        sees(node, 60.0, 50, 1)
        with leased(node, "--threads", "60", "--memory", "1GiB", "--wait", "60") as waiting:
            event(node, "lease_waits", pid=waiting.pid)
            node.end(signal.SIGKILL)
            node.start()
            sees(node, 60.0, 50, 1)
            (left,) = node.get("/v1/leases").json["leases"]
            assert left["state"] == "waiting"
            client.end()
            assert waiting.hello["mps"]


def test_left_behind_on_an_unreadable_gpu(make_node: Start) -> None:
    """A client that its lease left behind counts with its part of the memory until NVML reports what it holds."""
    node = make_node(simulate=1, control=None, config="").start()
    lease = node.request("POST", "/v1/leases", {"threads": 60, "memory": 60 * GIB}).json
    with calling(node.socket) as caller, SimulatedClient({**variables(node), **lease["env"]}) as client:
        other = caller.admit(threads=1, memory=GIB).json
        event(node, "client_attributed", client=client.hello["pid"])
        client.alloc("50GiB")
        gpus(node)[0].lose()
        assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
        event(node, "gpu_health", health="unknown")
        assert gpu(node) == (60.0, 60, 1)
        gpus(node)[0].recover()
        read(node, other)
        sees(node, 60.0, 50, 1)


@needs_root
def test_charged(make_node: Start) -> None:
    """The resources that a user's unleased clients use count in its quota."""
    quota = f'[daemon]\nusers = "many"\n[quota.{BOB}]\nthreads = 70\n'
    node = make_node(simulate=1, control=None, config=ALLOW + quota).start()
    as_bob = ("setpriv", f"--reuid={BOB}", f"--regid={BOB}", "--clear-groups")
    with (
        SimulatedClient({**variables(node), THREADS: "50"}, before=as_bob),
        calling(node.socket, uid=BOB) as bob,
    ):
        sees(node, 50.0, 0, 1)
        answer = bob.admit(threads=30, memory=GIB)
        assert (answer.status, answer.json["limit"]) == (403, "quota.threads")
        assert "mpsctl clients" in answer.json["hint"]
        assert bob.admit(threads=20, memory=GIB).status == 201
        assert node.request("POST", "/v1/leases", {"threads": 30, "memory": GIB}).status == 201


def test_one_too_many(make_node: Start) -> None:
    """A client for which its lease has no room counts beside the lease."""
    node = make_node(simulate=1, control=None, config="").start()
    lease = node.request("POST", "/v1/leases", {"threads": 60, "memory": GIB}).json
    with SimulatedClient({**variables(node), **lease["env"]}) as first:
        assert event(node, "client_attributed", client=first.hello["pid"])
        assert gpu(node)[2] == 0
        with SimulatedClient({**variables(node), **lease["env"], THREADS: "10"}) as second:
            assert event(node, "violation", pid=second.hello["pid"])["kind"] == "processes"
            sees(node, 10.0, 0, 1)
            refused(node, "threads", threads=31, memory=GIB)
