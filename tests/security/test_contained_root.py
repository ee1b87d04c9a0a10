"""Root in a container, which no access list keeps out of a control daemon, crashes it: its container is to blame.

A container is a caller in its own pid namespace and control group. A signal stands in for the bytes that it sends, as
in test_crashes.
"""

import contextlib
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.control_groups import control_group, joins
from tests.daemon.caller import Caller, calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import branches, event, quarantine
from tests.daemon.leases.holding import ROOT, add, path_in
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon
from tests.security.test_crashes import ANN, SMALL, crash, granted, let_in, warnings
from tests.security.test_strangers import OWN_PIDS, ROOT_OF
from tests.simulated_clients import SimulatedClient, variables

pytestmark = [needs_root, pytest.mark.thorough]

UNIFIED: Final = "cgroup2"


@contextlib.contextmanager
def root_in(node: Node, group: Path) -> Iterator[Caller]:
    """Start a caller that is root in a container with this control group."""
    before = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n{ROOT_OF.format(flags=OWN_PIDS, uid=0)}"
    with calling(node.socket, before=before) as caller:
        yield caller


@contextlib.contextmanager
def made(group: Path) -> Iterator[Path]:
    """Make a control group of this very name, and remove it when all of its processes have ended."""
    group.mkdir()
    try:
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), what=f"all in {group} to have ended")
        group.rmdir()


def quarantined(node: Node, group: Path) -> str:
    """Have root in a container of this group crash a control daemon until its group is quarantined; return its path."""
    with root_in(node, group) as caller:
        for _ in range(2):
            granted(caller)
            crash(node)
    event(node, "group_quarantined", cgroup=path_in(group))
    return path_in(group)


def groups(node: Node) -> dict[str, str]:
    """Return the status's warnings about control groups: the kind by path."""
    found = node.get("/v1/status").json["warnings"]
    return {each["subject"][14:]: each["kind"] for each in found if each["subject"].startswith("control group ")}


def refused(answer: Any) -> bool:
    return (answer.status, answer.json.get("code")) == (403, "quarantined")


@pytest.mark.parametrize("real", branches(470, 555))
def test_two_containers(make_node: Start, real: RealDaemon) -> None:
    """The container that was there at two crashes gets no lease any more; another one, and root outside, continue."""
    node = make_node(simulate=1, control=real.control, config="[daemon]\ndeaths = 3\n").start()
    with control_group(UNIFIED, "one") as group, control_group(UNIFIED, "two") as other:
        path = path_in(group)
        with root_in(node, group) as caller:
            lease = granted(caller)
            first = crash(node)
            assert (first["suspects"], first["cgroups"], first["verdict"]) == ([], [path], "at_once")
            assert f"control group {path} had pipe access" in first["how"]
            assert groups(node) == {path: "suspect"}
            second = crash(node)
            assert (second["cgroups"], second["verdict"], second["delay"]) == ([path], "at_once", 0.0)
            assert event(node, "group_quarantined", cgroup=path)["level"] == "error"
            ended = event(node, "lease_ended", lease=lease)
            assert ended["because"] == f"control group {path} is quarantined"
            answer = caller.admit(**SMALL)
            assert refused(answer)
            assert answer.json["hint"] == f"ask an administrator: mpsctl pardon {path}"
            with root_in(node, other) as innocent:
                granted(innocent)
                assert caller.request("DELETE", f"/v1/quarantines?cgroup={path}").status == 403
        assert node.lease()["state"] == "granted"
        assert groups(node) == {path: "quarantine"}
        assert warnings(node) == {}
    assert not node.events("daemon_state", state="failed")


