"""The ceiling and the pipe access of canaries: no other process gets more by the canary of a suspicion."""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from mpsd.simulator.devices import Setting, set_setting
from mpsd.system.files import acl
from tests.daemon.caller import needs_root
from tests.daemon.canary.conftest import CALM
from tests.daemon.canary.helpers import (
    ANN,
    REQUEST,
    anns_client,
    canary,
    canary_of,
    examination,
    hold,
    release,
    start_again,
)
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, MIB, event, is_running, kill, quarantine
from tests.daemon.leases.line import connect
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, leased, variables

pytestmark = [pytest.mark.enforcement, pytest.mark.thorough]


@pytest.fixture
def make_full(make_node: Start) -> Callable[..., Node]:
    """Return a maker of nodes where a context takes memory of its limit, so that a closed ceiling gives none."""

    def make(more: str = "") -> Node:
        node = make_node(simulate=1, control=None, config=CALM + more)
        set_setting(node.root / "run" / "simulated", Setting.CONTEXT_MEMORY, f"{400 * MIB}")
        return node.start()

    return make


def limits(node: Node) -> tuple[float, int | None]:
    """Return the ceiling that was read back last."""
    found = node.daemons()["gpu0"]["limits"]
    return found["active_thread_percentage"], found["pinned_device_mem_limit"]


def is_closed(node: Node) -> bool:
    return limits(node) == (0.1, MIB)


def named(path: Path) -> list[tuple[int, int]]:
    """Return the users and groups that the access list of a file names."""
    return [(each.tag, each.who) for each in acl.read(path) if each.tag in {acl.Tag.USER, acl.Tag.GROUP}]


def test_of_a_suspicion(make_full: Callable[..., Node]) -> None:
    """The ceiling is not opened for the canary of a suspicion: the refusal of a context is an answer."""
    node = make_full()
    with ExitStack() as stack:
        other = stack.enter_context(leased(node, *REQUEST))
        event(node, "client_attributed", client=other.pid)  # the ceiling is open: a context needs memory
        stray = stack.enter_context(SimulatedClient(variables(node)))
        assert stray.hello["mps"]
        other.end()
        wait_until(lambda: is_closed(node), what="the ceiling to be closed")
        start_again(node)
        ended = examination(node)
        assert (ended["proof"], ended["mps"]) == ("error", True)
        assert is_closed(node)
        assert {each["pinned_device_mem_limit"] for each in node.events("limits_verified")} <= {MIB, 2 * GIB}
        release(node, hold(node, wait=20))


def test_of_a_command(make_full: Callable[..., Node]) -> None:
    """The ceiling is opened for the canary of an operator's command, which proves a context, and closed again."""
    node = make_full()
    assert canary(node)["verdict"] == "ok"
    wait_until(lambda: is_closed(node), what="the ceiling to be closed again")
    assert (10.0, 512 * MIB) in {
        (each["active_thread_percentage"], each["pinned_device_mem_limit"]) for each in node.events("limits_verified")
    }


@needs_root
def test_of_another_user(make_full: Callable[..., Node]) -> None:
    """The canary has pipe access by a group of its own: another process of its user has none."""
    node = make_full()
    with anns_client(node) as (client, lease):
        release(node, lease)
        assert client.do("wedge")["ok"]
        wait_until(lambda: is_closed(node), what="the ceiling to be closed")
    start_again(node)
    pid = canary_of(node)
    control = node.pipe_directory("gpu0") / "control"
    wait_until(lambda: f"NEW CLIENT {pid} " in node.control_log("gpu0").read_text(), what="the canary to be there")
    assert is_closed(node)
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    assert f"Uid:\t{ANN}\t" in status
    assert Path(f"/proc/{pid}/fd").stat().st_uid == 0  # no process of that user may trace it, and so take its group
    [group] = status.partition("\nGroups:\t")[2].partition("\n")[0].split()
    assert named(control) == [(acl.Tag.GROUP, int(group))]
    with pytest.raises(PermissionError):
        connect(control, uid=ANN)
    node.end(signal.SIGKILL)
    wait_until(lambda: not is_running(pid), what="the canary to end")
    node.start(ready=False)
    node.wait_for_state("gpu0", "ready")
    after = canary_of(node)
    kill(after)
    wait_until(lambda: named(control) == [], what="the access of the canary to be gone")


@needs_root
def test_quarantined_user(make_full: Callable[..., Node]) -> None:
    """A canary examines the server of a quarantined user, too: that user gets no pipe access by it."""
    node = make_full()
    with anns_client(node):
        node.end()
        quarantine(node, ANN)
        node.start(ready=False)
        node.wait_for_state("gpu0", "ready")
        found = canary(node)
    assert found["verdict"] == "ok"
    assert f"(uid {ANN})" in found["because"]
