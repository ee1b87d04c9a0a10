"""Verifying a lease tells the truth, and tells it in the API's answer, in what `mpsctl` prints, and by its exit status.

The node is of simulated parts alone, so that there are servers, and clients that MPS gives or refuses something.
"""

import contextlib
import os
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.simulator.control import program as simulator_program
from tests.daemon.caller import calling
from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, GIB, event, holding, program, stopped
from tests.daemon.leases.line import Talk, message
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, gpus, leased, outside, variables

pytestmark = pytest.mark.usefixtures("binds")

WORDS: Final = {"ok": "ok", "unknown": "unknown", "violation": "not ok", "nothing": "not ok"}
PART: Final = {"active_thread_percentage": 25.0, "pinned_device_mem_limit": 2 * GIB}


@pytest.fixture
def node(make_node: Start) -> Node:
    """Start a node, whose policy is to report."""
    return make_node(simulate=1, control=None, config="").start()


def granted(node: Node, **asked: Any) -> dict[str, Any]:
    """Take out a lease that this very process holds."""
    answer = node.request("POST", "/v1/leases", {"threads": 25, "memory": 2 * GIB, "gpu": "0", **asked})
    assert answer.status == 201, answer.body
    lease: dict[str, Any] = answer.json
    return lease


def environment(lease: dict[str, Any]) -> dict[str, str]:
    """Return a lease's environment."""
    return {name: str(value) for name, value in lease["env"].items()}


def verified(node: Node, lease_id: str) -> dict[str, Any]:
    """Verify a lease through the API, and through mpsctl, which has to say the same; return what the API answered."""
    answer: dict[str, Any] = node.get(f"/v1/leases/{lease_id}/verify").json
    said = node.mpsctl("verify", lease_id)
    assert said.returncode == (0 if answer["ok"] else 1), said.stdout + said.stderr
    first, *lines = said.stdout.splitlines()
    assert first == f"{WORDS[answer['verdict']]}: {answer['because']}"
    assert answer["ok"] == (answer["verdict"] == "ok")
    for each in answer["processes"]:
        (row,) = (line for line in lines if line.split()[:2] == [str(each["pid"]), each["daemon"]])
        assert row.endswith("  ok" if each["ok"] else f"  {each['because']}")
    return answer


