"""Changes of a pipe directory's access by other processes are reported, whichever check finds them."""

import json
from pathlib import Path

from mpsd.core.reload import LiveSettings
from mpsd.core.settings import LogFormat, Settings
from mpsd.daemon.control.pipe_access import NodePipeAccess
from mpsd.daemon.leases.quarantine import Quarantine
from mpsd.daemon.record.log import configure
from mpsd.system.rundir import RunDir


def test_change_during_a_conversation(short_tmp: Path) -> None:
    """A change that the end of a conversation finds, and not the check of each second, is an event too."""
    settings = LiveSettings(Settings().under(short_tmp))
    with (short_tmp / "log").open("a") as stream:
        log = configure(LogFormat.JSON, stream=stream)
        quarantine = Quarantine(short_tmp / "quarantines.json", settings, log)
        run_dir = RunDir(settings.current, 0)
        access = NodePipeAccess(run_dir.daemon, lambda _: (), quarantine, settings=settings, log=log).of(
            "gpu0", "GPU-0"
        )
        directory = access.paths.pipe_directory
        directory.mkdir(parents=True, mode=0o700)
        access.paths.control_socket.touch()
        access.shut(many_users=False)
        access.admit()
        directory.chmod(0o755)
        access.admit()
        assert directory.stat().st_mode & 0o777 == 0o700
        access.admit()
    told = [json.loads(line) for line in (short_tmp / "log").read_text().splitlines()]
    assert [(each["path"], each["found"]) for each in told if each["event"] == "pipe_access_drift"] == [
        (str(directory), "user::rwx,group::r-x,other::r-x")
    ]
