"""Each kind of violation is told with its evidence, and policy alone decides whether anybody is ended, and how.

The node is of simulated parts alone: its clients are real processes, and so are its servers and control daemons.
"""

import signal
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.simulator.control import program as simulator
from tests.daemon.caller import calling
from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, GIB, event, is_running, needs_last_pid, program, stopped, with_pid
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, leased, outside, variables

GRACE: Final = "[enforcement]\ngrace = 0.3\n"
TERMINATE: Final = '[enforcement]\ngrace = 0.3\non_violation = "terminate"\n'


@pytest.fixture
def node(make_node: Start) -> Node:
    """Start a node whose policy is to report."""
    return make_node(simulate=1, control=None, config=GRACE).start()


def lease(node: Node, threads: float = 25, memory: int = GIB, **more: Any) -> dict[str, Any]:
    """Take out a lease whose holder is this very process, so that its clients are those that the test starts."""
    answer = node.request("POST", "/v1/leases", {"threads": threads, "memory": memory, "gpu": "0", **more})
    assert answer.status == 201, answer.body
    found: dict[str, Any] = answer.json
    return found


def environment(granted: dict[str, Any]) -> dict[str, str]:
    """Return a lease's environment."""
    return {name: str(value) for name, value in granted["shares"][0]["env"].items()}


def look(node: Node, granted: dict[str, Any], times: int = 2) -> None:
    """Have mpsd look at the GPUs, which it does by itself every ten seconds; what NVML says has to be said twice."""
    for _ in range(times):
        assert node.get(f"/v1/leases/{granted['id']}/verify").status == 200


def steps(node: Node, pid: int) -> list[str]:
    """Return how a client was ended so far."""
    return [line["step"] for line in node.events("client_forced", pid=pid)]


def over(node: Node, **facts: object) -> None:
    """Wait until a violation is over."""
    event(node, "violation_ended", **facts)


def stands_in(path: Path, node: Node, branch: int, before: str = "") -> Path:
    """Write a control program that is the simulator's of a driver branch, on a node's GPUs; `before` is shell."""
    path.mkdir()
    command = " ".join(simulator(branch, str(node.root / "run" / "simulated")))
    return program(path / "nvidia-cuda-mps-control", f'{before}\nexec {command} "$@"')


# -- what is a violation -----------------------------------------------------------------------------------------------


def test_no_lease(node: Node) -> None:
    """A client that no lease let in has next to nothing, is told, and is left alone; it is over when it is gone."""
    with SimulatedClient(variables(node)) as stray:
        assert (stray.hello["active_thread_percentage"], stray.hello["pinned_device_mem_limit"]) == (0.1, 1 << 20)
        told = event(node, "violation", pid=stray.pid)
        assert (told["kind"], told["lease"], told["daemon"], told["policy"]) == ("no_lease", None, "gpu0", "report")
        assert str(stray.pid) in told["because"]
        assert stray.sync()["ok"]
        stray.end()
        over(node, kind="no_lease", pid=stray.pid)
    assert node.events("client_forced") == []


def test_no_lease_where_it_is_allowed(make_node: Start) -> None:
    """Where the defaults are for everybody, a client without a lease breaks nothing; denied anew, it does."""
    node = make_node(simulate=1, control=None, config='[enforcement]\nunadmitted = "defaults"\n').start()
    with SimulatedClient(variables(node)) as stray:
        wait_until(lambda: stray.pid in [each["pid"] for each in clients(node)], what="it to be seen")
        assert stray.hello["active_thread_percentage"] == 100.0
        assert node.events("violation") == []
        node.reload('[enforcement]\nunadmitted = "deny"\n')
        assert event(node, "violation", pid=stray.pid)["kind"] == "no_lease"


def clients(node: Node) -> list[dict[str, Any]]:
    """Return the clients of all servers."""
    found: list[dict[str, Any]] = node.get("/v1/clients").json["clients"]
    return found


def test_processes(node: Node) -> None:
    """One client more than a lease may have is told; it is over when there is room for it."""
    granted = lease(node)
    with SimulatedClient(environment(granted)) as first:
        event(node, "client_attributed", client=first.hello["pid"])
        with SimulatedClient(environment(granted)) as second:
            told = event(node, "violation", pid=second.hello["pid"])
            assert (told["kind"], told["lease"]) == ("processes", granted["id"])
            assert "an extra client of lease" in told["because"]
            assert [line["pid"] for line in node.events("violation")] == [second.pid]
            first.end()
            over(node, kind="processes", pid=second.pid)


