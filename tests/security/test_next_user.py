"""A control daemon that serves one user at a time is new for each: no descriptor of the last user leads to it.

The subjects are NVIDIA's own control daemons.
"""

import subprocess
import sys
from typing import Final

import pytest

from tests.daemon.caller import calling, end, granted, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, SWIFT, branches, event
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon
from tests.simulated_clients import SimulatedClient, variables

pytestmark = pytest.mark.thorough

ANN, BOB = 61401, 61402

ONE: Final = '[daemon]\nusers = "one"\n'

STAYS: Final = """
import os, socket, sys
uid = int(sys.argv[1])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
fifo = os.open(sys.argv[2] + "/log", os.O_WRONLY)
print("open", flush=True)
sys.stdin.readline()
while True:
    try:
        os.write(fifo, os.urandom(4096))
    except BrokenPipeError:
        print("cut off", flush=True)
        sys.stdin.readline()
        break
"""
"""Keeps the FIFO open that a lease opened, and fills it on command, for as long as it has a reader."""


SITS: Final = """
import os, socket, sys
uid = int(sys.argv[1])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as seat:
    seat.connect(sys.argv[2] + "/control")
    print("open", flush=True)
    sys.stdin.read()
"""
"""Connects and sends nothing: a control daemon answers no other process meanwhile."""


def pid(node: Node) -> int:
    found: int = node.daemons()["gpu0"]["pid"]
    return found


@needs_root
@pytest.mark.parametrize("real", branches(470, 555))
class TestEveryDriver:
    """The change of users on each of NVIDIA's control daemons."""

    def test_next_user(self, make_node: Start, real: RealDaemon) -> None:
        """The next user gets a new control daemon, also among many concurrent requests; the same user keeps it."""
        node = make_node(simulate=1, control=real.control, config=ONE).start()
        with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
            first = pid(node)
            end(ann, granted(ann))
            end(ann, granted(ann))
            assert pid(node) == first
            lease = granted(bob)
            second = pid(node)
            assert second != first
            granted(bob)
            assert pid(node) == second
            assert not node.events("daemon_death")
            assert "its next user is uid" in event(node, "daemon_state", state="stopping")["because"]
            # A later user waits for its turn, and gets a new one as well.
            assert ann.admit(threads=10, memory="1GiB").json["limit"] == "user"
            for each in node.get("/v1/leases").json["leases"]:
                end(bob, each["id"])
            assert lease
            granted(ann)
            assert pid(node) not in {first, second}

    def test_what_the_last_one_keeps_open(self, make_node: Start, real: RealDaemon) -> None:
        """A user that fills the log's FIFO after its lease has ended has no reader, and the next user has the GPU."""
        node = make_node(simulate=1, control=real.control, config=ONE).start()
        with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
            lease = granted(ann)
            command = [sys.executable, "-I", "-c", STAYS, str(ANN), str(node.pipe_directory("gpu0"))]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stays:
                assert stays.stdin is not None
                assert stays.stdout is not None
                assert stays.stdout.readline() == "open\n"
                end(ann, lease)
                granted(bob)
                print(file=stays.stdin, flush=True)
                assert stays.stdout.readline() == "cut off\n"
                stays.communicate()
            granted(bob)
            assert node.daemons()["gpu0"]["state"] == "ready"
            assert not node.events("log_silent")

    def test_whose_servers_end(self, make_node: Start, real: RealDaemon) -> None:
        """A user whose servers end until none can be expected to start has the GPU closed to itself alone."""
        node = make_node(simulate=1, control=real.control, config=ONE).start()
        with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
            lease, small = granted(ann), {"threads": 10, "memory": "1GiB"}

            def is_refused() -> str | None:
                node.front_end("gpu0", f"start_server -uid {ANN}\n", cwd="/", user=ANN, group=ANN, extra_groups=[])
                answer = ann.admit(**small)
                if answer.status == 201:
                    end(ann, answer.json["id"])
                    return None
                detail: str = answer.json["detail"]
                return detail if "servers in a row failed to start" in detail else None

            assert wait_until(is_refused, what="the GPU to be closed to it", deadline=30)
            end(ann, lease)
            assert "servers in a row" in ann.admit(**small).json["detail"]
            granted(bob)

    @pytest.mark.thorough
    def test_who_keeps_the_seat(self, make_node: Start, real: RealDaemon) -> None:
        """If a user keeps the only connection after its lease has ended, the daemon is replaced for that reason."""
        node = make_node(simulate=1, control=real.control, config=f'{BRISK}users = "one"\n', durations=SWIFT).start()
        with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
            lease, first = granted(ann), pid(node)
            command = [sys.executable, "-I", "-c", SITS, str(ANN), str(node.pipe_directory("gpu0"))]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sits:
                assert sits.stdout is not None
                assert sits.stdout.readline() == "open\n"
                # With its own lease it can do this to its own GPU.
                node.wait_for_state("gpu0", "unresponsive")
                assert pid(node) == first
                end(ann, lease)
                node.wait_for_state("gpu0", "ready", deadline=40)
                assert pid(node) != first
                granted(bob)
                sits.communicate()
            assert not node.events("daemon_death")


@needs_root
@pytest.mark.parametrize("real", branches(555))
def test_many_users(make_node: Start, real: RealDaemon) -> None:
    """A control daemon that serves many users at a time also serves the next one."""
    node = make_node(simulate=1, control=real.control, config='[daemon]\nusers = "many"\n').start()
    with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
        first = pid(node)
        end(ann, granted(ann))
        granted(bob)
        assert pid(node) == first


@needs_root
def test_clients_that_are_left(make_node: Start) -> None:
    """While a client of the last user runs, its control daemon is left alone."""
    node = make_node(simulate=1, control=None, config='[enforcement]\nunadmitted = "deny"\n').start()
    first = pid(node)
    with SimulatedClient(variables(node)) as client, calling(node.socket, uid=ANN) as ann:
        wait_until(lambda: client.hello["ok"], what="the client to be there")
        end(ann, granted(ann))
        with calling(node.socket, uid=BOB) as bob:
            granted(bob)
        assert pid(node) == first
        assert client.process.poll() is None
