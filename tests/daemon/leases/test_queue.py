"""The queue as callers see it: which requests wait, for which limit, in which order, and how a wait ends."""

import os
import signal
import time
from typing import Any, Final

import pytest

from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, stopped
from tests.daemon.leases.conftest import MakeLine
from tests.daemon.leases.line import Call, Line
from tests.harness import wait_until
from tests.node import Answer, Node

pytestmark = pytest.mark.real_daemon(555)

ANN, BOB, CAT = 2001, 2002, 2003
"""Users without privileges."""

SMALL: Final[dict[str, Any]] = {"threads": 1, "memory": "1GiB", "gpu": "0"}


@pytest.fixture
def line(many: Node, make_line: MakeLine) -> Line:
    """Return a line in front of a node whose daemons serve many users, where that is possible."""
    return make_line(many)


def refused(answer: Answer, status: int, code: str, limit: str | None) -> str:
    problem = answer.json
    assert (answer.status, problem["code"], problem["limit"]) == (status, code, limit), problem
    assert problem["hint"]
    detail: str = problem["detail"]
    return detail


def fill(line: Line, **most: Any) -> Any:
    """Take most of the first GPU, as root."""
    return line.granted(**{"threads": 100, "memory": "1GiB", "gpu": "0", **most})


def ids(leases: list[Any]) -> list[str]:
    return [each["id"] for each in leases]


class TestWaiting:
    """A wait and its end."""

    @pytest.mark.parametrize("wait", [3600, 0.5e9, None])
    def test_granted_when_there_is_room(self, line: Line, wait: float | None) -> None:
        """A waiting request is answered when its share is free, with the lease that waited in the queue."""
        first = fill(line)
        call, lease = line.waits(threads=50, memory="1GiB", gpu="0", wait=wait)
        assert (lease["shares"], lease["env"], lease["granted"], lease["gpus"]) == ([], {}, None, [])
        assert line.node.get("/v1/status").json["waiting"] == 1
        assert not call.answered
        line.release(first)
        answer = call.answer()
        assert (answer.status, answer.json["id"], answer.json["state"]) == (201, lease["id"], "granted")
        assert answer.json["wait"] is None
        assert answer.json == line.lease(lease)
        assert line.node.get("/v1/status").json["waiting"] == 0

    @pytest.mark.parametrize(
        ("taken", "asked", "limit"),
        [
            ({"threads": 90}, {"threads": 20}, "threads"),
            ({"threads": 1, "memory": "70GiB"}, {"memory": "10GiB"}, "memory"),
            ({"threads": 50, "processes": 40}, {"processes": 9}, "clients"),
        ],
    )
    def test_refused_in_the_end(self, line: Line, taken: dict[str, Any], asked: dict[str, Any], limit: str) -> None:
        """A wait that times out is answered with the limit that it waited for, and leaves the queue."""
        fill(line, **taken)
        answer = line.ask(**{**SMALL, **asked, "wait": 0.01})
        assert "timed out in the queue" in refused(answer, 409, "does_not_fit", limit)
        assert line.queue() == []

    def test_no_waiting(self, line: Line) -> None:
        """A request without `wait` never enters the queue."""
        fill(line)
        refused(line.ask(**SMALL), 409, "does_not_fit", "threads")
        refused(line.ask(**SMALL, wait=0), 409, "does_not_fit", "threads")
        assert line.queue() == []

    def test_becomes_impossible(self, make_node: Start, make_line: MakeLine) -> None:
        """When a reload leaves no GPU that could ever grant a waiting request, only that request is refused at once."""
        line = make_line(make_node(simulate=1, config="[admission]\n").start())
        first = fill(line, threads=1, memory="79GiB")
        large, _ = line.waits(threads=1, memory="78GiB", wait=None)
        small, _ = line.waits(threads=1, memory="10GiB", wait=None)
        line.node.reload('[admission]\nmemory_reserve = "10GiB"\n')
        refused(large.answer(), 422, "never_fits", "memory")
        line.release(first)
        assert small.answer().status == 201

    def test_mpsd_stops(self, make_node: Start, make_line: MakeLine) -> None:
        """When mpsd stops, every waiting caller gets an answer that says so, instead of a dead connection."""
        line = make_line(make_node(simulate=1).start())
        fill(line)
        calls = [line.waits(**SMALL)[0], line.waits(**SMALL, request_id="mine")[0]]
        assert line.node.end() == 0
        for call in calls:
            refused(call.answer(), 503, "stopping", None)


