"""Attribution of clients to leases: by family and by control group, never by a pid that another process has now.

The processes and control groups are real, like the clients and servers of the simulated node.
"""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.simulator.client import program
from tests.control_groups import control_group, joins
from tests.daemon.caller import Caller, calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, MIB, Gate, event, kill, needs_last_pid, stopped, with_pid
from tests.daemon.leases.holding import asleep
from tests.harness import look_at, wait_until
from tests.node import Node
from tests.simulated_clients import WAITS, SimulatedClient, leased, variables

pytestmark = pytest.mark.enforcement

PART: Final = (25.0, 2 * GIB)
CLOSED: Final = (0.1, MIB)

ANN, BOB = 2701, 2702
MANY: Final = '[daemon]\nusers = "many"\n'

SHORT: Final = '[enforcement]\nattach = "strict"\nattach_window = 0.2\n'
LONG: Final = '[enforcement]\nattach = "strict"\nattach_window = 60.0\n'

_SHELL: Final = ("sh", "-c", '"$@"; exit', "sh")
"""Starts the command that follows as its child, and waits for it."""


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None).start()


def lease(node: Node, lease_id: str) -> dict[str, Any]:
    found: dict[str, Any] = node.get(f"/v1/leases/{lease_id}").json
    return found


def clients(node: Node, lease_id: str) -> list[int]:
    """Have mpsd ask the control daemon again, and return the clients of a lease."""
    assert node.get(f"/v1/leases/{lease_id}/verify").status == 200
    found: list[int] = lease(node, lease_id)["clients"]
    return found


def has(client: SimulatedClient) -> tuple[float, int]:
    """Return the limits that are in force for a client."""
    return client.hello["active_thread_percentage"], client.hello["pinned_device_mem_limit"]


# -- family ------------------------------------------------------------------------------------------------------------


def test_parents_that_are_gone(node: Node) -> None:
    """A client keeps its lease when all its ancestors are gone, also in the next mpsd."""
    with leased(node, "--threads", "25", "--memory", "2GiB", within=_SHELL * 2) as holder:
        pid = holder.hello["pid"]
        lease_id = event(node, "client_attributed", client=pid)["lease"]
        client = look_at(pid)
        assert client is not None
        assert client.parent != holder.pid
        kill(client.parent)
        holder.kill()
        for number in (signal.SIGKILL, signal.SIGTERM):
            assert clients(node, lease_id) == [pid]
            assert node.get(f"/v1/leases/{lease_id}/verify").json["ok"]
            node.end(number)
            node.start()
        assert holder.do("sync")["ok"]
        holder.tell("exit")
        ended = wait_until(
            lambda: (found := lease(node, lease_id))["state"] == "ended" and found, what="the lease to end with it"
        )
        assert ended["because"] == f"its holder, pid {holder.pid}, and its last client, pid {pid}, have exited"
    assert node.events("violation") == []


def test_child_of_a_client(node: Node, short_tmp: Path) -> None:
    """A child of a lease's client is a client of that lease too, also when the common ancestor, the holder, is gone."""
    fifo = short_tmp / "go"
    os.mkfifo(fifo)
    told = os.open(fifo, os.O_RDWR)
    child_of_it = ("sh", "-c", f'(read go && exec "$@") <{fifo} >{os.devnull} & exec "$@"', "sh")
    asked = ("--threads", "50", "--memory", "4GiB", "--processes", "2")
    try:
        with leased(node, *asked, within=(*_SHELL, *child_of_it)) as holder:
            pid = holder.hello["pid"]
            lease_id = event(node, "client_attributed", client=pid)["lease"]
            holder.kill()
            os.write(told, b"go\n")
            child = wait_until(lambda: {*clients(node, lease_id)} - {pid}, what="the child to be its lease's")
            found = look_at(*child)
            assert found is not None
            assert found.parent == pid
            os.write(told, b"exit\n")
            wait_until(lambda: clients(node, lease_id) == [pid], what="the child to be gone")
    finally:
        os.close(told)
    assert node.events("violation") == []


