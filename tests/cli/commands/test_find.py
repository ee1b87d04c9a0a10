"""Leases as users name them: by id, by a prefix of it, by name, several at a time, or not at all."""

import json
import os

import pytest

from tests.cli.conftest import run_mpsctl
from tests.node import Node


def living(node: Node) -> list[str]:
    return [each["id"] for each in node.leases()]


@pytest.mark.parametrize("length", [len("lease-") + 9, len("lease-") + 8])
def test_a_prefix(node: Node, length: int) -> None:
    """A prefix of an id is enough, with `lease-` or without."""
    lease = node.lease()["id"]
    for meant in (lease[:length], lease[len("lease-") : length]):
        done = node.mpsctl("show", meant, "-o", "json")
        assert (done.returncode, json.loads(done.stdout)["id"]) == (0, lease)
    done = node.mpsctl("release", lease[:length])
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{lease} is released\n", "")
    assert living(node) == []


def test_what_is_ambiguous(node: Node) -> None:
    """A name or prefix of several leases is refused, and the candidates are listed."""
    one, two = node.lease(name="twin")["id"], node.lease(name="twin")["id"]
    for meant in ("twin", "lease-", "le"):
        done = node.mpsctl("release", meant)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{meant!r} is ambiguous: " in done.stderr
        assert f"{one} 'twin' of " in done.stderr
        assert f"{two} 'twin' of " in done.stderr
        assert f"hint: name the lease by its id, such as mpsctl release {one}\n" in done.stderr
    assert {*living(node)} == {one, two}


def test_living_before_ended(node: Node) -> None:
    """Each command takes the living lease of a name; only of several such ones, or of ended ones, a name is refused."""
    ended = [node.lease(name="nob")["id"] for _ in range(2)]
    assert node.mpsctl("release", *ended).returncode == 0
    for command in ("show", "explain", "verify"):
        done = node.mpsctl(command, "nob")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{ended[0]} 'nob' of " in done.stderr
        assert f"{ended[1]} 'nob' of " in done.stderr
        assert done.stderr.count(" (ended)") == 2
        assert f"mpsctl {command} {ended[0]}\n" in done.stderr
    lease = node.lease(name="nob")["id"]
    assert f"lease     {lease}" in node.mpsctl("show", "nob").stdout
    assert node.mpsctl("explain", "nob").stdout.startswith(f"{lease} (nob), a lease of ")
    assert lease in node.mpsctl("verify", "nob").stdout
    assert node.mpsctl("release", "nob").stdout == f"{lease} is released\n"


def test_several(node: Node) -> None:
    """Several leases are handled one by one, independent of each other; the exit status is that of the worst."""
    one, two = node.lease()["id"], node.lease(name="two")["id"]
    done = node.mpsctl("release", one, "lease-nobody-has", "two")
    assert (done.returncode, done.stdout) == (1, f"{one} is released\n{two} is released\n")
    assert "lease-nobody-has" in done.stderr
    assert "[not_found]" in done.stderr
    assert living(node) == []
    three, four = node.lease()["id"], node.lease()["id"]
    done = node.mpsctl("show", three, four, "-o", "json")
    assert [each["id"] for each in json.loads(done.stdout)["leases"]] == [three, four]
    done = node.mpsctl("show", three, four)
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("lease ")] == [three, four]
    done = node.mpsctl("renew", three, four, "--ttl", "1h")
    assert done.returncode == 0
    assert all(each["expires"] for each in node.leases())
    done = node.mpsctl("show", three, four, "-o", "env")
    assert (done.returncode, done.stdout) == (2, "(exit 2)\n")


@pytest.mark.parametrize("command", [("show",), ("renew", "--ttl", "1h"), ("attach",), ("verify",), ("release",)])
def test_ones_own(node: Node, command: tuple[str, ...]) -> None:
    """Without a lease on the command line, MPSD_LEASE is used; without that too, it is a usage error."""
    lease, other = node.lease()["id"], node.lease()["id"]
    done = run_mpsctl(node.socket, *command, env={**os.environ, "MPSD_LEASE": lease})
    assert done.returncode in ({1} if command == ("verify",) else {0}), done.stderr  # no client is attached
    assert other in living(node)
    assert (lease in living(node)) is (command != ("release",))
    if command != ("verify",):
        bare = {name: value for name, value in os.environ.items() if name != "MPSD_LEASE"}
        done = run_mpsctl(node.socket, *command, env=bare)
        assert (done.returncode, done.stdout) == (2, "")
        assert "MPSD_LEASE is not set" in done.stderr
