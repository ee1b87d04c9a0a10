"""Attribution of a process that has left its family: by the token in its environment, which is safe against misuse.

The cases are those that new users try, such as a program that forks twice and runs in the background.
"""

import json
import os
import signal
from collections.abc import Mapping
from typing import Any, Final

import pytest

from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, event
from tests.daemon.leases.test_attribution import lease
from tests.harness import look_at, wait_until
from tests.node import TOKEN, Node
from tests.simulated_clients import WAITS, SimulatedClient, leased, variables

pytestmark = [pytest.mark.enforcement, pytest.mark.thorough]

ANN, BOB = 2711, 2712

DETACHED: Final = ("sh", "-c", 'exec 3<&0; (setsid "$@" <&3 3<&- & ); exit', "sh")
"""Starts the command that follows as daemons start themselves, in its own session without a family, and exits."""

TERMINATE: Final = """
[daemon]
users = "many"
[enforcement]
grace = 0.2
on_violation = "terminate"
"""


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None, config="").start()


def only_lease(node: Node) -> dict[str, Any]:
    (found,) = wait_until(lambda: node.get("/v1/leases").json["leases"], what="the lease")
    return dict(found)


def ended(node: Node, lease_id: str) -> str:
    wait_until(lambda: lease(node, lease_id)["state"] == "ended", what="the lease to end")
    return str(lease(node, lease_id)["because"])


def go(client: SimulatedClient) -> None:
    assert client.process.stdin is not None
    client.process.stdin.write(b"go\n")


