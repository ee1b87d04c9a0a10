"""The checks of `mpsctl slurm check`: what in Slurm's configuration keeps a share of a GPU from being a limit. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from mpsd.core.slurm import gres
from mpsd.core.slurm.configuration import Configuration, resources
from mpsd.core.units import first_of

HOOKS: Final = {"Prolog": "prolog", "Epilog": "epilog", "TaskProlog": "task-prolog"}
"""Our program for each hook, by its setting in slurm.conf."""

HEALTH: Final = "health"

SEEN: Final = ("22.05", "24.11", "26.05")
"""The versions of Slurm that this was run with."""

_SHARED: Final = ("mps", "shard")
SCRIPTS: Final = ("Prolog", "TaskProlog", "PrologSlurmctld", "Epilog", "TaskEpilog", "SrunProlog", "HealthCheckProgram")
"""The settings that name programs."""

_MPS: Final = "nvidia-cuda-mps-control"
_CONTROL: Final = re.compile(r"/dev/(?:nvidiactl|nvidia-uvm\S*|nvidia\*)")
_KILL_WAIT: Final = 30
_TIMEOUT: Final = 65535
_BATCH_START: Final = 10
"""Slurm's default of BatchStartTimeout, and the most of MessageTimeout that it adds."""
_SEVERAL: Final = "24.05"
"""The first version that runs several Prologs and Epilogs, each named by a line of its own."""


_CONTROLLERS: Final = ("SlurmctldHost", "ControlMachine", "BackupController")


class Verdict(StrEnum):
    WARN = "warn"
    """Something works less well than it can."""
    FAIL = "fail"
    """Jobs fail, or get no limits."""


class Finding(NamedTuple):
    verdict: Verdict
    because: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Seen:
    """A node, as it was looked at."""

    configuration: Configuration
    version: str = ""
    """Slurm's version, such as 22.05.8; empty where no program told it."""
    scripts: Mapping[str, str] = field(default_factory=dict)
    """The texts of the scripts that each value of the configuration names, by that value; a link has its target."""
    hooks: str = "/etc/mpsd/slurm"
    """The directory of our hooks."""
    missing: tuple[str, ...] = ()
    """Those of our hooks that are not there."""
    comment: bool = True
    """Whether Prolog believes comments (`comment` of slurm.toml)."""
    is_scripted: bool | None = True
    """Whether job_submit.lua calls mpsd's script; None where this machine has none."""
    is_current: bool = True
    """Whether mpsd.lua is the one of this version of mpsd, or is not on this machine."""
    grace: float = 10.0
    """Seconds that Epilog gives clients to end."""
    wait: float = 30.0
    """Seconds that Prolog waits at most."""
    node: str = ""
    """The name of this node in Slurm."""
    unreachable: str = ""
    """Why mpsd does not answer, empty where it does."""
    gpus: frozenset[int] | None = None
    """The numbers of the device files of the GPUs that mpsd shares; None where it does not answer."""
    one_user: bool | None = None
    """Whether mpsd serves one user at a time on a GPU of this node; None where it does not answer."""
    takes: bool = False
    """Whether any users may take out leases without Slurm (`roles.users` of mpsd.toml)."""

    @property
    def controllers(self) -> list[str]:
        """The machines of slurmctld, by their names without domains."""
        named = [each for name in _CONTROLLERS for each in self.configuration.all(name)]
        return [each.partition("(")[0].partition(".")[0] for each in named]

    @property
    def is_controller(self) -> bool:
        return not self.controllers or self.node in self.controllers or "localhost" in self.controllers

    @property
    def is_node(self) -> bool:
        """Whether this machine runs jobs: all do but one that slurm.conf names as controller alone."""
        named = [each["nodename"] for each in self.configuration.nodes if each["nodename"].lower() != "default"]
        alone = self.controllers and self.is_controller
        return not alone or any(gres.is_for(self.node, each) for each in named)


def findings(seen: Seen) -> list[Finding]:
    """Return what is wrong, the gravest first."""
    found = [each for look in _LOOKS for each in look(seen)]
    return sorted(found, key=lambda each: each.verdict is not Verdict.FAIL)


