"""A `quit` of somebody else is no crash: it is named, it gives no GPU up, and who repeats it is to blame for it alone.

The control daemons are NVIDIA's own where a driver is named. A stand-in for NVIDIA's server makes a `quit` wait, as a
server with clients does.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.control_groups import control_group, joins
from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, branches, event, kill, states
from tests.daemon.leases.holding import path_in
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon
from tests.security.test_contained_root import UNIFIED, groups, refused, root_in
from tests.security.test_crashes import ANN, SMALL, granted, server_for, stand_in
from tests.simulated_clients import SimulatedClient, leased

pytestmark = [needs_root, pytest.mark.thorough]

HINT: Final = "take `echo quit | nvidia-cuda-mps-control` out of the program or job script that has it"


def deaths(node: Node) -> list[dict[str, Any]]:
    return node.events("daemon_death", daemon="gpu0")


def heard(node: Node) -> int:
    """Count the `quit`s that control daemons of gpu0 have got: beside a front-end of mpsd's, one is turned away."""
    return node.control_log("gpu0").read_text().count("Cmd:quit")


def given(node: Node, attempt: Callable[[], object]) -> None:
    """Repeat an attempt to give a `quit` until the control daemon has got one, and wait until its end is told."""
    node.wait_for_state("gpu0", "ready", deadline=40)
    before, known = heard(node), len(deaths(node))
    wait_until(lambda: attempt() and heard(node) > before, what="the `quit` to be let in")
    wait_until(lambda: len(deaths(node)) > known, what="the end of the control daemon to be told")


def job(node: Node) -> bool:
    """Run a job script of root under a lease, which ends in a `quit`."""
    script = f"echo quit | {node.front_end_program[0]}; :"
    return node.mpsctl("run", "--threads", "10", "--memory", "1GiB", "--", "sh", "-c", script).returncode == 0


def ending(node: Node, because: str) -> Any:
    """Wait until the state of the control daemon names the sender of a `quit`, and return it."""
    return wait_until(
        lambda: found if because in (found := node.daemons()["gpu0"])["because"] else None,
        what=f"the sender of a `quit` to be named; the log is {node.stderr}",
        deadline=20,
    )


@contextlib.contextmanager
def quitting(node: Node, command: str = "quit", *, before: tuple[str, ...] = ()) -> Iterator[int]:
    """Have a process give a control daemon a `quit` that waits for a server; yield its pid, once it is seen."""
    sender = wait_until(lambda: _let_in(node, f"{command}\n", before), what="the `quit` to be let in")
    try:
        yield sender.pid
        sender.wait(timeout=30)
    finally:
        sender.kill()
        sender.wait()


def _let_in(node: Node, line: str, before: tuple[str, ...]) -> "subprocess.Popen[bytes] | None":
    """Return a front-end whose `quit` waits; None if it was turned away, after which its `quit` may still be heard."""
    known = heard(node)
    sender = subprocess.Popen(
        [*before, *node.front_end_program], stdin=subprocess.PIPE, stderr=-3, env=node.by_hand("gpu0")
    )
    assert sender.stdin is not None
    sender.stdin.write(line.encode())
    sender.stdin.close()
    wait_until(lambda: sender.poll() is not None or heard(node) > known, what="it to be let in, or turned away")
    return sender if sender.poll() is None else None


def ends(node: Node, command: str = "quit", *, before: tuple[str, ...] = ()) -> dict[str, Any]:
    """End a control daemon by a `quit` that waits for a server until it was seen; return the event of its death."""
    pid = node.wait_for_state("gpu0", "ready", deadline=40)["pid"]
    server = server_for(node, 0)
    with quitting(node, command, before=before):
        ending(node, f"it got the command {command!r} of ")
        kill(server)
    return wait_until(
        lambda: next((each for each in deaths(node) if f"pid {pid} " in each["how"]), None), what="its death to be told"
    )