# -- control group -----------------------------------------------------------------------------------------------------


def granted(caller: Caller, group: Path, **asked: Any) -> str:
    """Have a process of a control group request a lease, and return the lease's id."""
    (group / "cgroup.procs").write_text(f"{caller.pid}", encoding="ascii")
    answer = caller.admit(**{"threads": 25, "memory": 2 * GIB, "gpu": "0", **asked})
    assert answer.status == 201, answer.body
    found: str = answer.json["id"]
    return found


@pytest.mark.parametrize("hierarchy", ["name=systemd", "cgroup2"])
def test_no_relative(node: Node, hierarchy: str) -> None:
    """A process without a family belongs to the only lease in its control group, as far as that has room."""
    with (
        control_group(hierarchy, "job") as job,
        control_group(hierarchy, "other") as other,
        calling(node.socket) as caller,
        calling(node.socket) as another,
    ):
        lease_id = granted(caller, job)
        with SimulatedClient(variables(node), before=joins(other)) as stranger:
            assert event(node, "violation", pid=stranger.hello["pid"])["kind"] == "no_lease"
        with SimulatedClient(variables(node), before=joins(job)) as mate:
            event(node, "client_attributed", client=mate.hello["pid"], lease=lease_id)
            assert has(mate) == PART
            assert node.get(f"/v1/leases/{lease_id}/verify").json["ok"]
            with SimulatedClient(variables(node), before=joins(job)) as too_many:
                told = event(node, "violation", pid=too_many.hello["pid"])
                assert (told["kind"], told["lease"]) == ("processes", lease_id)
        # With a second lease in the group, the lease of the client is ambiguous.
        granted(another, job)
        with SimulatedClient(variables(node), before=joins(job)) as whose:
            told = event(node, "violation", pid=whose.hello["pid"])
            assert (told["kind"], told["lease"]) == ("no_lease", None)


def test_many_without_a_family(make_node: Start) -> None:
    """mpsd reads the groups of the leases' processes once for all clients, and not for each of them."""
    node, most = make_node(simulate=1, control=None, config='[enforcement]\nunadmitted = "allow"\n').start(), 20
    with control_group("cgroup2", "job") as job, contextlib.ExitStack() as stack:
        for _ in range(most):
            holder = stack.enter_context(asleep())
            stack.callback(holder.kill)
            assert node.request("POST", "/v1/leases", {"threads": 1, "memory": MIB, "pid": holder.pid}).status == 201
        for _ in range(10):
            stack.enter_context(SimulatedClient(variables(node), before=joins(job)))
        wait_until(lambda: len(node.get("/v1/clients").json["clients"]) == 10, what="all clients to be listed")

        def costs_little() -> bool:
            before = reads(node)
            for _ in range(10):
                assert [each["lease"] for each in node.get("/v1/clients").json["clients"]] == [None] * 10
            return reads(node) - before < 10 * 10 * most  # two for each process, client and answer otherwise

        wait_until(costs_little, what="ten answers with few reads, once the environments of the clients are read")


def test_many_leases_of_a_process(make_node: Start) -> None:
    """mpsd reads a process once at each reading of the GPUs, however many leases it holds."""
    node, most = make_node(simulate=1).start(), 40

    def cost() -> int:
        """Return how often mpsd reads for ten verifications."""
        before, (lease_id, *_) = reads(node), [each["id"] for each in node.leases()]
        for _ in range(10):
            assert node.get(f"/v1/leases/{lease_id}/verify").status == 200
        return reads(node) - before

    node.lease(threads=1, memory=MIB)
    alone = cost()
    for _ in range(most):
        node.lease(threads=1, memory=MIB)
    assert cost() - alone < 10 * most  # two for each lease and verification otherwise


def reads(node: Node) -> int:
    """Return how often mpsd has read from a file."""
    return int(Path(f"/proc/{node.pid}/io").read_text(encoding="ascii").split("syscr: ")[1].split()[0])


