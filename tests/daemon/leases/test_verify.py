"""Verification of a lease is truthful in the API's answer, in the output of `mpsctl verify` and in its exit status.

The node has only simulated parts, so that there are servers, and clients that get memory or are refused it.
"""

import contextlib
import os
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.cli.render import as_here
from mpsd.simulator.control import program as simulator_program
from tests.daemon.caller import calling
from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, GIB, event, holding, program, stopped
from tests.daemon.leases.holding import admitted
from tests.daemon.leases.line import Talk, message
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, gpus, leased, outside, variables

pytestmark = pytest.mark.enforcement

WORDS: Final = {"ok": "ok", "unknown": "unknown", "violation": "not ok", "nothing": "not ok"}
PART: Final = {"active_thread_percentage": 25.0, "pinned_device_mem_limit": 2 * GIB}


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None, config="").start()


def verified(node: Node, lease_id: str) -> dict[str, Any]:
    """Verify a lease through the API and through mpsctl, which must agree; return the API's answer."""
    answer: dict[str, Any] = node.get(f"/v1/leases/{lease_id}/verify").json
    said = node.mpsctl("verify", lease_id)
    assert said.returncode == (0 if answer["ok"] else 1), said.stdout + said.stderr
    first, *lines = said.stdout.splitlines()
    assert first == f"{WORDS[answer['verdict']]}: {as_here(answer['because'])}"
    assert answer["ok"] == (answer["verdict"] == "ok")
    for each in answer["processes"]:
        (row,) = (line for line in lines if line.split()[:2] == [str(each["pid"]), each["daemon"]])
        assert row.endswith("  ok" if each["ok"] else f"  {as_here(each['because'])}")
    return answer


def only(answer: dict[str, Any]) -> dict[str, Any]:
    (process,) = answer["processes"]
    found: dict[str, Any] = process
    return found


# -- well --------------------------------------------------------------------------------------------------------------


def test_attached(node: Node) -> None:
    """A client within its limits is well; the answer has its server, its limits and its memory, all of this moment."""
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        lease_id = event(node, "client_attributed", client=client.hello["pid"])["lease"]
        for held in (GIB, 2 * GIB):
            assert client.alloc("1GiB")["ok"]
            answer = verified(node, lease_id)
            assert (answer["ok"], answer["violations"]) == (True, [])
            assert answer["because"] == "1 of 1 processes attached, each under MPS and within its limits"
            process = only(answer)
            assert (process["pid"], process["server"], process["mps"]) == (client.pid, client.hello["server"], True)
            assert process["limits_granted"] == process["limits_in_force"] == PART
            assert answer["memory_held"] == process["memory_held"] == held
        # A process beside it without a lease, or outside MPS, does not concern the lease.
        with SimulatedClient(variables(node)) as stray, SimulatedClient(outside(node)) as beside:
            assert stray.hello["mps"]
            assert not beside.hello["mps"]
            assert only(verified(node, lease_id))["pid"] == client.pid


def test_at_once(node: Node) -> None:
    """The state is read for this answer: it has a client that has just connected, and lacks one that has just ended."""
    lease = admitted(node)
    for _ in range(5):
        with SimulatedClient(lease["env"]) as client:
            assert client.hello["mps"]
            assert node.get(f"/v1/leases/{lease['id']}/verify").json["ok"]
            client.end()
        assert not node.get(f"/v1/leases/{lease['id']}/verify").json["ok"]


def test_question_before(make_node: Start, short_tmp: Path) -> None:
    """An observation that began before a client connected is not used for the answer, however late it completes."""
    gate, held = short_tmp / "gate", short_tmp / "held"
    simulator = shlex.join((*simulator_program(), "--gpus"))
    node = make_node(simulate=1, config="[daemon]\nprobe_interval = 0.2\n")
    front_end = f"{simulator} {node.root}/run/simulated"
    node.control = program(
        short_tmp / "control",
        f"""case "$1" in -f) exec {front_end} "$@" ;; esac
{front_end} "$@"
while [ -e {gate} ]; do touch {held}; sleep 0.01; done""",
    )
    node.start()
    lease = admitted(node)
    gate.touch()
    wait_until(held.exists, what="a front-end that has its answers to be kept")
    with SimulatedClient(lease["env"]) as client, Talk(node.socket) as talk:
        assert client.hello["mps"]
        talk.send(message("GET", f"/v1/leases/{lease['id']}/verify"))
        assert node.get("/healthz").status == 200  # a later request was answered, so mpsd has read the question
        gate.unlink()
        assert talk.answer().json["ok"]


