"""Leases that control groups hold, claims, and handovers, by mpsctl."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mpsd.cli.render import as_here
from tests.cli.conftest import run_mpsctl
from tests.control_groups import control_group, joins
from tests.daemon.caller import needs_root
from tests.harness import wait_until
from tests.node import Node

SHARE = ("--threads", "10", "--memory", "1GiB")


def admitted(node: Node, *arguments: str) -> Any:
    """Request a lease by mpsctl, and return it."""
    done = node.mpsctl("admit", *SHARE, *arguments, "-o", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_root
def test_control_group(node: Node) -> None:
    """`admit --cgroup` and `show`: the lease belongs to the group, and its unit is named."""
    with control_group("name=systemd", "job") as group:
        lease = admitted(node, "--cgroup", str(group), "--while", "exists", "--user", "0")
        assert lease["holders"][0]["while"] == "exists"
        shown = node.mpsctl("show", lease["id"]).stdout
        assert f"control group /{group.name} (unit {group.name}), root" in shown
        assert f"{lease['id']}" in node.mpsctl("leases").stdout
        assert node.mpsctl("release", lease["id"]).returncode == 0


def test_hand_over(node: Node, sleeper: "subprocess.Popen[bytes]") -> None:
    """`hand-over` replaces the holder; with --keep it adds one."""
    lease = admitted(node, "--pid", str(os.getpid()))["id"]
    done = node.mpsctl("hand-over", lease, "--pid", str(sleeper.pid), "--keep")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"pid {os.getpid()}, pid {sleeper.pid}, {as_here(f'uid {os.geteuid()}')}" in done.stdout
    done = node.mpsctl("hand-over", lease, "--pid", str(sleeper.pid), "-o", "json")
    assert [each["pid"] for each in json.loads(done.stdout)["holders"]] == [sleeper.pid]
    sleeper.kill()
    wait_until(lambda: node.get(f"/v1/leases/{lease}").json["state"] == "ended", what="the lease to end")
    assert node.mpsctl("hand-over", lease, "--pid", str(os.getpid())).returncode == 1
    assert node.mpsctl("hand-over", lease).returncode == 2


def test_claim(node: Node) -> None:
    """`admit --claim` makes a lease that `claim` takes, as the command that it becomes.

    The lease ends with the command.
    """
    lease = admitted(node, "--claim", "--claim-deadline", "30")
    assert "a claim for anybody, until " in node.mpsctl("show", lease["id"]).stdout
    bare = run_mpsctl(node.socket, "claim", lease["id"], "--", "true", env=without_token())
    assert (bare.returncode, "MPSD_LEASE_TOKEN is not set" in bare.stderr) == (2, True)
    wrong = run_mpsctl(node.socket, "claim", lease["id"], "--", "true", env={**os.environ, "MPSD_LEASE_TOKEN": "0"})
    assert (wrong.returncode, "the token is not that of" in wrong.stderr) == (77, True)
    token = {"MPSD_LEASE_TOKEN": lease["env"]["MPSD_LEASE_TOKEN"]}
    script = 'echo "$$ $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $MPSD_LEASE"; exit 7'
    arguments = ("claim", lease["id"], "--", "sh", "-c", script)
    taken = run_mpsctl(node.socket, *arguments, env={**os.environ, **token})
    assert taken.stderr == ""
    pid, percentage, named = taken.stdout.split()
    assert (taken.returncode, float(percentage), named) == (7, 10, lease["id"])
    found = wait_until(
        lambda: (now := node.get(f"/v1/leases/{lease['id']}").json)["state"] == "ended" and now, what="it to end"
    )
    assert found["because"] == f"its holder, pid {pid}, has exited"
    again = run_mpsctl(node.socket, *arguments, env={**os.environ, **token})
    assert again.returncode == 1
    assert again.stdout == ""


def test_claim_of_the_environment(node: Node) -> None:
    """`claim -- COMMAND` takes the lease in MPSD_LEASE; without that variable, it requests a name."""
    lease = admitted(node, "--claim")
    names = {name: str(lease["env"][name]) for name in ("MPSD_LEASE", "MPSD_LEASE_TOKEN")}
    taken = run_mpsctl(
        node.socket, "claim", "--", "sh", "-c", "echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", env={**os.environ, **names}
    )
    assert (taken.returncode, taken.stderr, float(taken.stdout)) == (0, "", 10)
    unnamed = {name: value for name, value in os.environ.items() if name != "MPSD_LEASE"}
    unnamed["MPSD_LEASE_TOKEN"] = names["MPSD_LEASE_TOKEN"]
    refused = run_mpsctl(node.socket, "claim", "--", "true", env=unnamed)
    assert (refused.returncode, "no LEASE is named" in refused.stderr) == (2, True)


def without_token() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "MPSD_LEASE_TOKEN"}


@pytest.mark.parametrize("options", [("--claim", "--pid", "1"), ("--cgroup", "/a", "--unit", "b")])
def test_one_holder(node: Node, options: tuple[str, ...]) -> None:
    """Several holders at once are an error, and nothing is requested."""
    done = node.mpsctl("admit", *SHARE, *options)
    assert (done.returncode, "name one holder" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("admit", *SHARE, "--claim-deadline", "10"), "--claim-deadline is for --claim"),
        (("admit", *SHARE, "--while", "exists"), "--while is for --cgroup and --unit"),
        (("admit", *SHARE, "--cgroup", "train"), "'train' is not the path of a control group, such as /"),
        (("admit", *SHARE, "--cgroup", "/"), "'/' is not the path of a control group, such as /"),
        (("hand-over", "lease-1", "--unit", "a.service", "--group"), "--group is for --pid"),
    ],
)
def test_options_that_say_nothing(options: tuple[str, ...], says: str) -> None:
    """An option without effect is refused, not ignored."""
    done = run_mpsctl("none.sock", *options)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr


@needs_root
def test_container_stop(node: Node, short_tmp: Path) -> None:
    """`container stop` finds the lease also if a container has its first process in a group below its own."""
    runtime = short_tmp / "podman"
    with control_group("name=systemd", "outer") as outer, control_group("name=systemd", f"{outer.name}/inner") as inner:
        with subprocess.Popen([*joins(inner), "sleep", "600"]) as program:
            try:
                wait_until(
                    lambda: str(program.pid) in (inner / "cgroup.procs").read_text(), what="it to be in its group"
                )
                lease = admitted(node, "--cgroup", str(outer), "--user", "0")["id"]
                runtime.write_text(f"#!/bin/sh\n[ $1 = stop ] && kill {program.pid} || echo {program.pid}\n")
                runtime.chmod(0o755)
                environment = {**os.environ, "PATH": f"{short_tmp}:{os.environ['PATH']}"}
                done = node.mpsctl("container", "stop", "name", env=environment)
                assert (done.returncode, "has no lease" in done.stderr) == (0, False), done.stderr
                assert program.wait(10) == -signal.SIGTERM
            finally:
                program.kill()
        assert json.loads(node.mpsctl("show", lease, "-o", "json").stdout)["state"] == "ended"


def test_container_that_is_not_there(node: Node, short_tmp: Path) -> None:
    """The runtime's message about an unknown container is printed once, and mpsctl exits with its status."""
    runtime = short_tmp / "podman"
    runtime.write_text("#!/bin/sh\necho no such container >&2\nexit 125\n")
    runtime.chmod(0o755)
    done = node.mpsctl("container", "stop", "x", env={**os.environ, "PATH": f"{short_tmp}:{os.environ['PATH']}"})
    assert (done.returncode, done.stderr) == (125, "no such container\n")