def _types(seen: Seen) -> Iterator[Finding]:
    there = [each for each in seen.configuration.words("GresTypes") if each in _SHARED]
    if len(there) > 1:
        because = "GresTypes has both mps and shard, with which Slurm tells no GPU of a job with mps"
        yield _fail(because, "keep one of them in GresTypes, in the Gres= of the nodes, and in gres.conf")
    elif not there:
        yield _fail("GresTypes has neither mps nor shard, so that no job can ask for a share", "GresTypes=gpu,mps")
    listed = {name for node in seen.configuration.nodes for name in resources(node.get("gres", ""))}
    for kind in there:
        if kind not in listed:
            yield _fail(f"no node of slurm.conf has {kind} in its Gres=", f"NodeName=... Gres=gpu:1,{kind}:100")


def _sharing(seen: Seen) -> Iterator[Finding]:
    for kind in _SHARED:
        if kind not in seen.configuration.words("GresTypes"):
            continue
        lines = seen.configuration.of_gres(kind)
        gpus = max((resources(each.get("gres", "")).get("gpu", 1) for each in seen.configuration.nodes), default=1)
        if gpus > 1 and not (lines and all("all_sharing" in each.flags for each in lines)):
            because = f"one GPU of a node serves {kind} at a time (one_sharing), and nodes have {gpus}"
            yield _warn(because, f"in gres.conf, for each GPU: Name={kind} Count=... File=... Flags=all_sharing")
    if "multiple_sharing_gres_pj" in seen.configuration.words("SelectTypeParameters"):
        because = (
            "MULTIPLE_SHARING_GRES_PJ lets Slurm spread a share over GPUs: it does not tell how, and the job fails"
        )
        yield _fail(because, "remove MULTIPLE_SHARING_GRES_PJ from SelectTypeParameters")
    for each in seen.configuration.partitions:
        if each.get("oversubscribe", each.get("shared", "")).lower() == "exclusive":
            because = f"in partition {each['partitionname']} jobs have whole nodes, and Slurm starts none with a share"
            yield _warn(because, "OverSubscribe=NO; for nodes that one user has alone: ExclusiveUser=YES")


def _gpus(seen: Seen) -> Iterator[Finding]:
    own = [each for each in seen.configuration.of_gres("gpu") if gres.is_for(seen.node, each.nodes)]
    paths = [path for each in own for path in each.files]
    if not paths:
        because = (
            "gres.conf names no device files of GPUs: mpsd assumes that Slurm has them in the order of their numbers"
        )
        yield _warn(because, "a line Name=gpu File=/dev/nvidiaN for each of them, as mpsctl slurm install shows")
    if seen.gpus is None:
        return
    unknown = [path for path in paths if (found := gres.MINOR.search(path)) is None or int(found[1]) not in seen.gpus]
    unknown = [path for path in unknown if not _CONTROL.fullmatch(path)]
    if unknown:
        because = f"gres.conf names {first_of(unknown)}, which is no GPU that mpsd shares: its jobs fail"
        yield _fail(because, "compare mpsctl gpus, and /proc/driver/nvidia/gpus/*/information")


def _hooks(seen: Seen) -> Iterator[Finding]:
    for name, program in HOOKS.items():
        wanted = f"{seen.hooks}/{program}"
        if not seen.configuration.value(name):
            yield _fail(f"slurm.conf has no {name}", f"{name}={wanted}")
        elif (other := _uncalled(seen, name, wanted)) is not None:
            yield _fail(f"{name}={other} does not call mpsd's {program}", call(other, wanted))
    if seen.is_node and seen.missing:
        because = f"{first_of([f'{seen.hooks}/{each}' for each in seen.missing])} is not there: Slurm drains the node"
        yield _fail(because, "mpsctl slurm install --apply on each node")
    flags = seen.configuration.words("PrologFlags")
    if "contain" not in flags:
        because = "PrologFlags has no Contain: Prolog then runs at a job's first step, and a job has no control group"
        yield _fail(because, f"PrologFlags={','.join([*seen.configuration.value('PrologFlags').split(), 'Contain'])}")
    if "nohold" in flags:
        yield _warn("PrologFlags has NoHold: srun starts before Prolog has ended", "remove NoHold from PrologFlags")
    health = f"{seen.hooks}/{HEALTH}"
    if (other := _uncalled(seen, "HealthCheckProgram", health)) is not None:
        because = "HealthCheckProgram does not call mpsd's: without mpsd-slurm.service, a node without mpsd gets jobs"
        yield _warn(because, call(other, health) if other else f"HealthCheckProgram={health}, HealthCheckInterval=60")


