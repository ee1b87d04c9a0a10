"""Admission: capacity, placement, and leases that are bound to a process by the kernel's evidence."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.caller import NOBODY, Caller, calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, branches, next_ready, program
from tests.harness import wait_until
from tests.node import TOKEN, Answer, Node, as_listed
from tests.real import RealDaemon, real_daemons

pytestmark = pytest.mark.real_daemon(535)


@pytest.fixture(scope="module")
def shared(node_for_all: Start) -> Node:
    """Start the node that the tests of this module share."""
    return node_for_all().start()


@pytest.fixture
def node(shared: Node) -> Iterator[Node]:
    """Return the shared node, and release the leases of the test afterwards."""
    yield shared
    for lease in shared.get("/v1/leases").json["leases"]:
        assert shared.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
    assert all(gpu["threads_granted"] == 0 for gpu in shared.get("/v1/gpus").json["gpus"])


def admit(node: Node, **asked: Any) -> Answer:
    """Request a lease as the process of the tests."""
    return node.request("POST", "/v1/leases", asked)


def granted(answer: Answer) -> Any:
    assert answer.status == 201, answer.json
    return answer.json


def refused(answer: Answer, status: int, code: str, limit: str | None = None) -> str:
    assert answer.status == status, answer.json
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = answer.json
    assert (problem["status"], problem["code"]) == (status, code), problem
    assert problem["limit"] == limit, problem
    assert problem["hint"]
    detail: str = problem["detail"]
    return detail


def gpu(node: Node, index: int) -> Any:
    """Return a GPU as the API has it."""
    return node.get("/v1/gpus").json["gpus"][index]


def test_lease(node: Node) -> None:
    """A lease says what was granted, to whom and where, and its environment limits the client to that share."""
    lease = granted(admit(node, threads=25, memory="2GiB", name="mine", labels={"team": "a"}))
    daemon = node.daemons()[lease["daemon"]]
    assert (lease["state"], lease["clients"], lease["ended"]) == ("granted", [], None)
    assert (lease["active_thread_percentage"], lease["pinned_device_mem_limit"]) == (25.0, 2 * GIB)
    assert lease["gpus"] == [daemon["gpu"]]
    assert (lease["name"], lease["labels"]) == ("mine", {"team": "a"})
    owner = lease["owner"]
    assert (owner["uid"], owner["gid"], owner["pid"]) == (os.geteuid(), os.getegid(), os.getpid())
    assert lease["env"] == {
        "CUDA_MPS_PIPE_DIRECTORY": str(node.pipe_directory(lease["daemon"])),
        "CUDA_VISIBLE_DEVICES": daemon["gpu"],
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25.0",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G",
        "MPSD_LEASE": lease["id"],
        TOKEN: lease["env"][TOKEN],
    }
    assert node.get(f"/v1/leases/{lease['id']}").json == lease
    assert node.get("/v1/leases").json["leases"] == [as_listed(lease)]
    assert node.get("/v1/status").json["leases"] == 1
    shown = gpu(node, int(lease["daemon"][-1]))
    assert (shown["threads_granted"], shown["memory_granted"], shown["clients"]) == (25.0, 2 * GIB, 1)


class TestCapacity:
    """A request that does not fit is refused, and the refusal states the limiting number."""

    def test_memory(self, node: Node) -> None:
        """Memory is summed too, and the reserve stays free."""
        granted(admit(node, threads=10, memory="70GiB", gpu="0"))
        refused(admit(node, threads=10, memory="10GiB", gpu="0"), 409, "does_not_fit", "memory")
        granted(admit(node, threads=10, memory="9.5GiB", gpu="0"))

    def test_clients(self, node: Node) -> None:
        """MPS admits 48 clients on a GPU with this driver; mpsd keeps one place for its own canary."""
        for _ in range(47):
            granted(admit(node, threads=0.1, memory="1MiB", gpu="0"))
        refused(admit(node, threads=0.1, memory="1MiB", gpu="0"), 409, "does_not_fit", "clients")
        assert (gpu(node, 0)["clients"], gpu(node, 0)["clients_max"]) == (47, 48)

    def test_64_callers_at_once(self, node: Node) -> None:
        """Concurrent requests are granted exactly the capacity of the node, and every request gets an answer."""
        with ThreadPoolExecutor(64) as pool:
            answers = list(pool.map(lambda _: admit(node, threads=10, memory="1GiB"), range(64)))
        assert sorted(answer.status for answer in answers) == [201] * 20 + [409] * 44
        assert {answer.json["code"] for answer in answers if answer.status == 409} == {"does_not_fit"}
        assert len({answer.json["id"] for answer in answers if answer.status == 201}) == 20
        assert [gpu(node, index)["threads_granted"] for index in (0, 1)] == [100.0, 100.0]


class TestPlacement:
    """The choice of the GPU for a request."""

    def test_named_gpu(self, node: Node) -> None:
        """A GPU is named by index, by UUID, or by the start of its UUID."""
        first, second = (each["uuid"] for each in node.get("/v1/gpus").json["gpus"])
        for name, meant in (("0", first), ("1", second), (first, first), (second, second)):
            assert granted(admit(node, threads=1, memory="1MiB", gpu=name))["gpus"] == [meant]
        # These UUIDs differ in their last digit only.
        refused(admit(node, threads=1, memory="1MiB", gpu=second[:-1]), 422, "invalid_request", "gpu")

    @pytest.mark.parametrize("name", ["2", "-1", "GPU-", "GPU-ffffffff", "", "all"])
    def test_gpu_that_is_not_there(self, node: Node, name: str) -> None:
        """A name that no GPU has is refused, and the hint has the names of the node's GPUs."""
        answer = admit(node, threads=1, memory="1MiB", gpu=name)
        refused(answer, 422, "invalid_request", "gpu")
        assert "0 (gpu0), 1 (gpu1)" in answer.json["hint"]

    def test_spread(self, make_node: Start) -> None:
        """With `spread`, which a reload applies, the emptiest GPU comes first."""
        node = make_node(config="").start()
        assert [granted(admit(node, threads=10, memory="20GiB"))["daemon"] for _ in range(2)] == ["gpu0", "gpu0"]
        assert node.reload('[admission]\nplacement = "spread"\n')["applied"] == ["admission.placement"]
        assert [granted(admit(node, threads=10, memory="10GiB"))["daemon"] for _ in range(6)] == [
            *["gpu1"] * 4,
            "gpu0",
            "gpu1",
        ]


