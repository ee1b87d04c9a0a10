"""Leases that processes hold: each process is added or handed over, and the lease ends once."""

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.control_groups import control_group
from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import event
from tests.daemon.leases.holding import ANN, BOB, SMALL, add, admitted, asleep, ended, path_in, shown
from tests.harness import wait_until
from tests.node import Node


class TestProcesses:
    """A lease that processes hold."""

    def test_lives_with_any(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """The lease lives while any holder lives, also when mpsd dies, and ends once with the last holder."""
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
        """After a handover the former holder holds nothing: its end does not end the lease."""
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

    def test_as_many_as_a_user_may_add(self, make_node: Start) -> None:
        """All leases of a user together have so many additional holders; another can replace one, or come later."""
        node = make_node(simulate=1, durations={"mpsd.core.holders.MOST_ADDED": 2}).start()
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(asleep()) for _ in range(5)]
            for each in processes:
                stack.callback(each.kill)
            first, second = (admitted(node, pid=each.pid) for each in processes[:2])
            for lease, added in zip((first, second), processes[2:4], strict=True):
                assert add(node, lease, pid=added.pid).status == 200
            refused = add(node, first, pid=processes[4].pid)
            assert (refused.status, refused.json["limit"]) == (422, "holders")
            assert add(node, first, pid=processes[2].pid).status == 200  # it holds the lease already
            assert add(node, second, pid=processes[3].pid, replace=True).status == 200
            assert add(node, first, pid=processes[4].pid).status == 200

    def test_twice(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """A process that is added twice holds the lease once."""
        lease = admitted(node, pid=sleeper.pid)
        assert len(add(node, lease, pid=sleeper.pid).json["holders"]) == 1

    def test_ended(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """A lease that has ended gets no holder."""
        lease = admitted(node, pid=sleeper.pid)
        assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
        assert add(node, lease, pid=sleeper.pid).status == 404

    @pytest.mark.parametrize("named", ["pid", "cgroup", "unit"])
    def test_no_descriptor_left(self, node: Node, sleeper: "subprocess.Popen[bytes]", named: str) -> None:
        """When mpsd cannot open the named holder, the answer says that mpsd is the cause and that a retry helps."""
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
        """Additional holders may use half of mpsd's descriptors; leases and releases have the rest."""
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
            assert add(node, other, pid=sleepers[0].pid).status == 200  # the process is already watched
            assert len(add(node, other, pid=sleepers[-2].pid, replace=True).json["holders"]) == 1
            assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
            wait_until(lambda: add(node, other, pid=sleepers[1].pid).status == 200, what="room for another")

    @needs_root
    def test_descriptors_for_groups(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """A control group beside another holder is refused in the same case as a process."""
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
        """No user adds a holder to another user's lease, or another user's process to its own; nothing changes."""
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