class TestWhatItWaitsFor:
    """A waiting lease states its position and the limit that it waits for."""

    def test_threads_memory_and_clients(self, line: Line) -> None:
        """The limit is the one that would refuse the request."""
        fill(line, threads=90, memory="70GiB", processes=40)
        line.waits(threads=20, memory="1GiB", gpu="0")
        line.waits(threads=1, memory="20GiB", gpu="0")
        line.waits(threads=1, memory="1GiB", gpu="0", processes=9)
        assert [each["wait"]["position"] for each in line.queue()] == [1, 2, 3]
        assert [each["wait"]["waits_for"] for each in line.queue()] == ["threads", "memory", "clients"]
        assert all(each["wait"]["because"] for each in line.queue())

    @pytest.mark.real_daemon(535)
    @needs_root
    def test_user(self, one: Node, make_line: MakeLine) -> None:
        """On a daemon that serves one uid at a time, another uid waits until the first has left, room or not."""
        line = make_line(one)
        first = line.granted(uid=ANN, **SMALL)
        call, lease = line.waits(uid=BOB, **SMALL)
        assert lease["wait"]["waits_for"] == "user"
        refused(line.ask(uid=BOB, **SMALL), 409, "does_not_fit", "user")
        # The user that has the GPU may not prolong its turn while another user waits.
        refused(line.ask(uid=ANN, **SMALL), 409, "does_not_fit", "turn")
        # No other user is on the other GPU.
        line.granted(uid=BOB, threads=1, memory="1GiB")
        line.release(first)
        assert call.answer().json["id"] == lease["id"]

    def test_health(self, make_node: Start, make_line: MakeLine) -> None:
        """A hung control daemon admits no client; the requests that wait for it are granted when it answers again."""
        line = make_line(make_node(simulate=1, config=BRISK).start())
        with stopped(line.node.daemons()["gpu0"]["pid"]):
            line.node.wait_for_state("gpu0", "unresponsive")
            call, lease = line.waits(**SMALL)
            assert lease["wait"]["waits_for"] == "health"
            refused(line.ask(**SMALL, wait=0.01), 409, "does_not_fit", "health")
            refused(line.ask(**SMALL), 409, "daemon_not_ready", "health")
        assert call.answer().json["id"] == lease["id"]

    @needs_root
    def test_places_of_all(self, line: Line) -> None:
        """A user sees its own position, and who waits before it."""
        fill(line)
        _, first = line.waits(uid=ANN, **SMALL)
        _, lease = line.waits(uid=BOB, **SMALL)
        seen = line.call("GET", "/v1/leases", uid=BOB).answer().json["leases"]
        places = {each["wait"]["position"]: (each["id"], each["owner"]["uid"]) for each in seen if each["wait"]}
        assert places == {1: (first["id"], ANN), 2: (lease["id"], BOB)}


class TestOrder:
    """The order of grants: by priority, then by the user's recent share, then by arrival."""

    def served(self, line: Line, calls: list[Call]) -> list[int]:
        """Serve the waiting calls one by one, each with the whole GPU; return the order of their indices."""
        left, order = dict(enumerate(calls)), []
        while left:
            first = wait_until(lambda: [n for n, call in left.items() if call.answered], what="the next to be served")
            assert len(first) == 1
            order += first
            line.release(left.pop(first[0]).answer().json)
        return order

    def test_priority(self, line: Line) -> None:
        """A higher priority is served before an earlier arrival."""
        first = fill(line)
        calls = [line.waits(threads=100, memory="1GiB", gpu="0", priority=each)[0] for each in (0, -5, 10, 0, 10)]
        assert [each["priority"] for each in line.queue()] == [10, 10, 0, 0, -5]
        line.release(first)
        assert self.served(line, calls) == [2, 4, 0, 3, 1]

    @needs_root
    def test_fairness(self, make_node: Start, make_line: MakeLine, many: Node) -> None:
        """At equal priority, the user with the smaller recent share is served first, however late or seldom it asks."""
        line = make_line(make_node(simulate=1, control=many.control, config=many.config).start())
        begun = time.monotonic()
        line.release(fill(line, uid=BOB))
        moment, since = time.monotonic() - begun, time.monotonic()
        first = fill(line, uid=ANN)
        wait_until(lambda: time.monotonic() - since > 2 * moment, what="Ann to have it for longer than Bob had")
        whole = {"threads": 100, "memory": "1GiB"}
        anns = [line.waits(uid=ANN, **whole)[0] for _ in range(2)]
        bobs, cats = line.waits(uid=BOB, **whole)[0], line.waits(uid=CAT, **whole)[0]
        urgent = line.waits(uid=ANN, **whole, priority=1)[0]
        assert [each["owner"]["uid"] for each in line.queue()] == [ANN, CAT, BOB, ANN, ANN]
        line.release(first)
        # Cat had nothing yet, Bob had a moment, and Ann holds the GPU all this time.
        assert self.served(line, [*anns, bobs, cats, urgent])[:3] == [4, 3, 2]

    def test_back_fill_on_another_gpu(self, line: Line) -> None:
        """Later requests get resources that the queue's head cannot use, and never those that it waits for."""
        fill(line, threads=60)
        _, head = line.waits(threads=80, memory="1GiB", gpu="0")
        late, _ = line.waits(threads=20, memory="1GiB", gpu="0")
        assert line.granted(threads=90, memory="1GiB", gpu="1")["daemon"] == "gpu1"
        assert line.granted(threads=10, memory="1GiB")["daemon"] == "gpu1"
        assert [each["wait"]["waits_for"] for each in line.queue()] == ["threads", "turn"]
        refused(line.ask(threads=20, memory="1GiB", gpu="0"), 409, "does_not_fit", "turn")
        # The head times out, and the next request is no longer held back.
        line.release(head)
        assert late.answer().status == 201


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"threads": 1, "memory": "80GiB"}, (422, "never_fits", "memory")),
        ({"threads": 100, "memory": "1GiB", "processes": 49}, (422, "never_fits", "clients")),
        ({"threads": 1, "memory": "1GiB", "gpus": 3}, (422, "never_fits", "gpus")),
        ({**SMALL, "processes": 20}, (422, "invalid_request", "processes")),
        ({**SMALL, "gpus": 2}, (422, "invalid_request", "gpus")),
        ({**SMALL, "gpu": "2"}, (422, "invalid_request", "gpu")),
    ],
)
@pytest.mark.parametrize("wait", [60, None])
def test_never(line: Line, asked: dict[str, Any], refusal: tuple[int, str, str], wait: float | None) -> None:
    """A request that never fits is refused with the limit, also on a full node, and does not enter the queue."""
    fill(line)
    refused(line.ask(**asked, wait=wait), *refusal)
    assert line.queue() == []