def test_more_than_the_daemon_gives(make_node: Start) -> None:
    """A request above a configured default limit is refused by policy."""
    config = '[limits]\nactive_thread_percentage = 50\npinned_device_mem_limit = "4GiB"\n'
    node = make_node(simulate=1, config=config).start()
    limit = "limits.pinned_device_mem_limit"
    answer = admit(node, threads=10, memory="5GiB")
    refused(answer, 403, "exceeds_daemon_limit", limit)
    assert limit in answer.json["hint"]
    refused(admit(node, threads=60, memory="1GiB"), 403, "exceeds_daemon_limit", "limits.active_thread_percentage")
    granted(admit(node, threads=50, memory="4GiB"))
    node.reload(config.replace("4GiB", "5GiB"))
    wait_until(lambda: node.daemons()["gpu0"]["limits"]["pinned_device_mem_limit"] == 5 * GIB, what="the new limit")
    granted(admit(node, threads=10, memory="5GiB"))


class TestRequestId:
    """A request that is sent again with its request_id."""

    def test_same_request(self, node: Node) -> None:
        """The same request_id returns the same lease, and takes no resources twice."""
        first = granted(admit(node, threads=60, memory="1GiB", request_id="once", gpu="0"))
        again = granted(admit(node, threads=60, memory="1GiB", request_id="once", gpu="0"))
        assert first == again
        other = granted(admit(node, threads=10, memory="1GiB", request_id="twice", gpu="0"))
        assert other["id"] != first["id"]
        assert gpu(node, 0)["threads_granted"] == 70.0

    @needs_root
    def test_another_request(self, node: Node) -> None:
        """A request_id that was used for another request is refused, naming the difference. The wait may differ."""
        asked = {"threads": 60, "memory": "1GiB", "request_id": "once", "gpu": "0"}
        first = granted(admit(node, **asked))
        assert granted(admit(node, **asked, wait=5))["id"] == first["id"]
        assert granted(admit(node, **{**asked, "memory": 1024**3, "gpu": first["gpus"][0]}))["id"] == first["id"]
        other = {**asked, "threads": 50, "memory": "2GiB", "gpu": "1", "ttl": 60, "name": "x", "stop": "sigterm"}
        detail = refused(admit(node, **other), 422, "request_id_reused", "request_id")
        assert first["id"] in detail
        for name in ("threads", "memory", "gpu", "ttl", "name", "stop"):
            assert f"{name} was " in detail
        assert node.events("lease_refused", code="request_id_reused")
        assert node.request("DELETE", f"/v1/leases/{first['id']}").status == 204
        assert granted(admit(node, **other))["id"] != first["id"]

    def test_another_holder(self, node: Node) -> None:
        """A request that names another process as the holder is another request."""
        asked = {"threads": 10, "memory": "1GiB", "request_id": "once"}
        first = granted(admit(node, **asked))
        assert granted(admit(node, **asked, pid=os.getpid()))["id"] == first["id"]
        refused(admit(node, **asked, pid=os.getppid()), 422, "request_id_reused", "request_id")

    @needs_root
    def test_of_another_user(self, node: Node) -> None:
        """A request_id belongs to its user: no other user gets the lease by guessing it."""
        mine = granted(admit(node, threads=10, memory="1GiB", request_id="once"))
        with calling(node.socket, uid=NOBODY) as stranger:
            theirs = granted(stranger.admit(threads=10, memory="1GiB", request_id="once"))
            assert theirs["id"] != mine["id"]
            assert theirs["owner"]["uid"] == NOBODY

    def test_at_once(self, node: Node) -> None:
        """The same request gets one lease also when it arrives sixteen times at once."""
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: admit(node, threads=10, memory="1GiB", request_id="race"), range(16)))
        assert len({granted(answer)["id"] for answer in answers}) == 1


