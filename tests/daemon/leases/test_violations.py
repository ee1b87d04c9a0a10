"""Each kind of violation is reported with its evidence; policy alone decides whether and how a process is ended.

The node has only simulated parts: its clients, servers and control daemons are real processes.
"""

import signal
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.simulator.client import program as client_program
from mpsd.simulator.control import program as simulator
from tests.daemon.caller import calling
from tests.daemon.conftest import Start
from tests.daemon.ends.clients import steps
from tests.daemon.helpers import BRISK, GIB, MIB, event, holding, is_running, needs_last_pid, program, stopped, with_pid
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, leased, outside, variables

pytestmark = [pytest.mark.enforcement, pytest.mark.thorough]

GRACE: Final = "[enforcement]\ngrace = 0.3\n"
TERMINATE: Final = '[enforcement]\ngrace = 0.3\non_violation = "terminate"\n'


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None, config=GRACE).start()


def lease(node: Node, threads: float = 25, memory: int = GIB, **more: Any) -> dict[str, Any]:
    """Request a lease whose holder is this process, so that its clients are those that the test starts."""
    answer = node.request("POST", "/v1/leases", {"threads": threads, "memory": memory, "gpu": "0", **more})
    assert answer.status == 201, answer.body
    found: dict[str, Any] = answer.json
    return found


def environment(granted: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in granted["shares"][0]["env"].items()}


def look(node: Node, granted: dict[str, Any]) -> None:
    """Have mpsd read the GPUs, which it does by itself every ten seconds."""
    assert node.get(f"/v1/leases/{granted['id']}/verify").status == 200


def over(node: Node, **facts: object) -> None:
    event(node, "violation_ended", **facts)


def stands_in(path: Path, node: Node, branch: int, before: str = "") -> Path:
    """Write a control program that is the simulator's of a driver branch, on a node's GPUs; `before` is shell code."""
    path.mkdir()
    command = " ".join(simulator(branch, str(node.root / "run" / "simulated")))
    return program(path / "nvidia-cuda-mps-control", f'{before}\nexec {command} "$@"')


# -- what is a violation -----------------------------------------------------------------------------------------------


def test_no_lease(node: Node) -> None:
    """A client without a lease has next to nothing and is reported, not ended; the violation ends with the client."""
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
    """Where unadmitted clients get the defaults, a client without a lease is no violation."""
    node = make_node(simulate=1, control=None, config='[enforcement]\nunadmitted = "defaults"\n').start()
    with SimulatedClient(variables(node)) as stray:
        wait_until(lambda: stray.pid in [each["pid"] for each in clients(node)], what="it to be seen")
        assert stray.hello["active_thread_percentage"] == 100.0
        assert node.events("violation") == []
        node.reload('[enforcement]\nunadmitted = "deny"\n')
        assert event(node, "violation", pid=stray.pid)["kind"] == "no_lease"


def clients(node: Node) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.get("/v1/clients").json["clients"]
    return found


def test_processes(node: Node) -> None:
    """One client more than a lease may have is reported; the violation ends when there is room for it."""
    granted = lease(node)
    with SimulatedClient(environment(granted)) as first:
        event(node, "client_attributed", client=first.hello["pid"])
        with SimulatedClient(environment(granted)) as second:
            told = event(node, "violation", pid=second.hello["pid"])
            assert (told["kind"], told["lease"]) == ("processes", granted["id"])
            assert [line["pid"] for line in node.events("violation")] == [second.pid]
            first.end()
            over(node, kind="processes", pid=second.pid)


@pytest.mark.parametrize("processes", [1, "any"])
def test_successor(node: Node, processes: int | str) -> None:
    """A program that replaces itself runs on under `terminate`: both are there for a moment, which proves nothing."""
    node.reload(TERMINATE)
    granted = lease(node, processes=processes)
    with SimulatedClient(environment(granted)) as before:
        assert before.alloc("1GiB")["ok"]
        event(node, "client_attributed", client=before.pid)
        with SimulatedClient(environment(granted)) as after:
            assert after.alloc("1GiB")["ok"]
            for _ in range(2):
                look(node, granted)
            before.end()
            event(node, "client_attributed", client=after.pid)
            look(node, granted)
            assert after.sync()["ok"]
    assert node.events("violation") == []


IN_PROCESS: Final = """
import os, sys
sys.path.insert(0, sys.argv[1])
os.environ.update(pair.split("=", 1) for pair in sys.argv[2:] if "=" in pair)
from mpsd.simulator import client
sys.exit(client.main())
"""
"""A program that sets its own environment before it uses CUDA, as a library in a notebook does."""