def test_both_or_none(line: Line) -> None:
    """The lease holds nothing until it can have all GPUs, and then has the same share on each."""
    first = fill(line, threads=60, gpu="1")
    call, lease = line.waits(threads=50, memory="3GiB", gpus=2)
    assert (line.gpu(0)["threads_granted"], line.gpu(0)["memory_granted"]) == (0, 0)
    refused(line.ask(threads=50, memory="3GiB", gpus=2), 409, "does_not_fit", "threads")
    line.release(first)
    granted = call.answer().json
    assert granted["id"] == lease["id"]
    assert granted["gpus"] == [share["gpu"] for share in granted["shares"]]
    assert sorted(granted["gpus"]) == [line.gpu(index)["uuid"] for index in (0, 1)]
    for share in granted["shares"]:
        assert share["env"]["CUDA_VISIBLE_DEVICES"] == share["gpu"]
        assert share["env"]["CUDA_MPS_PIPE_DIRECTORY"] == str(line.node.pipe_directory(share["daemon"]))
    assert [line.gpu(index)["threads_granted"] for index in (0, 1)] == [50, 50]
    line.release(granted)
    assert [line.gpu(index)["threads_granted"] for index in (0, 1)] == [0, 0]


class TestTimeToLive:
    """A lease that is not renewed ends when its time to live has passed."""

    def test_expiry_and_renewal(self, line: Line) -> None:
        """A renewed lease outlives one that would have ended later; the share of that one goes to a waiting request."""
        renewed = line.granted(threads=40, memory="1GiB", gpu="0", ttl=0.5)
        expires = line.granted(threads=60, memory="1GiB", gpu="0", ttl=0.6)
        answer = line.call("POST", f"/v1/leases/{renewed['id']}/renew", {"ttl": 3600}).answer()
        assert answer.status == 200
        assert answer.json["expires"] > renewed["expires"]
        call, lease = line.waits(threads=60, memory="1GiB", gpu="0")
        assert lease["expires"] is None
        assert call.answer().json["id"] == lease["id"]
        ended = line.lease(expires)
        assert (ended["state"], ended["because"]) == ("ended", "its time to live of 0.6 s has expired")
        # The holder gets a warning and a notice of the expiry; a holder that renewed in time gets neither.
        told = {each["event"]: each for each in line.node.log() if each["event"].startswith("lease_expir")}
        assert [each["lease"] for each in told.values()] == [expires["id"]] * 2
        assert line.lease(renewed)["state"] == "granted"

    @pytest.mark.parametrize("state", ["waiting", "ended"])
    def test_nothing_to_renew(self, line: Line, state: str) -> None:
        """A lease that holds nothing cannot be renewed."""
        lease = fill(line)
        if state == "ended":
            line.release(lease)
        else:
            _, lease = line.waits(**SMALL)
        answer = line.call("POST", f"/v1/leases/{lease['id']}/renew", {"ttl": 60}).answer()
        refused(answer, 404, "not_found", None)