@pytest.mark.real_daemon(555)
@pytest.mark.real_daemon(470)
@pytest.mark.thorough
def test_client_priority_after_an_upgrade(make_node: Start, short_tmp: Path) -> None:
    """A control daemon may have a command that the one before lacked: its program was replaced while mpsd ran."""
    driver = short_tmp / "driver"
    driver.write_text(str(real_daemons()[470]))
    node = make_node(simulate=1, control=program(short_tmp / "control", f'exec "$(cat {driver})" "$@"')).start()
    refused(admit(node, threads=10, memory="1GiB", client_priority=1), 422, "invalid_request", "client_priority")
    driver.write_text(str(real_daemons()[555]))
    pid = node.daemons()["gpu0"]["pid"]
    assert node.request("POST", "/v1/daemons/gpu0/restart").status == 202
    next_ready(node, "gpu0", pid)
    assert granted(admit(node, threads=10, memory="1GiB", client_priority=1))["client_priority"] == 1


@pytest.mark.parametrize("real", branches(470, 555))
def test_client_priority(make_node: Start, real: RealDaemon) -> None:
    """The priority is in the environment of the lease's clients. On a driver without priorities the refusal says so."""
    node = make_node(simulate=1, control=real.control).start()
    answer = admit(node, threads=10, memory="1GiB", client_priority=1)
    if real.branch < 535:
        detail = refused(answer, 422, "invalid_request", "client_priority")
        assert detail.endswith("this driver has no priority of clients: 535 and newer have")
        assert granted(admit(node, threads=10, memory="1GiB"))["client_priority"] is None
        return
    lease = granted(answer)
    assert lease["client_priority"] == 1
    assert lease["env"]["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    plain = granted(admit(node, threads=10, memory="1GiB"))
    assert "CUDA_MPS_CLIENT_PRIORITY" not in plain["env"]
    refused(admit(node, threads=10, memory="1GiB", client_priority=2), 422, "invalid_request", "client_priority")


class TestEnd:
    """The ends of a lease."""

    @pytest.mark.parametrize("end", [Caller.end, Caller.kill])
    def test_holder_is_gone(self, node: Node, end: Any) -> None:
        """A lease ends when the process that requested it ends in any manner, and its share is free again."""
        with calling(node.socket) as holder:
            lease = granted(holder.admit(threads=100, memory="1GiB", gpu="0"))
            assert lease["owner"]["pid"] == holder.pid
            refused(admit(node, threads=1, memory="1GiB", gpu="0"), 409, "does_not_fit", "threads")
            end(holder)
            ended = wait_until(
                lambda: (found := node.get(f"/v1/leases/{lease['id']}").json)["state"] == "ended" and found,
                what="the lease to end with its holder",
            )
        assert ended["because"] == f"its holder, pid {holder.pid}, has exited"
        assert ended["ended"] is not None
        assert node.get("/v1/leases").json["leases"] == []
        granted(admit(node, threads=100, memory="1GiB", gpu="0"))

    def test_release(self, node: Node) -> None:
        """The owner of a lease can release it, once or twice; a lease that never existed is not found."""
        lease = granted(admit(node, threads=100, memory="1GiB", gpu="0"))
        path = f"/v1/leases/{lease['id']}"
        answer = node.request("DELETE", path)
        assert (answer.status, answer.body) == (204, b"")
        ended = node.get(path).json
        assert (ended["state"], ended["because"]) == ("ended", f"uid {os.geteuid()} released it")
        assert node.request("DELETE", path).status == 204
        assert node.get(path).json == ended
        refused(node.request("DELETE", "/v1/leases/lease-0000000000"), 404, "not_found")
        refused(node.get("/v1/leases/lease-0000000000"), 404, "not_found")
        granted(admit(node, threads=100, memory="1GiB", gpu="0"))

    def test_process_that_connected_is_gone(self, node: Node) -> None:
        """A caller whose process has ended gets no lease, though another process holds its connection."""
        with socket.socket(socket.AF_UNIX) as connection:
            program = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).connect(sys.argv[2])"
            number = connection.fileno()
            subprocess.run(
                [sys.executable, "-I", "-c", program, str(number), str(node.socket)],
                pass_fds=[number],
                check=True,
                timeout=10,
            )
            body = b'{"threads": 10, "memory": "1GiB"}'
            connection.sendall(
                b"POST /v1/leases HTTP/1.1\r\nHost: mpsd\r\nConnection: close\r\nContent-Length: 33\r\n\r\n" + body
            )
            answer = connection.makefile("rb").read().decode()
        assert answer.startswith("HTTP/1.1 403 ")
        assert '"peer_unknown"' in answer
        assert node.get("/v1/leases").json["leases"] == []