def sets_itself(node: Node, own: dict[str, str]) -> SimulatedClient:
    """Start a client that sets its own environment, so that no other process can see it."""
    root, _, _ = client_program()[3].rpartition("/mpsd/")
    pairs = [f"{name}={value}" for name, value in own.items()]
    return SimulatedClient(variables(node), before=(sys.executable, "-I", "-S", "-c", IN_PROCESS, root, *pairs))


def test_own_environment_beside_a_larger_lease(node: Node) -> None:
    """A program that set its own environment obeys it, unseen by mpsd: its share is unknown, and it keeps running."""
    node.reload(TERMINATE)
    granted = lease(node, threads=25, memory=GIB)
    with calling(node.socket) as other:
        assert other.admit(threads=50, memory=4 * GIB, gpu="0").status == 201
        with sets_itself(node, environment(granted)) as held:
            assert held.hello["active_thread_percentage"] == 25.0
            event(node, "client_attributed", client=held.pid)
            # A second client is one too many, which is proven: mpsd has judged both by the time that it ends.
            with SimulatedClient(variables(node)) as stray:
                assert stray.process.wait(20) != 0
            (client,) = [each for each in clients(node) if each["pid"] == held.pid]
            assert client["verdict"] == "unknown"
            cure = f'eval "$(mpsctl show {granted["id"]} -o env)"'
            for command in (("clients",), ("leases",), ("show", granted["id"]), ("verify", granted["id"])):
                assert cure in node.mpsctl(*command).stdout
            status = node.get("/v1/status").json
            assert (status["healthy"], status["violations"]) == (True, [])
            assert held.compute(0.01)["ok"]
    assert {line["pid"] for line in node.events("violation")} == {stray.pid}
    assert {line["pid"] for line in node.events("client_forced")} == {stray.pid}


def test_after_the_lease(node: Node) -> None:
    """A client whose lease has expired reads what to type, wherever its user looks: in events, status and clients."""
    with leased(node, "--fraction", "0.25", "--ttl", "2") as client:
        assert client.hello["mps"]
        event(node, "client_attributed", client=client.pid)
        event(node, "violation", kind="no_lease", pid=client.pid)
        (expired,) = node.events("lease_expired")
        assert "mpsctl renew" in expired["because"]
        for command in ("status", "clients", "events"):
            assert "mpsctl renew" in node.mpsctl(command).stdout


