"""A real Slurm cluster of one node, in namespaces of its own: munged, slurmctld and slurmd of Debian's packages.

Whatever runs there is below one process, the init of a pid namespace, and ends with it.
"""

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from tests.harness import wait_until

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_CONFIGURATION: Final = """\
ClusterName=toy
SlurmctldHost=slurmnode
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge/socket
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd.log
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
KillWait=5
NodeName=slurmnode CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_INIT: Final = """\
ip link set lo up
ip link add br0 type bridge && ip addr add 10.88.5.1/24 dev br0 && ip link set br0 up
hostname slurmnode
mkdir -p /etc/slurm
mount --bind {here}/hosts /etc/hosts
mount --bind {here}/etc /etc/slurm
touch {here}/ready
trap : TERM INT
while :; do sleep 1000 & wait; done
"""
"""The init of the pid namespace, in which bash reaps orphans. Slurm resolves names only where an address is up."""


class Slurm:
    """The cluster, which ends with its `with` block."""

    def __init__(self, directory: Path) -> None:
        self._here = directory
        self._init: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def __enter__(self) -> Self:
        here = self._here
        for name in ("etc", "munge", "state", "spool"):
            (here / name).mkdir()
        (here / "hosts").write_text("127.0.0.1 localhost\n10.88.5.1 slurmnode\n")
        (here / "etc" / "slurm.conf").write_text(_CONFIGURATION.format(here=here))
        key = here / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (here / "init").write_text(_INIT.format(here=here))
        with (here / "init.log").open("wb") as log:
            command = "unshare --mount --net --uts --pid --fork --mount-proc --propagation private --kill-child bash"
            self._init = subprocess.Popen(
                [*command.split(), f"{here / 'init'}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={"PATH": PATH},
            )  # fmt: skip
        wait_until((here / "ready").exists, what=f"the namespaces; the log is {here / 'init.log'}")
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children")
        self._pid = int(children.read_text())
        munge = [
            "--force",
            "--key-file",
            f"{key}",
            "--socket",
            f"{here}/munge/socket",
            "--pid-file",
            f"{here}/munge/pid",
        ]
        self.run("munged", *munge, "--seed-file", f"{here}/munge/seed", "--log-file", f"{here}/munge/log")
        self.run("slurmctld", "-c")
        self.run("slurmd", "-c")
        wait_until(
            lambda: self.run("sinfo", "--noheader", "--format=%t").strip() == "idle",
            what=f"the node to be idle; the log is {here / 'slurmctld.log'}",
            deadline=30,
            not_yet=(subprocess.SubprocessError,),
        )
        return self

    def command(self, *arguments: str) -> Sequence[str]:
        """Return a command as one that runs in the cluster, with the environment of its caller."""
        return ("nsenter", "--target", f"{self._pid}", "--mount", "--net", "--uts", "--pid", *arguments)

    def run(self, *arguments: str) -> str:
        """Run a program of Slurm to its end, and return its output."""
        program = shutil.which(arguments[0], path=PATH) or arguments[0]
        done = subprocess.run(
            self.command(program, *arguments[1:]), env={"PATH": PATH}, stdin=subprocess.DEVNULL, timeout=20,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    def __exit__(self, *_: object) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
        if self._init is not None:
            self._init.wait(20)
