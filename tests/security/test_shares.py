"""The part that one user can take of common resources: the queue, reservations, idle GPUs, and lines of the log."""

from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.caller import needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import event
from tests.daemon.leases.line import Line
from tests.harness import wait_until
from tests.real import real_daemons
from tests.security.conftest import MakeLine

pytestmark = [pytest.mark.real_daemon(555), needs_root]

MALLORY, ANN = 2801, 2802
SMALL: Final[dict[str, Any]] = {"threads": 1, "memory": "1GiB"}
MANY: Final = '[daemon]\nusers = "many"\n'


@pytest.fixture
def make(make_node: Start, make_line: MakeLine) -> "Any":
    """Return a maker of nodes whose daemons serve many users, with more configuration, and a line in front."""
    return lambda config, **more: make_line(
        make_node(config=MANY + config, control=real_daemons()[555], **more).start()
    )


@pytest.mark.parametrize("wants", [{"threads": 100}, {"threads": 10, "processes": 47}])
def test_own_leases_in_the_way(make: Any, wants: dict[str, Any]) -> None:
    """A user that holds a little of each GPU, and waits for all of one, withholds neither from others."""
    line: Line = make("[admission]\npatience = 0.1\n")
    mine = [line.granted(uid=MALLORY, **SMALL, gpu=gpu) for gpu in ("0", "1")]
    call, waiting = line.waits(uid=MALLORY, memory="1GiB", **wants)
    for _ in range(3):
        leases = [line.granted(uid=ANN, threads=50, memory="1GiB", gpu=gpu) for gpu in ("0", "1")]
        for each in leases:
            line.release(each)
    assert line.queue()[0]["id"] == waiting["id"]
    line.release(mine[0])
    assert call.answer().json["id"] == waiting["id"]


def test_queue(make: Any) -> None:
    """Requests of disconnected callers count, and one user's share of the queue leaves places to others."""
    line: Line = make("[admission]\nqueue_length = 12\nqueue_per_uid = 10\nhang_ups_per_uid = 100\n", simulate=1)
    line.granted(threads=100, memory="1GiB")
    for number in range(10):
        call, _ = line.waits(uid=MALLORY, **SMALL, request_id=f"r{number}")
        call.hang_up()
    refused = line.ask(uid=MALLORY, **SMALL, wait=None, request_id="more").json
    assert (refused["code"], refused["limit"]) == ("queue_full", "admission.queue_per_uid")
    assert "10 requests waiting" in refused["detail"]
    assert refused["hint"]
    line.waits(uid=ANN, **SMALL)
    line.waits(uid=ANN, **SMALL)
    assert line.ask(uid=ANN, **SMALL, wait=None).json["limit"] == "queue"


def test_what_is_kept_for_those_who_hung_up(make: Any) -> None:
    """A number of one user's requests is kept for disconnected callers, and any further one ends at once."""
    line: Line = make("[admission]\nhang_ups_per_uid = 2\n", simulate=1)
    line.granted(threads=100, memory="1GiB")
    calls = [line.waits(uid=uid, **SMALL, request_id=f"r{n}") for n in range(3) for uid in (MALLORY, ANN)]
    for call, _ in calls:
        call.hang_up()
    for _, lease in calls[4:]:
        assert "admission.hang_ups_per_uid" in line.gone(lease)["because"]
    assert {each["id"] for each in line.queue()} == {lease["id"] for _, lease in calls[:4]}
    again = line.call(
        "POST", "/v1/leases", {**SMALL, "wait": None, "request_id": "r0", "name": calls[0][1]["name"]}, uid=MALLORY
    )
    wait_until(lambda: not again.answered, what="it to stand in its place again")
    call, lease = line.waits(uid=MALLORY, **SMALL, request_id="r9")
    call.hang_up()
    line.waits(uid=ANN, **SMALL)  # by then mpsd has noticed that the other one disconnected
    assert line.lease(lease)["state"] == "waiting"


def test_lines(make: Any) -> None:
    """A user that endlessly requests and releases, or is refused, fills neither the log nor the events."""
    line: Line = make("[api]\nlines_per_uid = 1\n", simulate=1)
    node = line.node
    for _ in range(20):
        lease = line.granted(uid=MALLORY, **SMALL)
        assert line.call("DELETE", f"/v1/leases/{lease['id']}", uid=MALLORY).answer().status == 204
        assert line.ask(uid=MALLORY, threads=1, memory="1000GiB").status == 422
        assert line.lease(lease)["state"] == "ended"  # the API says what the log leaves out
    theirs = line.granted(uid=ANN, **SMALL)
    event(node, "lease_granted", lease=theirs["id"], uid=ANN)
    told = [each for each in node.log() if each.get("uid") == MALLORY]
    assert 10 <= len(told) <= 12
    seen = node.request("GET", "/v1/events").body.decode().splitlines()
    # The control daemon's limits may be verified meanwhile.
    leases = [each for each in seen if '"event":"lease_' in each]
    assert f'"uid":{ANN}' in leases[-1]
    assert Path(node.stderr).read_text().count(f'"uid":{MALLORY}') == len(told)