class TestEnd:
    """The cases in which a place in the queue is lost, or survives."""

    @needs_root
    def test_revoked(self, line: Line) -> None:
        """An administrator can end every lease, granted or waiting, and a waiting caller gets an answer."""
        granted = fill(line, uid=ANN)
        call, lease = line.waits(uid=BOB, **SMALL)
        line.release(lease)
        assert "uid 0 revoked it" in refused(call.answer(), 409, "does_not_fit", None)
        line.release(granted)
        assert line.lease(granted)["because"] == "uid 0 revoked it"

    @needs_root
    def test_released_by_its_owner(self, line: Line) -> None:
        """The owner of a waiting lease can release it over another connection."""
        fill(line)
        call, lease = line.waits(uid=BOB, **SMALL)
        assert line.call("DELETE", f"/v1/leases/{lease['id']}", uid=BOB).answer().status == 204
        assert f"uid {BOB} released it" in refused(call.answer(), 409, "does_not_fit", None)

    def test_caller_hangs_up(self, line: Line) -> None:
        """A caller that disconnects loses its place, and those behind it move up."""
        fill(line)
        call, lease = line.waits(**SMALL)
        _, behind = line.waits(**SMALL)
        call.hang_up()
        assert line.gone(lease)["because"] == "its caller disconnected before the answer was sent"
        assert ids(line.queue()) == [behind["id"]]
        assert line.queue()[0]["wait"]["position"] == 1

    def test_caller_hangs_up_and_comes_back(self, line: Line) -> None:
        """A place with a request_id survives a disconnect: the caller gets the same lease at the same position."""
        first = fill(line)
        call, lease = line.waits(**SMALL, request_id="mine")
        assert lease["request_id"] == "mine"
        line.waits(**SMALL)
        call.hang_up()
        again = line.call("POST", "/v1/leases", {**SMALL, "wait": None, "request_id": "mine", "name": lease["name"]})
        # The answer to a later question about the queue proves that mpsd has noticed the disconnect.
        _, last = line.waits(**SMALL)
        assert ids(line.queue())[0] == lease["id"]
        assert ids(line.queue())[2] == last["id"]
        line.release(first)
        assert again.answer().json["id"] == lease["id"]

    def test_granted_while_away(self, line: Line) -> None:
        """A lease that is granted while its caller is disconnected is there when the caller repeats its request_id."""
        first = fill(line)
        call, lease = line.waits(**SMALL, request_id="mine")
        call.hang_up()
        line.release(first)
        wait_until(lambda: line.lease(lease)["state"] == "granted", what="the lease to be granted")
        assert line.granted(**SMALL, request_id="mine", name=lease["name"])["id"] == lease["id"]

    def test_same_request_twice_at_once(self, line: Line) -> None:
        """Two callers with the same request_id wait for the same lease; when one disconnects, the other keeps it."""
        first = fill(line)
        one, lease = line.waits(**SMALL, request_id="mine")
        two = line.call("POST", "/v1/leases", {**SMALL, "wait": None, "request_id": "mine", "name": lease["name"]})
        three = line.call("POST", "/v1/leases", {**SMALL, "wait": None, "request_id": "mine", "name": lease["name"]})
        assert ids(line.queue()) == [lease["id"]]
        two.hang_up()
        line.release(first)
        assert one.answer().json == three.answer().json == line.lease(lease)
        assert line.gpu(0)["threads_granted"] == 1

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_holder_dies_waiting(self, line: Line, number: signal.Signals) -> None:
        """A place that was requested for another process ends with that process, and the caller gets an answer."""
        fill(line)
        with calling(line.node.socket) as holder:
            call, lease = line.waits(**SMALL, pid=holder.pid)
            os.kill(holder.pid, number)
            refused(call.answer(), 409, "does_not_fit", None)
        assert line.lease(lease)["because"] == f"its holder, pid {holder.pid}, has exited"
        assert line.queue() == []


class TestHowMany:
    """The number of waiting requests and the number of leases are bounded."""

    @pytest.fixture
    def line(self, make_node: Start, make_line: MakeLine) -> Line:
        """Return a line in front of a node with a short queue."""
        return make_line(make_node(simulate=1, config="[admission]\nqueue_length = 20\nleases = 23\n").start())

    def test_queue_length(self, line: Line) -> None:
        """The queue takes its configured number of requests."""
        first = fill(line)
        waiting = [line.waits(**SMALL) for _ in range(20)]
        refused(line.ask(**SMALL, wait=None), 409, "queue_full", "queue")
        assert ids(line.queue()) == [lease["id"] for _, lease in waiting]
        call, left = waiting.pop()
        call.hang_up()
        line.gone(left)
        waiting.append(line.waits(**SMALL))
        line.release(first)
        assert [call.answer().status for call, _ in waiting] == [201] * 20