def _uncalled(seen: Seen, name: str, wanted: str) -> str | None:
    """Return the value of a setting by which Slurm does not call our program; None where it does, or none can tell."""
    values = seen.configuration.all(name) or ("",)
    if name not in {"Prolog", "Epilog"} or _release(seen) < _SEVERAL:
        values = values[-1:]
    if any(each == wanted or wanted in seen.scripts.get(each, "") for each in values):
        return None
    return values[-1] if seen.is_node or not values[-1] else None


def call(path: str, wanted: str) -> str:
    """Return what to do so that a script, or those that fit a pattern, call a program of ours."""
    folder, _, name = path.rpartition("/")
    if any(each in name for each in "*?["):
        return f"ln -s {wanted} {folder}/, by a name that fits {name}"
    return f"call {wanted} in it"


def _tracking(seen: Seen) -> Iterator[Finding]:
    if seen.configuration.value("ProctrackType").lower() not in {"", "proctrack/cgroup"}:
        because = "ProctrackType is not proctrack/cgroup: a process that leaves its session is none of its job's"
        yield _warn(because, "ProctrackType=proctrack/cgroup, and TaskPlugin=task/cgroup")


def _devices(seen: Seen) -> Iterator[Finding]:
    if seen.configuration.cgroup.get("constraindevices", "no").lower() not in {"yes", "true", "1"}:
        because = "ConstrainDevices is not set in cgroup.conf: a job can open every GPU of its node"
        yield _warn(because, "ConstrainDevices=yes in cgroup.conf")
        return
    for line in seen.configuration.gres:
        shared = [each for each in line.files if _CONTROL.fullmatch(each)]
        if shared:
            because = (
                f"gres.conf names {first_of(shared)}, which every client opens: with ConstrainDevices, jobs cannot"
                " unless they have all of that resource"
            )
            yield _fail(because, "name /dev/nvidia0, /dev/nvidia1 and so on alone in File=")
    path = seen.configuration.cgroup.get("alloweddevicesfile", "")
    if path in seen.scripts and not _CONTROL.search(seen.scripts[path]):
        because = f"{path} (AllowedDevicesFile) has no /dev/nvidiactl, which every client opens"
        yield _fail(because, f"add /dev/nvidiactl and /dev/nvidia-uvm to {path}, or remove AllowedDevicesFile")


def _other_daemons(seen: Seen) -> Iterator[Finding]:
    for name in SCRIPTS:
        for path in seen.configuration.all(name):
            if _MPS in seen.scripts.get(path, ""):
                because = f"{name}={path} starts or stops a control daemon of its own, beside mpsd's"
                yield _fail(because, f"remove {_MPS} from {path}")


def _times(seen: Seen) -> Iterator[Finding]:
    wait = seen.configuration.number("KillWait", _KILL_WAIT)
    if wait < seen.grace:
        because = (
            f"KillWait={wait} is shorter than the {seen.grace:g} s that mpsd gives clients to end (grace in"
            " slurm.toml): a client that is killed in a kernel can take its GPU's server with it"
        )
        yield _warn(because, f"KillWait={round(seen.grace + 0.5)}")
    timeout, needed = seen.configuration.number("PrologEpilogTimeout", _TIMEOUT), max(seen.wait, seen.grace) + 10
    if timeout < needed:
        because = f"PrologEpilogTimeout={timeout} can end mpsd's hooks, and then Slurm drains the node"
        yield _fail(because, f"PrologEpilogTimeout={round(needed + 0.5)} at least")
    start = seen.configuration.number("BatchStartTimeout", _BATCH_START)
    if start + min(seen.configuration.number("MessageTimeout", _BATCH_START), _BATCH_START) < seen.wait:
        because = f"BatchStartTimeout={start}: Slurm requeues a job whose Prolog waits for {seen.wait:g} s (wait)"
        yield _warn(because, f"BatchStartTimeout={round(seen.wait + 0.5)}, or a shorter wait in slurm.toml")