def only(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the one process that an answer is about."""
    (process,) = answer["processes"]
    found: dict[str, Any] = process
    return found


# -- well --------------------------------------------------------------------------------------------------------------


def test_attached(node: Node) -> None:
    """A client within its limits is well, with its server, what it has and what it holds; all of it of this moment."""
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
        # Who runs beside it without a lease, or outside MPS, is not its affair.
        with SimulatedClient(variables(node)) as stray, SimulatedClient(outside(node)) as beside:
            assert stray.hello["mps"]
            assert not beside.hello["mps"]
            assert only(verified(node, lease_id))["pid"] == client.pid


def test_at_once(node: Node) -> None:
    """It is read for this answer: a client is seen the moment it has connected, and gone the moment it has ended."""
    lease = granted(node)
    for _ in range(5):
        with SimulatedClient(environment(lease)) as client:
            assert client.hello["mps"]
            assert node.get(f"/v1/leases/{lease['id']}/verify").json["ok"]
            client.end()
        assert not node.get(f"/v1/leases/{lease['id']}/verify").json["ok"]


def test_question_before(make_node: Start, short_tmp: Path) -> None:
    """What was asked before a client connected is not the answer, however late it comes."""
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
    lease = granted(node)
    gate.touch()
    wait_until(held.exists, what="a front-end that has its answers to be kept")
    with SimulatedClient(environment(lease)) as client, Talk(node.socket) as talk:
        assert client.hello["mps"]
        talk.send(message("GET", f"/v1/leases/{lease['id']}/verify"))
        assert node.get("/healthz").status == 200  # it came later, and is answered: mpsd has heard the question
        gate.unlink()
        assert talk.answer().json["ok"]


# -- not well ----------------------------------------------------------------------------------------------------------


def test_not_attached(node: Node) -> None:
    """A lease that nobody uses is not well: its holder is named, which has nothing and was not seen on the GPU."""
    lease = granted(node)
    answer = verified(node, lease["id"])
    assert answer["because"] == f"no process of lease {lease['id']} is a client of MPS yet"
    process = only(answer)
    assert (answer["ok"], process["pid"], process["mps"], process["server"]) == (False, os.getpid(), None, None)
    assert (process["limits_granted"], process["limits_in_force"]) == (PART, None)
    assert "was not seen on the GPU of gpu0" in process["because"]


def test_ended_and_waiting(node: Node) -> None:
    """One that has ended is not well, whoever runs on; nor is one that waits."""
    lease = granted(node, threads=100)
    with SimulatedClient(environment(lease)) as client, calling(node.socket) as other, ThreadPoolExecutor(1) as pool:
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
        assert not asked.done()  # whoever runs on is counted, without a lease too
        client.end()
        assert asked.result(timeout=30).json["id"] == waiting


def test_environment_of_its_own(node: Node) -> None:
    """Whether a client that has no environment, while more is open for somebody else, uses that is not known."""
    lease = granted(node)
    with calling(node.socket) as other:
        assert other.admit(threads=50, memory=4 * GIB, gpu="0").status == 201
        with SimulatedClient(variables(node)) as client:
            answer = verified_more(node, lease, client)
            assert only(answer)["limits_in_force"] == {
                "active_thread_percentage": 50.0,
                "pinned_device_mem_limit": 4 * GIB,
            }


def verified_more(node: Node, lease: dict[str, Any], client: SimulatedClient) -> dict[str, Any]:
    """Verify a lease whose one client may use more than its part, and return the answer."""
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
    """Return the id of a lease by its name; None while there is none."""
    leases = node.get("/v1/leases").json["leases"]
    return next((lease["id"] for lease in leases if lease["name"] == name), None)


@pytest.mark.parametrize("between", [0, 100])
def test_foreign_hand_on_the_server(node: Node, between: int) -> None:
    """What a stranger opened on a server counts for who connected meanwhile, also when it is closed before mpsd looks.

    A front-end that stays keeps mpsd's own out for as long; and no crowd of other commands makes mpsd forget this one.
    """
    lease = granted(node)
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
            # Of so many that mpsd does not remember them all it may have been anything, for which nobody is to blame.
            answer = verified(node, lease["id"])
            assert (answer["ok"], answer["violations"], only(answer)["limits_in_force"]) == (False, [], None)
            assert "before this mpsd could see what was open to it" in answer["because"]


# -- not known ---------------------------------------------------------------------------------------------------------


def test_outside(node: Node) -> None:
    """A process that did not find its control daemon is told at the first look, with what it holds."""
    lease = granted(node)
    with SimulatedClient({**environment(lease), **outside(node)}) as client:
        assert not client.hello["mps"]
        assert client.alloc("1GiB")["ok"]
        answer = node.get(f"/v1/leases/{lease['id']}/verify").json
        process = only(answer)
        assert (answer["ok"], process["pid"], process["mps"]) == (False, client.pid, False)
        assert (process["limits_in_force"], process["memory_held"]) == (None, GIB)
        assert answer["because"] == f"process {client.pid} runs on the GPU of gpu0 outside MPS, where no limits apply"
        # The second time it is a violation, too.
        assert len(verified(node, lease["id"])["violations"]) == 1
        # It is no comfort that another one of the lease is well.
        with SimulatedClient(environment(lease)) as well:
            assert well.hello["mps"]
            event(node, "client_attributed", client=well.pid)
            answer = verified(node, lease["id"])
            assert not answer["ok"]
            assert {each["pid"]: each["mps"] for each in answer["processes"]} == {well.pid: True, client.pid: False}


def test_silent_daemon(make_node: Start) -> None:
    """What cannot be asked now is not said to be well, whatever was known before."""
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
    """Where it cannot be read who is on a GPU, nobody is said to be there under MPS only."""
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
    """A pid names the lease of its process, or of the nearest of its ancestors that has one."""
    well = 0, "ok: 1 of 1 processes attached, each under MPS and within its limits"
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        assert client.hello["mps"]
        assert says(node, "--pid", f"{client.pid}") == well
        # This process has none, nor has any of its ancestors.
        status, first = says(node, "--pid", f"{os.getpid()}")
        assert (status, first) == (
            1,
            f"mpsctl: process {os.getpid()} has no lease of yours, and is not a client of MPS [not_found]",
        )
        with SimulatedClient(variables(node)) as stray:
            event(node, "violation", pid=stray.hello["pid"])
            assert "has no lease of yours, and is a client of gpu0" in says(node, "--pid", f"{stray.pid}")[1]
            # Once it has one, so has its child, which came before, when as much was open; and the other keeps its own.
            own = granted(node)
            assert says(node, "--pid", f"{stray.pid}") == well
        assert says(node, "--pid", f"{client.pid}") == well
        assert says(node, "--pid", f"{os.getpid()}")[0] == 1
    assert says(node, "--pid", f"{os.getpid()}", own["id"])[0] == 2


def test_of_the_caller(node: Node) -> None:
    """Without a word it is the lease of the shell that called, or of the command that `mpsctl run` became."""
    assert says(node)[0] == 1
    lease = granted(node)
    with SimulatedClient(environment(lease)) as client:
        assert client.hello["mps"]
        assert says(node) == (0, "ok: 1 of 1 processes attached, each under MPS and within its limits")
    mpsctl = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket)]
    done = node.mpsctl("run", "--threads", "10", "--memory", "1GiB", "--name", "inner", "--", *mpsctl, "verify")
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].endswith("is a client of MPS yet")
