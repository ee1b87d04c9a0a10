"""An operator holds a control daemon: no lease is granted, nothing stops, and the hold outlives mpsd."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mpsd.core import health
from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import branches, is_running, kill, stopped
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon

pytestmark = pytest.mark.thorough

SMALL = {"threads": 10, "memory": "1GiB", "gpu": "0"}


def operate(node: Node, verb: str) -> Any:
    answer = node.request("POST", f"/v1/daemons/gpu0/{verb}")
    assert answer.status == 202, answer.body
    assert node.get(f"/v1/operations/{answer.json['id']}").json == answer.json
    return answer.json


@pytest.mark.parametrize("real", branches(470, 555))
def test_hold_and_resume(make_node: Start, real: RealDaemon) -> None:
    """While it is held no lease is granted and clients stay; afterwards the waiting requests are granted at once."""
    node = make_node(simulate=2, control=real.control, config="").start()
    before = node.daemons()
    lease = node.request("POST", "/v1/leases", SMALL).json["id"]
    done = operate(node, "hold")
    assert (done["state"], done["verb"], done["daemon"]) == ("done", "hold", "gpu0")
    held = node.daemons()["gpu0"]
    assert (held["state"], held["pid"]) == ("held", before["gpu0"]["pid"])
    assert node.get("/readyz").status == 503

    refused = node.request("POST", "/v1/leases", SMALL)
    assert (refused.status, refused.json["code"], refused.json["limit"]) == (409, "daemon_not_ready", "hold")
    assert node.request("POST", "/v1/leases", {**SMALL, "gpu": "1"}).status == 201
    assert node.get(f"/v1/leases/{lease}").json["state"] == "granted"

    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(node.request, "POST", "/v1/leases", {**SMALL, "wait": 30})
        wait_until(lambda: node.events("lease_waits"), what="a request to wait")
        operate(node, "resume")
        assert waits.result(timeout=10).status == 201
    assert node.daemons()["gpu0"]["state"] == "ready"
    assert node.get("/readyz").status == 200


@pytest.mark.real_daemon(535)
class TestOutlives:
    """Events that do not undo a hold."""

    def test_any_death(self, make_node: Start) -> None:
        """A hold outlives mpsd and the control daemon; only an operator's command ends it."""
        node = make_node(simulate=1).start()
        operate(node, "hold")
        node.end(signal.SIGKILL)
        node.start(ready=False)
        pid = node.wait_for_state("gpu0", "held")["pid"]
        kill(pid)
        wait_until(
            lambda: (found := node.daemons()["gpu0"])["state"] == "held" and found["pid"] not in {None, pid},
            what="the next one to be held",
        )
        # Neither daemon was ready for a moment: the answer and the hold are one move.
        moves = [(each["state"], each["on"]) for each in node.events("daemon_state", daemon="gpu0")]
        adopted, started, held = ("starting", "adopted"), ("starting", "started"), ("held", "verified")
        ready, by_hand = ("ready", "verified"), ("held", "hold")
        assert moves == [started, ready, by_hand, adopted, held, ("down", "died"), started, held]
        assert node.request("POST", "/v1/leases", SMALL).json["limit"] == "hold"
        operate(node, "resume")
        node.end()
        node.start()
        assert node.wait_for_state("gpu0", "ready")

    def test_before_it_answers(self, make_node: Start) -> None:
        """A daemon that does not answer yet is held once it does."""
        node = make_node(simulate=1, config="[daemon]\nanswer_deadline = 0.7\nprobe_interval = 0.5\n").start()
        pid = node.daemons()["gpu0"]["pid"]
        with stopped(pid):
            node.wait_for_state("gpu0", "unresponsive")
            operate(node, "hold")
            assert node.daemons()["gpu0"]["state"] == "unresponsive"
        node.wait_for_state("gpu0", "held")
        assert is_running(pid)

    @pytest.mark.parametrize("damaged", [b"hol", b"\xff\xff\xff\xff"])
    def test_file_that_is_damaged(self, make_node: Start, damaged: bytes) -> None:
        """A damaged file may have contained a hold: the daemon is held, and says so, until an operator resumes it."""
        node = make_node(simulate=1).start()
        operate(node, "hold")
        node.end()
        path = node.root / "state" / "gpu0.intention.json"
        path.write_bytes(path.read_bytes().replace(b"hold", damaged))
        node.start(ready=False)
        assert "cannot be parsed" in node.wait_for_state("gpu0", "held")["because"]
        operate(node, "resume")
        node.wait_for_state("gpu0", "ready")

    def test_nowhere_to_keep_it(self, make_node: Start) -> None:
        """A hold that cannot be stored is refused, and changes nothing."""
        node = make_node(simulate=1).start()
        path = node.root / "state" / "gpu0.intention.json"
        path.mkdir()
        refused = node.request("POST", "/v1/daemons/gpu0/hold")
        assert (refused.status, refused.json["code"]) == (507, "storage")
        assert node.daemons()["gpu0"]["state"] == "ready"
        path.rmdir()
        operate(node, "hold")
        assert node.daemons()["gpu0"]["state"] == "held"


