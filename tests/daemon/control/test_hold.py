"""An operator holds a control daemon: nobody is let in, nothing is stopped, and that outlives mpsd."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.daemon.conftest import Start
from tests.daemon.helpers import branches, is_running, kill, stopped
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon

SMALL = {"threads": 10, "memory": "1GiB", "gpu": "0"}


def operate(node: Node, verb: str) -> Any:
    """Have an operation done, and return it."""
    answer = node.request("POST", f"/v1/daemons/gpu0/{verb}")
    assert answer.status == 202, answer.body
    assert node.get(f"/v1/operations/{answer.json['id']}").json == answer.json
    return answer.json


@pytest.mark.parametrize("real", branches())
def test_hold_and_resume(make_node: Start, real: RealDaemon) -> None:
    """While it is held nobody is let in, and whoever is there stays; afterwards those who wait are let in at once."""
    node = make_node(simulate=2, control=real.control, config="").start()
    before = node.daemons()
    lease = node.request("POST", "/v1/leases", SMALL).json["id"]
    done = operate(node, "hold")
    assert (done["state"], done["verb"], done["daemon"]) == ("done", "hold", "gpu0")
    held = node.daemons()["gpu0"]
    assert (held["state"], held["pid"]) == ("held", before["gpu0"]["pid"])
    assert f"uid {os.geteuid()} holds it" in held["because"]
    assert "mpsctl resume gpu0" in held["hint"]
    assert node.get("/readyz").status == 503

    refused = node.request("POST", "/v1/leases", SMALL)
    assert (refused.status, refused.json["code"], refused.json["limit"]) == (409, "daemon_not_ready", "hold")
    assert f"uid {os.geteuid()} holds it" in refused.json["detail"]
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
    """What does not undo it."""

    def test_any_death(self, make_node: Start) -> None:
        """Neither mpsd's death nor the control daemon's; and an operator's word does."""
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
        assert node.request("POST", "/v1/leases", SMALL).json["limit"] == "hold"
        operate(node, "resume")
        node.end()
        node.start()
        assert node.wait_for_state("gpu0", "ready")

    def test_before_it_answers(self, make_node: Start) -> None:
        """A daemon that does not answer is held once it does."""
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
        """A file that cannot be understood may have said hold: it holds, and says so, until somebody resumes it."""
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
        """Where it cannot be stored it is refused, and nothing has changed."""
        node = make_node(simulate=1).start()
        path = node.root / "state" / "gpu0.intention.json"
        path.mkdir()
        refused = node.request("POST", "/v1/daemons/gpu0/hold")
        assert (refused.status, refused.json["code"]) == (507, "storage")
        assert node.daemons()["gpu0"]["state"] == "ready"
        path.rmdir()
        operate(node, "hold")
        assert node.daemons()["gpu0"]["state"] == "held"


@pytest.mark.real_daemon(535)
def test_by_mpsctl(make_node: Start) -> None:
    """The same by hand: one daemon, or all of them."""
    node = make_node(simulate=2).start()
    done = node.mpsctl("hold", "--all")
    assert done.returncode == 0, done.stderr
    assert [each["state"] for each in node.daemons().values()] == ["held", "held"]
    assert node.mpsctl("status").returncode == 1
    assert node.mpsctl("resume", "gpu0").returncode == 0
    assert [each["state"] for each in node.daemons().values()] == ["ready", "held"]
    assert node.mpsctl("resume").returncode == 2
    assert node.mpsctl("hold", "gpu7").returncode == 1
