"""A process that has set a title shows no environment: it is unknown, which ends no client, and excuses none.

The clients set their titles with the real setproctitle, as vLLM, SGLang and gunicorn do, and overwrite their
environments so.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.core.enforcement.attribution import TOKEN
from tests.control_groups import control_group, joins
from tests.daemon.caller import calling
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, event
from tests.daemon.leases.holding import ROOT
from tests.harness import look_at, wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables
from tests.titled_client import TITLED

pytestmark = [pytest.mark.enforcement, pytest.mark.thorough]

TERMINATE: Final = '[enforcement]\ngrace = 0.3\non_violation = "terminate"\n'

NAME: Final = "VLLM::EngineCore"


@pytest.fixture
def node(make_node: Start) -> Node:
    """Start a node that ends what breaks its lease."""
    return make_node(simulate=1, control=None, config=TERMINATE).start()


def lease(node: Node, memory: int, **more: Any) -> dict[str, Any]:
    """Take out a lease that this process holds."""
    answer = node.request("POST", "/v1/leases", {"threads": 25, "memory": memory, "gpu": "0", **more})
    assert answer.status == 201, answer.body
    found: dict[str, Any] = answer.json
    return found


@contextmanager
def titled(
    node: Node, granted: dict[str, Any], when: str = "first", title: str = NAME, before: Sequence[str] = ()
) -> Iterator[SimulatedClient]:
    """Start a client in the environment of a lease, which sets a title (`tests.titled_client`) and connects."""
    environment = {**variables(node), **granted["env"]}
    with SimulatedClient(environment, before=(*before, *TITLED, when, title), late=True) as client:
        assert client.init()["mps"]
        assert client.context()["ok"]
        yield client


def shows_environment(pid: int) -> bool:
    return b"=" in Path(f"/proc/{pid}/environ").read_bytes()


def set_title(client: SimulatedClient) -> None:
    """Have a client set its title now."""
    assert shows_environment(client.pid)
    os.kill(client.pid, signal.SIGUSR1)
    wait_until(lambda: not shows_environment(client.pid), what="the environment to be overwritten")


def verified(node: Node, granted: dict[str, Any]) -> dict[str, Any]:
    """Have mpsd read the GPUs, and return its verdict on a lease."""
    answer = node.get(f"/v1/leases/{granted['id']}/verify")
    assert answer.status == 200
    found: dict[str, Any] = answer.json
    return found


def unknown(node: Node, granted: dict[str, Any]) -> dict[str, Any]:
    """Wait until mpsd's verdict on a lease is that not all is known, and return it."""
    found = verified(node, granted)

    def is_unknown() -> bool:
        found.update(verified(node, granted))
        return bool(found["verdict"] == "unknown")

    wait_until(is_unknown, what="the lease to be unknown")
    return found


def restart(node: Node) -> None:
    """Kill mpsd, and start the next one."""
    node.end(signal.SIGKILL)
    node.start()


# -- one lease ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("title", [NAME, f"{NAME} {'x' * 400} l=INFO)"])
def test_unknown(node: Node, title: str) -> None:
    """Its lease is verified as unknown with the reason, and there is no violation; an extra client is ended."""
    granted = lease(node, GIB)
    with titled(node, granted, title=title) as client:
        assert not shows_environment(client.pid) or title != NAME
        event(node, "client_attributed", client=client.pid, lease=granted["id"])
        found = verified(node, granted)
        assert (found["ok"], found["verdict"]) == (False, "unknown")
        assert f"/proc/{client.pid}/environ cannot be read" in found["because"]
        assert node.get("/v1/status").json["violations"] == []
        # A client beyond the number of the lease is in its family, and its user has no other lease: that is proven.
        with titled(node, granted) as extra:
            assert extra.process.wait(20) == -signal.SIGTERM
        assert client.sync()["ok"]
    assert {line["pid"] for line in node.events("violation")} == {extra.pid}


