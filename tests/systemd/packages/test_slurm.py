"""docs/slurm.md on a booted machine, with Debian's packages of Slurm and mpsd's own: from the setup to the purge.

Slurm's control groups are of version 1 here, as those of the kernel that the machine shares. systemd-nspawn mounts its
part of them read-only, so the test mounts the two that Slurm uses anew. Simulated are the GPU and its device file.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any, Final

import pytest

from mpsd.core.units import MIB
from mpsd.slurm.node import PREFIX
from tests import systemd
from tests.harness import wait_until
from tests.systemd import keeper
from tests.systemd.machine import Machine
from tests.systemd.node import STOP, Service
from tests.systemd.packages.packages import ROOT, Packages

pytestmark = pytest.mark.machine

PAGE: Final = ROOT / "docs" / "slurm.md"

MOST: Final = 10
"""Commands from nothing to two users on one GPU."""

USERS: Final = {"ann": 3001, "bert": 3002, "cleo": 3003}

_HOST: Final = "slurmnode"

_DEADLINE: Final = 90.0
"""Seconds for what takes a few: the machine may be busy."""

_SLURM_CONF: Final = f"""\
ClusterName=toy
SlurmctldHost={_HOST}
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
KillWait=15
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,bf_interval=2,sched_interval=2,sched_min_interval=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
NodeName={_HOST} CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_TRAIN: Final = """\
#!/bin/sh
exec env MPSD_SIMULATED_GPUS=/run/mpsd/simulated /usr/lib/mpsd/bin/python3 -I -m mpsd.simulator.client \
    <>"/srv/train/$USER.in" >"/srv/train/$SLURM_JOB_ID"
"""
"""The users' program: a client of simulated GPUs, which takes commands from a pipe."""

_MACHINE: Final = """\
[Unit]
Before=munge.service slurmctld.service slurmd.service
[Service]
Type=oneshot
ExecStart=ip link add br0 type bridge
ExecStart=ip addr add 10.88.5.1/24 dev br0
ExecStart=ip link set br0 up
ExecStart=mount -o remount,rw,bind /sys/fs/cgroup/freezer
ExecStart=mount -o remount,rw,bind /sys/fs/cgroup/devices
ExecStart=mknod -m 666 /dev/nvidia0 c 195 0
[Install]
WantedBy=multi-user.target
"""
"""What a boot in systemd-nspawn lacks: an address, Slurm's control groups, and the device file."""

_QUICK: Final = "[Manager]\nDefaultTimeoutStopSec=3s\n"
"""For systemd, which otherwise waits for 90 seconds for the programs of Slurm that ignore SIGTERM."""


