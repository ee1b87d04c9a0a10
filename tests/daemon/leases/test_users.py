"""Leases of one user and programs of another: mpsd names the cause and the cure, and root has a correct way."""

import grp
import json
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from mpsd.cli.render import as_here
from mpsd.core.enforcement import violations
from tests.daemon.caller import NOBODY, calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, event
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import WAITS, SimulatedClient, leased, variables

pytestmark = [needs_root, pytest.mark.enforcement, pytest.mark.thorough]

ANN, BOB = 2731, 2732
MANY = '[daemon]\nusers = "many"\n'
QUOTA = f'{MANY}[quota."%{NOBODY}"]\nthreads = 30\n'
CLOSED = f'{MANY}compute_mode = "exclusive-process"\n'
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
NAME = pwd.getpwuid(NOBODY).pw_name
ROOT = str(Path(__file__).parents[3])


@pytest.fixture(scope="module")
def python() -> str:
    """Return an interpreter that other users can run, since that of the tests may be in a home directory."""
    for each in (sys.executable, "/usr/bin/python3"):
        if subprocess.run([*AS_NOBODY, "sh", "-c", f"{each} -c ''"], capture_output=True, check=False).returncode == 0:
            return each
    pytest.skip("no Python here that other users can run")


def instead(python: str) -> tuple[str, ...]:
    """Return a command prefix that runs the program that follows under another interpreter."""
    return ("sh", "-c", f'shift; exec {python} "$@"', "sh")


def go(program: SimulatedClient) -> None:
    assert program.process.stdin is not None
    program.process.stdin.write(b"go\n")


def of_holder(lease: str, pid: int) -> str:
    """Return the sentence about a holder that became the other user."""
    return (
        f"process {pid}, the holder of lease {lease}, runs as uid {NOBODY}, and the lease is uid 0's, so"
        f" that the process has no part in it: start it, as root, by mpsctl run --user {NOBODY} -- PROGRAM"
    )


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None, config=QUOTA).start()


def verified(node: Node, lease: str) -> Any:
    """Have mpsd read everything again, and return the verification of a lease."""
    return node.get(f"/v1/leases/{lease}/verify").json


# -- a change of user --------------------------------------------------------------------------------------------------


def test_holder_that_changed(node: Node, python: str) -> None:
    """A holder that changed its user is named, with the command that helps, before it is on the GPU and after."""
    with leased(node, "--fraction", "0.25", within=(*AS_NOBODY, *WAITS, *instead(python))) as program:
        lease = event(node, "lease_granted", pid=program.pid)["lease"]
        expected = of_holder(lease, program.pid)
        # At once, and not at the next reading of the GPUs after 10 s.
        (told,) = wait_until(lambda: node.events("violation", pid=program.pid), what="it to be found", deadline=5)
        answer = verified(node, lease)
        assert (answer["ok"], answer["because"], answer["violations"]) == (False, expected, [expected])
        assert [each["because"] for each in answer["processes"]] == [expected]
        assert (told["kind"], told["lease"], told["policy"]) == ("user", lease, "report")
        for command in (("verify", lease), ("status",), ("show", lease), ("doctor", "--only", "node")):
            assert as_here(expected) in node.mpsctl(*command).stdout, command
        go(program)
        assert not program.hello["mps"]
        outside = expected.replace("runs as", "runs outside MPS, without limits, on the GPU of gpu0 as")
        assert verified(node, lease)["violations"] == [outside]
    event(node, "lease_ended", lease=lease)
    event(node, "violation_ended", pid=program.pid)


def test_one_of_many_holders(make_node: Start, python: str) -> None:
    """Of many holders, whose check leaves the loop to others after each, the one that changed its user is named."""
    durations = {"mpsd.daemon.leases.clients._SLICE": -1.0}
    node = make_node(simulate=1, control=None, config=MANY, durations=durations).start()
    for _ in range(20):
        assert node.request("POST", "/v1/leases", {"threads": 1, "memory": "1MiB"}).status == 201
    with leased(node, "--fraction", "0.25", within=(*AS_NOBODY, *WAITS, *instead(python))) as program:
        lease = event(node, "lease_granted", pid=program.pid)["lease"]
        event(node, "lease_user_changed", lease=lease, pids=[program.pid])
        go(program)
        assert not program.hello["mps"]


