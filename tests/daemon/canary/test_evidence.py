"""Evidence about a server is evidence about its processes, for as long as these live."""

import subprocess
import sys

from mpsd.core.model import ProcessIdentity
from mpsd.daemon.canary.evidence import Processes
from mpsd.system import proc
from tests.harness import wait_until


def test_ended_and_not_reaped() -> None:
    """A server that has ended is gone, also before its parent has reaped it: none applies to the next."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server:
        ticks = proc.start_ticks(server.pid)
        assert ticks is not None
        against = Processes(server=ProcessIdentity(server.pid, ticks))
        assert not against.is_gone
        server.kill()
        wait_until(lambda: proc.live_ticks(server.pid) is None, what="the server to end")
        assert proc.start_ticks(server.pid) == ticks  # it was not reaped
        assert against.is_gone