def test_its_memory_counts(node: Node) -> None:
    """Where it can belong to one lease only, it is ended for holding more memory than that has."""
    granted = lease(node, GIB)
    with calling(node.socket) as other:
        assert other.admit(threads=25, memory=4 * GIB, gpu="0").status == 201
        with titled(node, {"env": {}}) as client:
            event(node, "client_attributed", client=client.pid, lease=granted["id"])
            assert client.alloc("2GiB")["ok"]
            verified(node, granted)
            told = event(node, "violation", kind="memory", pid=client.pid)
            assert (told["lease"], told["policy"]) == (granted["id"], "terminate")
            assert client.process.wait(20) == -signal.SIGTERM


def test_without_a_lease(node: Node) -> None:
    """A client without a family is no violation while its user's lease has a place, and makes that lease unknown.

    Beyond that it is reported, and not ended: it may have had the token.
    """
    with calling(node.socket) as holder:
        found = holder.admit(threads=25, memory=GIB, gpu="0").json
        with titled(node, found) as client:
            assert f"process {client.pid} may belong to lease {found['id']}" in unknown(node, found)["because"]
            said = node.mpsctl("verify", "--pid", str(client.pid)).stderr
            assert f"process {client.pid} has no lease of yours, as far as is known" in said
            assert node.events("violation") == []
            assert node.get("/v1/gpus").json["gpus"][0]["clients_unleased"] == 0
            with SimulatedClient({**variables(node), **found["env"]}) as first:
                event(node, "client_attributed", client=first.hello["pid"], lease=found["id"])
                told = event(node, "violation", pid=client.pid)
                assert (told["kind"], told["policy"]) == ("no_lease", "report")
                assert f"/proc/{client.pid}/environ cannot be read" in told["because"]
                verified(node, found)
                assert client.sync()["ok"]
                assert first.sync()["ok"]
    assert node.events("client_forced") == []


# -- several leases of one holder --------------------------------------------------------------------------------------


def test_one_lease_of_several(node: Node) -> None:
    """Where its holder has several leases, it counts for none of them, and may hold what they have together."""
    small, large = lease(node, GIB), lease(node, 4 * GIB)
    with titled(node, large) as client:
        assert client.alloc("4GiB")["ok"]
        for each in (small, large):
            found = unknown(node, each)
            assert f"/proc/{client.pid}/environ cannot be read" in found["because"]
            assert f"process {client.pid} may belong to lease {small['id']} and {large['id']}" in found["because"]
            assert client.pid not in {process["pid"] for process in found["processes"]}
        (listed,) = node.get("/v1/clients").json["clients"]
        assert (listed["lease"], listed["verdict"]) == (None, "unknown")
        # The memory that it holds is granted already.
        (gpu,) = node.get("/v1/gpus").json["gpus"]
        assert (gpu["memory_granted"], gpu["memory_unleased"], gpu["clients_unleased"]) == (5 * GIB, 0, 0)
        assert client.sync()["ok"]
        assert node.events("violation") == []
        with titled(node, large) as other:
            assert other.alloc("2GiB")["ok"]
            verified(node, small)
            for process in (client, other):
                told = event(node, "violation", kind="memory", pid=process.pid)
                assert (told["lease"], told["policy"]) == (None, "terminate")
                assert process.process.wait(20) == -signal.SIGTERM
    assert {line["client"] for line in node.events("client_attributed")} == set()


def test_more_than_their_places(node: Node) -> None:
    """Of such clients, as many as the leases have places left are no violation; the others are reported."""
    leases = [lease(node, GIB), lease(node, 4 * GIB)]
    with SimulatedClient({**variables(node), **leases[0]["env"]}) as known, titled(node, leases[1]) as client:
        event(node, "client_attributed", client=known.hello["pid"], lease=leases[0]["id"])
        unknown(node, leases[1])
        assert node.events("violation") == []
        with titled(node, leases[1]) as extra:
            told = event(node, "violation", pid=extra.pid)
            assert (told["kind"], told["lease"], told["policy"]) == ("no_lease", None, "report")
            for each in (known, client, extra):
                assert each.sync()["ok"]
    assert {line["pid"] for line in node.events("violation")} == {extra.pid}