def test_relative_that_changed(make_node: Start, python: str) -> None:
    """A child of the holder that runs as another user on the GPU, by su for example, is named, and not ended."""
    config = f'{MANY}[enforcement]\non_violation = "terminate"\ngrace = 0.2\n'
    node = make_node(simulate=1, control=None, config=config).start()
    within = ("sh", "-c", 'exec 3<&0; "$@" <&3 & wait', "sh", *AS_NOBODY, *instead(python))
    with leased(node, "--fraction", "0.25", within=within) as program:
        lease, pid = event(node, "lease_granted", pid=program.pid)["lease"], program.hello["pid"]
        assert not program.hello["mps"]
        answer = verified(node, lease)
        assert answer["because"] == (
            f"process {pid} of the family of lease {lease} runs outside MPS, without limits, on the GPU of gpu0 as uid"
            f" {NOBODY}, and the lease is uid 0's, so that the process has no part in it: start it, as root, by"
            f" mpsctl run --user {NOBODY} -- PROGRAM"
        )
        assert event(node, "violation", pid=pid)["policy"] == "report"
        assert verified(node, lease)["violations"] == [answer["because"]]
        assert program.do("sync")["ok"]


class TestClosed:
    """On a closed node the program gets an error at once, and is never on the GPU: an event names it nevertheless."""

    @pytest.fixture
    def node(self, make_node: Start) -> Iterator[Node]:
        """Start a node whose GPU is closed: its only context is that of the server, which has a client."""
        node = make_node(simulate=1, control=None, config=CLOSED).start()
        with leased(node, "--fraction", "0.25") as client:
            assert client.hello["mps"]
            yield node

    @staticmethod
    def ended(program: SimulatedClient) -> None:
        """Have a program end by the error of a closed GPU."""
        assert program.hello["code"] == 46
        assert program.process.wait(30) == 1

    def test_holder(self, node: Node, python: str) -> None:
        """A holder that becomes another user, and stays, is reported without a reading of the GPUs."""
        with leased(node, "--fraction", "0.25", within=(*AS_NOBODY, *WAITS, *instead(python))) as program:
            lease = event(node, "lease_granted", pid=program.pid)["lease"]
            told = event(node, "lease_user_changed", lease=lease)
            assert (told["pids"], told["because"]) == ([program.pid], of_holder(lease, program.pid))
            assert told["hint"] == violations.AS_OTHER_USER
            go(program)
            self.ended(program)
        event(node, "lease_ended", lease=lease)
        assert as_here(of_holder(lease, program.pid)) in node.mpsctl("explain", lease).stdout
        assert len(node.events("lease_user_changed")) == 1

    def test_holder_that_is_gone(self, node: Node, python: str) -> None:
        """A holder that becomes another user, and fails at once, is reported when the lease ends with it."""
        node.fork_server = None  # then this test alone reaps the program
        within = (*AS_NOBODY, *instead(python))
        with leased(node, "--fraction", "0.25", within=within) as program:
            lease = event(node, "lease_granted", pid=program.pid)["lease"]
            assert program.hello["code"] == 46
            event(node, "lease_ended", lease=lease)
            (told,) = node.events("lease_user_changed", lease=lease)
            assert told["because"] == of_holder(lease, program.pid)

    def test_relative(self, node: Node, python: str) -> None:
        """A child of the holder that becomes another user, as by su, is reported, once for all such children."""
        script = 'exec 3<&0; "$@" <&3 & wait; setpriv --reuid=65534 --clear-groups sleep 1'
        within = ("sh", "-c", script, "sh", *AS_NOBODY, *WAITS, *instead(python))
        with leased(node, "--fraction", "0.25", within=within) as program:
            lease = event(node, "lease_granted", pid=program.pid)["lease"]
            told = event(node, "lease_user_changed", lease=lease)
            assert f"mpsctl run --user {NOBODY} -- PROGRAM" in told["because"]
            go(program)
            assert program.hello["code"] == 46
            program.process.wait(30)
        assert len(node.events("lease_user_changed")) == 1

    def test_own_lease(self, node: Node, python: str) -> None:
        """A process with a lease of its own user is not reported, though it is started under a lease of root."""
        again = (sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket), "run", "--fraction", "0.25")
        within = ("sh", "-c", 'exec 3<&0; "$@" <&3 & wait', "sh", *again, "--user", NAME, "--", *instead(python))
        with leased(node, "--fraction", "0.25", within=within) as program:
            assert program.hello["mps"]
        assert node.events("lease_user_changed") == []