def test_variable_trap(node: Node) -> None:
    """A limit for a GPU that a client does not see removes all its memory limits. mpsd reports it and ends nothing."""
    node.reload(TERMINATE)
    granted = lease(node, threads=25, memory=GIB)
    own = environment(granted) | {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G,1=1G"}
    with SimulatedClient(own) as trapped:
        assert trapped.hello["pinned_device_mem_limit"] is None
        told = event(node, "violation", pid=trapped.pid)
        assert (told["kind"], told["lease"], told["policy"]) == ("limits", granted["id"], "report")
        assert node.mpsctl("verify", granted["id"]).returncode == 1
        status = node.mpsctl("status")
        assert status.returncode == 0
        assert f"mpsctl show {granted['id']} -o env" in status.stdout
        assert node.get("/readyz").status == 200
        examined = node.mpsctl("doctor", "--only", "node")
        assert (examined.returncode, f"process {trapped.pid} was started with" in examined.stdout) == (0, True)
        assert trapped.sync()["ok"]
    assert node.events("client_forced") == []


def test_memory_without_a_limit(make_node: Start) -> None:
    """The memory of a client that dropped its limit is found long before the next ordinary reading of the GPUs."""
    seldom = {"mpsd.daemon.gpu.gpus._INTERVAL": 3600.0}
    node = make_node(simulate=1, control=None, config=TERMINATE, durations=seldom).start()
    granted = lease(node, threads=25, memory=GIB)
    own = environment(granted) | {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G,7=1G"}
    with SimulatedClient(own) as liar:
        event(node, "violation", kind="limits", pid=liar.pid)
        assert liar.alloc("2GiB")["ok"]
        assert event(node, "violation", kind="memory")["pid"] == liar.pid
        wait_until(lambda: not is_running(liar.pid), what="it to be ended")


def test_short(node: Node) -> None:
    """A client that connected while its daemon was closed has less than its lease. mpsd reports it and ends nothing."""
    with SimulatedClient(variables(node)) as early, calling(node.socket) as caller:
        assert early.hello["active_thread_percentage"] == 0.1
        event(node, "violation", kind="no_lease", pid=early.pid)
        granted = caller.admit(threads=25, memory=GIB, gpu="0", pid=early.pid).json
        told = event(node, "violation", kind="short", pid=early.pid)
        assert (told["lease"], told["policy"]) == (granted["id"], "report")
        node.reload(TERMINATE)
        assert node.mpsctl("verify", granted["id"]).returncode == 1
        status = node.mpsctl("status")
        assert (status.returncode, node.get("/readyz").status) == (0, 200)
        assert f"  short, process {early.pid}: " in status.stdout
        assert early.sync()["ok"]
        early.end()
        over(node, kind="short", pid=early.pid)
    assert node.events("client_forced") == []


def test_memory(make_node: Start, short_tmp: Path) -> None:
    """Where the driver does not limit memory (470), the memory of a lease's processes is summed."""
    node = make_node(simulate=1, config=GRACE)
    node.control = stands_in(short_tmp / "470", node, 470)
    node.start()
    granted = lease(node, threads=50, memory=2 * GIB, processes=2)
    own = variables(node) | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    with SimulatedClient(own) as more, SimulatedClient(own) as less:
        assert less.alloc("2GiB")["ok"]
        assert more.alloc("1536MiB")["ok"]
        for each in (more, less):
            event(node, "client_attributed", client=each.pid)
        look(node, granted)
        told = event(node, "violation", kind="memory")
        assert (told["pid"], told["lease"]) == (less.pid, granted["id"])  # the younger one
        more.free("1GiB")
        look(node, granted)
        over(node, kind="memory", pid=less.pid)
        # The violation is reported once, and there is no other.
        assert len(node.events("violation")) == 1


def test_memory_of_a_lease(make_node: Start) -> None:
    """The memory of a lease is that of all its processes, however many it may have: the newest that are over end.

    mpsd reads the GPUs for it by itself. Nobody else ends: no older process, no newer one that fits, and no neighbour.
    """
    seldom = {"mpsd.daemon.gpu.gpus._INTERVAL": 3600.0}
    config = GRACE + '[violations]\nmemory = "terminate"\n'
    node = make_node(simulate=1, control=None, config=config, durations=seldom).start()
    granted = lease(node, memory=2 * GIB)
    with (
        leased(node, "--threads", "25", "--memory", "2GiB") as neighbour,
        SimulatedClient(environment(granted)) as oldest,
        SimulatedClient(environment(granted)) as middle,
        SimulatedClient(environment(granted)) as newest,
    ):
        assert oldest.alloc("1GiB")["ok"]
        assert middle.alloc("2GiB")["ok"]  # the limit of each process is that of the lease
        assert newest.alloc("512MiB")["ok"]
        assert neighbour.alloc("2GiB")["ok"]
        told = event(node, "violation", kind="memory")
        assert (told["pid"], told["lease"], told["policy"]) == (middle.pid, granted["id"], "terminate")
        assert "hold 3.5GiB of memory on gpu0 instead of 2GiB" in told["because"]
        middle.process.wait(20)
        over(node, kind="memory", pid=middle.pid)
        assert [each.sync()["ok"] for each in (oldest, newest, neighbour)] == [True] * 3
        verified = node.get(f"/v1/leases/{granted['id']}/verify").json
        held = {each["pid"]: each["memory_held"] for each in verified["processes"]}
        assert held == {oldest.pid: GIB, newest.pid: 512 * MIB}
    assert {line["pid"] for line in node.events("client_forced")} == {middle.pid}


# -- what becomes of it ------------------------------------------------------------------------------------------------


def test_report_and_terminate(node: Node) -> None:
    """`report` ends no process; once policy says `terminate`, the process ends, and no other process is affected."""
    with leased(node, "--threads", "25", "--memory", "2GiB") as good:
        event(node, "client_attributed", client=good.hello["pid"])
        with SimulatedClient(variables(node)) as stray:
            assert stray.hello["server"] == good.hello["server"]
            event(node, "violation", pid=stray.pid, policy="report")
            assert stray.sync()["ok"]
            assert node.events("client_forced") == []
            # The policy for one kind applies to that kind alone.
            node.reload(GRACE + '[violations]\nmemory = "terminate"\n')
            assert stray.sync()["ok"]
            node.reload(GRACE + '[violations]\nno_lease = "terminate"\n')
            assert stray.process.wait(20) == -signal.SIGTERM
            over(node, kind="no_lease", pid=stray.pid)
            assert steps(node, stray.pid) == ["terminate_client", "SIGTERM"]
        assert good.compute(0.01)["ok"]
        assert good.alloc("2GiB")["ok"]
    assert {line["pid"] for line in node.events("client_forced")} == {stray.pid}


def test_steps(node: Node) -> None:
    """A process gets no signal before its server has said that its contexts are ended."""
    with leased(node, "--threads", "25", "--memory", "2GiB") as good:
        event(node, "client_attributed", client=good.hello["pid"])
        with SimulatedClient(variables(node)) as stray:
            server = stray.hello["server"]
            assert server == good.hello["server"]
            stray.do("ignore TERM")
            event(node, "violation", pid=stray.pid)
            node.reload(TERMINATE)
            assert stray.process.wait(20) == -signal.SIGKILL
            asked = f"Cmd:terminate_client {server} {stray.pid}"
            assert asked in node.control_log("gpu0").read_text()
            assert steps(node, stray.pid) == ["terminate_client", "SIGTERM", "SIGKILL"]
            assert "failed" not in node.events("client_forced", step="terminate_client")[0]
        assert good.compute(0.01)["ok"]
        wait_until(
            lambda: node.ask("gpu0", f"get_client_list {server}") == [str(good.pid)],
            what="the server to list the other client alone",
        )
    assert {line["pid"] for line in node.events("client_forced")} == {stray.pid}


def test_steps_outside(node: Node) -> None:
    """A process outside MPS has no server to ask: it gets SIGTERM, and then SIGKILL."""
    granted = lease(node)
    node.reload(TERMINATE)
    with SimulatedClient({**environment(granted), **outside(node)}) as client:
        client.do("ignore TERM")
        look(node, granted)
        assert client.process.wait(20) == -signal.SIGKILL
        wait_until(lambda: steps(node, client.pid) == ["SIGTERM", "SIGKILL"], what="both steps to be told")


_SAYS: Final = """
[ "$1" = -f ] || exec sed 's/^terminate_client .*/{instead}/' | {command}
"""


@pytest.mark.parametrize(("branch", "instead"), [(470, None), (555, "get_server_list")])
def test_no_zero(make_node: Start, short_tmp: Path, branch: int, instead: str | None) -> None:
    """Where `terminate_client` does not answer 0 (470 never does), no client that shares a server gets a signal.

    A client that is alone on its server in the end can be ended: no other client can be harmed.
    """
    node = make_node(simulate=1, config=GRACE)
    command = " ".join(simulator(branch, str(node.root / "run" / "simulated")))
    before = _SAYS.format(instead=instead, command=command) if instead else ""
    node.control = stands_in(short_tmp / "control", node, branch, before)
    node.start()
    with SimulatedClient(variables(node)) as stray, SimulatedClient(variables(node)) as other:
        for each in (stray, other):
            event(node, "violation", pid=each.hello["pid"])
        node.reload(TERMINATE)
        for each in (stray, other):
            assert event(node, "client_forced", pid=each.pid, step="terminate_client")["failed"]
            stays = event(node, "client_not_ended", pid=each.pid)["stays_because"]
            assert f"server {stray.hello['server']} of gpu0 has other clients" in stays
        assert stray.sync()["ok"]
        assert other.sync()["ok"]
        assert {*steps(node, stray.pid), *steps(node, other.pid)} == {"terminate_client"}
        other.end()
        assert stray.process.wait(20) == -signal.SIGTERM


def test_let_go(make_node: Start) -> None:
    """A process that was not touched yet is spared when the reason to end it disappears."""
    node = make_node(simulate=1, control=None, config=BRISK).start()
    with SimulatedClient(variables(node)) as stray:
        event(node, "violation", pid=stray.hello["pid"])
        with holding(node, "gpu0"):  # mpsd cannot ask for the clients' servers meanwhile
            node.reload(BRISK + TERMINATE)
            assert "gpu0 does not answer" in event(node, "client_not_ended", pid=stray.pid)["stays_because"]
            node.reload(BRISK)
            event(node, "client_let_go", pid=stray.pid)
        node.wait_for_state("gpu0", "ready")
        assert stray.sync()["ok"]
    assert node.events("client_forced") == []


@needs_last_pid
def test_pid_that_was_reused(make_node: Start) -> None:
    """Policy does not apply to a process that reuses the pid of an ended client, even while mpsd lists the client."""
    node = make_node(simulate=1, control=None, config=BRISK).start()
    with SimulatedClient(variables(node)) as stray:
        event(node, "violation", pid=stray.hello["pid"])
        # A stopped server does not notice that its client has ended, and no other source reports it.
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
