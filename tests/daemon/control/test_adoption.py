"""mpsd stops and starts again without any effect on control daemons: the next mpsd adopts them by evidence."""

import signal

import pytest

from tests.daemon.conftest import Start
from tests.daemon.helpers import LIMITS, branches, by_hand, kill, untouched
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon

_KEPT = ("pid", "limits", "drift", "state")


@pytest.mark.parametrize("real", branches(470))
def test_limits_in_force_without_a_memory_limit(make_node: Start, real: RealDaemon) -> None:
    """Where leases may be lost, a driver without a memory limit is asked for the limits in force, too, at once."""
    node = make_node(simulate=1, control=real.control).start()
    node.end(signal.SIGKILL)
    (node.root / "run" / "leases.db").unlink()
    node.start()
    assert node.events("limits_not_held") == []


@pytest.mark.real_daemon(535)
class TestAway:
    """Changes that happen while mpsd is down."""

    @pytest.fixture
    def node(self, make_node: Start) -> Node:
        return make_node(config=LIMITS).start()

    def test_what_is_kept_and_what_is_proven_again(self, node: Node) -> None:
        """The next mpsd reports each daemon as adopted, verifies every limit, and reports nothing more."""
        before = node.daemons()
        node.end(signal.SIGKILL)
        seen = len(node.log())
        node.start()
        after = node.daemons()
        log = node.log()[seen:]
        for name in before:
            assert [after[name][key] for key in _KEPT] == [before[name][key] for key in _KEPT]
            mine = [line for line in log if line.get("daemon") == name]
            assert [line["event"] for line in mine] == ["daemon_state", "limits_verified", "daemon_state"]
            assert "adopted" in mine[0]["because"]

    def test_grant_before_the_examination(self, make_node: Start) -> None:
        """A grant waits for the examination of what was adopted, and continues as soon as that is over."""
        durations = {"mpsd.daemon.canary.watch._ADOPTED": 0.5}
        config = "[daemon]\nprobe_interval = 60.0\nanswer_deadline = 40.0\n"  # nothing else wakes the grant
        node = make_node(simulate=1, config=config, durations=durations).start()
        node.end(signal.SIGKILL)
        node.start()
        assert node.request("POST", "/v1/leases", {"threads": 1, "memory": "1MiB"}).status == 201

    def test_unwritable_record(self, node: Node) -> None:
        """A control daemon whose record can be neither read nor written is adopted by the kernel's evidence."""
        before = node.daemons()
        node.end(signal.SIGKILL)
        record = node.root / "run" / "gpu0.process.json"
        record.unlink()
        record.mkdir()
        try:
            node.start()
            assert node.daemons()["gpu0"]["pid"] == before["gpu0"]["pid"]
            assert node.events("file_not_stored", daemon="gpu0", file=str(record))
        finally:
            record.rmdir()

    def test_drift(self, node: Node) -> None:
        """A limit that a stranger changed meanwhile is restored on adoption, and the change is reported."""
        node.end(signal.SIGKILL)
        node.ask("gpu1", "set_default_active_thread_percentage 10")
        node.ask("gpu1", "set_default_device_pinned_mem_limit 0 1G")
        node.start()
        assert by_hand(node, "gpu1") == (["50.0"], ["8G"])
        assert node.daemons()["gpu1"]["drift"] == []
        drifts = {line["limit"]: (line["wanted"], line["found"]) for line in node.events("limit_drift", daemon="gpu1")}
        assert drifts == {
            "active_thread_percentage": (50.0, 10.0),
            "pinned_device_mem_limit": (8 << 30, 1 << 30),
        }
        assert len(node.events("limit_drift_ended", daemon="gpu1")) == 1
        assert node.events("limit_drift", daemon="gpu0") == []

    def test_other_limits(self, node: Node) -> None:
        """Limits that were configured meanwhile are set on the running daemons, also if fewer are configured."""
        pids = [each["pid"] for each in node.daemons().values()]
        node.end()
        node.config = '[limits]\nactive_thread_percentage = 12.5\npinned_device_mem_limit = "512MiB"\n'
        node.start()
        assert by_hand(node, "gpu0") == (["12.5"], ["512M"])
        node.end()
        node.config = '[enforcement]\nunadmitted = "allow"\n'
        node.start()
        assert by_hand(node, "gpu0") == (["100.0"], [])
        daemons = node.daemons().values()
        assert [each["pid"] for each in daemons] == pids
        assert all(
            each["limits"] == {"active_thread_percentage": 100.0, "pinned_device_mem_limit": None} for each in daemons
        )

    def test_death_of_an_adopted_daemon(self, node: Node) -> None:
        """An adopted daemon is no child of mpsd, yet mpsd detects its death."""
        node.end(signal.SIGKILL)
        node.start()
        before = node.daemons()
        kill(before["gpu0"]["pid"])
        wait_until(lambda: node.events("daemon_death", daemon="gpu0"), what="the death to be seen")
        daemon = node.wait_for_state("gpu0", "ready")
        assert daemon["pid"] != before["gpu0"]["pid"]
        assert untouched(node.daemons()["gpu1"]) == untouched(before["gpu1"])