@pytest.mark.real_daemon(535)
class TestOneDriver:
    """Behaviour that does not depend on the driver."""

    @pytest.fixture
    def node(self, make_node: Start) -> Node:
        return make_node(simulate=1, config="[daemon]\ndeaths = 2\n").start()

    def test_without_a_lease(self, node: Node) -> None:
        """A quarantined container that goes on is named, is to blame for no other, and closes no GPU."""
        with control_group(UNIFIED, "one") as group:
            path = quarantined(node, group)
            with calling(node.socket, uid=ANN) as ann:
                lease = granted(ann)
                for _ in range(3):
                    wait_until(lambda: let_in(node, ANN), what="the lease to be let in", deadline=40)
                    died = crash(node)
                    assert (died["suspects"], died["cgroups"]) == ([ANN], [path])
                    assert died["verdict"] != "give_up"
                assert not node.events("uid_quarantined")
                assert ann.request("DELETE", f"/v1/leases/{lease}").status == 204
        node.wait_for_state("gpu0", "ready", deadline=40)
        assert crash(node)["cgroups"] == []  # the container has gone
        assert groups(node) == {path: "quarantine"}

    def test_crash_while_it_starts(self, node: Node) -> None:
        """Nothing keeps root out while a control daemon starts, so a container with a lease is named for that, too."""
        with control_group(UNIFIED, "one") as group, root_in(node, group) as caller:
            granted(caller)
            crash(node)
            record = node.root / "run" / "gpu0.let-in.json"
            wait_until(lambda: path_in(group) in record.read_text(), what="the next control daemon to have a record")

    def test_across_restarts(self, node: Node) -> None:
        """The crashes, the control groups with access, and their quarantines survive any death of mpsd."""
        with control_group(UNIFIED, "one") as group, root_in(node, group) as caller:
            lease = granted(caller)
            crash(node)
            node.wait_for_state("gpu0", "ready")
            assert caller.request("DELETE", f"/v1/leases/{lease}").status == 204
            for number in (signal.SIGKILL, signal.SIGTERM):
                node.end(number)
                node.start()
                if number is signal.SIGKILL:
                    assert crash(node)["cgroups"] == [path_in(group)]  # that daemon was adopted
                assert groups(node) == {path_in(group): "quarantine"}
                assert refused(caller.admit(**SMALL))

    def test_pods(self, node: Node) -> None:
        """A control group that holds a lease counts likewise; no claim is given to it then, and one to another is."""
        with control_group(UNIFIED, "one") as group, control_group(UNIFIED, "two") as other:
            holder, path = {"cgroup": str(group), "while": "exists"}, path_in(group)
            lease = node.lease(holder=holder, owner=ROOT)["id"]
            for _ in range(2):
                assert crash(node)["cgroups"] == [path]
            event(node, "lease_ended", lease=lease)
            node.wait_for_state("gpu0", "ready")
            assert refused(node.request("POST", "/v1/leases", {**SMALL, "holder": holder, "owner": ROOT}))
            claim = node.lease(holder={"claim": {}})
            assert refused(add(node, claim, cgroup=str(group), owner=ROOT))
            assert add(node, claim, cgroup=str(other), owner=ROOT).status == 200
            assert refused(add(node, claim, cgroup=str(group), replace=True))

    def test_own_groups(self, node: Node) -> None:
        """Root in a container does not leave its quarantine by groups of its own making, nor by its restart."""
        scope = f"docker-{secrets.token_hex(32)}.scope"
        with control_group(UNIFIED, "machine") as top:
            for name in ("a", "b"):
                with made(top / scope), made(top / scope / name) as group, root_in(node, group) as caller:
                    granted(caller)
                    assert crash(node)["cgroups"] == [f"{path_in(top)}/{scope}"]
            with made(top / scope) as group, root_in(node, group) as caller:
                assert refused(caller.admit(**SMALL))

    def test_ever_new_containers(self, node: Node) -> None:
        """Containers that crash once each are all named. The GPU comes back each time, and nobody else is accused."""
        for number in range(4):
            with control_group(UNIFIED, f"new{number}") as group, root_in(node, group) as caller:
                assert caller.request("DELETE", f"/v1/leases/{granted(caller)}").status == 204
                died = crash(node)
                assert died["cgroups"] == [path_in(group)]
                assert died["verdict"] == ("later" if number else "at_once")
                assert died["delay"] <= 15
        assert not node.events("group_quarantined")
        assert node.wait_for_state("gpu0", "ready", deadline=40)

    def test_pardon(self, node: Node) -> None:
        """An administrator lifts the quarantine of a control group by its path, for good and with a clean slate."""
        with control_group(UNIFIED, "one") as group:
            path = quarantined(node, group)
            (found,) = node.get("/v1/quarantines").json["quarantines"]
            assert (found["cgroup"], "uid" in found) == (path, False)
            assert node.mpsctl("pardon", "/nothing").returncode == 1
            assert node.mpsctl("pardon", "nothing").returncode == 1
            assert node.mpsctl("pardon", path).returncode == 0
            event(node, "group_pardoned", cgroup=path)
            node.end(signal.SIGKILL)
            node.start()
            with root_in(node, group) as caller:
                granted(caller)
                assert crash(node)["cgroups"] == [path]
                assert groups(node) == {path: "suspect"}

    def test_containers_without_a_group(self, node: Node) -> None:
        """Containers in no control group of their own are one, and root outside them is not meant."""
        with calling(node.socket, before=ROOT_OF.format(flags=OWN_PIDS, uid=0)) as caller:
            for _ in range(2):
                granted(caller)
                assert crash(node)["cgroups"] == ["/"]
            wait_until(lambda: refused(caller.admit(**SMALL)), what="it to be quarantined")
            node.wait_for_state("gpu0", "ready")
            assert node.lease()["state"] == "granted"

    def test_another_user_in_it(self, node: Node) -> None:
        """Whoever asks from a quarantined container is refused, and that uid has a lease elsewhere."""
        with control_group(UNIFIED, "one") as group:
            quarantined(node, group)
            before = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n{ROOT_OF.format(flags=OWN_PIDS, uid=ANN)}"
            with calling(node.socket, before=before) as inside, calling(node.socket, uid=ANN) as outside:
                assert refused(inside.admit(**SMALL))
                granted(outside)


