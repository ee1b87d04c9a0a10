"""A lease holder uses up the descriptors of a control daemon, which answers no more: the suspects are named.

NVIDIA's control daemon keeps the sockets of some connections that were closed at once, forever (measured, all
versions). The subjects are these daemons; they get few descriptors here, so that it takes less time.
"""

import contextlib
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, SWIFT, branches
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon

pytestmark = [needs_root, pytest.mark.thorough]

ANN: Final = 61401

MOST: Final = 64
"""Descriptors that the control daemon may have; it needs about 15."""

CLOSES: Final = f"""
import os, socket, sys
os.setgroups([])
os.setresgid({ANN}, {ANN}, {ANN})
os.setresuid({ANN}, {ANN}, {ANN})
while True:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as to:
        to.settimeout(0.2)
        try:
            to.connect(sys.argv[1])
            to.send(bytes(4096))
        except OSError:
            pass
"""
"""Connects, sends something, and disconnects, again and again."""


@contextlib.contextmanager
def used_up(node: Node) -> Iterator[dict[str, Any]]:
    """Have a lease holder use up the descriptors of its control daemon; yield the daemon's state then."""
    daemon = node.daemons()["gpu0"]["pid"]
    resource.prlimit(daemon, resource.RLIMIT_NOFILE, (MOST, MOST))
    with calling(node.socket, uid=ANN) as ann:
        assert ann.admit(threads=1, memory="1GiB").status == 201
        command = [sys.executable, "-I", "-c", CLOSES, str(node.pipe_directory("gpu0") / "control")]
        with contextlib.ExitStack() as stack:
            stranger = stack.enter_context(subprocess.Popen(command))
            stack.callback(stranger.kill)
            wait_until(
                lambda: len(list(Path(f"/proc/{daemon}/fd").iterdir())) >= MOST,
                what="the descriptors to be used up",
                deadline=60,
            )
            ann.admit(threads=2, memory="1GiB")  # so that the daemon is queried
            # The stranger stays until then: the last descriptor may be that of a connection that ends with it.
            found = node.wait_for_state("gpu0", "unresponsive", deadline=30)
        assert found["pid"] == daemon
        yield found


@pytest.mark.parametrize("real", branches(470, 555))
def test_used_up(make_node: Start, real: RealDaemon) -> None:
    """The reason for the silence is reported, with the uids that have access and with a remedy."""
    with used_up(make_node(simulate=1, control=real.control, config=BRISK).start()) as found:
        assert f"all of its {MOST} descriptors are in use" in found["because"]
        assert f"had pipe access: uid {ANN}" in found["because"]
        assert "mpsctl restart gpu0" in found["hint"]


@pytest.mark.parametrize("real", branches(535))  # each takes a processor until it ends
def test_replaced(make_node: Start, real: RealDaemon) -> None:
    """When the last lease of that user ends, the daemon is replaced, since no client can be left."""
    node = make_node(simulate=1, control=real.control, config=BRISK, durations=SWIFT).start()
    with used_up(node) as found:
        pass
    assert node.wait_for_state("gpu0", "ready", deadline=40)["pid"] != found["pid"]
    assert not node.events("daemon_death")
