"""What a uid that is let in gains by crashing a control daemon: little power, and not the GPU of the others.

The subjects are NVIDIA's own control daemons. A signal of root's stands in for what bytes on their socket can do: the
kernel reports both in the same way.
"""

from pathlib import Path

import pytest

from mpsd.core.capabilities import DAEMON, Capability
from tests.daemon.caller import needs_root
from tests.daemon.conftest import Start, make_node
from tests.daemon.helpers import branches
from tests.harness import look_at, wait_until
from tests.node import Node
from tests.real import RealDaemon

__all__ = ["make_node"]

pytestmark = [needs_root, pytest.mark.slow]

ANN, BOB = 61001, 61002
"""Two uids that have no rights and no name."""


def status_of(pid: int) -> dict[str, str]:
    """Return /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def sets(pid: int) -> dict[str, int]:
    """Return the capability sets of a process."""
    return {name: int(value, 16) for name, value in status_of(pid).items() if name.startswith("Cap")}


def stand_in(directory: Path) -> dict[str, str]:
    """Put a stand-in for NVIDIA's server first in PATH."""
    directory.mkdir()
    program = directory / "nvidia-cuda-mps-server"
    program.write_text("#!/bin/sh\nexec sleep 1000\n", encoding="ascii")
    program.chmod(0o755)
    return {"PATH": f"{directory}:/usr/bin:/bin"}


def server_for(node: Node, uid: int) -> int:
    """Have the control daemon start a server, and return its pid once the stand-in runs."""
    node.ask("gpu0", f"start_server -uid {uid}")
    (pid,) = wait_until(lambda: node.ask("gpu0", "get_server_list"), what="a server")

    def runs() -> bool:
        found = look_at(int(pid))
        return found is not None and "sleep" in found.command

    wait_until(runs, what="the stand-in to run")
    return int(pid)


@pytest.mark.parametrize("real", branches())
class TestCapabilities:
    """On each of NVIDIA's control daemons, started by mpsd."""

    def test_control_daemon(self, make_node: Start, real: RealDaemon, short_tmp: Path) -> None:
        """It and its servers never have more than the listed capabilities; mpsd loses none, and all of it works."""
        node = make_node(simulate=1, control=real.control, env=stand_in(short_tmp / "bin")).start()
        before = sets(node.pid)
        listed = sum(1 << each for each in DAEMON)
        daemon = node.daemons()["gpu0"]["pid"]
        assert sets(daemon) == {"CapInh": 0, "CapPrm": listed, "CapEff": listed, "CapBnd": listed, "CapAmb": 0}
        server = server_for(node, ANN)
        assert status_of(server)["Uid"].split() == [str(ANN)] * 4
        assert sets(server) == {"CapInh": 0, "CapPrm": 0, "CapEff": 0, "CapBnd": listed, "CapAmb": 0}
        assert sets(node.pid) == before
        # With force, since the stand-in waits for ever: the daemon ends it, and so itself.
        assert node.mpsctl("restart", "gpu0", "--timeout", "0").returncode == 0
        wait_until(lambda: (found := look_at(server)) is None or found.zombie, what="the server to be ended")
        assert sets(node.wait_for_state("gpu0", "ready")["pid"])["CapBnd"] == listed

    def test_setting(self, make_node: Start, real: RealDaemon) -> None:
        """An operator can give them more, of what mpsd has."""
        config = '[daemon]\ncapabilities = ["CAP_SYS_PTRACE", "SYS_NICE"]\n'
        node = make_node(simulate=1, control=real.control, config=config).start()
        more = DAEMON | {Capability.SYS_PTRACE, Capability.SYS_NICE}
        assert sets(node.daemons()["gpu0"]["pid"])["CapBnd"] == sum(1 << each for each in more)