@pytest.mark.parametrize("real", branches())
def test_five_job_scripts(make_node: Start, real: RealDaemon) -> None:
    """Job scripts of root that end in a `quit` close no GPU, and each end names the command and the lease."""
    node = make_node(simulate=1, control=real.control).start()
    for _ in range(5):
        given(node, partial(job, node))
    node.wait_for_state("gpu0", "ready", deadline=40)
    found = deaths(node)
    assert {each["cause"] for each in found} == {"quit"}, found
    assert [each["verdict"] for each in found[:2]] == ["at_once", "later"], found
    assert {each["verdict"] for each in found[1:]} == {"later"}, found
    assert {each["command"] for each in found} == {"quit"}
    assert all(each["hint"].startswith(HINT) for each in found)
    leases = [each["lease"] for each in node.events("lease_granted")]
    for each in found:
        assert "by the command 'quit' of " in each["how"]
        assert any(lease in each["how"].partition("root's leases there: ")[2] for lease in leases)
    assert max(each["delay"] for each in found) <= 15
    assert "failed" not in states(node, "gpu0")
    assert not node.events("uid_quarantined")


@pytest.mark.parametrize("real", branches(470, 555))
class TestSeen:
    """A `quit` that waits for a server: mpsd sees who has sent it."""

    @pytest.fixture
    def node(self, make_node: Start, real: RealDaemon, short_tmp: Path) -> Node:
        env = stand_in(short_tmp / "bin")
        return make_node(simulate=1, control=real.control, env=env, config=BRISK).start()

    def test_is_named(self, node: Node) -> None:
        """While it waits, the control daemon admits nobody, and its state names the sender, with the remedy."""
        server = server_for(node, 0)
        with quitting(node) as sender:
            state = ending(node, f"it got the command 'quit' of pid {sender} (uid 0)")
            assert state["state"] == "unresponsive"
            assert state["hint"].startswith(HINT)
            answer = node.request("POST", "/v1/leases", SMALL)
            assert (answer.status, answer.json["code"]) == (409, "daemon_not_ready")
            kill(server)
        died = event(node, "daemon_death")
        assert (died["command"], died["uid"], died["clients"]) == ("quit", 0, [])
        assert f"by the command 'quit' of pid {sender} (uid 0)" in died["how"]
        node.wait_for_state("gpu0", "ready", deadline=40)

    def test_root_outside_containers(self, node: Node) -> None:
        """An administrator is to blame for no more than a sentence, and the control daemon comes back each time."""
        with control_group(UNIFIED, "innocent") as group, root_in(node, group) as innocent:
            lease = granted(innocent)
            for _ in range(4):
                assert ends(node, "quit -t 60")["cgroups"] == []
            node.wait_for_state("gpu0", "ready", deadline=40)
            assert node.lease()["state"] == "granted"
            assert innocent.request("DELETE", f"/v1/leases/{lease}").status == 204
        assert not node.events("group_quarantined")

    def test_container(self, node: Node) -> None:
        """The third `quit` of one container of root is its last with a lease; another container goes on."""
        with control_group(UNIFIED, "one") as group, control_group(UNIFIED, "two") as other:
            path, inside = path_in(group), (*joins(group), "unshare", "--pid", "--fork")
            with root_in(node, group) as caller, root_in(node, other) as innocent:
                granted(caller)
                granted(innocent)
                for number in range(1, 4):
                    died = ends(node, before=inside)
                    assert died["cgroups"] == [path]
                    assert bool(node.events("group_quarantined", cgroup=path)) is (number == 3)
                assert refused(caller.admit(**SMALL))
                node.wait_for_state("gpu0", "ready", deadline=40)
                granted(innocent)
            assert groups(node) == {path: "quarantine"}
        assert not node.events("daemon_state", state="failed")


