"""The main job from beginning to end, on every driver branch whose control daemon is available.

The file covers what users rely on most; the other files test each part in depth, on one branch.
"""

import signal

import pytest

from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, branches, by_hand, is_running, kill, limits_for, next_ready, undone, untouched
from tests.node import Node
from tests.real import RealDaemon


def see_limits(node: Node, real: RealDaemon) -> None:
    """Check that each control daemon reports the configured limits, to mpsd and to a front-end that the test runs."""
    memory = 8 * GIB if real.branch >= 535 else None
    for name, daemon in node.daemons().items():
        assert daemon["state"] == "ready"
        assert daemon["limits"] == {"active_thread_percentage": 50.0, "pinned_device_mem_limit": memory}
        assert daemon["drift"] == []
        assert by_hand(node, name, real) == (["50.0"], ["8G"] if memory else [])


@pytest.mark.parametrize("real", branches())
def test_main_job(make_node: Start, real: RealDaemon) -> None:
    """Daemons start with their limits, drift is detected, dead daemons are replaced, a killed mpsd's are adopted."""
    node = make_node(control=real.control, config=limits_for(real)).start()
    before = node.daemons()
    assert list(before) == ["gpu0", "gpu1"]
    see_limits(node, real)
    status = node.get("/v1/status").json
    assert status["healthy"] is True
    # 470 cannot limit memory. The status notes that, and stays healthy as long as no such limit is configured.
    assert any("no pinned device memory limit" in note for note in status["notes"]) == (real.branch < 535)

    # A stranger changes a limit, and mpsd restores it.
    node.ask("gpu0", "set_default_active_thread_percentage 10")
    seen = undone(node, "gpu0", "active_thread_percentage")
    assert (seen["found"], seen["command"]) == (10.0, "set_default_active_thread_percentage 10")
    see_limits(node, real)
    assert untouched(node.daemons()["gpu1"]) == untouched(before["gpu1"])

    # One control daemon is killed.
    kill(before["gpu0"]["pid"])
    replaced = next_ready(node, "gpu0", before["gpu0"]["pid"])
    (death,) = node.events("daemon_death")
    assert (death["daemon"], "killed by SIGKILL" in death["how"]) == ("gpu0", True)
    see_limits(node, real)
    assert untouched(node.daemons()["gpu1"]) == untouched(before["gpu1"])

    # mpsd is killed, and returns to the same control daemons.
    node.end(signal.SIGKILL)
    node.start()
    after = node.daemons()
    assert [each["pid"] for each in after.values()] == [replaced["pid"], before["gpu1"]["pid"]]
    see_limits(node, real)

    # mpsd is stopped, and its control daemons stay.
    assert node.end(signal.SIGTERM) == 0
    assert not node.socket.exists()
    assert all(is_running(each["pid"]) for each in after.values())
    assert by_hand(node, "gpu1", real)[0] == ["50.0"]