def of_lease(node: Node, found: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a process that runs with a lease."""
    return {**variables(node), **found["env"]}


@pytest.mark.parametrize("restarted", [None, signal.SIGKILL, signal.SIGTERM])
def test_double_fork(node: Node, restarted: signal.Signals | None) -> None:
    """A program that moves to the background keeps its lease, as a client or before, also when mpsd restarts."""
    sixty = {"fraction": 0.6}
    with leased(node, "--fraction", "0.6", within=(*WAITS, *DETACHED, *WAITS)) as program:
        wait_until(lambda: (seen := look_at(program.pid)) and seen.command.startswith("sh"), what="mpsctl to become it")
        if restarted is not None:
            node.end(restarted)
        go(program)
        assert program.process.wait(30) == 0
        if restarted is not None:
            node.start()
        lease_id = only_lease(node)["id"]
        (pid,) = event(node, "lease_borne", lease=lease_id)["pids"]
        assert lease(node, lease_id)["bearers"] == [pid]
        assert str(pid) in node.mpsctl("show", lease_id).stdout
        (unseen,) = node.get(f"/v1/leases/{lease_id}/verify").json["processes"]
        assert unseen["pid"] == pid
        refused = node.request("POST", "/v1/leases", sixty)
        assert (refused.status, refused.json["limit"]) == (409, "threads")
        go(program)
        assert program.hello["pid"] == pid
        assert program.hello["active_thread_percentage"] == 60.0
        told = event(node, "client_attributed", client=pid, lease=lease_id)
        assert told["lease"] == lease_id
        assert node.get(f"/v1/leases/{lease_id}/verify").json["ok"]
        assert lease(node, lease_id)["clients"] == [pid]
        assert [(each["kind"], each["pid"]) for each in lease(node, lease_id)["keepers"]] == [("client", pid)]
        assert node.request("POST", "/v1/leases", sixty).status == 409
        program.tell("exit")
        because = ended(node, lease_id)
        assert because.endswith(f"and its last process that carries or may carry its token, pid {pid}, have exited")
    assert node.request("POST", "/v1/leases", sixty).status == 201
    assert node.events("violation") == []


def test_bearer_that_forks(node: Node) -> None:
    """A child of an ended bearer bears the lease, and the lease ends with its last bearer."""
    with leased(node, "--fraction", "0.6", within=(*DETACHED, *WAITS, *DETACHED, *WAITS)) as one:
        assert one.process.wait(30) == 0
        lease_id = only_lease(node)["id"]
        (first,) = event(node, "lease_borne", lease=lease_id)["pids"]
        go(one)
        told = wait_until(
            lambda: [each for each in node.events("lease_borne") if each["pids"] != [first]], what="another bearer"
        )
        go(one)
        assert [one.hello["pid"]] == told[0]["pids"]
    assert ended(node, lease_id)


def test_no_token(node: Node) -> None:
    """A process without the token does not keep the lease when its family is gone, as before there were tokens."""
    with leased(node, "--fraction", "0.6", within=("env", "-u", TOKEN, *DETACHED, *WAITS)) as program:
        lease_id = event(node, "lease_granted", pid=program.pid)["lease"]
        assert ended(node, lease_id) == f"its holder, pid {program.pid}, has exited"
        assert node.events("lease_borne") == []


@needs_root
@pytest.mark.parametrize("uid", [BOB, 0])
def test_token_of_another_user(make_node: Start, uid: int) -> None:
    """A process with a copy of another user's token is no client, keeps no lease and takes no place; nor does root."""
    node = make_node(simulate=1, control=None, config='[daemon]\nusers = "many"\n').start()
    asked = {"threads": 25, "memory": 2 * GIB}
    with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
        stolen = ann.admit(**asked).json
        assert bob.admit(**asked).status == 201  # otherwise the control daemon is closed to this user
        as_thief = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
        with SimulatedClient(of_lease(node, stolen), before=as_thief) as thief:
            told = event(node, "violation", pid=thief.hello["pid"])
            assert (told["kind"], told["lease"]) == ("no_lease", None)
            assert lease(node, stolen["id"])["clients"] == []
            ann.end()
            assert ended(node, stolen["id"]) == f"its holder, pid {ann.pid}, has exited"
            assert thief.sync()["ok"]


def test_family_comes_first(node: Node) -> None:
    """A process whose family has a lease belongs to that lease, whichever token it carries."""
    with calling(node.socket) as other:
        others = other.admit(threads=25, memory=2 * GIB).json
        mine = node.request("POST", "/v1/leases", {"threads": 25, "memory": 2 * GIB}).json
        with SimulatedClient(of_lease(node, others)) as client:
            told = event(node, "client_attributed", client=client.hello["pid"])
            assert told["lease"] == mine["id"]
            assert lease(node, others["id"])["clients"] == []


@pytest.mark.parametrize("wrong", ["token", "lease"])
def test_guessed(node: Node, wrong: str) -> None:
    """A lease's id without its token, or its token without its id, gives no access."""
    with calling(node.socket) as holder:
        found = holder.admit(threads=25, memory=2 * GIB).json
        environment = of_lease(node, found)
        environment[TOKEN if wrong == "token" else "MPSD_LEASE"] = "guessed"
        with SimulatedClient(environment) as client:
            assert event(node, "violation", pid=client.hello["pid"])["kind"] == "no_lease"


def test_it_ends_nobody(make_node: Start) -> None:
    """A client by token takes a place. A holder that is one too many is reported; neither of the two is ended.

    This holds even where policy ends a surplus client, and a client that can use more than its share.
    """
    node = make_node(simulate=1, control=None, config=TERMINATE).start()
    with SimulatedClient(variables(node), before=WAITS) as holder, calling(node.socket) as caller:
        found = caller.admit(threads=25, memory=2 * GIB, pid=holder.pid).json
        bearing = {**variables(node), "MPSD_LEASE": found["id"], TOKEN: found["env"][TOKEN]}
        with SimulatedClient(bearing) as bearer:
            told = event(node, "client_attributed", client=bearer.hello["pid"])
            assert (told["lease"], told["by"]) == (found["id"], "token")
            assert lease(node, found["id"])["bearers"] == [bearer.pid]
            go(holder)
            told = event(node, "violation", pid=holder.hello["pid"])
            assert (told["kind"], told["policy"]) == ("processes", "report")
            bearer.alloc("2GiB")
            for each in (holder, bearer):
                assert each.sync()["ok"]
            assert {each["policy"] for each in node.events("violation")} == {"report"}


def test_new_environment(make_node: Start) -> None:
    """A client without family and token is reported while its user has a lease with room, which it may belong to.

    `podman run` and `systemd-run` start such clients. Once the lease has no room for it, policy ends it.
    """
    node = make_node(simulate=1, control=None, config=TERMINATE).start()
    with calling(node.socket) as holder:
        found = holder.admit(threads=25, memory=2 * GIB).json
        with SimulatedClient(variables(node)) as client:
            told = event(node, "violation", pid=client.hello["pid"])
            assert (told["kind"], told["lease"], told["policy"]) == ("no_lease", None, "report")
            assert f"it may belong to lease {found['id']}" in told["because"]
            assert node.get(f"/v1/leases/{found['id']}/verify").status == 200
            assert client.sync()["ok"]
            assert node.events("client_forced") == []
            with SimulatedClient(of_lease(node, found)) as another:
                event(node, "client_attributed", client=another.hello["pid"], lease=found["id"])
                assert client.process.wait(20) == -signal.SIGTERM
                assert another.sync()["ok"]


def test_no_place_left(node: Node) -> None:
    """A token gives no more places than the lease has."""
    with calling(node.socket) as holder:
        found = holder.admit(threads=25, memory=2 * GIB).json
        with SimulatedClient(of_lease(node, found)) as first:
            event(node, "client_attributed", client=first.hello["pid"], lease=found["id"])
            with SimulatedClient(of_lease(node, found)) as second:
                told = event(node, "violation", pid=second.hello["pid"])
                assert told["kind"] == "no_lease"
                # Nothing is in doubt about it, so that the policy applies: the lease has no room for it.
                assert told["because"].endswith(" without a lease there")
            assert json.dumps(found["env"][TOKEN]) not in node.stderr.read_text()
            assert os.getpid() not in lease(node, found["id"])["clients"]