def test_limits(node: Node) -> None:
    """A client that unset its environment, while more was open for another lease, can use more than its part."""
    granted = lease(node, threads=25, memory=GIB)
    with calling(node.socket) as other:
        assert other.admit(threads=50, memory=4 * GIB, gpu="0").status == 201
        with SimulatedClient(variables(node)) as client:
            assert client.hello["active_thread_percentage"] == 50.0
            told = event(node, "violation", pid=client.pid)
            assert (told["kind"], told["lease"]) == ("limits", granted["id"])
            assert "50 % of the threads instead of 25 %" in told["because"]
            assert "4GiB of memory instead of 1GiB" in told["because"]
            # Only its end makes it over: nobody can change what it got.
            client.end()
            over(node, kind="limits", pid=client.pid)


@pytest.mark.parametrize("figure", ["9" * 5000 + "G", "0G", "\u0663G", "1_0M"])
def test_figures_that_are_none(node: Node, figure: str) -> None:
    """What MPS ignores in a client's environment, or is no limit to it, lowers nothing; and mpsd lives on."""
    granted = lease(node, threads=25, memory=GIB)
    own = variables(node) | {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={figure}"}
    with calling(node.socket) as other:
        assert other.admit(threads=50, memory=4 * GIB, gpu="0").status == 201
        with SimulatedClient(own) as client:
            told = event(node, "violation", pid=client.pid)
            assert (told["kind"], told["lease"]) == ("limits", granted["id"])
            assert "4GiB of memory instead of 1GiB" in told["because"]


def test_memory(make_node: Start, short_tmp: Path) -> None:
    """Where the driver limits no memory (470), what the processes of a lease hold together is counted."""
    node = make_node(simulate=1, config=GRACE)
    node.control = stands_in(short_tmp / "470", node, 470)
    node.start()
    granted = lease(node, threads=50, memory=2 * GIB, processes=2)
    own = variables(node) | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    with SimulatedClient(own) as more, SimulatedClient(own) as less:
        assert less.alloc("1GiB")["ok"]
        assert more.alloc("1536MiB")["ok"]
        for each in (more, less):
            event(node, "client_attributed", client=each.pid)
        look(node, granted)
        told = event(node, "violation", kind="memory")
        assert (told["pid"], told["lease"]) == (more.pid, granted["id"])
        assert "hold 2560MiB of memory on gpu0 instead of 2GiB" in told["because"]
        more.free("1GiB")
        look(node, granted, times=1)
        over(node, kind="memory", pid=more.pid)
        # Told once, and nothing else is wrong with them.
        assert len(node.events("violation")) == 1


def test_outside(node: Node) -> None:
    """A process of a lease that did not find its control daemon runs without limits: that is told."""
    granted = lease(node)
    with SimulatedClient({**environment(granted), **outside(node)}) as client:
        assert not client.hello["mps"]
        assert client.alloc("3GiB")["ok"]
        look(node, granted)
        told = event(node, "violation", kind="outside")
        assert (told["pid"], told["lease"]) == (client.pid, granted["id"])
        assert "outside MPS" in told["because"]
        client.end()
        look(node, granted, times=1)
        over(node, kind="outside", pid=client.pid)


# -- what becomes of it ------------------------------------------------------------------------------------------------


def test_report_and_terminate(node: Node) -> None:
    """To report touches nobody; the day policy says terminate, SIGTERM is enough, and nobody else notices."""
    with leased(node, "--threads", "25", "--memory", "2GiB") as good, calling(node.socket) as another:
        event(node, "client_attributed", client=good.hello["pid"])
        another.admit(threads=10, memory=GIB, gpu="0", processes=1)
        with SimulatedClient(variables(node)) as stray:
            assert stray.hello["server"] == good.hello["server"]
            event(node, "violation", pid=stray.pid, policy="report")
            assert stray.sync()["ok"]
            assert node.events("client_forced") == []
            # Policy for one kind is of that kind alone.
            node.reload(GRACE + '[violations]\nlimits = "terminate"\n')
            assert stray.sync()["ok"]
            node.reload(GRACE + '[violations]\nno_lease = "terminate"\n')
            assert stray.process.wait(20) == -signal.SIGTERM
            over(node, kind="no_lease", pid=stray.pid)
            assert steps(node, stray.pid) == ["SIGTERM"]
        assert good.compute(0.01)["ok"]
        assert good.alloc("2GiB")["ok"]
    assert {line["pid"] for line in node.events("client_forced")} == {stray.pid}


def test_steps(node: Node) -> None:
    """Who ignores SIGTERM is killed only when its server has said that its contexts are ended; others compute on."""
    with leased(node, "--threads", "25", "--memory", "2GiB") as good, calling(node.socket) as another:
        event(node, "client_attributed", client=good.hello["pid"])
        another.admit(threads=10, memory=GIB, gpu="0")
        with SimulatedClient(variables(node)) as stray:
            server = stray.hello["server"]
            assert server == good.hello["server"]
            stray.do("ignore TERM")
            event(node, "violation", pid=stray.pid)
            node.reload(TERMINATE)
            assert stray.process.wait(20) == -signal.SIGKILL
            asked = f"Cmd:terminate_client {server} {stray.pid}"
            assert asked in node.control_log("gpu0").read_text()
            assert steps(node, stray.pid) == ["SIGTERM", "terminate_client", "SIGKILL"]
            assert "failed" not in node.events("client_forced", step="terminate_client")[0]
        assert good.compute(0.01)["ok"]
        assert node.ask("gpu0", f"get_client_list {server}") == [str(good.pid)]
    assert {line["pid"] for line in node.events("client_forced")} == {stray.pid}


def test_steps_outside(node: Node) -> None:
    """A process outside MPS has no server that could be asked: it gets SIGTERM, and then SIGKILL."""
    granted = lease(node)
    node.reload(TERMINATE)
    with SimulatedClient({**environment(granted), **outside(node)}) as client:
        client.do("ignore TERM")
        look(node, granted)
        assert client.process.wait(20) == -signal.SIGKILL
        assert steps(node, client.pid) == ["SIGTERM", "SIGKILL"]


_SAYS: Final = """
[ "$1" = -f ] || exec sed 's/^terminate_client .*/{instead}/' | {command}
"""


@pytest.mark.parametrize(("branch", "instead"), [(470, None), (555, "get_server_list")])
def test_no_zero(make_node: Start, short_tmp: Path, branch: int, instead: str | None) -> None:
    """Where `terminate_client` does not answer 0 (470 has none) there is no SIGKILL: it could take others with it."""
    node = make_node(simulate=1, config=GRACE)
    command = " ".join(simulator(branch, str(node.root / "run" / "simulated")))
    before = _SAYS.format(instead=instead, command=command) if instead else ""
    node.control = stands_in(short_tmp / "control", node, branch, before)
    node.start()
    with SimulatedClient(variables(node)) as stubborn:
        stubborn.do("ignore TERM")
        event(node, "violation", pid=stubborn.pid)
        node.reload(TERMINATE)
        told = event(node, "client_forced", pid=stubborn.pid, step="terminate_client")
        assert told["failed"]
        # Another one goes all of its way meanwhile; this one stays, told and alive.
        with SimulatedClient(variables(node)) as other:
            assert other.process.wait(20) == -signal.SIGTERM
            over(node, pid=other.pid)
        assert stubborn.sync()["ok"]
        assert steps(node, stubborn.pid) == ["SIGTERM", "terminate_client"]
        assert node.events("violation_ended", pid=stubborn.pid) == []


def test_grace(node: Node) -> None:
    """Who goes within enforcement.grace is not asked a second time."""
    node.reload('[enforcement]\ngrace = 30.0\non_violation = "terminate"\n')
    with SimulatedClient(variables(node)) as stray:
        assert stray.process.wait(20) == -signal.SIGTERM
        over(node, pid=stray.pid)
    assert steps(node, stray.pid) == ["SIGTERM"]


@pytest.mark.slow
def test_let_go(node: Node) -> None:
    """A process whose reason is over is no longer ended."""
    granted = lease(node)
    with SimulatedClient(environment(granted)) as first:
        event(node, "client_attributed", client=first.hello["pid"])
        with SimulatedClient(environment(granted)) as second:
            second.do("ignore TERM")
            event(node, "violation", pid=second.pid)
            node.reload('[enforcement]\ngrace = 2.0\non_violation = "terminate"\n')
            event(node, "client_forced", pid=second.pid, step="SIGTERM")
            first.end()
            over(node, pid=second.pid)
            # A third takes all steps, and by then the second would have, too.
            with SimulatedClient(environment(granted)) as third:
                third.do("ignore TERM")
                assert third.process.wait(20) == -signal.SIGKILL
            assert second.sync()["ok"]
            assert steps(node, second.pid) == ["SIGTERM"]


@needs_last_pid
def test_pid_that_was_reused(make_node: Start) -> None:
    """Who has the pid of a client that is gone is nobody that policy is about, also while mpsd has it listed yet."""
    node = make_node(simulate=1, control=None, config=BRISK).start()
    with SimulatedClient(variables(node)) as stray:
        event(node, "violation", pid=stray.hello["pid"])
        # A server that is stopped does not notice its client's end, and nobody else says that it is gone.
        with stopped(stray.hello["server"]):
            node.wait_for_state("gpu0", "unresponsive")
            stray.kill()
            with with_pid(stray.pid) as innocent:
                node.reload(BRISK + TERMINATE)
                over(node, pid=innocent.pid)
                assert is_running(innocent.pid)
                innocent.communicate()
                assert innocent.returncode == 0
    assert node.events("client_forced") == []
    assert len(node.events("violation")) == 1