def test_seen_before(node: Node) -> None:
    """What was readable when it was first seen counts for good, also for the next mpsd: it is judged by its lease."""
    small, large = lease(node, GIB), lease(node, 4 * GIB)
    with titled(node, large, "later") as client:
        event(node, "client_attributed", client=client.pid, lease=large["id"])
        wait_until(lambda: verified(node, large)["ok"], what="the lease to be verified")
        set_title(client)
        for next_mpsd in (False, True):
            if next_mpsd:
                restart(node)
            assert client.alloc("2GiB")["ok"]
            wait_until(lambda: verified(node, large)["ok"], what="the lease to be verified again")
            assert verified(node, small)["verdict"] == "nothing"
    assert node.events("violation") == []


def test_judged_by_what_was_seen(node: Node) -> None:
    """A title that it sets later, and the next mpsd, excuse no client that holds more than its lease grants."""
    small, _ = lease(node, GIB), lease(node, 4 * GIB)
    del small["env"]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]
    with titled(node, small, "later") as client:
        event(node, "client_attributed", client=client.pid, lease=small["id"])
        wait_until(lambda: "was not started in" in verified(node, small)["because"], what="its environment to be read")
        set_title(client)
        restart(node)
        assert client.alloc("2GiB")["ok"]
        verified(node, small)
        told = event(node, "violation", kind="memory", pid=client.pid)
        assert (told["lease"], told["policy"]) == (small["id"], "terminate")
        assert client.process.wait(20) == -signal.SIGTERM


def test_titled_over_a_restart(node: Node) -> None:
    """One that had its title before mpsd first saw it is as unknown to the next mpsd."""
    leases = [lease(node, GIB), lease(node, 4 * GIB)]
    with titled(node, leases[1]) as client:
        for next_mpsd in (False, True):
            if next_mpsd:
                restart(node)
            for each in leases:
                unknown(node, each)
        assert client.alloc("4GiB")["ok"]
        verified(node, leases[0])
        assert client.sync()["ok"]
    assert node.events("violation") == []


@pytest.mark.parametrize("when", ["fork", "child"])
def test_forked(node: Node, when: str) -> None:
    """A client that was forked belongs to the lease whose token an ancestor shows; otherwise it remains unknown."""
    small, large = lease(node, GIB, processes=2), lease(node, 4 * GIB)
    with titled(node, large, when) as parent:
        client = parent.hello["pid"]
        assert client != parent.pid
        if when == "child":
            event(node, "client_attributed", client=client, lease=large["id"])
            found = verified(node, large)
            assert f"/proc/{client}/environ cannot be read" in found["because"]
            assert verified(node, small)["verdict"] == "nothing"
            restart(node)
            unknown(node, large)
            wait_until(lambda: verified(node, small)["verdict"] == "nothing", what="nothing to be unknown of the other")
        else:
            for each in (small, large):
                unknown(node, each)
        assert parent.alloc("4GiB")["ok"]
        verified(node, small)
        assert parent.sync()["ok"]
    assert node.events("violation") == []


def test_two_containers(node: Node) -> None:
    """Of the leases of a pod, a client has that of which a process around it in its container shows the token."""
    asked = {"owner": ROOT}
    with control_group("cgroup2", "pod") as pod, ExitStack() as stack:
        containers = [pod / name for name in ("first", "second")]
        for folder in containers:
            folder.mkdir()
            stack.callback(folder.rmdir)
        holder = {"holder": {"cgroup": str(pod)}, **asked}
        small, large = lease(node, GIB, **holder), lease(node, 4 * GIB, **holder)
        with (
            titled(node, large, "child", before=joins(containers[1])) as parent,
            titled(node, small, before=joins(containers[0])) as whose,
        ):
            event(node, "client_attributed", client=parent.hello["pid"], lease=large["id"])
            assert f"process {whose.pid} may belong to lease" in unknown(node, small)["because"]
            assert parent.alloc("3GiB")["ok"]
            assert whose.alloc("1GiB")["ok"]
            for each in (small, large):
                verified(node, each)
            assert parent.sync()["ok"]
            assert whose.sync()["ok"]
        wait_until(lambda: not any((each / "cgroup.procs").read_text() for each in containers), what="all to end")
    assert node.events("violation") == []