def _script(seen: Seen) -> Iterator[Finding]:
    is_loaded, missing = "lua" in seen.configuration.words("JobSubmitPlugins"), ""
    if not is_loaded:
        missing = "JobSubmitPlugins has no lua"
    elif not seen.is_scripted and (seen.is_controller or seen.is_scripted is not None):
        missing = "job_submit.lua does not call mpsd.lua"
    elif seen.is_scripted is None and seen.comment:
        because = "job_submit.lua is not on this machine: the comments of jobs are safe only if it calls mpsd.lua"
        yield _warn(because, f"mpsctl slurm check on {first_of(seen.controllers)}, where slurmctld runs")
    if not seen.is_current:
        yield _warn("mpsd.lua is that of another version", "mpsctl slurm install --apply, and restart slurmctld")
    if missing and not seen.is_node:
        because = f"{missing}: where Prolog believes comments (comment in the nodes' slurm.toml), users can forge them"
        yield _warn(because, "mpsctl slurm install on a node shows what to copy here")
    elif missing and seen.comment:
        because = f"Prolog believes comments (comment in slurm.toml), and {missing}: users can forge them"
        yield _fail(because, "mpsctl slurm install shows both; without the script: comment = false in slurm.toml")
    elif seen.is_node and not seen.comment:
        shares = [each for each in seen.configuration.words("GresTypes") if each in _SHARED]
        what = "a job's shards are not known, nor is its memory" if "shard" in shares else "memory cannot be asked for"
        yield _warn(f"comment = false in slurm.toml: {what}", "use mpsd.lua on the machine of slurmctld")


def _users(seen: Seen) -> Iterator[Finding]:
    alone = [seen.configuration.value("ExclusiveUser"), *(each.get("exclusiveuser", "") for each in _places(seen))]
    if seen.one_user and not any(each.lower() in {"yes", "true"} for each in alone):
        because = (
            "mpsd serves one user at a time on each GPU, and Slurm puts jobs of several users on one: they wait in"
            " Prolog, or fail (several_users in slurm.toml)"
        )
        yield _warn(because, 'ExclusiveUser=YES on the partition; or, with driver 555 and newer, daemon.users = "many"')


def _takers(seen: Seen) -> Iterator[Finding]:
    if seen.takes:
        because = "users may take out leases without Slurm (roles.users in mpsd.toml), which does not count them"
        yield _warn(because, 'users = [] and observers = ["*"] there, as mpsctl service configure slurm has it')


def _places(seen: Seen) -> tuple[Mapping[str, str], ...]:
    return (*seen.configuration.partitions, *seen.configuration.nodes)


def _version(seen: Seen) -> Iterator[Finding]:
    release = _release(seen)
    if not release:
        yield _warn("the version of Slurm is not known: no slurmd and no scontrol is here", "run this on the node")
    elif release not in SEEN:
        because = f"mpsd has not seen Slurm {seen.version}; it was run with {', '.join(SEEN)}"
        yield _warn(because, "try a job on one node first: its output has what TaskProlog says")


def _release(seen: Seen) -> str:
    return ".".join(seen.version.split(".")[:2])


def _mpsd(seen: Seen) -> Iterator[Finding]:
    if seen.is_node and seen.unreachable:
        yield _fail(f"mpsd does not answer: {seen.unreachable}", "systemctl enable --now mpsd.socket mpsd.service")


_LOOKS: Final[tuple[Callable[[Seen], Iterator[Finding]], ...]] = (
    _mpsd, _types, _sharing, _gpus, _hooks, _tracking, _devices, _other_daemons, _times, _script, _users, _takers,
    _version,
)  # fmt: skip


def _fail(because: str, remedy: str) -> Finding:
    return Finding(Verdict.FAIL, because, remedy)


def _warn(because: str, remedy: str) -> Finding:
    return Finding(Verdict.WARN, because, remedy)