def commands(part: str) -> list[str]:
    """Return the commands of the page in the part with this anchor."""
    text = re.split(
        r'^## |^<a id="', PAGE.read_text(encoding="utf-8").partition(f'<a id="{part}"></a>\n## ')[2], flags=re.MULTILINE
    )[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


class Node:
    """The machine as a node of Slurm."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.service = Service(machine)

    def prepare(self) -> None:
        """Make it the machine on which the page begins: Slurm runs, without GPUs, and mpsd is not installed."""
        write = self.machine.write
        write("/etc/hostname", f"{_HOST}\n")
        write("/etc/hosts", f"127.0.0.1 localhost\n10.88.5.1 {_HOST}\n")
        self.machine.run("mkdir", "-p", "/srv/train", "/var/log/slurm", "/var/lib/slurm")
        for each, uid in USERS.items():
            self.machine.run("useradd", "--create-home", "--shell=/bin/bash", f"--uid={uid}", each)
            self.machine.run("mkfifo", "--mode=666", f"/srv/train/{each}.in")
        self.machine.run("chmod", "1777", "/srv/train")
        write("/usr/local/bin/train", _TRAIN, 0o755)
        write("/etc/slurm/slurm.conf", _SLURM_CONF)
        write("/etc/slurm/cgroup.conf", "CgroupMountpoint=/sys/fs/cgroup\n")
        for unit, more in (("mpsd.service", ""), (STOP, " --stop-daemons")):
            command = f"/usr/bin/mpsd run --simulate 1{more}"
            write(f"/etc/systemd/system/{unit}.d/simulate.conf", f"[Service]\nExecStart=\nExecStart={command}\n")
        write("/etc/systemd/system/machine.service", _MACHINE)
        self.machine.run("hostname", _HOST)
        self.machine.enable("machine.service")
        self.machine.run("systemctl", "restart", "munge", "slurmctld", "slurmd")
        self.wait_until_it_is("idle")

    def dpkg(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run dpkg, which compiles mpsd."""
        return self.machine.run("dpkg", *arguments, check=check, timeout=3 * _DEADLINE)

    # -- Slurm --------------------------------------------------------------------------------------------------------

    def state(self) -> str:
        return self.machine.run("sinfo", "-h", "-o", "%T", check=False).stdout.strip()

    def reason(self) -> str:
        return self.machine.run("sinfo", "-h", "-o", "%E").stdout.strip()

    def wait_until_it_is(self, *states: str) -> None:
        try:
            wait_until(lambda: self.state() in states, what=f"the node to be {' or '.join(states)}", deadline=_DEADLINE)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.state()}, {self.reason()}\n{self.story()}") from None

    def as_user(self, user: str, command: str) -> str:
        return self.machine.run("runuser", "-l", user, "-c", command).stdout

    def job(self, user: str, command: str) -> int:
        """Run a user's sbatch, and return the id of its job."""
        return int(re.findall(r"Submitted batch job ([0-9]+)", self.as_user(user, command))[0])

    def shown(self, job: int) -> dict[str, str]:
        """Return what Slurm says about a job; empty once it has forgotten it."""
        said = self.machine.run("scontrol", "show", "job", str(job), check=False).stdout
        whole = dict(re.findall(r"^ *(\w+)=(.*)$", said, re.MULTILINE))
        return {**dict(re.findall(r"(\w+)=(\S*)", said)), "AdminComment": whole.get("AdminComment", "")}

    def wait_for(self, job: int, *states: str) -> None:
        try:
            wait_until(
                lambda: self.shown(job).get("JobState") in states,
                what=f"{job} to be {' or '.join(states)}",
                deadline=_DEADLINE,
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.shown(job)}\n{self.story()}") from None

    # -- a user's program ---------------------------------------------------------------------------------------------

    def answers(self, job: int, count: int) -> list[dict[str, Any]]:
        """Return what the program of a job has answered, once that is this many lines."""
        path = self.machine.path(f"/srv/train/{job}")

        def lines() -> list[str] | None:
            found = path.read_text().splitlines() if path.exists() else []
            return found if len(found) >= count else None

        try:
            return [
                json.loads(each) for each in wait_until(lines, what=f"{count} answers of {job}", deadline=_DEADLINE)
            ]
        except AssertionError as error:
            outputs = [each.read_text() for each in self.machine.path("/home").glob("*/slurm-*.out")]
            raise AssertionError(f"{error}\n{outputs}\n{self.shown(job)}\n{self.story()}") from None

    def tell(self, user: str, line: str) -> None:
        """Send a line to the program of a user."""
        descriptor = os.open(self.machine.path(f"/srv/train/{user}.in"), os.O_RDWR | os.O_NONBLOCK)
        os.write(descriptor, f"{line}\n".encode())
        os.close(descriptor)

    def leases(self) -> dict[str, int]:
        """Return the leases that have not ended, with their jobs."""
        return {each["id"]: int(each["labels"]["slurm/job"]) for each in self.service.ask("leases")["leases"]}

    def story(self) -> str:
        """Return what the daemons wrote."""
        logs = [path.read_text(errors="replace")[-2000:] for path in self.machine.path("/var/log/slurm").glob("*.log")]
        return "\n".join([*logs, self.machine.run("journalctl", "-n", "40", "-u", "mpsd*", "--no-pager").stdout])

    def clean(self) -> None:
        """Check that no unit has failed."""
        assert self.machine.run("systemctl", "list-units", "--failed", "--plain", "--no-legend").stdout == ""


