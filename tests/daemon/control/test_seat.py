"""The process that occupies a control daemon's only connection is named, whatever its program.

The kernel has its pid.
"""

import subprocess
import sys
from typing import Final

import pytest

from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, branches
from tests.harness import wait_until
from tests.real import RealDaemon

pytestmark = [needs_root, pytest.mark.thorough]

ANN: Final = 2661

SITS: Final = """
import os, socket, sys
os.setgroups([])
os.setresgid(*[int(sys.argv[2])] * 3)
os.setresuid(*[int(sys.argv[2])] * 3)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as seat:
    seat.connect(sys.argv[1])
    print(flush=True)
    sys.stdin.read()
"""
"""Connects as a user, and sends nothing. It is no program of NVIDIA's, and has no such name."""


@pytest.mark.parametrize("real", branches())
def test_a_socket_of_its_own(make_node: Start, real: RealDaemon) -> None:
    """A lease holder that only connects is named with pid and uid; when it leaves, the daemon is ready again."""
    node = make_node(simulate=1, control=real.control, config=BRISK).start()
    before = node.daemons()["gpu0"]
    with calling(node.socket, uid=ANN) as caller:
        assert caller.admit(threads=5, memory="1GiB").status == 201
        command = [sys.executable, "-I", "-c", SITS, str(node.pipe_directory("gpu0") / "control"), str(ANN)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sitting:
            assert sitting.stdout is not None
            assert sitting.stdout.readline() == b"\n"
            named = f"pid {sitting.pid} (uid {ANN})"
            found = wait_until(
                lambda: (now := node.daemons()["gpu0"])["state"] == "unresponsive" and now,
                what=f"it to be noticed; the log is {node.stderr}",
            )
            assert named in found["because"], found["because"]
            assert named in node.get("/readyz").json["because"]
            assert caller.admit(threads=5, memory="1GiB").json["code"] == "daemon_not_ready"
            assert node.events("daemon_state", state="unresponsive", because=found["because"])
            sitting.communicate()
    after = node.wait_for_state("gpu0", "ready")
    assert after["pid"] == before["pid"]