def of_lease(node: Node, lease_id: str) -> dict[str, str]:
    """Return the environment of a process that runs with a lease."""
    return {**variables(node), **{name: str(value) for name, value in lease(node, lease_id)["env"].items()}}


def as_user(uid: int) -> tuple[str, ...]:
    """Return a command prefix that becomes this user."""
    return "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"


TERMINATE: Final = """
[daemon]
users = "many"
[enforcement]
grace = 0.2
on_violation = "terminate"
"""


@needs_root
@pytest.mark.parametrize("terminate", [False, True])
def test_another_user_in_the_control_group(make_node: Start, *, terminate: bool) -> None:
    """Another user's client takes no place in a lease, and another user's lease takes none of its clients."""
    node = make_node(simulate=1, control=None, config=TERMINATE if terminate else MANY).start()
    with control_group("name=systemd", "shared") as job, calling(node.socket, uid=ANN) as ann:
        lease_id = granted(ann, job)
        with calling(node.socket, uid=BOB) as bob:
            bobs = granted(bob, job, threads=10, processes=2)
            with SimulatedClient(of_lease(node, bobs), before=(*joins(job), *as_user(BOB))) as first:
                event(node, "client_attributed", client=first.hello["pid"], lease=bobs)
                with SimulatedClient(of_lease(node, lease_id), before=(*joins(job), *as_user(ANN))) as honest:
                    event(node, "client_attributed", client=honest.hello["pid"], lease=lease_id)
                    assert clients(node, lease_id) == [honest.pid]
                    assert bob.request("DELETE", f"/v1/leases/{bobs}").status == 204
                    told = event(node, "violation", pid=first.pid)
                    assert (told["kind"], told["lease"]) == ("no_lease", None)
                    if terminate:
                        assert first.process.wait(20) == -signal.SIGTERM
                    assert honest.sync()["ok"]
        assert [each["pid"] for each in node.events("violation")] == [first.pid]


@needs_root
def test_another_user_in_the_family(make_node: Start) -> None:
    """A holder's child that runs as another user, by su for example, is no client of the lease and takes no place."""
    node = make_node(simulate=1, control=None, config=MANY).start()
    asked = {"threads": 25, "memory": 2 * GIB, "gpu": "0"}
    mine = node.request("POST", "/v1/leases", asked).json  # this process holds it, and both clients descend from it
    with calling(node.socket, uid=BOB) as bob:
        assert bob.admit(**{**asked, "threads": 10}).status == 201  # otherwise the control daemon is closed to bob
        with SimulatedClient(variables(node), before=as_user(BOB)) as other:
            told = event(node, "violation", pid=other.hello["pid"], kind="no_lease")
            assert told["lease"] is None
            with SimulatedClient(variables(node)) as honest:
                event(node, "client_attributed", client=honest.hello["pid"], lease=mine["id"])
                assert clients(node, mine["id"]) == [honest.pid]
                held = other.alloc("1MiB")
                assert held["ok"], held
                verdict = [node.get(f"/v1/leases/{mine['id']}/verify").json for _ in range(2)][1]
                # It is no client of the lease, and is named as the process that lost it.
                judged = [(each["pid"], each["verdict"], each["mps"]) for each in verdict["processes"]]
                assert judged == [(honest.pid, "ok", True), (other.pid, "violation", None)]


def test_login_session(node: Node) -> None:
    """The control group of a login session is no job: not all processes in it belong to one lease."""
    with control_group("cgroup2", "session") as group, calling(node.socket) as caller:
        granted(caller, group)
        with SimulatedClient(variables(node), before=joins(group)) as client:
            assert event(node, "violation", pid=client.hello["pid"])["kind"] == "no_lease"


# -- those that come late ----------------------------------------------------------------------------------------------