@pytest.fixture(scope="class")
def node(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Node]:
    """Boot a machine, whose disk is still there after another boot, with Slurm and mpsd's package."""
    name, disk = f"slurm-{os.getpid()}", tmp_path_factory.mktemp("disk")
    disk.chmod(0o755)
    (disk / "etc" / "systemd").mkdir(parents=True)
    (disk / "etc" / "systemd" / "system.conf").write_text(_QUICK)
    machine = Machine(systemd.SUITES["slurm"], name, tmp_path_factory.mktemp("machine"), disk=disk)
    with machine:
        node = Node(machine)
        node.prepare()
        for package in packages:
            machine.copy(package, f"/root/{package.name}")
        node.dpkg("--install", f"/root/{packages.first.name}")
        machine.run("mpsctl", "service", "configure", "slurm")
        machine.run("mv", "/etc/mpsd/mpsd.toml.new", "/etc/mpsd/mpsd.toml")
        machine.run("systemctl", "restart", "mpsd")
        yield node
    assert not [group for group in keeper.groups(name) if group.exists()]


@pytest.fixture(scope="class")
def rebooted(node: Node) -> Node:
    """Boot the machine again, while jobs compute."""
    assert node.leases()
    node.machine.power_off()
    node.machine.boot()
    return node


@pytest.mark.timeout(600)
class TestSlurm:
    """The tests, in their order."""

    SUITE = systemd.SUITES["slurm"]

    def test_the_page(self, node: Node) -> None:
        """Two users are on one GPU after at most ten commands, each within its limits; a third one waits."""
        found = commands("setup")
        assert len(found) <= MOST
        jobs = []
        for line in found:
            command, is_users, of = line.partition("# as ")
            if is_users:
                jobs.append(node.job(of, command))
            else:
                node.machine.run("bash", "-c", line)
        assert jobs == [1, 2]
        waits = node.job("cleo", 'sbatch --gres=mps:25 --wrap="srun train"')
        for job, user, threads in ((1, "ann", 60), (2, "bert", 40)):
            (hello, *_) = node.answers(job, 1)
            assert hello["active_thread_percentage"] == threads
            granted = hello["pinned_device_mem_limit"]
            node.tell(user, f"alloc {granted // MIB + 1024}MiB")
            node.tell(user, "alloc 2GiB")
            assert [each["ok"] for each in node.answers(job, 3)] == [True, False, True]
        assert sorted(node.leases().values()) == jobs
        wait_until(lambda: node.shown(waits).get("Reason") == "Resources", what="the third to wait", deadline=_DEADLINE)
        assert "fail" not in node.machine.run("mpsctl", "slurm", "check").stdout
        wait_until(lambda: "held=2048M" in node.shown(1)["AdminComment"], what="AdminComment", deadline=_DEADLINE)
        node.clean()

    def test_its_service(self, node: Node) -> None:
        """It has few rights; a stop leaves the records of jobs alone, and an order about a GPU drains the node."""
        unit, machine = "mpsd-slurm.service", node.machine
        verified = machine.run("systemd-analyze", "verify", "--man=no", f"/usr/lib/systemd/system/{unit}")
        assert not verified.stdout + verified.stderr
        pid = machine.show(unit, "MainPID")
        status = machine.run("cat", f"/proc/{pid}/status").stdout
        assert re.search(r"^CapEff:\s+0*3$", status, re.MULTILINE)  # CHOWN and DAC_OVERRIDE
        assert "NoNewPrivs:\t1\n" in status
        assert "Seccomp:\t2\n" in status
        for path in ("/etc/slurm/x", "/sys/fs/cgroup/freezer/x"):
            tried = machine.run("nsenter", "-t", pid, "-m", "mkdir", path, check=False)
            assert "Read-only file system" in tried.stderr, path

        machine.run("mpsctl", "hold", "gpu0", "--reason", "memory is replaced")
        node.wait_until_it_is("draining")
        assert node.reason().startswith(PREFIX)
        records = ["sh", "-c", "stat -c '%n %i %U %a' /run/mpsd-slurm/jobs/*/*"]
        before = machine.run(*records).stdout
        assert re.search(r"jobs/1/task \d+ ann 400\n", before)
        machine.run("systemctl", "stop", unit)
        assert machine.run(*records).stdout == before
        machine.run("mpsctl", "resume", "gpu0")
        machine.run("systemctl", "start", unit)
        node.wait_until_it_is("mixed")
        assert machine.run(*records).stdout == before
        node.clean()

    def test_an_upgrade(self, node: Node, packages: Packages) -> None:
        """Slurm's daemons restart, and another version is installed: jobs compute, and only services have changed."""
        before, machine = node.leases(), node.machine
        machine.run("systemctl", "restart", "slurmctld", "slurmd")
        node.wait_until_it_is("mixed")
        pid = machine.show("mpsd-slurm.service", "MainPID")
        node.dpkg("--install", f"/root/{packages.second.name}")
        assert machine.show("mpsd-slurm.service", "MainPID") not in {pid, "0"}
        wait_until(lambda: node.leases() == before, what="the leases", deadline=_DEADLINE)
        for job, user in ((1, "ann"), (2, "bert")):
            node.tell(user, "alloc 1GiB")
            assert node.answers(job, 4)[-1]["ok"]
        node.wait_until_it_is("mixed")
        node.clean()

    def test_no_removal_below_slurm(self, node: Node) -> None:
        """While slurmd would call the hooks, the package stays: Slurm drains a node whose Prolog is not there."""
        before = node.leases()
        refused = node.dpkg("--remove", "mpsd", check=False)
        assert refused.returncode == 1
        assert "without which Slurm drains the node: see /etc/slurm/slurm.conf\n" in refused.stderr
        assert node.leases() == before
        assert node.machine.show("mpsd-slurm.service", "ActiveState") == "active"
        node.clean()

    def test_a_reboot(self, rebooted: Node) -> None:
        """The leases have ended with the boot, and everything runs again: another job computes."""
        node = rebooted
        assert node.leases() == {}
        assert node.machine.show("mpsd-slurm.service", "ActiveState") == "active"
        node.machine.run("scancel", "1", "2", "3")
        node.wait_until_it_is("idle")
        job = node.job("cleo", 'sbatch --gres=mps:25 --wrap="srun train"')
        assert node.answers(job, 1)[0]["active_thread_percentage"] == 25
        assert [*node.leases().values()] == [job]
        node.clean()

    def test_a_removal(self, node: Node) -> None:
        """Without mpsd's lines in Slurm's configuration mpsd can go: the job that computes goes on, and others run."""
        machine = node.machine
        (job,) = node.leases().values()
        for line in commands("removal"):
            machine.run("bash", "-c", line)
        machine.run("ln", "-s", "/etc/mpsd/slurm/prolog", "/etc/slurm/prolog.d")
        refused = node.dpkg("--remove", "mpsd", check=False)
        assert "see /etc/slurm/prolog.d\n" in refused.stderr
        machine.run("rm", "/etc/slurm/prolog.d")
        node.wait_until_it_is("mixed", "idle")
        other = node.job("ann", "sbatch --wrap=hostname")
        node.wait_for(other, "COMPLETED")
        node.tell("cleo", "alloc 1GiB")
        assert node.answers(job, 2)[-1]["ok"]
        machine.run("scancel", str(job))
        node.wait_until_it_is("idle")
        node.dpkg("--purge", "mpsd")
        assert (
            machine.run("systemctl", "is-active", "mpsd", "mpsd-slurm", check=False).stdout.split() == ["inactive"] * 2
        )
        for path in ("/etc/mpsd", "/run/mpsd-slurm", "/etc/systemd/system/multi-user.target.wants/mpsd-slurm.service"):
            assert machine.run("ls", path, check=False).returncode != 0, path
        node.wait_for(node.job("ann", "sbatch --wrap=hostname"), "COMPLETED")
        node.clean()
