"""Leases that control groups hold: while processes are in the group, or while the group exists."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.control_groups import control_group, joins
from tests.daemon.caller import calling, needs_root
from tests.daemon.helpers import event, stopped
from tests.daemon.leases.holding import (
    ANN,
    BOB,
    ROOT,
    SMALL,
    add,
    admitted,
    asleep,
    ended,
    path_in,
    refusal,
    shown,
    stored,
)
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables

pytestmark = pytest.mark.thorough

HIERARCHIES: Final = ("name=systemd", "cgroup2", "pids")


@needs_root
class TestControlGroups:
    """A lease that a control group holds."""

    @pytest.mark.enforcement
    @pytest.mark.parametrize("hierarchy", HIERARCHIES)
    def test_lives_with_its_processes(self, node: Node, hierarchy: str) -> None:
        """An empty group holds the lease until processes have come and gone, those of groups below it included."""
        with control_group(hierarchy, "holds") as group, control_group(hierarchy, f"{group.name}/below") as below:
            lease = admitted(node, {"cgroup": str(group)}, owner=ROOT)
            assert lease["holders"] == [
                {"kind": "cgroup", "cgroup": path_in(group), "while": "populated", "unit": group.name}
            ]
            assert lease["owner"] == {"uid": 0, "gid": 0, "pid": 0, "start_time": None}
            node.end(signal.SIGKILL)
            node.start()
            assert shown(node, lease)["state"] == "granted"
            with asleep(below) as first, asleep(group) as second:
                with SimulatedClient(variables(node), before=joins(below)) as client:
                    event(node, "client_attributed", client=client.hello["pid"], lease=lease["id"])
                    assert node.get(f"/v1/leases/{lease['id']}/verify").json["ok"]
                second.kill()
                second.wait()
                node.end(signal.SIGKILL)
                node.start()
                assert shown(node, lease)["state"] == "granted"
                first.kill()
            assert ended(node, lease) == f"its holder, control group {path_in(group)}, has no processes any more"

    @pytest.mark.parametrize("hierarchy", ["cgroup2", "cpuacct"])
    @pytest.mark.parametrize("away", [False, True])
    def test_came_and_went(self, node: Node, hierarchy: str, *, away: bool) -> None:
        """Processes that came and went between two checks, or while mpsd was down, were its first."""
        with control_group(hierarchy, "brief") as group, control_group(hierarchy, f"{group.name}/below") as below:
            subprocess.run([*joins(group), "true"], check=True)
            lease = admitted(node, {"cgroup": str(group)}, owner=ROOT)
            again = admitted(node, {"cgroup": str(group), "while": "exists"}, owner=ROOT)
            if away:
                node.end(signal.SIGKILL)
            with contextlib.nullcontext() if away else stopped(node.pid):
                subprocess.run([*joins(below), "true"], check=True)
            if away:
                node.start()
                assert "ended while mpsd was not running" in ended(node, lease)
            else:
                assert ended(node, lease) == f"its holder, control group {path_in(group)}, has no processes any more"
            assert shown(node, again)["state"] == "granted"

    def test_earlier_processes(self, node: Node) -> None:
        """Processes that had left a group before a request named it do not count as its first."""
        with control_group("cgroup2", "earlier") as group, control_group("cgroup2", "later") as later:
            subprocess.run([*joins(group), "true"], check=True)
            lease, other = (admitted(node, {"cgroup": str(each)}, owner=ROOT) for each in (group, later))
            subprocess.run([*joins(later), "true"], check=True)
            ended(node, other)  # by the check that would have ended the first one, too
            assert shown(node, lease)["state"] == "granted"
            subprocess.run([*joins(group), "true"], check=True)
            ended(node, lease)

    @pytest.mark.parametrize("hierarchy", HIERARCHIES)
    @pytest.mark.parametrize("away", [False, True])
    def test_another_of_its_name(self, node: Node, hierarchy: str, *, away: bool) -> None:
        """A group that was removed and made again is another group: the lease has ended, even with processes in it."""
        with control_group(hierarchy, "again") as group:
            lease = admitted(node, {"cgroup": str(group), "while": "exists"}, owner=ROOT)
            if away:
                node.end(signal.SIGKILL)
            group.rmdir()
            group.mkdir()
            with asleep(group) as other:
                if away:
                    node.start()
                    assert "ended while mpsd was not running" in ended(node, lease)
                else:
                    assert ended(node, lease) == f"its holder, control group {path_in(group)}, was removed"
                other.kill()

    def test_while_it_exists(self, node: Node) -> None:
        """A group can hold a lease while it exists: the lease then outlives the group's processes."""
        with control_group("name=systemd", "exists") as group:
            lease = admitted(node, {"cgroup": path_in(group), "while": "exists"}, owner=ROOT)
            with asleep(group) as process:
                wait_until((group / "cgroup.procs").read_text, what="a process to be there")
                process.kill()
            with control_group("name=systemd", "later") as later:
                other = admitted(node, {"cgroup": path_in(later)}, owner=ROOT)
                with asleep(later) as process:
                    node.wait_for_state("gpu0", "ready")
                    wait_until((later / "cgroup.procs").read_text, what="a process to be there")
                    wait_until(
                        lambda: any(each["populated"] for each in stored(node, other)), what="it to be seen there"
                    )
                    process.kill()
                ended(node, other)  # by the same check that would have ended the other one
            assert shown(node, lease)["state"] == "granted"

    def test_handed_to_a_group(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """A lease can be handed from a process to a container's group."""
        with control_group("name=systemd", "handed") as group, asleep(group) as inside:
            lease = admitted(node, pid=sleeper.pid)
            wait_until((group / "cgroup.procs").read_text, what="the process to be there")
            answer = add(node, lease, pid=inside.pid, group=True, replace=True)
            assert [each["cgroup"] for each in answer.json["holders"]] == [path_in(group)]
            sleeper.kill()
            sleeper.wait()
            node.end(signal.SIGKILL)
            node.start()
            assert shown(node, lease)["state"] == "granted"
            inside.kill()
            ended(node, lease)

    def test_whose(self, node: Node) -> None:
        """The lease belongs to the user of the group's first process, or to the user that an administrator names."""
        with control_group("name=systemd", "whose") as group:
            assert refusal(node, {"cgroup": path_in(group)}) == (422, "invalid_request", "owner")
            ann = subprocess.Popen([*joins(group), "setpriv", f"--reuid={ANN}", "--clear-groups", "sleep", "600"])
            with ann:
                wait_until(lambda: Path(f"/proc/{ann.pid}").stat().st_uid == ANN, what="it to be the user's")
                assert admitted(node, {"cgroup": path_in(group)})["owner"]["uid"] == ANN
                ann.kill()

    @pytest.mark.parametrize(
        "path",
        ["/", "/sys/fs/cgroup", "/nothing-of-this-name", "relative", "/a/../b", "/etc", "/x\n", "/" + "x" * 5000],
    )
    def test_no_group(self, node: Node, path: str) -> None:
        """A path that is no control group, or the root of all groups, is refused."""
        assert refusal(node, {"cgroup": path}, owner=ROOT)[0] == 422

    def test_not_both(self, node: Node) -> None:
        """A request names one holder: a process or a control group."""
        assert refusal(node, {"claim": {}}, pid=os.getpid())[0] == 422
        assert refusal(node, {"cgroup": "/a", "unit": "b"})[0] == 422
        assert refusal(node, {})[0] == 422

    @pytest.mark.parametrize("hierarchy", HIERARCHIES)
    def test_users(self, node: Node, hierarchy: str) -> None:
        """A user can name a group that was delegated to it, for a limited time, and no other group."""
        with control_group(hierarchy, "theirs") as group, calling(node.socket, uid=ANN) as ann:
            asked = {**SMALL, "holder": {"cgroup": str(group)}, "ttl": 600}
            for owned in ([], [group], [group / "cgroup.procs"]):
                for path in (group, group / "cgroup.procs"):
                    os.chown(path, ANN if path in owned else 0, 0)
                answer = ann.admit(**asked)
                assert (answer.status, answer.json["code"]) == (403, "not_permitted")
            os.chown(group, ANN, 0)
            answer = ann.admit(**{**asked, "ttl": None})
            assert (answer.status, answer.json["limit"]) == (422, "ttl")
            answer = ann.admit(**asked)
            assert (answer.status, answer.json["owner"]["uid"]) == (201, ANN)
            assert answer.json["expires"] is not None

    def test_not_out_of_a_group(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """An owner cannot move a lease out of a group that an administrator chose; out of its own group it can."""
        anns = ("setpriv", f"--reuid={ANN}", "--clear-groups", "sleep", "600")
        with (
            control_group("name=systemd", "container") as group,
            calling(node.socket, uid=ANN) as ann,
            subprocess.Popen([*joins(group), *anns]) as container,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(container.kill)
            wait_until(lambda: Path(f"/proc/{container.pid}").stat().st_uid == ANN, what="it to be the user's")
            lease = admitted(node, {"claim": {}}, ttl=600)
            token = lease["env"]["MPSD_LEASE_TOKEN"]
            taken = add(node, lease, pid=container.pid, group=True, token=token, owner={"uid": ANN, "gid": ANN})
            assert (taken.status, taken.json["owner"]["uid"]) == (200, ANN), taken.body
            path = f"/v1/leases/{lease['id']}/holders"
            for replace in (False, True):
                for asked in ({"pid": ann.pid}, {"pid": container.pid}, {"pid": container.pid, "group": True}):
                    answer = ann.request("POST", path, {**asked, "replace": replace})
                    assert (answer.status, answer.json["code"]) == (403, "not_permitted"), answer.body
            assert [each["kind"] for each in shown(node, lease)["holders"]] == ["cgroup"]
            assert add(node, lease, pid=sleeper.pid).status == 200
            refused = ann.request("POST", path, {"pid": ann.pid, "replace": True})
            assert (refused.status, len(shown(node, lease)["holders"])) == (403, 2)
            assert f"control group {path_in(group)}" in refused.json["detail"]
            for each in (group, group / "cgroup.procs"):
                os.chown(each, ANN, 0)
            assert ann.request("POST", path, {"pid": ann.pid}).status == 200

    @pytest.mark.enforcement
    def test_other_namespaces(self, node: Node) -> None:
        """A client in its own pid, user and mount namespaces belongs to its group's lease."""
        apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--user", "--map-root-user")
        with control_group("name=systemd", "apart") as group:
            lease = admitted(node, {"cgroup": str(group)}, owner=ROOT)
            with SimulatedClient(variables(node), before=(*joins(group), *apart)) as client:
                assert client.hello["mps"]
                told = event(node, "client_attributed", lease=lease["id"])
                assert told["unit"] == group.name
                assert client.hello["active_thread_percentage"] == 25
                verdict = node.get(f"/v1/leases/{lease['id']}/verify").json
                assert (verdict["ok"], [each["pid"] for each in verdict["processes"]]) == (True, [told["client"]])
        ended(node, lease)
        assert node.events("violation") == []

    @pytest.mark.enforcement
    def test_another_user_inside(self, node: Node) -> None:
        """Another user's client in the group takes no place in the lease and gets no share of it."""
        other = ("setpriv", f"--reuid={BOB}", f"--regid={BOB}", "--clear-groups")
        with control_group("name=systemd", "mixed") as group, calling(node.socket, uid=BOB) as bob:
            bobs = bob.admit(**SMALL, pid=bob.pid).json  # otherwise the control daemon is closed to this user
            lease = admitted(node, {"cgroup": str(group)}, owner={"uid": ANN, "gid": ANN})
            own = {**variables(node), **{name: str(each) for name, each in lease["env"].items()}}
            with SimulatedClient(variables(node), before=(*joins(group), *other)) as stranger:
                told = event(node, "violation", pid=stranger.hello["pid"])
                assert (told["kind"], told["lease"]) == ("no_lease", None)
                ann = ("setpriv", f"--reuid={ANN}", f"--regid={ANN}", "--clear-groups")
                with SimulatedClient(own, before=(*joins(group), *ann)) as honest:
                    event(node, "client_attributed", client=honest.hello["pid"], lease=lease["id"])
                    assert shown(node, lease)["clients"] == [honest.pid]
            assert bob.request("DELETE", f"/v1/leases/{bobs['id']}").status == 204

    @pytest.mark.enforcement
    def test_a_lease_within(self, node: Node) -> None:
        """A process in a group holds the lease that it requests alone."""
        mine = admitted(node, threads=10)  # this process holds the lease, and all others descend from it
        mpsctl = (sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket))
        runs = (*mpsctl, "run", "--threads", "5", "--memory", "1GiB", "--")
        with control_group("name=systemd", "within") as group:
            lease = admitted(node, {"cgroup": str(group)}, owner=ROOT, threads=20, processes=2)
            root = {"PYTHONPATH": str(Path(__file__).parents[3])}
            for before, expected in ((joins(group), lease["id"]), ((), mine["id"])):
                with SimulatedClient(variables(node), before=before) as client:
                    event(node, "client_attributed", client=client.hello["pid"], lease=expected)
            with SimulatedClient({**variables(node), **root}, before=(*joins(group), *runs)) as client:
                told = event(node, "client_attributed", client=client.hello["pid"])
                assert told["lease"] not in {lease["id"], mine["id"]}
                assert client.hello["active_thread_percentage"] == 5