@pytest.mark.parametrize("moment", ["context", "connect"])
def test_later_context(make_node: Start, moment: str) -> None:
    """Where limits bind at each context, the answer says that a later one may have less; otherwise it has no less."""
    config = f'[enforcement]\nattach = "strict"\nlimits_bind = "{moment}"\n'
    node = make_node(simulate=1, control=None, config=config).start()
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        lease_id = event(node, "client_attributed", client=client.hello["pid"])["lease"]
        assert client.alloc("1MiB")["ok"]
        assert node.get(f"/v1/leases/{lease_id}/verify").json["ok"]  # this request reads the GPUs
        wait_until(lambda: in_force(node) == 0.1, what="the ceiling to close behind it")
        assert client.do("reset")["ok"]
        assert client.context()["active_thread_percentage"] in {25.0, 0.1}
        answer = verified(node, lease_id)
        assert answer["ok"]
        assert (f"a later context of process {client.pid}" in answer["because"]) == (moment == "context")
        assert only(answer)["limits_at_least"] == PART


def in_force(node: Node) -> float:
    """Return the percentage of the ceiling, as read back last."""
    return float(node.daemons()["gpu0"]["limits"]["active_thread_percentage"])


# -- not well ----------------------------------------------------------------------------------------------------------


def test_not_attached(node: Node) -> None:
    """A lease without clients is not well: the answer names its holder, which has nothing and is not on the GPU."""
    lease = admitted(node)
    answer = verified(node, lease["id"])
    assert answer["because"] == f"no process of lease {lease['id']} is a client of MPS yet"
    process = only(answer)
    assert (answer["ok"], process["pid"], process["mps"], process["server"]) == (False, os.getpid(), None, None)
    assert (process["limits_granted"], process["limits_in_force"]) == (PART, None)
    assert "was not seen on the GPU of gpu0" in process["because"]


def test_ended_and_waiting(node: Node) -> None:
    """An ended lease is not well, whichever processes still run; nor is a waiting lease."""
    lease = admitted(node, threads=100)
    with SimulatedClient(lease["env"]) as client, calling(node.socket) as other, ThreadPoolExecutor(1) as pool:
        assert client.hello["mps"]
        assert verified(node, lease["id"])["ok"]
        asked = pool.submit(other.admit, threads=50, memory=GIB, wait=600, name="next")
        waiting = wait_until(lambda: named(node, "next"), what="the next lease to wait")
        answer = verified(node, waiting)
        assert (answer["ok"], answer["because"]) == (False, f"lease {waiting} is waiting, and holds nothing yet")
        assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
        answer = verified(node, lease["id"])
        assert (answer["ok"], answer["processes"]) == (False, [])
        assert answer["because"] == f"lease {lease['id']} has ended: uid {os.geteuid()} released it"
        assert not asked.done()  # a process that still runs is counted, also without a lease
        client.end()
        assert asked.result(timeout=30).json["id"] == waiting


def test_environment_of_its_own(node: Node) -> None:
    """A client without an environment may use what is open for another lease; whether it does is unknown."""
    lease = admitted(node)
    with calling(node.socket) as other:
        assert other.admit(threads=50, memory=4 * GIB, gpu="0").status == 201
        with SimulatedClient(variables(node)) as client:
            answer = verified_more(node, lease, client)
            assert only(answer)["limits_in_force"] == {
                "active_thread_percentage": 50.0,
                "pinned_device_mem_limit": 4 * GIB,
            }