class TestReason:
    """The operator's reason for a hold."""

    @pytest.mark.thorough
    def test_it_lasts(self, make_node: Start) -> None:
        """Every refusal states the reason, also from the next mpsd."""
        node = make_node(simulate=1).start()
        for verb, reason in (("hold", "a new fan"), ("drain", "driver 570, until 17:00"), ("drain", "ünïcode")):
            answer = node.request("POST", f"/v1/daemons/gpu0/{verb}", {"reason": reason})
            assert answer.status == 202
            for number in (None, signal.SIGKILL, signal.SIGTERM):
                if number is not None:
                    node.end(number)
                    node.start(ready=False)
                    node.wait_for_state("gpu0", {"hold": "held", "drain": "draining"}[verb])
                refused = node.request("POST", "/v1/leases", SMALL).json
                assert f" ({reason})" in refused["detail"]
                assert f" ({reason})" in node.daemons()["gpu0"]["because"]
                (gpu,) = node.get("/v1/gpus").json["gpus"]
                assert f" ({reason})" in gpu["refused"]
        node.request("POST", "/v1/daemons/gpu0/resume")
        node.wait_for_state("gpu0", "ready")
        assert node.get("/v1/gpus").json["gpus"][0]["refused"] is None

    def test_after_a_restart(self, make_node: Start) -> None:
        """A daemon that was held before a restart is held after it, for the same reason."""
        node = make_node(simulate=1).start()
        node.request("POST", "/v1/daemons/gpu0/hold", {"reason": "a new fan"})
        assert node.mpsctl("restart", "gpu0").returncode == 0
        held = node.wait_for_state("gpu0", "held")
        assert "(a new fan)" in held["because"]

    @pytest.mark.parametrize("reason", ["a\nb", "\x1b[2J", "\u202e", "x" * 201, 7, "\ud800"])
    def test_what_is_no_reason(self, make_node: Start, reason: object) -> None:
        """A reason is one printable line of at most 200 characters; anything else is refused and changes nothing."""
        node = make_node(simulate=1).start()
        for verb in ("hold", "drain", "restart"):
            refused = node.request("POST", f"/v1/daemons/gpu0/{verb}", {"reason": reason})
            assert (refused.status, refused.json["code"]) == (422, "invalid_request")
        assert node.daemons()["gpu0"]["state"] == "ready"

    @needs_root
    def test_hints_by_role(self, make_node: Start) -> None:
        """A hint is an operator's command for operators, and a remaining action for others, also in a refusal."""
        node = make_node(simulate=1, config='[roles]\noperators = ["1001"]\n').start()
        operate(node, "hold")
        found = {}
        for uid in (1001, 1002):
            with calling(node.socket, uid=uid) as caller:
                status = caller.request("GET", "/v1/status").json
                (daemon,) = caller.request("GET", "/v1/daemons").json["daemons"]
                hints = {each["kind"]: each["hint"] for each in status["reasons"] + status["warnings"]}
                assert status["daemons"][0]["hint"] == daemon["hint"] == hints["hold"]
                for wait in (0, 0.1):
                    refused = caller.request("POST", "/v1/leases", {**SMALL, "wait": wait})
                    assert (refused.status, refused.json["hint"]) == (409, hints["hold"])
                found[uid] = hints
        assert found[1001]["hold"] == "resume admission: mpsctl resume gpu0"
        assert "mpsctl reload" in found[1001]["not_closed"]
        assert found[1002]["hold"] == health.REFUSED_HINT
        assert "mpsctl run" in found[1002]["not_closed"]
        assert not any("mpsctl resume" in hint or "mpsctl reload" in hint for hint in found[1002].values())


def test_drained(make_node: Start) -> None:
    """A daemon that drains and one that has been drained are shown as different states."""
    node = make_node(simulate=1).start()
    lease = node.request("POST", "/v1/leases", SMALL).json["id"]
    operation = node.request("POST", "/v1/daemons/gpu0/drain", {}).json["id"]
    assert (node.daemons()["gpu0"]["state"], node.daemons()["gpu0"]["drained"]) == ("draining", False)
    assert re.search(r"^gpu0 +draining ", node.mpsctl("status").stdout, re.MULTILINE)
    node.request("DELETE", f"/v1/leases/{lease}")
    wait_until(lambda: node.get(f"/v1/operations/{operation}").json["state"] == "done", what="the drain to be done")
    found = wait_until(lambda: (each := node.daemons()["gpu0"])["drained"] and each, what="it to be drained")
    assert found["state"] == "draining"
    assert re.search(r"^gpu0 +drained ", node.mpsctl("status").stdout, re.MULTILINE)


@pytest.mark.real_daemon(535)
def test_by_mpsctl(make_node: Start) -> None:
    """mpsctl holds one daemon, or all of them."""
    node = make_node(simulate=2).start()
    done = node.mpsctl("hold", "--all")
    assert done.returncode == 0, done.stderr
    assert [each["state"] for each in node.daemons().values()] == ["held", "held"]
    assert node.mpsctl("status").returncode == 1
    assert node.mpsctl("resume", "gpu0").returncode == 0
    assert [each["state"] for each in node.daemons().values()] == ["ready", "held"]
    assert node.mpsctl("resume").returncode == 2
    assert node.mpsctl("hold", "gpu7").returncode == 1
