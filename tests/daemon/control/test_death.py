"""A control daemon that dies is replaced at once, one that keeps dying becomes failed; other daemons are unaffected."""

import signal
from datetime import datetime
from pathlib import Path

import pytest

from tests.daemon.conftest import Start
from tests.daemon.helpers import is_running, kill, next_ready, program, states
from tests.harness import wait_until
from tests.node import Node

pytestmark = pytest.mark.real_daemon(535)


_SLOW = """
if [ "$1" = -f ] && [ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ]; then
    rm "$CUDA_MPS_PIPE_DIRECTORY"/control*
    sleep 0.3
fi
exec {control} "$@"
"""


def test_daemon_that_takes_its_time(make_node: Start, short_tmp: Path, control: Path) -> None:
    """mpsd waits for a new daemon that has removed the old socket and not bound its own yet."""
    slow = program(short_tmp / "nvidia-cuda-mps-control", _SLOW.format(control=control))
    node = make_node(simulate=1, control=slow).start()
    before = node.daemons()["gpu0"]["pid"]
    kill(before)
    next_ready(node, "gpu0", before)
    assert states(node, "gpu0") == ["starting", "ready", "down", "starting", "ready"]


_DEAF = """
[ "$1" != -f ] || [ -e {heard} ] || {{ touch {heard}; exec sleep 1000; }}
exec {control} "$@"
"""


def test_daemon_that_never_listens(make_node: Start, short_tmp: Path, control: Path) -> None:
    """A daemon that never listens cannot have clients, so mpsd ends it and starts the next one."""
    deaf = program(short_tmp / "nvidia-cuda-mps-control", _DEAF.format(heard=short_tmp / "heard", control=control))
    node = make_node(simulate=1, control=deaf, config="[daemon]\nstart_deadline = 0.5\n").start(ready=False)
    first = node.wait_for_state("gpu0", "starting")["pid"]
    assert next_ready(node, "gpu0", first)["pid"] != first
    assert not is_running(first)
    assert states(node, "gpu0") == ["starting", "unresponsive", "down", "starting", "ready"]
    (silence,) = node.events("daemon_state", state="unresponsive")
    assert "did not listen within" in silence["because"]


_DIES = """
case "$1" in -f) echo started >> {starts} ;; esac
echo "no luck today"
exit 3
"""


class TestCrashLoop:
    """A control program that dies immediately after each start."""

    @pytest.fixture
    def starts(self, short_tmp: Path) -> Path:
        """Return the file in which the control program records each start."""
        return short_tmp / "starts"

    @pytest.fixture
    def node(self, make_node: Start, short_tmp: Path, starts: Path) -> Node:
        control = program(short_tmp / "control", _DIES.format(starts=starts))
        node = make_node(simulate=1, control=control, config="[daemon]\ndeaths = 3\n").start(ready=False)
        node.wait_for_state("gpu0", "failed")
        return node

    def test_it_is_given_up(self, node: Node, starts: Path) -> None:
        """The daemon cools down between starts, then is failed, and its last output is among the reasons."""
        daemon = node.daemons()["gpu0"]
        assert "no luck today" in daemon["because"]
        assert "mpsctl reset gpu0" in daemon["hint"]
        assert daemon["pid"] is None
        assert starts.read_text().count("started") == 3
        assert [death["verdict"] for death in node.events("daemon_death")] == ["at_once", "later", "give_up"]
        assert states(node, "gpu0")[-4:] == ["cooling", "down", "starting", "failed"]
        assert node.events("daemon_state", daemon="gpu0")[-1]["level"] == "error"
        assert node.get("/readyz").status == 503
        refused = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
        assert (refused.status, refused.json["code"]) == (409, "daemon_not_ready")

    def test_only_an_operator_leaves_it(self, node: Node, starts: Path, control: Path) -> None:
        """Neither a restart nor mpsd's death clears the failure; a reset does, and a repaired program then runs."""
        because = node.daemons()["gpu0"]["because"]
        for number in (signal.SIGTERM, signal.SIGKILL):
            node.end(number)
            node.start(ready=False)
            assert node.wait_for_state("gpu0", "failed")["because"] == because
        assert starts.read_text().count("started") == 3

        # The cause still exists: the tally starts from zero, and ends the same way.
        assert node.request("POST", "/v1/daemons/gpu0/reset").status == 202
        wait_until(lambda: starts.read_text().count("started") == 6, what="three more starts")
        node.wait_for_state("gpu0", "failed")

        program(node.control or control, f'exec {control} "$@"')
        answer = node.request("POST", "/v1/daemons/gpu0/reset")
        assert answer.status == 202
        assert answer.json["verb"] == "reset"
        assert node.get(f"/v1/operations/{answer.json['id']}").json == answer.json
        daemon = node.wait_for_state("gpu0", "ready")
        assert is_running(daemon["pid"])
        assert node.get("/readyz").status == 200


def next_death(node: Node, known: int) -> None:
    """Wait until mpsd has reported one more death."""
    wait_until(lambda: len(node.events("daemon_death")) > known, what="its death to be seen")


def test_it_cools_down_whatever_is_asked(make_node: Start) -> None:
    """Requests during the cool-down, such as the end of a lease or a reload, do not shorten it."""
    node = make_node(simulate=1, config="[daemon]\ndeaths = 100\n").start()
    while not [each for each in node.events("daemon_death") if each["delay"] > 1]:
        before = node.wait_for_state("gpu0", "ready")["pid"]
        deaths = len(node.events("daemon_death"))
        kill(before)
        next_death(node, deaths)
    node.reload("[daemon]\ndeaths = 100\n[limits]\nactive_thread_percentage = 50\n")
    node.wait_for_state("gpu0", "ready")
    (*_, death) = node.events("daemon_death")
    (*_, start) = node.events("daemon_state", state="starting")
    waited = datetime.fromisoformat(start["at"]) - datetime.fromisoformat(death["at"])
    assert waited.total_seconds() >= death["delay"] - 0.1  # both times are from the wall clock


def test_program_that_cannot_be_executed(make_node: Start, short_tmp: Path, control: Path) -> None:
    """A control program that disappears, as in an upgrade of the driver, ends neither mpsd nor the running daemons."""
    link = short_tmp / "control"
    link.symlink_to(control)
    node = make_node(control=link, config="[daemon]\ndeaths = 3\nprobe_interval = 0.2\n").start()
    before = node.daemons()
    link.unlink()
    daemon = node.wait_for_state("gpu0", "unresponsive")
    assert str(link) in daemon["because"]
    assert daemon["pid"] == before["gpu0"]["pid"]

    kill(before["gpu1"]["pid"])
    daemon = node.wait_for_state("gpu1", "failed")
    assert "could not be started" in daemon["because"]

    link.symlink_to(control)
    assert node.wait_for_state("gpu0", "ready")["pid"] == before["gpu0"]["pid"]
    node.request("POST", "/v1/daemons/gpu1/reset")
    node.wait_for_state("gpu1", "ready")