def verified_more(node: Node, lease: dict[str, Any], client: SimulatedClient) -> dict[str, Any]:
    """Verify a lease whose one client may use more than its share, and return the answer."""
    assert client.hello["mps"]
    answer = verified(node, lease["id"])
    process = only(answer)
    assert (answer["ok"], process["ok"], process["pid"], process["mps"]) == (False, False, client.pid, True)
    assert process["limits_granted"] == PART
    assert process["limits_in_force"]["active_thread_percentage"] >= client.hello["active_thread_percentage"]
    assert "% of the threads instead of 25 %" in answer["because"]
    assert (answer["verdict"], answer["violations"], answer["unknown"]) == ("unknown", [], [answer["because"]])
    return answer


def named(node: Node, name: str) -> str | None:
    leases = node.get("/v1/leases").json["leases"]
    return next((lease["id"] for lease in leases if lease["name"] == name), None)


@pytest.mark.parametrize("between", [0, 100])
def test_foreign_hand_on_the_server(node: Node, between: int) -> None:
    """A limit that a stranger opened counts for clients that connected meanwhile, even if closed before mpsd looks.

    It counts also while a front-end keeps mpsd's own out, and however many other commands follow.
    """
    lease = admitted(node)
    with leased(node, "--threads", "10", "--memory", "1GiB", "--gpu", "0") as keeper:
        server = keeper.hello["server"]
        event(node, "client_attributed", client=keeper.pid)
        opens, closes = (
            f"set_active_thread_percentage {server} {percentage}\nset_device_pinned_mem_limit {server} 0 {memory}"
            for percentage, memory in ((80, "40G"), (25, "2G"))
        )
        with contextlib.ExitStack() as stack:
            with holding(node, "gpu0", opens, f"{closes}\n" * (between + 1)):
                client = stack.enter_context(SimulatedClient(variables(node)))
                assert (client.hello["server"], client.hello["active_thread_percentage"]) == (server, 80.0)
            if not between:
                found = only(verified_more(node, lease, client))["limits_in_force"]
                assert found == {"active_thread_percentage": 80.0, "pinned_device_mem_limit": 40 * GIB}
                return
            # mpsd has forgotten some of so many commands; any of them could be the one, so no process is in violation.
            answer = verified(node, lease["id"])
            assert (answer["ok"], answer["violations"], only(answer)["limits_in_force"]) == (False, [], None)
            assert "mpsd could not see what was open to" in answer["because"]


# -- not known ---------------------------------------------------------------------------------------------------------


def test_outside(node: Node) -> None:
    """A process that did not find its control daemon is reported at the first check, with the memory that it holds."""
    lease = admitted(node)
    with SimulatedClient({**lease["env"], **outside(node)}) as client:
        assert not client.hello["mps"]
        assert client.alloc("1GiB")["ok"]
        answer = node.get(f"/v1/leases/{lease['id']}/verify").json
        process = only(answer)
        assert (answer["ok"], process["pid"], process["mps"]) == (False, client.pid, False)
        assert (process["limits_in_force"], process["memory_held"]) == (None, GIB)
        assert answer["because"] == f"process {client.pid} runs on the GPU of gpu0 outside MPS, where no limits apply"
        # Once that has persisted, it is a violation, too.
        event(node, "violation", kind="outside", pid=client.pid)
        assert len(verified(node, lease["id"])["violations"]) == 1
        # Another client of the lease that is well changes nothing.
        with SimulatedClient(lease["env"]) as well:
            assert well.hello["mps"]
            event(node, "client_attributed", client=well.pid)
            answer = verified(node, lease["id"])
            assert not answer["ok"]
            assert {each["pid"]: each["mps"] for each in answer["processes"]} == {well.pid: True, client.pid: False}


