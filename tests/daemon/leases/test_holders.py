"""Who can hold a lease: processes, control groups and claims; each is added, handed over, and ends the lease once."""

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.system.acl import read, text
from tests.control_groups import control_group, joins
from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, GIB, event
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables

ANN, BOB = 2711, 2712
MANY: Final = '[daemon]\nusers = "many"\n'
SMALL: Final[dict[str, Any]] = {"threads": 25, "memory": 2 * GIB, "gpu": "0"}
ROOT: Final = {"uid": 0, "gid": 0}

HIERARCHIES: Final = ("name=systemd", "cgroup2", "pids")


@pytest.fixture
def node(make_node: Start) -> Node:
    """Start a node whose control daemon serves many users."""
    return make_node(simulate=1, control=None, config=MANY if os.geteuid() == 0 else "").start()


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """Give a process that holds whatever it is told to."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def asleep(group: Path | None = None) -> "subprocess.Popen[bytes]":
    """Start a process, in a control group."""
    return subprocess.Popen([*(joins(group) if group else ()), "sleep", "600"])


def admitted(node: Node, holder: object = None, **more: Any) -> dict[str, Any]:
    """Take out a lease, and return it."""
    answer = node.request("POST", "/v1/leases", {**SMALL, "holder": holder, **more})
    assert answer.status == 201, answer.body
    found: dict[str, Any] = answer.json
    return found


def refusal(node: Node, holder: object, **more: Any) -> tuple[int, str, str | None]:
    """Ask for a lease that is refused, and return how: status, code and limit."""
    answer = node.request("POST", "/v1/leases", {**SMALL, "holder": holder, **more})
    assert node.get("/v1/leases").json["leases"] == []
    return answer.status, answer.json["code"], answer.json.get("limit")


def shown(node: Node, lease: dict[str, Any]) -> dict[str, Any]:
    """Return a lease as it is now."""
    found: dict[str, Any] = node.get(f"/v1/leases/{lease['id']}").json
    return found


def ended(node: Node, lease: dict[str, Any]) -> str:
    """Wait until a lease has ended, once, and return why."""
    wait_until(lambda: shown(node, lease)["state"] == "ended", what="the lease to end")
    assert len(node.events("lease_ended", lease=lease["id"])) == 1
    because: str = shown(node, lease)["because"]
    return because


def add(node: Node, lease: dict[str, Any], **asked: Any) -> Any:
    """Ask for another holder of a lease."""
    return node.request("POST", f"/v1/leases/{lease['id']}/holders", asked)


def path_in(group: Path) -> str:
    """Return what /proc/PID/cgroup calls a control group that a test has made."""
    return f"/{group.name}"


# -- processes ---------------------------------------------------------------------------------------------------------


class TestProcesses:
    """A lease that processes hold."""

    def test_lives_with_any(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """It lives while any of them does, also across mpsd's death, and ends once with the last."""
        with asleep() as first:
            lease = admitted(node, pid=first.pid)
            assert [each["pid"] for each in lease["holders"]] == [first.pid]
            both = add(node, lease, pid=sleeper.pid)
            assert both.status == 200, both.body
            assert [each["pid"] for each in both.json["holders"]] == [first.pid, sleeper.pid]
            assert both.json["env"]["MPSD_LEASE_TOKEN"] == lease["env"]["MPSD_LEASE_TOKEN"]
            event(node, "lease_holder_added", lease=lease["id"])
            first.kill()
        wait_until(lambda: len(shown(node, lease)["holders"]) == 1, what="the first to be left out")
        node.end(signal.SIGKILL)
        node.start()
        assert [each["pid"] for each in shown(node, lease)["holders"]] == [sleeper.pid]
        sleeper.kill()
        assert ended(node, lease) == f"its holder, pid {sleeper.pid}, has exited"

    def test_handed_over(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """Whoever had it holds it no more: its end does not end the lease."""
        with asleep() as first:
            lease = admitted(node, pid=first.pid)
            answer = add(node, lease, pid=sleeper.pid, replace=True)
            assert [each["pid"] for each in answer.json["holders"]] == [sleeper.pid]
            because = event(node, "lease_handed_over", lease=lease["id"])["because"]
            assert because == f"it is held by pid {sleeper.pid}, and was by pid {first.pid}"
            first.kill()
        node.end(signal.SIGKILL)
        node.start()
        assert shown(node, lease)["state"] == "granted"
        sleeper.kill()
        ended(node, lease)

    def test_twice(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """Who holds it already holds it once."""
        lease = admitted(node, pid=sleeper.pid)
        assert len(add(node, lease, pid=sleeper.pid).json["holders"]) == 1

    def test_ended(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """A lease that has ended gets no holder."""
        lease = admitted(node, pid=sleeper.pid)
        assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
        assert add(node, lease, pid=sleeper.pid).status == 404

    @pytest.mark.parametrize("named", ["pid", "cgroup", "unit"])
    def test_no_descriptor_left(self, node: Node, sleeper: "subprocess.Popen[bytes]", named: str) -> None:
        """Where mpsd cannot open what is named, it says so, that it is no fault of the caller's, and to ask again."""
        asked = (
            {"pid": sleeper.pid} if named == "pid" else {"holder": {named: "x" if named == "unit" else "/x"}, "ttl": 60}
        )
        soft, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
        with contextlib.closing(http.client.HTTPConnection("mpsd")) as connection:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(os.fspath(node.socket))
            connection.request("GET", "/healthz")
            assert connection.getresponse().read()
            resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (3, hard))
            try:
                connection.request("POST", "/v1/leases", json.dumps({**SMALL, **asked}))
                answer = connection.getresponse()
                told = json.loads(answer.read())
            finally:
                resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert (answer.status, told["code"], told["limit"]) == (429, "too_many_requests", "descriptors"), told
        assert "Too many open files" in told["detail"]
        assert "try again" in told["hint"]

    def test_descriptors_for_others(self, node: Node) -> None:
        """Holders beside others take half of mpsd's descriptors; leases, and whoever releases one, have the rest."""
        with contextlib.ExitStack() as stack:
            sleepers = [stack.enter_context(asleep()) for _ in range(60)]
            for each in sleepers:
                stack.callback(each.kill)
            lease = admitted(node, pid=sleepers[0].pid)
            _, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (100, hard))
            answers = [add(node, lease, pid=each.pid) for each in sleepers[1:]]
            refused = [each for each in answers if each.status != 200]
            assert {each.status for each in refused} == {429}
            assert (refused[0].json["code"], refused[0].json["limit"]) == ("too_many_requests", "descriptors")
            held = shown(node, lease)["holders"]
            assert len(held) == 1 + len(answers) - len(refused) > 1
            assert held[-1]["pid"] != sleepers[-1].pid
            other = admitted(node, pid=sleepers[-1].pid)
            assert add(node, other, pid=sleepers[0].pid).status == 200  # it is watched already
            assert len(add(node, other, pid=sleepers[-2].pid, replace=True).json["holders"]) == 1
            assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
            wait_until(lambda: add(node, other, pid=sleepers[1].pid).status == 200, what="room for another")

    @needs_root
    def test_descriptors_for_groups(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """A control group beside another holder is refused as a process is."""
        lease = admitted(node, pid=sleeper.pid)
        soft, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
        there = len([*Path(f"/proc/{node.pid}/fd").iterdir()])
        with control_group("name=systemd", "beside") as group:
            for most, status in ((there + 14, 429), (soft, 200)):
                resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (most, hard))
                answer = add(node, lease, cgroup=path_in(group))
                assert answer.status == status, answer.body
            assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204

    @needs_root
    def test_another_user(self, node: Node) -> None:
        """Nobody adds a holder to another's lease, nor another's process to one's own; and nothing changes."""
        with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
            lease = ann.admit(**SMALL).json
            path = f"/v1/leases/{lease['id']}/holders"
            for caller, asked in (
                (bob, {"pid": bob.pid}),
                (bob, {"pid": bob.pid, "token": "0" * 32}),
                (bob, {"pid": bob.pid, "token": "\u00e9"}),
                (ann, {"pid": bob.pid}),
                (ann, {"owner": {"uid": BOB, "gid": BOB}}),
            ):
                answer = caller.request("POST", path, asked)
                assert (answer.status, answer.json["code"]) == (403, "not_permitted"), asked
            token = lease["env"]["MPSD_LEASE_TOKEN"]
            taken = bob.request("POST", path, {"pid": bob.pid, "token": token})
            assert (taken.status, taken.json["code"]) == (409, "already_claimed")
            assert [each["pid"] for each in shown(node, lease)["holders"]] == [ann.pid]


# -- control groups ----------------------------------------------------------------------------------------------------


@needs_root
class TestControlGroups:
    """A lease that a control group holds."""

    @pytest.mark.parametrize("hierarchy", HIERARCHIES)
    def test_lives_with_its_processes(self, node: Node, hierarchy: str) -> None:
        """Empty, it holds the lease until processes came; then until they are gone, those of groups below it too."""
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

    @pytest.mark.parametrize("hierarchy", HIERARCHIES)
    @pytest.mark.parametrize("away", [False, True])
    def test_another_of_its_name(self, node: Node, hierarchy: str, *, away: bool) -> None:
        """A group that was removed and made again is another: the lease has ended, whoever is in there now."""
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
        """A group that is to hold it while it exists does so when its processes have left."""
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
                ended(node, other)  # by the same look that would have ended the other one
            assert shown(node, lease)["state"] == "granted"

    def test_handed_to_a_group(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """From the process that asked for it to a container's group, named by a process of it."""
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
        """It is the user's of the group's first process, or the one that an administrator names."""
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
        """What is none, or is everything, is refused."""
        assert refusal(node, {"cgroup": path}, owner=ROOT)[0] == 422

    def test_not_both(self, node: Node) -> None:
        """A request names one holder."""
        assert refusal(node, {"claim": {}}, pid=os.getpid())[0] == 422
        assert refusal(node, {"cgroup": "/a", "unit": "b"})[0] == 422
        assert refusal(node, {})[0] == 422

    @pytest.mark.parametrize("hierarchy", HIERARCHIES)
    def test_users(self, node: Node, hierarchy: str) -> None:
        """A user names a group that was delegated to it, for a time; nobody's else, and not for ever."""
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

    def test_other_namespaces(self, node: Node) -> None:
        """A client in pid, user and mount namespaces of its own is its group's, and nobody's who is not in there."""
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

    def test_another_user_inside(self, node: Node) -> None:
        """Another user's client in the group takes no place in the lease, and has no part in it."""
        other = ("setpriv", f"--reuid={BOB}", f"--regid={BOB}", "--clear-groups")
        with control_group("name=systemd", "mixed") as group, calling(node.socket, uid=BOB) as bob:
            bobs = bob.admit(**SMALL, pid=bob.pid).json  # else the control daemon is closed to it
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

    def test_a_lease_within(self, node: Node) -> None:
        """What takes out a lease inside a group has it for itself, and who started the group has no part in that."""
        mine = admitted(node, threads=10)  # this process's, from which all others descend
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


def stored(node: Node, lease: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the holders of a lease as they are on disk."""
    uri = f"file:{node.root / 'run' / 'leases.db'}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True)
    try:
        rows = [json.loads(data) for (data,) in connection.execute("SELECT data FROM leases") if data]
    finally:
        connection.close()
    return [each for row in rows if row["id"] == lease["id"] for each in row["holders"]]


# -- claims ------------------------------------------------------------------------------------------------------------


class TestClaims:
    """A lease that is claimed before anybody holds it."""

    def test_expires(self, node: Node) -> None:
        """One that nobody takes holds its part until its time is over, which is told; and nothing is left of it."""
        lease = admitted(node, {"claim": {"deadline": 0.6}}, threads=100, memory=2 * GIB)
        assert [each["kind"] for each in lease["holders"]] == ["claim"]
        assert lease["holders"][0]["deadline"]
        refused = node.request("POST", "/v1/leases", SMALL)
        assert (refused.status, refused.json["limit"]) == (409, "threads")
        assert ended(node, lease) == "its claim was not taken within 0.6 s"
        event(node, "lease_claim_expired", lease=lease["id"])
        assert stored(node, lease) == []
        admitted(node, pid=os.getpid())

    def test_expires_while_mpsd_is_away(self, node: Node) -> None:
        """Its time passes whether mpsd lives or not."""
        lease = admitted(node, {"claim": {"deadline": 0.5}})
        node.end(signal.SIGKILL)
        node.start()
        ended(node, lease)
        event(node, "lease_claim_expired", lease=lease["id"])

    def test_taken_once(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """The first takes it, and may ask again; a second one is refused."""
        lease = admitted(node, {"claim": {}})
        token = lease["env"]["MPSD_LEASE_TOKEN"]
        for _ in range(2):
            answer = add(node, lease, pid=sleeper.pid, token=token)
            assert answer.status == 200, answer.body
            assert answer.json["owner"]["pid"] == sleeper.pid
        assert len(node.events("lease_claimed", lease=lease["id"])) == 1
        second = add(node, lease, token=token)
        assert (second.status, second.json["code"]) == (409, "already_claimed")
        node.end(signal.SIGKILL)
        node.start()
        assert [each["pid"] for each in shown(node, lease)["holders"]] == [sleeper.pid]
        sleeper.kill()
        assert ended(node, lease) == f"its holder, pid {sleeper.pid}, has exited"
        assert node.events("lease_claim_expired") == []

    @needs_root
    def test_by_its_token(self, node: Node) -> None:
        """Whoever has the token takes it, and has the lease for itself: it is let in, and is that lease's client."""
        lease = admitted(node, {"claim": {}})
        path, token = f"/v1/leases/{lease['id']}/holders", lease["env"]["MPSD_LEASE_TOKEN"]
        with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
            wrong = ann.request("POST", path, {"token": token[::-1]})
            assert (wrong.status, wrong.json["code"]) == (403, "not_permitted")
            assert ann.request("GET", f"/v1/leases/{lease['id']}").status == 403
            taken = ann.request("POST", path, {"token": token})
            assert (taken.status, taken.json["owner"]["uid"]) == (200, ANN), taken.body
            assert bob.request("POST", path, {"token": token}).status == 409
            own = {**variables(node), **{name: str(each) for name, each in taken.json["env"].items()}}
            with SimulatedClient(own, before=("setpriv", f"--reuid={ANN}", f"--regid={ANN}", "--clear-groups")) as it:
                event(node, "client_attributed", client=it.hello["pid"], lease=lease["id"])
                assert it.hello["active_thread_percentage"] == 25

    def test_device(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """Its CDI document is there while nobody has taken it."""
        lease = admitted(node, {"claim": {}})
        found = node.get(f"/v1/leases/{lease['id']}/cdi?shared_memory=true").json
        (device,) = found["devices"]
        edits = device["containerEdits"]
        assert (found["kind"], device["name"]) == ("mpsd/lease", lease["id"])
        assert edits["env"] == [f"{name}={value}" for name, value in lease["env"].items()]
        assert [each["hostPath"] for each in edits["mounts"]] == [str(node.pipe_directory("gpu0")), "/dev/shm"]
        assert len(node.get(f"/v1/leases/{lease['id']}/cdi").json["devices"][0]["containerEdits"]["mounts"]) == 1
        assert add(node, lease, pid=sleeper.pid, token=lease["env"]["MPSD_LEASE_TOKEN"]).status == 200
        late = node.get(f"/v1/leases/{lease['id']}/cdi")
        assert (late.status, late.json["code"]) == (409, "already_claimed")

    @needs_root
    def test_for_one_user(self, node: Node) -> None:
        """One for a uid is nobody else's, token or not, and stays open for that one."""
        lease = admitted(node, {"claim": {"uid": ANN, "gid": ANN}})
        assert lease["holders"][0]["uid"] == ANN
        path, token = f"/v1/leases/{lease['id']}/holders", lease["env"]["MPSD_LEASE_TOKEN"]
        with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
            refused = bob.request("POST", path, {"token": token})
            assert (refused.status, refused.json["code"]) == (403, "not_permitted")
            assert [each["kind"] for each in shown(node, lease)["holders"]] == ["claim"]
            assert ann.request("POST", path, {"token": token}).json["owner"]["uid"] == ANN

    def test_claimed_again(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """A lease outlives its holder by a claim for its own user, over mpsd's death too, for the next holder."""
        lease = admitted(node, pid=sleeper.pid)
        left = add(node, lease, claim={"deadline": 60}, replace=True)
        assert (left.status, [each["kind"] for each in left.json["holders"]]) == (200, ["claim"]), left.body
        sleeper.kill()
        sleeper.wait()
        node.end(signal.SIGKILL)
        node.start()
        assert shown(node, lease)["holders"][0]["uid"] == os.getuid()
        again = add(node, lease, replace=True)
        assert [each["pid"] for each in again.json["holders"]] == [os.getpid()]
        assert again.json["env"] == lease["env"]

    def test_claimed_again_for_a_time(self, node: Node) -> None:
        """A claim that nobody takes again ends the lease, and what is no such claim is refused and changes nothing."""
        lease = admitted(node, pid=os.getpid())
        wrongs: list[dict[str, Any]] = [
            {"claim": {}},
            {"claim": {}, "replace": True, "pid": 1},
            {"claim": {"gid": 1}, "replace": True},
        ]
        for wrong in wrongs:
            assert (add(node, lease, **wrong).status, len(shown(node, lease)["holders"])) == (422, 1)
        assert add(node, lease, claim={"deadline": 0.3}, replace=True).status == 200
        assert ended(node, lease) == "its claim was not taken within 0.3 s"

    @needs_root
    def test_claimed_again_for_another_user(self, node: Node) -> None:
        """An administrator has a lease claimed for another uid, whose processes alone can take it then."""
        lease = admitted(node, pid=os.getpid())
        left = add(node, lease, claim={"deadline": 60, "uid": ANN}, replace=True)
        assert [each["uid"] for each in left.json["holders"]] == [ANN]
        token = lease["env"]["MPSD_LEASE_TOKEN"]
        with calling(node.socket, uid=BOB) as bob:
            answer = bob.request("POST", f"/v1/leases/{lease['id']}/holders", {"token": token})
            assert (answer.status, answer.json["code"]) == (403, "not_permitted")
        with calling(node.socket, uid=ANN) as ann:
            answer = ann.request("POST", f"/v1/leases/{lease['id']}/holders", {"token": token})
            assert answer.json["owner"]["uid"] == ANN
            assert answer.json["env"] == lease["env"]

    def test_not_claimed_again_under_a_client(self, node: Node) -> None:
        """A client that lives keeps its lease as it is."""
        lease = admitted(node, pid=os.getpid())
        own = {**variables(node), **{name: str(each) for name, each in lease["env"].items()}}
        with SimulatedClient(own) as client:
            event(node, "client_attributed", client=client.hello["pid"], lease=lease["id"])
            answer = add(node, lease, claim={}, replace=True)
            assert (answer.status, answer.json["code"]) == (409, "already_claimed")
            assert [each["kind"] for each in shown(node, lease)["holders"]] == ["process"]

    @needs_root
    def test_only_by_administrators(self, node: Node) -> None:
        """No user claims a lease for others."""
        with calling(node.socket, uid=ANN) as ann:
            answer = ann.admit(**SMALL, holder={"claim": {}})
            assert (answer.status, answer.json["code"]) == (403, "not_permitted")
            own = ann.admit(**SMALL).json["id"]
            answer = ann.request("POST", f"/v1/leases/{own}/holders", {"claim": {}, "replace": True})
            assert (answer.status, answer.json["code"]) == (403, "not_permitted")

    @needs_root
    def test_opens_nothing(self, node: Node) -> None:
        """Nobody is let in by a claim before it is taken, nor after its time is over."""
        before = text(read(node.pipe_directory("gpu0")))
        lease = admitted(node, {"claim": {"uid": ANN, "gid": ANN, "deadline": 1.0}})
        node.reload(f"{MANY}[admission]\nclaim_deadline = 5.0\n")  # which has everybody let in who is to be
        assert text(read(node.pipe_directory("gpu0"))) == before
        ended(node, lease)
        assert text(read(node.pipe_directory("gpu0"))) == before
        lease = admitted(node, {"claim": {"uid": ANN, "gid": ANN}})
        with calling(node.socket, uid=ANN) as ann:
            taken = ann.request(
                "POST", f"/v1/leases/{lease['id']}/holders", {"token": lease["env"]["MPSD_LEASE_TOKEN"]}
            )
            assert taken.status == 200
            assert str(ANN) in text(read(node.pipe_directory("gpu0")))
        ended(node, lease)
        wait_until(lambda: text(read(node.pipe_directory("gpu0"))) == before, what="the way to be closed again")

    @needs_root
    def test_quota(self, make_node: Start) -> None:
        """Its taker has a quota as for a request; a refusal leaves it open for another."""
        config = f'{MANY}[quota."{ANN}"]\nthreads = 10.0\n[quota."{BOB}"]\nttl = 500.0\n'
        node = make_node(simulate=1, control=None, config=config).start()
        lease = admitted(node, {"claim": {}})
        path, token = f"/v1/leases/{lease['id']}/holders", lease["env"]["MPSD_LEASE_TOKEN"]
        with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
            refused = ann.request("POST", path, {"token": token})
            assert (refused.status, refused.json["code"], refused.json["limit"]) == (403, "quota", "quota.threads")
            assert [each["kind"] for each in shown(node, lease)["holders"]] == ["claim"]
            event(node, "lease_refused", uid=ANN)
            taken = bob.request("POST", path, {"token": token})
            assert (taken.status, taken.json["expires"] is not None) == (200, True)

    @needs_root
    def test_one_user_at_a_time(self, make_node: Start) -> None:
        """Where a control daemon serves one, a claim keeps others out, and is its taker's when nobody else is there."""
        node = make_node(simulate=1, control=None, config='[daemon]\nusers = "one"\n').start()
        lease = admitted(node, {"claim": {}})
        path, token = f"/v1/leases/{lease['id']}/holders", lease["env"]["MPSD_LEASE_TOKEN"]
        with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
            refused = bob.admit(**SMALL)
            assert (refused.status, refused.json["limit"]) == (409, "user")
            roots = admitted(node)
            refused = ann.request("POST", path, {"token": token})
            assert (refused.status, refused.json["limit"]) == (409, "user")
            assert node.request("DELETE", f"/v1/leases/{roots['id']}").status == 204
            taken = ann.request("POST", path, {"token": token})
            assert (taken.status, taken.json["owner"]["uid"]) == (200, ANN), taken.body
            assert bob.admit(**SMALL).json["limit"] == "user"

    def test_renewed_while_it_is_open(self, node: Node) -> None:
        """More time to live is no more time for the claim."""
        lease = admitted(node, {"claim": {"deadline": 0.8}}, ttl=100)
        assert node.request("POST", f"/v1/leases/{lease['id']}/renew", {"ttl": 1000}).status == 200
        assert ended(node, lease) == "its claim was not taken within 0.8 s"

    def test_attaches_nobody(self, node: Node) -> None:
        """A claim has no processes that could attach."""
        lease = admitted(node, {"claim": {}})
        assert node.request("POST", f"/v1/leases/{lease['id']}/attach").status == 404
        assert node.get(f"/v1/leases/{lease['id']}/verify").json["verdict"] == "nothing"

    def test_returned(self, make_node: Start, sleeper: "subprocess.Popen[bytes]") -> None:
        """One that could not be opened to whoever took it is open again, to the next mpsd too."""
        node = make_node(simulate=1, control=None, config=BRISK).start()
        lease = admitted(node, {"claim": {}})
        token = lease["env"]["MPSD_LEASE_TOKEN"]
        daemon = node.daemons()["gpu0"]["pid"]
        os.kill(daemon, signal.SIGSTOP)
        try:
            node.wait_for_state("gpu0", "unresponsive")
            refused = add(node, lease, pid=sleeper.pid, token=token)
            assert (refused.status, refused.json["code"]) == (409, "daemon_not_ready"), refused.body
            event(node, "lease_claim_returned", lease=lease["id"])
            assert [each["kind"] for each in shown(node, lease)["holders"]] == ["claim"]
            node.end(signal.SIGKILL)
        finally:
            os.kill(daemon, signal.SIGCONT)
        node.start()
        assert [each["kind"] for each in shown(node, lease)["holders"]] == ["claim"]
        with asleep() as other:
            assert add(node, lease, pid=other.pid, token=token).status == 200
            other.kill()
        ended(node, lease)

    def test_its_taker_dies(self, node: Node) -> None:
        """The claim ends with whoever took it, also when that died at once."""
        lease = admitted(node, {"claim": {}})
        with asleep() as taker:
            os.kill(taker.pid, signal.SIGSTOP)
            assert add(node, lease, pid=taker.pid, token=lease["env"]["MPSD_LEASE_TOKEN"]).status == 200
            node.end(signal.SIGKILL)
            taker.kill()
        node.start()
        assert ended(node, lease) == f"its holder, pid {taker.pid}, died while mpsd was not running"
        assert add(node, lease, token=lease["env"]["MPSD_LEASE_TOKEN"]).status in {404, 409}