def test_late(make_node: Start) -> None:
    """A client that connects after the window gets next to nothing, unless the API or mpsctl opened a new window."""
    node = make_node(simulate=1, control=None, config=SHORT).start()
    asked = {"threads": 50, "memory": 4 * GIB, "gpu": "0", "processes": 2}
    found = node.request("POST", "/v1/leases", asked).json
    own = {name: str(value) for name, value in found["env"].items()}
    lease_id, route = found["id"], f"/v1/leases/{found['id']}/attach"

    def is_closed() -> bool:
        daemon = node.daemons()["gpu0"]
        return bool(daemon["verified"]) and tuple(daemon["limits"].values()) == CLOSED

    with SimulatedClient(own) as first:
        assert has(first) == PART
        assert first.alloc("1MiB")["ok"]  # the window stays open behind a client without memory
        wait_until(is_closed, what="the window to be over")
        with SimulatedClient(own) as late:
            assert has(late) == CLOSED
            assert {*clients(node, lease_id)} == {first.pid, late.pid}
        for by in ("api", "mpsctl"):
            wait_until(lambda: clients(node, lease_id) == [first.pid] and is_closed(), what="room for another one")
            node.reload(LONG)  # from here on no window closes by itself
            if by == "api":
                assert node.request("POST", route).status == 200
            else:
                assert node.mpsctl("attach", lease_id).returncode == 0
            with SimulatedClient(own) as second:
                assert has(second) == PART
                assert second.alloc("1MiB")["ok"]
                wait_until(lambda: len(clients(node, lease_id)) == 2 and is_closed(), what="it to be closed behind it")
                # There is no third client to wait for.
                refused = node.request("POST", route)
                assert (refused.status, refused.json["code"]) == (409, "does_not_fit")
                assert is_closed()
            node.reload(SHORT)
        node.request("DELETE", f"/v1/leases/{lease_id}")
        assert node.request("POST", route).status == 404
        wait_until(is_closed, what="it to be closed behind the lease")


# -- pids --------------------------------------------------------------------------------------------------------------


@needs_last_pid
@pytest.mark.parametrize("meanwhile", [None, signal.SIGKILL])
def test_pid_of_somebody_else(node: Node, meanwhile: signal.Signals | None) -> None:
    """A process that reuses the pid of an ended client is no client of the lease, also if mpsd was down meanwhile."""
    with SimulatedClient(variables(node), before=WAITS) as client, calling(node.socket) as caller:
        answer = caller.admit(threads=25, memory=2 * GIB, gpu="0", pid=client.pid)
        lease_id = answer.json["id"]
        assert client.process.stdin is not None
        client.process.stdin.write(b"go\n")
        event(node, "client_attributed", client=client.hello["pid"], lease=lease_id)
        if meanwhile is not None:
            node.end(meanwhile)
        client.kill()
        with with_pid(client.pid, *program(), env={**os.environ, **variables(node)}) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write(b"go\n")
            assert json.loads(other.stdout.readline())["mps"]
            if meanwhile is not None:
                node.start()
            told = event(node, "violation", pid=other.pid)
            assert (told["kind"], told["lease"]) == ("no_lease", None)
            assert lease(node, lease_id)["state"] == "ended"


def test_before_a_conversation_is_over(make_node: Start, short_tmp: Path) -> None:
    """A client is reported with its lease while mpsd restores the limits that another user changed."""
    node = make_node(simulate=1)
    gate = Gate(node, short_tmp)
    node.start()
    with SimulatedClient(variables(node), before=WAITS) as client:
        lease_id = node.request("POST", "/v1/leases", {"threads": 20, "memory": "1GiB", "pid": client.pid}).json["id"]
        with gate.shut("set_default_active_thread_percentage"):
            with stopped(node.pid):
                assert client.process.stdin is not None
                client.process.stdin.write(b"go\n")
                assert client.hello["ok"], client.hello
                node.ask("gpu0", "set_default_device_pinned_mem_limit 0 2G")
            seen = wait_until(lambda: node.get("/v1/clients").json["clients"], what="the client to be listed")
            wait_until(gate.has_held, what="mpsd to restore the limit")
        assert [(each["pid"], each["lease"]) for each in seen] == [(client.pid, lease_id)]