def test_too_much_memory(node: Node) -> None:
    """More memory than that of the lease is not `ok` at the first check, although it is a violation a second later."""
    lease = admitted(node, processes="any")
    with SimulatedClient(lease["env"]) as one, SimulatedClient(lease["env"]) as other:
        for client in (one, other):
            assert client.hello["mps"]
            event(node, "client_attributed", client=client.pid)
            assert client.alloc("1.5GiB")["ok"]
        answer = node.get(f"/v1/leases/{lease['id']}/verify").json
        assert answer["verdict"] in {"unknown", "violation"}
        assert f"the processes of lease {lease['id']} hold 3GiB of memory on gpu0 instead of 2GiB" in answer["because"]
        event(node, "violation", kind="memory")
        assert verified(node, lease["id"])["verdict"] == "violation"


def test_silent_daemon(make_node: Start) -> None:
    """A lease whose daemon cannot answer now is not called well, whatever was known before."""
    node = make_node(simulate=1, control=None, config=BRISK).start()
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        lease_id = event(node, "client_attributed", client=client.hello["pid"])["lease"]
        with stopped(node.daemons()["gpu0"]["pid"]):
            answer = node.get(f"/v1/leases/{lease_id}/verify").json
            assert (answer["ok"], answer["because"].split()[0]) == (False, "gpu0")
            node.wait_for_state("gpu0", "unresponsive")
            assert verified(node, lease_id)["because"].startswith("gpu0 is unresponsive: ")
        wait_until(lambda: node.get(f"/v1/leases/{lease_id}/verify").json["ok"], what="it to be well again")


def test_unreadable_gpu(node: Node) -> None:
    """Where the processes of a GPU cannot be read, the answer does not claim that all of them run under MPS."""
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        lease_id = event(node, "client_attributed", client=client.hello["pid"])["lease"]
        (gpu,) = gpus(node)
        gpu.lose()
        answer = verified(node, lease_id)
        assert not answer["ok"]
        assert "GPU is lost" in answer["because"]
        assert only(answer)["memory_held"] is None
        gpu.recover()
        assert verified(node, lease_id)["ok"]


# -- whose lease -------------------------------------------------------------------------------------------------------


def says(node: Node, *arguments: str, **options: Any) -> tuple[int, str]:
    """Run `mpsctl verify`, and return its exit status and the first line that it printed."""
    done = node.mpsctl("verify", *arguments, **options)
    return done.returncode, (done.stdout + done.stderr).splitlines()[0]


def test_by_pid(node: Node) -> None:
    """A pid names the lease of its process, or of the nearest ancestor that has one."""
    well = 0, "ok: 1 of 1 processes attached, each under MPS and within its limits"
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        assert client.hello["mps"]
        assert says(node, "--pid", f"{client.pid}") == well
        # Neither this process nor any of its ancestors has a lease.
        status, first = says(node, "--pid", f"{os.getpid()}")
        assert (status, first) == (
            1,
            f"mpsctl: process {os.getpid()} has no lease of yours, and is not a client of MPS [not_found]",
        )
        assert says(node, "--pid", f"{2**31 - 1}") == (1, f"mpsctl: there is no process {2**31 - 1} [not_found]")
        with SimulatedClient(variables(node)) as stray:
            event(node, "violation", pid=stray.hello["pid"])
            assert "has no lease of yours, and is a client of gpu0" in says(node, "--pid", f"{stray.pid}")[1]
            # Once it has one, so has its older child, which connected when as much was open; the other child keeps its
            # own.
            own = admitted(node)
            assert says(node, "--pid", f"{stray.pid}") == well
        assert says(node, "--pid", f"{client.pid}") == well
        assert says(node, "--pid", f"{os.getpid()}")[0] == 1
    assert says(node, "--pid", f"{os.getpid()}", own["id"])[0] == 2


def test_of_the_caller(node: Node) -> None:
    """Without an argument it verifies the lease of the calling shell, or of the command that `mpsctl run` became."""
    assert says(node)[0] == 1
    lease = admitted(node)
    with SimulatedClient(lease["env"]) as client:
        assert client.hello["mps"]
        assert says(node) == (0, "ok: 1 of 1 processes attached, each under MPS and within its limits")
    mpsctl = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket)]
    done = node.mpsctl("run", "--threads", "10", "--memory", "1GiB", "--name", "inner", "--", *mpsctl, "verify")
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].endswith("is a client of MPS yet")