class TestHolder:
    """The process whose life a lease is bound to."""

    def test_process_that_is_not_there(self, node: Node) -> None:
        """A pid that no process has is refused."""
        with calling(node.socket) as gone:
            gone.kill()
        refused(admit(node, threads=10, memory="1GiB", pid=gone.pid), 422, "invalid_request", "pid")

    @needs_root
    def test_another_user_s(self, node: Node) -> None:
        """A user can neither bind a lease to another user's process nor end another user's lease; root can do both."""
        mine = granted(admit(node, threads=10, memory="1GiB"))
        with calling(node.socket, uid=NOBODY) as stranger:
            refused(stranger.admit(threads=10, memory="1GiB", pid=os.getpid()), 403, "not_permitted")
            refused(stranger.request("DELETE", f"/v1/leases/{mine['id']}"), 403, "not_permitted")
            assert node.get(f"/v1/leases/{mine['id']}").json["state"] == "granted"

            theirs = granted(stranger.admit(threads=10, memory="1GiB"))
            assert (theirs["owner"]["uid"], theirs["owner"]["pid"]) == (NOBODY, stranger.pid)
            for_them = granted(admit(node, threads=10, memory="1GiB", pid=stranger.pid))
            assert for_them["owner"]["pid"] == stranger.pid
            assert node.request("DELETE", f"/v1/leases/{theirs['id']}").status == 204
            assert stranger.request("GET", f"/v1/leases/{theirs['id']}").json["because"] == "uid 0 revoked it"
            own = granted(stranger.admit(threads=10, memory="1GiB"))
            assert stranger.request("DELETE", f"/v1/leases/{own['id']}").status == 204

    @needs_root
    def test_user_who_cannot_reach_the_daemon(self, make_node: Start) -> None:
        """A user without access to the pipe directory would run without MPS, so it is refused."""
        node = make_node(simulate=1, config='[daemon]\nusers = "one"\n')
        node.start()
        node.root.chmod(0o700)
        # The process reaches mpsd's socket because its working directory already is there.
        with calling("mpsd.sock", uid=NOBODY, cwd=node.root / "run") as stranger:
            answer = stranger.admit(threads=10, memory="1GiB")
            detail = refused(answer, 403, "not_permitted")
            assert f"uid {NOBODY} cannot reach the control daemons: it may not traverse {node.root}" in detail
            assert f"chmod o+x {node.root}" in answer.json["hint"]
            assert node.get("/v1/leases").json["leases"] == []
            mine = granted(admit(node, threads=10, memory="1GiB"))  # root may traverse every directory
            node.root.chmod(0o711)
            # A control daemon serves one uid at a time, so the other uid has to wait.
            refused(stranger.admit(threads=10, memory="1GiB"), 409, "does_not_fit", "user")
            node.request("DELETE", f"/v1/leases/{mine['id']}")
            granted(stranger.admit(threads=10, memory="1GiB"))