def test_clients(make_node: Start) -> None:
    """The policy `terminate` ends the clients of a quarantined control group on the other GPUs, too, and no others."""
    config = '[enforcement]\ngrace = 0.3\n[violations]\nquarantined = "terminate"\n'
    node = make_node(simulate=2, control=None, config=config).start()
    with control_group(UNIFIED, "one") as group:
        holder = {"holder": {"cgroup": str(group), "while": "exists"}, "owner": ROOT}
        theirs = node.lease(**holder, gpu="1")
        with (
            SimulatedClient({**variables(node), **theirs["env"]}, before=joins(group)) as inside,
            SimulatedClient({**variables(node), **node.lease(gpu="1")["env"]}) as outside,
        ):
            assert inside.hello["mps"]
            assert outside.hello["mps"]
            node.lease(**holder, gpu="0")
            for _ in range(2):
                crash(node)
                node.wait_for_state("gpu0", "ready")
            wait_until(lambda: inside.process.poll() is not None, what=f"the client to be ended; {node.stderr}")
            assert node.events("violation", kind="quarantined", pid=inside.pid)
            assert outside.compute(0.01)["ok"]


def test_end_of_a_quarantine(make_node: Start) -> None:
    """A quarantine that is as old as the settings say ends: by then, another user may have the uid."""
    node = make_node(simulate=1, control=None, config="[enforcement]\nquarantine = 3600\n").start()
    node.end()
    quarantine(node, ANN, since="2020-01-01T00:00:00Z")
    node.start()
    told = event(node, "uid_pardoned", uid=ANN)
    assert told["because"] == "it has lasted 3600 s (enforcement.quarantine)"
    assert node.get("/v1/quarantines").json["quarantines"] == []
    with calling(node.socket, uid=ANN) as ann:
        granted(ann)
    node.end(signal.SIGKILL)
    node.start()
    assert warnings(node) == {}