# -- left behind -------------------------------------------------------------------------------------------------------

CHILD: Final = ("sh", "-c", 'exec 3<&0; "$@" <&3 & exec sleep 600', "sh")
DAEMON: Final = ("sh", "-c", 'exec 3<&0; (setsid "$@" <&3 3<&- &); exec sleep 600', "sh")
"""Start the command that follows, and become a holder that is left to end: as a shell does, and as daemons start."""


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("start", [CHILD, DAEMON])
def test_left_behind(node: Node, start: Sequence[str], *, restarted: bool) -> None:
    """A program that had its title before its holder ends keeps the leases that it may have, until it ends."""
    environment = {**variables(node)}
    with control_group("cgroup2", "left") as group:
        command = (*joins(group), *node.mpsctl_command("run", "--fraction", "0.2", "--"))
        command += (*node.mpsctl_command("run", "--fraction", "0.3", "--"), *start, *TITLED, "first", NAME)
        with SimulatedClient(environment, before=command, late=True) as program:
            pid = program.hello["pid"]
            assert not shows_environment(pid)
            granted = {each["id"]: each for each in node.leases()}
            assert {each["holders"][0]["pid"] for each in granted.values()} == {program.pid}
            if restarted:
                node.end(signal.SIGKILL)
            program.kill()
            if restarted:
                node.start()
            for lease_id in granted:
                assert event(node, "lease_borne", lease=lease_id)["pids"] == [pid]
            assert program.do("init")["mps"]
            assert program.do("context")["ok"]
            for each in granted.values():
                unknown(node, each)
            assert program.sync()["ok"]
            assert node.events("violation") == []
            program.tell("exit")
            for lease_id in granted:
                event(node, "lease_ended", lease=lease_id)


def test_left_behind_in_a_group(node: Node) -> None:
    """The lease of the whole control group takes no lease from a program in it that was left behind."""
    with control_group("cgroup2", "left") as group:
        around = lease(node, GIB, holder={"cgroup": str(group)}, owner=ROOT)
        command = (
            *joins(group),
            *node.mpsctl_command("run", "--fraction", "0.2", "--"),
            *CHILD,
            *TITLED,
            "first",
            NAME,
        )
        with SimulatedClient(variables(node), before=command, late=True) as program:
            pid = program.hello["pid"]
            (own,) = (each["id"] for each in node.leases() if each["id"] != around["id"])
            program.kill()
            assert event(node, "lease_borne", lease=own)["pids"] == [pid]
            assert program.do("init")["mps"]
            event(node, "client_attributed", client=pid, lease=own)
    assert node.events("violation") == []


def test_not_left_behind(node: Node) -> None:
    """A titled process that is older than a lease keeps it no more than one whose parent lives, or of another group."""
    with ExitStack() as stack:
        groups = [stack.enter_context(control_group("cgroup2", name)) for name in ("one", "other")]

        def start(group: Path, *within: str) -> SimulatedClient:
            command = (*joins(group), *within, *TITLED, "first", NAME)
            started = stack.enter_context(SimulatedClient(variables(node), before=command, late=True))
            assert not shows_environment(started.hello["pid"])
            return started

        start(groups[0], *DAEMON).kill()
        with calling(node.socket) as caller:
            (groups[0] / "cgroup.procs").write_text(f"{caller.pid}", encoding="ascii")
            found = caller.admit(threads=25, memory=GIB, gpu="0").json
            start(groups[0])
            start(groups[1], *DAEMON).kill()
            caller.end()
            ended = event(node, "lease_ended", lease=found["id"])
            assert ended["because"] == f"its holder, pid {caller.pid}, has exited"
    assert TOKEN in found["env"]
    assert look_at(caller.pid) is None