BAD_BODIES = [
    ({}, "threads"),
    ({"threads": 10}, "memory"),
    ({"threads": 150, "memory": "1GiB"}, "active_thread_percentage"),
    ({"threads": 0.01, "memory": "1GiB"}, "active_thread_percentage"),
    ({"threads": "25", "memory": "1GiB"}, "threads"),
    ({"threads": 10, "memory": "10T"}, "pinned_device_mem_limit"),
    ({"threads": 10, "memory": 0}, "pinned_device_mem_limit"),
    ({"threads": 10, "memory": True}, "memory"),
    ({"threads": 10, "memory": 2**64}, "pinned_device_mem_limit"),
    ({"fraction": 1.5}, "fraction"),
    ({"fraction": 0.5, "threads": 10}, "fraction"),
    ({"threads": 10, "memory": "1GiB", "gpuu": "0"}, None),
    ({"threads": 10, "memory": "1GiB", "pid": 0}, "pid"),
    ({"threads": 10, "memory": "1GiB", "pid": 2**40}, "pid"),
    ({"threads": 10, "memory": "1GiB", "labels": {"a b": "c"}}, "labels"),
    ({"threads": 10, "memory": "1GiB", "labels": {"a": 1}}, "labels"),
    ({"threads": 10, "memory": "1GiB", "name": "\x1b[2J"}, "name"),
    ({"threads": 10, "memory": "1GiB", "request_id": ""}, "request_id"),
    ([], None),
    (b"", "threads"),
    (b"{", None),
    (b"\xff\xfe", None),
    (b'{"threads": 1e999, "memory": "1GiB"}', "threads"),
    (b'{"threads": NaN, "memory": "1GiB"}', None),
    (b'{"gpu": 1, "labels": ' + 5000 * b"[", "gpu"),
    (b'{"gpu": 1, no json', "gpu"),
    (b'{"gpu": 1, "name": "\xff"}', "gpu"),
]


@pytest.mark.parametrize(("body", "limit"), BAD_BODIES)
def test_bad_body(node: Node, body: object, limit: str | None) -> None:
    """An invalid request is refused with the field that is wrong, and nothing is granted."""
    refused(node.request("POST", "/v1/leases", body), 422, "invalid_request", limit)
    assert node.get("/v1/leases").json["leases"] == []