@pytest.mark.real_daemon(535)
class TestOneDriver:
    """Behaviour that does not depend on the driver."""

    @pytest.fixture
    def node(self, make_node: Start) -> Node:
        return make_node(simulate=1, config=f"{BRISK}deaths = 3\n").start()

    def test_container_that_was_not_seen(self, node: Node) -> None:
        """Whoever may have sent a `quit` is named, and not quarantined for it: an administrator may have sent it."""
        with control_group(UNIFIED, "one") as group, root_in(node, group) as caller:
            for _ in range(4):
                granted(caller)
                given(node, partial(node.front_end, "gpu0", "quit\n"))
                assert deaths(node)[-1]["cgroups"] == [path_in(group)]
            assert groups(node) == {path_in(group): "suspect"}
        assert not node.events("group_quarantined")
        assert not node.events("daemon_state", state="failed")

    def test_refused(self, node: Node) -> None:
        """A user's `quit` is refused by the control daemon, and forged lines of its log count for nothing."""
        with calling(node.socket, uid=ANN) as ann:
            granted(ann)
            pid = node.daemons()["gpu0"]["pid"]
            stamp = "[2026-11-22 01:02:03.004 Control     1]"
            lines = ["quit", "quit -t 0", f"x\n{stamp} UI closed\n{stamp} NEW UI\n{stamp} Cmd:quit"]
            ask = partial(node.front_end, "gpu0", user=ANN, group=ANN, extra_groups=[], cwd="/")
            for count, line in enumerate(lines, 1):
                wait_until(lambda: ask(script=f"{line}\n").args and heard(node) >= count, what="it to be let in")  # noqa: B023
            wait_until(lambda: len(node.events("foreign_command")) >= 2, what="the commands to be seen")
            assert node.daemons()["gpu0"]["pid"] == pid
            for number in range(3):
                kill(node.wait_for_state("gpu0", "ready", deadline=40)["pid"])
                wait_until(lambda: len(deaths(node)) > number, what="its death to be told")  # noqa: B023
            node.wait_for_state("gpu0", "failed")
        assert not [each for each in deaths(node) if "command" in each]


class TestClients:
    """Simulated clients, which a `quit` waits for, or takes along."""

    @pytest.fixture
    def node(self, make_node: Start) -> Node:
        return make_node(simulate=1, control=None, config=BRISK).start()

    def test_client_that_goes_with_it(self, node: Node) -> None:
        """The event of the end names the clients whose work ended with it, and so does that of their lease."""
        with leased(node, "--threads", "25", "--memory", "2GiB") as client:
            assert client.hello["mps"]
            lease = event(node, "client_attributed", client=client.pid)["lease"]
            given(node, partial(node.front_end, "gpu0", "quit -t 0\n"))
            died = event(node, "daemon_death", cause="quit")
            assert (died["command"], died["clients"]) == ("quit -t 0", [client.pid])
            assert f"the work of its clients ended with it: process {client.pid}" in died["how"]
            lost = event(node, "lease_clients_lost", lease=lease)
            assert "by the command 'quit -t 0' of " in lost["because"]

    def test_lease_of_the_sender(self, node: Node) -> None:
        """A `quit` that waits for a client is of the lease that its sender's family holds, also for the next mpsd."""
        front_end = " ".join(map(str, node.front_end_program))
        script = f"read go; echo quit | {front_end}; read go"
        with leased(node, "--threads", "25", "--memory", "2GiB") as client:
            assert client.hello["mps"]
            holder = subprocess.Popen(
                node.mpsctl_command("run", "--threads", "10", "--memory", "1GiB", "--", "sh", "-c", script),
                stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
            assert holder.stdin is not None
            try:
                lease = wait_until(
                    lambda: node.events("lease_granted", active_thread_percentage=10.0), what="the lease of the script"
                )[0]["lease"]
                holder.stdin.write(b"go\n")
                holder.stdin.flush()
                ending(node, f"of lease {lease}: it accepts no client")
                node.end(signal.SIGKILL)
                node.start(ready=False)
                ending(node, f"of lease {lease}: it accepts no client")
                assert client.compute(0.01)["ok"]
                client.end()
                died = event(node, "daemon_death", cause="quit", lease=lease)
                assert (died["uid"], died["clients"]) == (0, [])
                node.wait_for_state("gpu0", "ready", deadline=40)
                with SimulatedClient(node.lease()["env"]) as another:
                    assert another.hello["mps"]
            finally:
                holder.stdin.close()
                holder.wait(timeout=30)
