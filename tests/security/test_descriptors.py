"""A control daemon whose descriptors a lease holder has used up: it answers nobody, and who was let in is named.

NVIDIA's control daemon keeps the sockets of some connections that were closed at once, for good (measured, all
versions). The subjects are those; they get few descriptors here, so that it takes less time.
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
from tests.daemon.helpers import BRISK, branches
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon

pytestmark = [needs_root, pytest.mark.slow]

ANN: Final = 61401
"""A uid that has no rights and no name."""

MOST: Final = 64
"""Descriptors that the control daemon may have; it needs some 15."""

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
"""Connects, says something, and is gone, again and again."""


@contextlib.contextmanager
def used_up(node: Node) -> Iterator[dict[str, Any]]:
    """Have the holder of a lease use up the descriptors of its control daemon; give that as it is then."""
    daemon = node.daemons()["gpu0"]["pid"]
    resource.prlimit(daemon, resource.RLIMIT_NOFILE, (MOST, MOST))
    with calling(node.socket, uid=ANN) as ann:
        assert ann.admit(threads=1, memory="1GiB").status == 201
        command = [sys.executable, "-I", "-c", CLOSES, str(node.pipe_directory("gpu0") / "control")]
        with subprocess.Popen(command) as stranger:
            wait_until(
                lambda: len(list(Path(f"/proc/{daemon}/fd").iterdir())) >= MOST,
                what="the descriptors to be used up",
                deadline=60,
            )
            stranger.kill()
        ann.admit(threads=2, memory="1GiB")  # so that it is asked
        found = node.wait_for_state("gpu0", "unresponsive", deadline=30)
        assert found["pid"] == daemon
        yield found


@pytest.mark.parametrize("real", branches())
def test_used_up(make_node: Start, real: RealDaemon) -> None:
    """Why it does not answer is told, with who was let in and what helps."""
    with used_up(make_node(simulate=1, control=real.control, config=BRISK).start()) as found:
        assert f"all of its {MOST} descriptors are in use" in found["because"]
        assert f"had pipe access: uid {ANN}" in found["because"]
        assert "mpsctl restart gpu0" in found["hint"]


@pytest.mark.parametrize("real", branches(535))  # each takes a processor until it is gone
def test_replaced(make_node: Start, real: RealDaemon) -> None:
    """With the last lease of that user it is replaced, since nobody can be there."""
    node = make_node(simulate=1, control=real.control, config=BRISK).start()
    with used_up(node) as found:
        pass
    assert node.wait_for_state("gpu0", "ready", deadline=40)["pid"] != found["pid"]
    assert not node.events("daemon_death")
