"""What a shell has from its lease when the lease is over: the environment, the notes about it, and how it goes."""

import os
import subprocess
from typing import Final

import pytest

from tests.node import Node
from tests.tools import needed

SHARE: Final = ("--threads", "25", "--memory", "8GiB")
_OTHER: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_PREFIXES: Final = ("CUDA_", "MPSD_")


def left(environment: str, *, before: dict[str, str]) -> dict[str, str]:
    """Return the variables of MPS and mpsd in the output of env, without those that the shell began with."""
    found = dict(line.split("=", 1) for line in environment.splitlines() if line.startswith(_PREFIXES))
    return {name: value for name, value in found.items() if before.get(name) != value}


@pytest.mark.parametrize("shell", ["bash", "dash", "zsh", "fish"])
def test_a_shell_loses_both(node: Node, in_path: dict[str, str], shell: str) -> None:
    """One command ends a shell's lease and removes its environment, and leaves what the shell had before."""
    take, release = f"mpsctl admit {' '.join(SHARE)} --client-priority 1 -o env", "mpsctl release -o env"
    script = f'set -u; eval "$({take})"; echo $MPSD_LEASE; eval "$({release})"; env'
    if shell == "fish":
        script = f'eval "$({take})"; echo $MPSD_LEASE; {release} | source; env'
    before = {**in_path, _OTHER: "4", "CUDA_MPS_PROTOCOL_VERSION": "2"}
    done = subprocess.run([needed(shell, shell), "-c", script], capture_output=True, text=True, check=True, env=before)
    lease, _, environment = done.stdout.partition("\n")
    assert node.get(f"/v1/leases/{lease}").json["state"] == "ended"
    assert f"{lease} is released" in done.stderr
    assert left(environment, before=before) == {}
    assert f"{_OTHER}=4\n" in environment


def test_environment_of_another_lease(node: Node) -> None:
    """The environment that a shell has from another lease stays, and so do values that are not from the lease."""
    own, other = node.lease(), node.lease()
    environment = {**os.environ, **own["env"], "CUDA_VISIBLE_DEVICES": "7"}
    done = node.mpsctl("release", other["id"], "-o", "env", env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "")
    done = node.mpsctl("release", own["id"], env=environment)
    assert (done.returncode, done.stdout) == (0, f"{own['id']} is released\n")
    assert 'eval "$(mpsctl release -o env)"' in done.stderr
    names = {*node.mpsctl("release", "-o", "env", env={**environment, _OTHER: "4"}).stdout.split()}
    assert names == {"unset", *own["env"]} - {"CUDA_VISIBLE_DEVICES"}


def test_forgotten(node: Node) -> None:
    """The environment of a lease that mpsd does not know any more goes, too; another such lease is an error."""
    environment = {**os.environ, "MPSD_LEASE": "lease-0123456789", "MPSD_LEASE_TOKEN": "t", "CUDA_VISIBLE_DEVICES": "0"}
    done = node.mpsctl("release", "-o", "env", env=environment)
    assert (done.returncode, done.stdout.split()[0]) == (0, "unset")
    assert {*done.stdout.split()[1:]} == {"MPSD_LEASE", "MPSD_LEASE_TOKEN", "CUDA_VISIBLE_DEVICES"}
    refused = node.mpsctl("release", "lease-9876543210", "-o", "env", env=environment)
    assert (refused.returncode, refused.stdout) == (1, "(exit 1)\n")


@pytest.mark.parametrize("command", ["status", "verify", "show"])
def test_note(node: Node, command: str) -> None:
    """Commands that say how things are name the ended lease of the environment, with what removes it."""
    lease = node.lease()
    environment = {**os.environ, **lease["env"]}
    assert "has ended" not in node.mpsctl(command, env=environment).stderr
    node.request("DELETE", f"/v1/leases/{lease['id']}")
    said = node.mpsctl(command, env=environment).stderr
    assert f"MPSD_LEASE names {lease['id']}, which has ended" in said
    assert 'eval "$(mpsctl release -o env)"' in said
    assert "has ended" not in node.mpsctl("status", "-o", "json", env=environment).stderr
    gone = node.mpsctl(command, env={**environment, "MPSD_LEASE": "lease-0123456789"}).stderr
    assert "MPSD_LEASE names lease-0123456789, which has ended" in gone


def test_run(node: Node) -> None:
    """A program that is run in the environment of an ended lease has a lease of its own, and nothing of the other."""
    lease = node.lease(gpu="1", client_priority=1)
    environment = {**os.environ, **lease["env"]}
    node.request("DELETE", f"/v1/leases/{lease['id']}")
    done = node.mpsctl("run", *SHARE, "--gpu", "0", "--", "env", env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    found = left(done.stdout, before={})
    assert found["MPSD_LEASE"] != lease["id"]
    assert not {*found.items()} & {*lease["env"].items()}
