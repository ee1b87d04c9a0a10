"""A real Slurm cluster: slurmctld, munged, and a slurmd for each node, which has namespaces of its own.

slurmctld and munged run on the first node. The nodes have networks, hosts' names, mounts and control groups of their
own, and share the machine's processes and files.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.control_groups import mounted
from tests.harness import look_at, wait_until
from tests.slurm import database

_ROOT: Final = Path(__file__).parents[2]
_KEEPER: Final = Path(__file__).with_name("keeper.py")

PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"

USERS: Final = {"ann": 3001, "bert": 3002, "cleo": 3003}

VERSION: Final = 2 if mounted("freezer") is None else 1
"""The version of the control groups by which Slurm follows jobs here: 1 also on a machine that has both."""

_HIERARCHIES: Final = ("freezer", "devices") if VERSION == 1 else ()
"""Those of version 1 that Slurm uses here: to follow the processes of a job, and to bar devices."""

_PLUGIN: Final = {
    1: "CgroupPlugin=cgroup/v1\nCgroupMountpoint={place}/cgroup\n",
    2: "CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\n",
}
"""With version 2, slurmd takes only the hierarchy that the first process of the machine sees."""

_CONFIGURATION: Final = """\
ClusterName=toy
SlurmctldHost={names[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge/munge.socket.2
StateSaveLocation={place}/spool/ctld
SlurmdSpoolDir={place}/spool/%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/%n.pid
SlurmctldLogFile={place}/log/slurmctld.log
SlurmdLogFile={place}/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,bf_interval=2,sched_interval=2,sched_min_interval=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
KillWait=2
PrologEpilogTimeout=40
MessageTimeout=30
GresTypes=gpu,{types}
NodeName={nodes} CPUs=256 Boards=1 SocketsPerBoard=1 CoresPerSocket=256 ThreadsPerCore=1 RealMemory=8000 {gres}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_SETUP: Final = """\
set -e
hostname {name}; ip link set lo up
if [ -z "{first}" ]; then
    ip link add eth0 type bridge
else
    ip link add eth0 type veth peer name {name} netns {first}
    nsenter -t {first} -n ip link set {name} master eth0 up
    mount --bind {own}/hooks {place}/hooks
fi
ip addr add 10.88.5.{number}/24 dev eth0; ip link set eth0 up
place={place} root={root} prefix={prefix} closed={closed} project={project}
if [ -n "$root" ]; then
    mount --bind "$root" "$root"
    for each in proc sys dev tmp; do mount --rbind /$each "$root/$each"; done
    [ -z "$closed" ] || mount -t tmpfs -o mode=755 tmpfs "$root$closed"
    for each in "$prefix" "$project"; do mkdir -p "$root$each"; mount --bind "$each" "$root$each"; done
elif [ -n "$closed" ]; then
    mkdir -p "$place/prefix"; mount --bind "$prefix" "$place/prefix"
    mount -t tmpfs -o mode=755 tmpfs "$closed"
    mkdir -p "$prefix"; mount --move "$place/prefix" "$prefix" 2>/dev/null || mount --rbind "$place/prefix" "$prefix"
fi
mkdir -p "$root/run/munge" "$root/etc/slurm"
for each in passwd group hosts; do
    [ -e "$root/etc/$each" ] || touch "$root/etc/$each"
    mount --bind "$place/etc/$each" "$root/etc/$each"
done
mount --bind "{slurm}" "$root/etc/slurm"; mount --bind "$place/munge" "$root/run/munge"
mkdir -p "$root/run/slurm"; mount -t tmpfs -o mode=755 tmpfs "$root/run/slurm"
for each in {hierarchies}; do
    mkdir -p "$place/cgroup/$each"; mount -t cgroup -o $each cgroup "$root$place/cgroup/$each"  # where slurmd sees it
done
"""


@dataclass
class Machine:
    """A node of a cluster, in namespaces of its own."""

    cluster: "Cluster"
    number: int
    """From 1, the node of slurmctld."""
    _keeper: "subprocess.Popen[str] | None" = None

    @property
    def name(self) -> str:
        """Its name in Slurm."""
        return "slurmnode" if self.number == 1 else f"slurmnode{self.number}"

    @property
    def own(self) -> Path:
        """The directory with its devices and hooks; the paths of hooks are those of the first node on each node."""
        return self.cluster.place if self.number == 1 else self.cluster.place / self.name

    @property
    def devices(self) -> list[Path]:
        return [self.own / "dev" / f"nvidia{number}" for number in range(self.cluster.gpus)]

    @property
    def pid(self) -> int:
        """The first process of its namespaces."""
        assert self._keeper is not None
        return self._keeper.pid

    @property
    def groups(self) -> list[tuple[str, Path]]:
        found = [(each, mounted(each)) for each in _HIERARCHIES if self.cluster.control_groups]
        place = self.cluster.place
        return [
            (each, top / f"mpsd-tests-{os.getpid()}-{place.parent.name}-{place.name}-{self.number}")
            for each, top in found
            if top is not None
        ]

    def start(self) -> None:
        """Make the namespaces; that of the first node's network connects the others."""
        place, root = self.cluster.place, self.cluster.root
        for _, group in self.groups:
            group.mkdir()
        joins = "".join(f'echo $$ >"{group}/cgroup.procs"; ' for _, group in self.groups)
        keeper = [sys.executable, "-I", "-S", str(_KEEPER)]
        prefix = Path(sys.base_prefix)
        closed = next((each for each in reversed(prefix.parents) if not each.stat().st_mode & 0o001), "")
        is_first = self.number == 1
        setup = _SETUP.format(
            name=self.name, number=self.number, first="" if is_first else self.cluster.machines[0].pid, own=self.own,
            place=place, root=root or "", prefix=prefix, closed=closed, project=_ROOT,
            slurm=place / "etc" / "slurm" if is_first or not self.cluster.configless else self.own / "slurm",
            hierarchies=" ".join(each for each, _ in self.groups),
        )  # fmt: skip
        setup += 'exec "$@"\n' if root is None else f'exec chroot {root} "$@"\n'
        script = f'{joins} exec unshare --mount --net --uts --cgroup --propagation private bash -c "$0" bash "$@"'
        log = place / "log" / f"keeper.{self.name}"
        with log.open("wb") as output:
            self._keeper = subprocess.Popen(
                ["bash", "-c", script, setup, *keeper], cwd="/", text=True, bufsize=1,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
            )  # fmt: skip
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        assert line == "ready\n", (line, log.read_text())

    def run_daemon(self, name: str, *command: str) -> int:
        """Start a program as root in these namespaces, in the foreground, and return its pid."""
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        environment = {"PATH": PATH, "HOME": "/root"}
        output = self.cluster.place / "log" / f"{name}{'' if self.number == 1 else self.number}.out"
        asked = {"start": command, "output": str(output), "environment": environment}
        self._keeper.stdin.write(f"{json.dumps(asked)}\n")
        return int(self._keeper.stdout.readline())

    def command(self, *command: str, user: str | None = None) -> list[str]:
        """Return a command line that runs a command in these namespaces, as root or as a user."""
        inside = ["nsenter", "-t", str(self.pid), "-m", "-n", "-u", "-C", "-r", "-w"]
        if user is None:
            return [*inside, "env", "-i", f"PATH={PATH}", "HOME=/root", *command]
        identity = [f"--reuid={USERS[user]}", f"--regid={USERS[user]}", "--clear-groups"]
        return [*inside, "setpriv", *identity, "env", "-i", f"PATH={PATH}", "HOME=/tmp", f"USER={user}", *command]

    def root_run(self, *command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        return self.cluster.finished(self.command(*command), check=check)

    def end(self) -> None:
        """End every process here, and remove the control groups."""
        for kind, group in self.groups:
            if kind == "freezer":  # a suspended job cannot end
                for each in group.rglob("freezer.state"):
                    with contextlib.suppress(OSError):
                        each.write_text("THAWED")
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            assert self._keeper.stdout is not None
            self._keeper.stdin.close()
            self._keeper.wait(30)
            self._keeper.stdout.close()
        for _, group in self.groups:
            if group.exists():
                wait_until(lambda group=group: _removed(group), what=f"{group} to be empty", not_yet=(OSError,))  # type: ignore[misc]
        if VERSION == 2 and (top := mounted("cgroup2")) is not None:
            with contextlib.suppress(OSError):  # a cluster of another test may be in it
                _removed(top / "system.slice" / f"{self.name}_slurmstepd.scope")


@dataclass
class Cluster:
    """A cluster; its daemons run from `start` to `close`."""

    place: Path
    root: Path | None = None
    """A root file system with another version of Slurm; the machine's own without one."""
    nodes: int = 1
    gpus: int = 2
    """GPUs of each node."""
    share: str = "mps"
    """The types of GRES by which GPUs are shared."""
    flags: str = ""
    """Flags of the GRES in gres.conf."""
    more_gres: Mapping[str, int] = field(default_factory=dict)
    """Further GRES, each with its number, which stands for no device."""
    control_groups: bool = True
    """Whether Slurm follows jobs by control groups; otherwise by what /proc tells of processes."""
    constrain: bool = True
    """Whether it bars the devices of others, by control groups."""
    configless: bool = False
    """Whether the nodes beside the first get their configuration from slurmctld."""
    configuration: str = ""
    """Further lines of slurm.conf."""
    reversed_devices: bool = False
    """Whether gres.conf names the devices from the last one on."""
    shards: int = 4
    """Shards of each GPU."""
    slurmdbd: bool = False
    """Whether slurmdbd keeps the accounts of jobs."""
    pids: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machines = [Machine(self, number) for number in range(1, self.nodes + 1)]

    def write(self) -> None:
        """Write the configuration, and what belongs to it."""
        for name in ("etc/slurm", "munge", "spool/ctld", "log", "out"):
            (self.place / name).mkdir(parents=True)
        self.place.chmod(0o755)
        for name in ("out", "log"):
            (self.place / name).chmod(0o1777)
        for machine in self.machines:
            (self.place / "spool" / machine.name).mkdir()
            for name in ("dev", "hooks", "slurm"):
                (machine.own / name).mkdir(parents=True)
            for number, each in enumerate(machine.devices):
                os.mknod(each, 0o666 | 0o020000, os.makedev(195, number))
                each.chmod(0o666)
        etc, tree = self.place / "etc", self.root or Path("/")
        accounts = [f"{name}:x:{uid}:{uid}::/tmp:/bin/bash" for name, uid in USERS.items()]
        groups = [f"{name}:x:{uid}:" for name, uid in USERS.items()]
        passwd, group = (tree / "etc" / each for each in ("passwd", "group"))
        (etc / "passwd").write_text("\n".join([passwd.read_text().rstrip(), *accounts, ""]))
        (etc / "group").write_text("\n".join([group.read_text().rstrip(), *groups, ""]))
        addresses = [f"10.88.5.{each.number} {each.name}" for each in self.machines]
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *addresses, ""]))
        munge = next(each.split(":") for each in passwd.read_text().splitlines() if each.startswith("munge:"))
        key = etc / "munge.key"
        key.write_bytes(os.urandom(128))
        for each in (key, self.place / "munge"):
            os.chown(each, int(munge[2]), int(munge[3]))
        key.chmod(0o400)
        (self.place / "munge").chmod(0o711)
        types = [*self.share.split(), *self.more_gres]
        counts = {"mps": 100 * self.gpus, "shard": self.shards * self.gpus, **self.more_gres}
        gres = ",".join([f"gpu:{self.gpus}", *(f"{each}:{counts[each]}" for each in types)])
        names = [each.name for each in self.machines]
        text = _CONFIGURATION.format(
            place=self.place,
            types=",".join(types),
            names=names,
            nodes=",".join(names),
            gres=f"Gres={gres} State=UNKNOWN",
        )
        if self.configless:
            text += "SlurmctldParameters=enable_configless\n"
        if self.control_groups:
            text += "ProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup\n"
            constrains = "yes" if self.constrain else "no"
            (etc / "slurm" / "cgroup.conf").write_text(
                f"{_PLUGIN[VERSION].format(place=self.place)}ConstrainDevices={constrains}\n"
                "ConstrainCores=no\nConstrainRAMSpace=no\n"
            )
        else:
            text += "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
            if self.root is not None:
                (etc / "slurm" / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        database.write(self, text + self._included("slurm.conf", self.configuration))
        (etc / "slurm" / "gres.conf").write_text(self._included("gres.conf", "\n".join([*self._gres(), ""])))

    def _included(self, name: str, lines: str) -> str:
        """Return lines of a file of Slurm, or, where nodes get it from slurmctld, one that includes them."""
        if not self.configless:
            return lines
        (self.place / "etc" / "slurm" / f"further-{name}").write_text(lines)
        return f"Include further-{name}\n"

    def _gres(self) -> Iterator[str]:
        """Yield the lines of gres.conf."""
        flags = f" Flags={self.flags}" if self.flags else ""
        for machine in self.machines:
            node = "" if self.nodes == 1 else f"NodeName={machine.name} "
            devices = machine.devices[::-1] if self.reversed_devices else machine.devices
            yield from (f"{node}Name=gpu File={each}" for each in devices)
            for kind, count in (("mps", 100), ("shard", self.shards)):
                if kind in self.share.split():
                    yield from (f"{node}Name={kind} Count={count} File={each}{flags}" for each in devices)
        yield from (f"Name={each} Count={count} Flags=CountOnly" for each, count in self.more_gres.items())

    def start(self) -> "Cluster":
        """Start the daemons on what was written, and wait until the nodes are idle."""
        for each in self.machines:
            each.start()
        munge = ["setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups", "munged", "--foreground"]
        options = {"--key-file": self.place / "etc" / "munge.key", "--socket": "/run/munge/munge.socket.2"}
        options |= {"--pid-file": "/run/munge/pid", "--seed-file": "/run/munge/seed", "--log-file": "/run/munge/log"}
        self.run_daemon("munged", *munge, *(str(each) for pair in options.items() for each in pair))
        if self.slurmdbd:
            database.start(self)
        self.start_slurmctld()
        for each in self.machines:
            self.start_slurmd(each)
        self.wait_until_idle()
        return self

    # -- daemons ------------------------------------------------------------------------------------------------------

    def run_daemon(self, name: str, *command: str) -> int:
        """Start a program as root on the first node, in the foreground, and return its pid."""
        self.pids[name] = self.machines[0].run_daemon(name, *command)
        return self.pids[name]

    def start_slurmctld(self) -> None:
        self.run_daemon("slurmctld", "slurmctld", "-D")

    def start_slurmd(self, machine: Machine | None = None) -> None:
        """Start slurmd, on the first node unless another is named; it takes up the jobs of an earlier one."""
        if machine is None or machine is self.machines[0]:
            self.run_daemon("slurmd", "slurmd", "-D")
        else:
            server = ["--conf-server", self.machines[0].name] if self.configless else []
            machine.run_daemon("slurmd", "slurmd", "-D", *server)

    def kill(self, name: str) -> None:
        """End a daemon by SIGKILL."""
        pid = self.pids.pop(name)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: look_at(pid) is None, what=f"{name} to be gone")

    def wait_until_idle(self, deadline: float = 30) -> None:
        wait_until(lambda: self.node_state() == "idle", what="the nodes to be idle", deadline=deadline)

    def node_state(self, name: str = "") -> str:
        """Return the state of a node, or of all, in Slurm's words; empty where slurmctld does not answer."""
        named = [f"--nodes={name}"] if name else []
        return self.root_run("sinfo", "-h", "-o", "%t", *named, check=False).stdout.strip()

    # -- commands -----------------------------------------------------------------------------------------------------

    def command(self, *command: str, user: str | None = None) -> list[str]:
        """Return a command line that runs a command on the first node, as root or as a user."""
        return self.machines[0].command(*command, user=user)

    def root_run(self, *command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        return self.finished(self.command(*command), check=check)

    def run(self, user: str, *command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run a command as a user."""
        return self.finished(self.command(*command, user=user), check=check)

    def finished(self, command: Sequence[str], *, check: bool) -> "subprocess.CompletedProcess[str]":
        """Run a command line of `command` to its end."""
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=50, check=False, stdin=subprocess.DEVNULL, cwd="/"
        )
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr, self.logs())
        return done

    def submit(self, user: str, script: str, *options: str) -> int:
        """Submit a job with this script, and return its id; its output is in `output`."""
        path = self.place / "out" / f"{user}-{os.urandom(4).hex()}.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
        done = self.run(user, "sbatch", "--parsable", f"--output={self.place}/out/%j", *options, str(path))
        return int(done.stdout.strip().split(";")[0])

    def output(self, job: int | str) -> str:
        """Return what a job has printed so far."""
        with contextlib.suppress(FileNotFoundError):
            return (self.place / "out" / f"{job}").read_text(errors="replace")
        return ""

    def job(self, job: int | str) -> dict[str, str]:
        """Return what Slurm says about a job; empty once it has forgotten it."""
        done = self.root_run("scontrol", "-o", "show", "job", str(job), check=False)
        return dict(each.partition("=")[::2] for each in done.stdout.split() if "=" in each)

    def state(self, job: int | str) -> str:
        return self.job(job).get("JobState", "")

    def wait_for_state(self, job: int | str, *states: str, deadline: float = 30) -> str:
        """Wait until a job has one of these states, and return it."""

        def reached() -> str | None:
            return found if (found := self.state(job)) in states else None

        try:
            return wait_until(reached, what=f"job {job} to be {' or '.join(states)}", deadline=deadline)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.job(job)}\n{self.output(job)}\n{self.logs()}") from None

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        found = []
        for each in sorted((self.place / "log").glob("slurm*.log")):
            text = each.read_text(errors="replace").splitlines()[-15:]
            found.append("\n".join([f"--- {each.name}", *text]))
        return "\n".join(found)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every process of the cluster, and remove its control groups."""
        for each in reversed(self.machines):
            each.end()
        shutil.rmtree(self.place, ignore_errors=True)


def _removed(group: Path) -> bool:
    """Remove a control group with those below it."""
    for folder, _, _ in os.walk(group, topdown=False):
        os.rmdir(folder)  # noqa: PTH106 - os.walk has paths as text
    return True


@contextlib.contextmanager
def running(place: Path, **options: Any) -> Iterator[Cluster]:
    """Start a cluster, and close it."""
    place.mkdir()
    cluster = Cluster(place, **options)
    try:
        cluster.write()
        yield cluster.start()
    finally:
        cluster.close()