# -- the right way -----------------------------------------------------------------------------------------------------


def test_run_as(node: Node, python: str) -> None:
    """Root runs another user's program under a lease of that user: under MPS, within its limits and its quota."""
    with leased(node, "--fraction", "0.25", "--user", NAME, within=(*WAITS, *instead(python))) as program:
        lease = event(node, "lease_granted", pid=program.pid)["lease"]
        assert verified(node, lease)["violations"] == []
        go(program)
        assert (program.hello["mps"], program.hello["active_thread_percentage"]) == (True, 25.0)
        event(node, "client_attributed", client=program.pid, lease=lease)
        assert verified(node, lease)["ok"]
        shown = node.get(f"/v1/leases/{lease}").json
        assert (shown["owner"]["uid"], shown["owner"]["gid"]) == (NOBODY, pwd.getpwuid(NOBODY).pw_gid)
        refused = node.mpsctl("run", "--fraction", "0.25", "--user", str(NOBODY), "--", "true")
        assert (refused.returncode, "your quota is 30 %" in refused.stderr) == (77, True), refused.stderr
    assert node.events("violation") == []


def test_what_it_becomes(node: Node, python: str) -> None:
    """The program has the user's uid, gid and groups, and the variables that su sets; the user can renew the lease."""
    script = (
        f'id; echo "$HOME $SHELL $USER $LOGNAME $PWD"; {python} -m mpsd.cli.main renew "$MPSD_LEASE" --ttl 5000 -o json'
    )
    done = node.mpsctl(
        "run", "--fraction", "0.25", "--ttl", "1000", "--user", NAME, "--", "sh", "-c", script,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{Path(click.__file__).parents[1]}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    identity, variables, *renewed = done.stdout.splitlines()
    user = pwd.getpwuid(NOBODY)
    assert variables == f"{user.pw_dir} {user.pw_shell} {NAME} {NAME} {ROOT}"
    as_su_has_it = subprocess.run(["su", "-s", "/bin/sh", "-c", "id", NAME], capture_output=True, text=True, check=True)
    assert identity == as_su_has_it.stdout.strip()
    assert json.loads("\n".join(renewed))["owner"]["uid"] == NOBODY


@pytest.mark.parametrize("user", [str(ANN), f"{ANN}:{ANN}", f"{ANN}:{BOB}"])
def test_user_without_an_account(node: Node, user: str) -> None:
    """A uid without an account here, such as a container's, has the group that root names, or that of its number."""
    gid = user.rpartition(":")[2]
    done = node.mpsctl(
        "run", "--fraction", "0.25", "--user", user, "--", "sh", "-c", 'id; echo "$HOME $SHELL $USER $LOGNAME"'
    )
    assert (done.stdout, done.stderr) == (f"uid={ANN} gid={gid} groups={gid}\n/ /bin/sh {ANN} {ANN}\n", "")


def test_group_that_another_has(node: Node) -> None:
    """A uid without an account gets no group of this machine by its number alone: root names the group."""
    accounts = {each.pw_uid for each in pwd.getpwall()}
    taken = str(next(each.gr_gid for each in grp.getgrall() if each.gr_gid not in accounts))
    refused = node.mpsctl("run", "--fraction", "0.25", "--user", taken, "--", "true")
    assert refused.returncode == 2
    assert f"there is no user '{taken}'; one without an account here: --user {taken}:GID" in refused.stderr
    assert node.mpsctl("run", "--fraction", "0.25", "--user", f"{taken}:{ANN}", "--", "true").returncode == 0


def test_what_cannot_be(node: Node) -> None:
    """Only an administrator requests leases for other users, and a user that does not exist cannot be named."""
    owner = {"uid": BOB, "gid": BOB}
    with calling(node.socket, uid=ANN) as ann:
        answer = ann.admit(threads=10, memory=GIB, owner=owner)
        assert (answer.status, answer.json["code"]) == (403, "not_permitted")
    for name in (
        "nobody-has-this-name",
        "4294967295",
        "99999999999999999999",
        "1:",
        ":1",
        "1:x",
        "1:4294967295",
        "1:" + "9" * 5000,
    ):
        refused = node.mpsctl("admit", "--fraction", "0.1", "--user", name)
        assert (refused.returncode, "there is no user" in refused.stderr) == (2, True), refused.stderr
    by_ann = ["setpriv", f"--reuid={ANN}", f"--regid={ANN}", "--clear-groups", sys.executable, "-m", "mpsd.cli.main"]
    done = subprocess.run(
        [*by_ann, "--socket", str(node.socket), "run", "--fraction", "0.1", "--user", NAME, "--", "true"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, "only root" in done.stderr) == (77, True), done.stderr
    assert "hint: run it as root: sudo mpsctl run --user NAME -- PROGRAM\n" in done.stderr
    assert node.get("/v1/leases").json["leases"] == []


def test_admit_for(node: Node) -> None:
    """Root requests a lease for another user's process, which stays its holder; that user can end the lease."""
    with calling(node.socket, uid=BOB) as bob, calling(node.socket, uid=ANN) as ann:
        answer = node.request(
            "POST", "/v1/leases", {"fraction": 0.1, "pid": bob.pid, "owner": {"uid": BOB, "gid": BOB, "groups": [77]}}
        )
        assert (answer.status, answer.json["owner"]["uid"], answer.json["owner"]["pid"]) == (201, BOB, bob.pid)
        path = f"/v1/leases/{answer.json['id']}"
        assert verified(node, answer.json["id"])["violations"] == []
        assert ann.request("DELETE", path).status == 403
        assert bob.request("DELETE", path).status == 204
    done = node.mpsctl("admit", "--fraction", "0.1", "--user", NAME, "-o", "env", "--pid", str(os.getpid()))
    (lease,) = re.findall(r"^export MPSD_LEASE=(\S+)$", done.stdout, re.MULTILINE)
    assert node.get(f"/v1/leases/{lease}").json["owner"]["uid"] == NOBODY
    # This process, of root, holds the lease for the other user, as an administrator requested.
    assert verified(node, lease)["violations"] == []


def test_a_program_of_the_holder(node: Node, python: str) -> None:
    """A program of root in root's shell that holds a lease for another user reads why it has no lease, and what to do.

    The command that `verify` and the hint say starts a program of that user under the lease.
    """
    gid = pwd.getpwuid(NOBODY).pw_gid
    owner = {"uid": NOBODY, "gid": gid}
    lease = node.request("POST", "/v1/leases", {"fraction": 0.1, "pid": os.getpid(), "owner": owner}).json
    start = f"setpriv --reuid {NOBODY} --regid {gid} --init-groups"
    shown = f'(eval "$(mpsctl show {lease["id"]} -o env)"; {start} PROGRAM)'
    assert verified(node, lease["id"])["hint"] == f"start a program in its environment: {shown}"
    environment = {**variables(node), **lease["env"]}
    with SimulatedClient(environment) as program:
        assert program.hello["mps"]
        found = event(node, "violation", pid=program.pid, kind="no_lease")
        assert found["because"] == (
            f"process {program.pid} is a client of gpu0 without a lease there: it runs as uid 0, and lease"
            f" {lease['id']} is for processes of uid {NOBODY}"
        )
        assert found["hint"].startswith(f"start it again as uid {NOBODY}: {shown}; or ")
    with SimulatedClient(environment, before=(*start.split(), *instead(python))) as program:
        assert program.hello["mps"]
        event(node, "client_attributed", client=program.pid, lease=lease["id"])
        assert verified(node, lease["id"])["ok"]
    said = node.mpsctl("explain", lease["id"]).stdout
    assert f"no process uses it yet; for a program that runs as {NAME}: {shown}" in said
