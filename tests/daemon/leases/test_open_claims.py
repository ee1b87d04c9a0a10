"""Leases that are claimed before they have a holder: for which user, for how long, and what they open."""

import os
import signal
import subprocess
from typing import Any

import pytest

from mpsd.system.files.acl import read, text
from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, GIB, event
from tests.daemon.leases.holding import ANN, BOB, MANY, SMALL, add, admitted, asleep, ended, shown, stored
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables

pytestmark = pytest.mark.thorough


class TestClaims:
    """A lease that is claimed before it has a holder."""

    def test_expires(self, node: Node) -> None:
        """A claim that no process takes holds its share until it expires; the expiry is logged, and nothing remains."""
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
        """A claim expires also while mpsd is down."""
        lease = admitted(node, {"claim": {"deadline": 0.5}})
        node.end(signal.SIGKILL)
        node.start()
        ended(node, lease)
        event(node, "lease_claim_expired", lease=lease["id"])

    def test_taken_once(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """The first process takes the claim, and may repeat its request; a second process is refused."""
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

    @pytest.mark.enforcement
    @needs_root
    def test_by_its_token(self, node: Node) -> None:
        """A process with the token takes the claim and holds the lease: it is admitted as a client of that lease."""
        lease = admitted(node, {"claim": {}})
        path, token = f"/v1/leases/{lease['id']}/holders", lease["env"]["MPSD_LEASE_TOKEN"]
        with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
            wrong = ann.request("POST", path, {"token": token[::-1]})
            assert (wrong.status, wrong.json["code"]) == (403, "not_permitted")
            assert token not in str(ann.request("GET", f"/v1/leases/{lease['id']}").json)
            taken = ann.request("POST", path, {"token": token})
            assert (taken.status, taken.json["owner"]["uid"]) == (200, ANN), taken.body
            assert bob.request("POST", path, {"token": token}).status == 409
            own = {**variables(node), **{name: str(each) for name, each in taken.json["env"].items()}}
            with SimulatedClient(own, before=("setpriv", f"--reuid={ANN}", f"--regid={ANN}", "--clear-groups")) as it:
                event(node, "client_attributed", client=it.hello["pid"], lease=lease["id"])
                assert it.hello["active_thread_percentage"] == 25

    @needs_root
    def test_for_one_user(self, node: Node) -> None:
        """A claim for a uid is refused to all others, with or without the token, and stays open for that uid."""
        lease = admitted(node, {"claim": {"uid": ANN, "gid": ANN}})
        assert lease["holders"][0]["uid"] == ANN
        path, token = f"/v1/leases/{lease['id']}/holders", lease["env"]["MPSD_LEASE_TOKEN"]
        with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
            refused = bob.request("POST", path, {"token": token})
            assert (refused.status, refused.json["code"]) == (403, "not_permitted")
            assert [each["kind"] for each in shown(node, lease)["holders"]] == ["claim"]
            assert ann.request("POST", path, {"token": token}).json["owner"]["uid"] == ANN

    def test_claimed_again(self, node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
        """A lease outlives its holder by a claim for its own user and its next holder, also when mpsd dies."""
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
        """A claim that is not taken again ends the lease. An invalid claim is refused and changes nothing."""
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
        """An administrator can have a lease claimed for another uid; then only that uid's processes can take it."""
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

    @needs_root
    def test_only_by_administrators(self, node: Node) -> None:
        """Only administrators claim leases for others."""
        with calling(node.socket, uid=ANN) as ann:
            answer = ann.admit(**SMALL, holder={"claim": {}})
            assert (answer.status, answer.json["code"]) == (403, "not_permitted")
            own = ann.admit(**SMALL).json["id"]
            answer = ann.request("POST", f"/v1/leases/{own}/holders", {"claim": {}, "replace": True})
            assert (answer.status, answer.json["code"]) == (403, "not_permitted")

    @needs_root
    def test_opens_nothing(self, node: Node) -> None:
        """A claim opens no pipe directory before it is taken, or after it has expired."""
        before = text(read(node.pipe_directory("gpu0")))
        lease = admitted(node, {"claim": {"uid": ANN, "gid": ANN, "deadline": 1.0}})
        node.reload(f"{MANY}[admission]\nclaim_deadline = 5.0\n")  # after it, every pipe directory has its final access
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
        """The quota of the user that takes the claim applies, as for a request."""
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
        """Where a daemon serves one user, a claim keeps other users out, and is taken when no other user is left."""
        node = make_node(simulate=1, config='[daemon]\nusers = "one"\n').start()
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

    def test_attaches_nobody(self, node: Node) -> None:
        """A claim has no processes that could attach."""
        lease = admitted(node, {"claim": {}})
        assert node.request("POST", f"/v1/leases/{lease['id']}/attach").status == 404
        assert node.get(f"/v1/leases/{lease['id']}/verify").json["verdict"] == "nothing"

    def test_returned(self, make_node: Start, sleeper: "subprocess.Popen[bytes]") -> None:
        """A claim whose daemon could not be opened to its taker is open again, also in the next mpsd."""
        node = make_node(simulate=1, config=BRISK).start()
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
        """The claim ends with the process that took it, also when that process died at once."""
        lease = admitted(node, {"claim": {}})
        with asleep() as taker:
            os.kill(taker.pid, signal.SIGSTOP)
            assert add(node, lease, pid=taker.pid, token=lease["env"]["MPSD_LEASE_TOKEN"]).status == 200
            node.end(signal.SIGKILL)
            taker.kill()
        node.start()
        assert ended(node, lease) == f"its holder, pid {taker.pid}, died while mpsd was not running"
        assert add(node, lease, token=lease["env"]["MPSD_LEASE_TOKEN"]).status in {404, 409}
