"""Holders that are gone, what keeps a lease alive then, and which leases have most of a scarce resource."""

import os
import signal
import socket
import subprocess
import time

import pytest

from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import event
from tests.daemon.leases.test_successors import attributed
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import leased

ANN, BOB = 2721, 2722

CONFIG = f'[roles]\nusers = ["{ANN}", "{BOB}"]\n'

STARTS = ("sh", "-c", 'exec 3<&0; "$@" <&3 & wait', "sh")
"""Holds a lease, and starts a process that uses it."""


@pytest.mark.enforcement
def test_a_dead_holder(make_node: Start) -> None:
    """A lease that outlives its holder says so and names the client that keeps it alive; lists say so in words."""
    node = make_node(simulate=1, control=None).start()
    with leased(node, "--threads", "25", "--memory", "2GiB", within=STARTS) as holder:
        client = holder.hello["pid"]
        lease = attributed(node, 1)
        path = f"/v1/leases/{lease}"
        before = node.get(path).json
        assert [(each["pid"], "gone" in each) for each in before["holders"]] == [(holder.pid, False)]
        assert before["keepers"] == []
        os.kill(holder.pid, signal.SIGKILL)
        after = wait_until(
            lambda: (found := node.get(path).json)["keepers"] and found, what="the lease to live for its client alone"
        )
        told = event(node, "lease_borne", lease=lease)
        assert (told["pids"], f"mpsctl release {lease}" in told["because"]) == ([client], True)
        assert [(each["pid"], each["gone"]) for each in after["holders"]] == [(holder.pid, True)]
        assert [(each["kind"], each["pid"]) for each in after["keepers"]] == [("client", client)]
        assert after["keepers"][0]["name"]
        (listed,) = node.get("/v1/leases").json["leases"]
        assert (listed["holders"], listed["keepers"]) == (after["holders"], after["keepers"])
        for command in (("leases",), ("show", lease)):
            said = node.mpsctl(*command).stdout
            assert f"{holder.pid} (gone)" in said
            assert f"client {client} ({after['keepers'][0]['name']})" in said
        holder.tell("exit")
        ended = wait_until(
            lambda: (found := node.get(path).json)["state"] == "ended" and found,
            what="the lease to end with its client",
        )
    assert "gone" not in ended["holders"][0]
    assert ended["keepers"] == []


def test_one_after_another(make_node: Start) -> None:
    """Each of several programs gets the whole GPU as soon as the one before it has ended, without waiting for it."""
    node = make_node(simulate=1, control=None).start()
    for _ in range(10):
        with subprocess.Popen(["sleep", "1000"]) as program:
            try:
                lease = node.lease(threads=100, memory="40GiB", pid=program.pid)
            finally:
                program.kill()
        assert node.get(f"/v1/leases/{lease['id']}").status == 200  # mpsd has seen that end, or will in this turn
    assert len(node.leases()) <= 1


@pytest.mark.thorough
def test_released_as_its_process_ends(make_node: Start) -> None:
    """A lease may be released at any moment after its last process has ended, before mpsd has looked for others."""
    node = make_node(simulate=1, control=None).start()
    for number in range(300):
        with subprocess.Popen(["sleep", "1000"]) as program, socket.socket(socket.AF_UNIX) as caller:
            lease = node.lease(threads=10, pid=program.pid)["id"]
            caller.connect(str(node.socket))
            caller.sendall(f"DELETE /v1/leases/{lease} HTTP/1.1\r\nHost: mpsd\r\nConnection: close\r\n".encode())
            program.kill()
            moment = time.monotonic() + number % 150 * 1e-5  # mpsd decides within a millisecond or so
            while time.monotonic() < moment:
                pass
            caller.sendall(b"\r\n")
            assert caller.recv(64).startswith(b"HTTP/1.1 ")
    assert node.exited() is None


def hint(node: Node, **asked: object) -> str:
    """Request a lease that does not fit, as mpsd's own user, and return the hint."""
    answer = node.request("POST", "/v1/leases", asked)
    assert (answer.status, answer.json["code"]) == (409, "does_not_fit")
    said: str = answer.json["hint"]
    return said


def test_the_largest_holders(make_node: Start) -> None:
    """A refusal names the three leases that have most of the scarce resource, on the GPU that comes closest."""
    node = make_node(simulate=2, control=None).start()
    asked = [("trainer", 40, "1GiB"), ("", 30, "4GiB"), ("small", 20, "2GiB"), ("last", 5, "3GiB")]
    ids = [
        node.request("POST", "/v1/leases", {"threads": threads, "memory": memory, "name": name, "gpu": "0"}).json["id"]
        for name, threads, memory in asked
    ]
    other = node.request("POST", "/v1/leases", {"threads": 90, "memory": "9GiB", "name": "other", "gpu": "1"}).json[
        "id"
    ]
    uid = os.getuid()
    by_threads = hint(node, threads=20, memory="1GiB", gpu="0")
    assert by_threads.endswith(
        f"mpsctl leases; {ids[0]} (trainer, uid {uid}) has 40 % and 1GiB, {ids[1]} (uid {uid}) has 30 % and 4GiB,"
        f" {ids[2]} (small, uid {uid}) has 20 % and 2GiB"
    )
    by_memory = hint(node, threads=1, memory="75GiB", gpu="0")
    assert [each for each in ids if each in by_memory] == [ids[1], ids[2], ids[3]]
    assert other not in by_threads + by_memory
    assert f"{other} (other, uid {uid}) has 90 % and 9GiB" in hint(node, threads=15, memory="1GiB", gpu="1")


@needs_root
@pytest.mark.parametrize("is_open", [False, True])
def test_who_may_know(make_node: Start, *, is_open: bool) -> None:
    """A user sees other users' leases as totals, and their names only where it may list them."""
    config = f'{CONFIG}[daemon]\nusers = "many"\n[api]\nopen = {str(is_open).lower()}\n'
    node = make_node(simulate=1, control=None, config=config).start()
    with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
        hers = ann.admit(threads=60, memory="1GiB", name="secret").json["id"]
        his = bob.admit(threads=10, memory="2GiB", name="mine").json["id"]
        for caller, sees_all in ((bob, is_open), (None, True)):
            asked = {"threads": 50, "memory": "1GiB"}
            answer = caller.admit(**asked) if caller else node.request("POST", "/v1/leases", asked)
            assert answer.json["code"] == "does_not_fit"
            said = answer.json["hint"]
            assert f"{his} (mine, uid {BOB}) has 10 % and 2GiB" in said
            assert (f"{hers} (secret, uid {ANN}) has 60 % and 1GiB" in said) is sees_all
            assert ("leases of other users have 60 % and 1GiB" in said) is not sees_all
            assert ("secret" in said) is sees_all
