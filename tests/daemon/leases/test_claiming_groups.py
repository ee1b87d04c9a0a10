"""Claims whose administrator names control groups: whoever takes one of them takes it for such a group."""

import subprocess
from pathlib import Path

import pytest

from tests.control_groups import control_group
from tests.daemon.caller import calling, needs_root
from tests.daemon.helpers import event
from tests.daemon.leases.holding import ANN, add, admitted, asleep, ended, path_in, shown
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables

pytestmark = pytest.mark.thorough


def _joined(group: Path, *pids: int) -> None:
    wait_until(lambda: {*map(str, pids)} <= {*(group / "cgroup.procs").read_text().split()}, what="all to have joined")


@needs_root
@pytest.mark.parametrize("hierarchy", ["cgroup2", "freezer"])
def test_taken_for_the_group(node: Node, hierarchy: str) -> None:
    """The innermost group of that name around the taker holds the lease; others of the group find it taken."""
    with control_group(hierarchy, "job") as job, control_group(hierarchy, f"{job.name}/step") as step:
        lease = admitted(node, {"claim": {"groups": ["other", job.name]}})
        token = lease["env"]["MPSD_LEASE_TOKEN"]
        with asleep(step) as first, asleep(step) as second, asleep() as outside:
            try:
                _joined(step, first.pid, second.pid)
                for taker in (first, second, first):
                    answer = add(node, lease, pid=taker.pid, token=token)
                    assert answer.status == 200, answer.body
                    (holder,) = answer.json["holders"]
                    assert (holder["kind"], holder["cgroup"]) == ("cgroup", path_in(job))
                refused = add(node, lease, pid=outside.pid, token=token)
                assert (refused.status, refused.json["code"]) == (409, "already_claimed")
            finally:
                for each in (first, second, outside):
                    each.kill()
        assert "control group" in ended(node, lease)


@needs_root
def test_a_user_takes_it(node: Node) -> None:
    """A user takes it for a group of root's, which that user could not name, and cannot change the holders then."""
    with control_group("freezer", "job") as job:
        lease = admitted(node, {"claim": {"uid": ANN, "gid": ANN, "groups": [job.name]}})
        token = lease["env"]["MPSD_LEASE_TOKEN"]
        joins_it = f"import os; open({str(job / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        with calling(node.socket, uid=ANN, before=joins_it) as ann:
            path = f"/v1/leases/{lease['id']}/holders"
            taken = ann.request("POST", path, {"token": token})
            assert taken.status == 200, taken.body
            assert taken.json["holders"][0]["cgroup"] == path_in(job)
            assert taken.json["owner"]["uid"] == ANN
            refused = ann.request("POST", path, {})
            assert (refused.status, refused.json["code"]) == (403, "not_permitted")
        ended(node, lease)


def test_without_such_a_group(node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
    """Where no group of that name is around the taker, the process holds the lease."""
    lease = admitted(node, {"claim": {"groups": ["nobody.s"]}})
    answer = add(node, lease, pid=sleeper.pid, token=lease["env"]["MPSD_LEASE_TOKEN"])
    assert [each["pid"] for each in answer.json["holders"]] == [sleeper.pid]


def test_no_more_clients_than_its_maximum(node: Node) -> None:
    """A lease for any number of processes has at most its maximum; the others are named, whatever else is free."""
    lease = admitted(node, processes="any", processes_max=2)
    own = {**variables(node), **lease["env"]}
    with SimulatedClient(own) as one, SimulatedClient(own) as two, SimulatedClient(own) as three:
        pids = [each.hello["pid"] for each in (one, two, three)]
        wait_until(
            lambda: [each["pid"] for each in shown(node, lease)["violations"] if each["kind"] == "processes"],
            what="the third client to be found",
        )
        said = event(node, "violation", kind="processes", lease=lease["id"])
        assert said["pid"] in pids
        assert "at most 2" in said["because"]
        assert len(shown(node, lease)["clients"]) == 2
