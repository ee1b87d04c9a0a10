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
_SCRIPTS: Final = ("Prolog", "TaskProlog", "PrologSlurmctld", "Epilog", "TaskEpilog", "SrunProlog")
_MPS: Final = "nvidia-cuda-mps-control"
_CONTROL: Final = re.compile(r"/dev/(?:nvidiactl|nvidia-uvm\S*|nvidia\*)")
_KILL_WAIT: Final = 30
_TIMEOUT: Final = 65535


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
    """The text of each script that the configuration names, by its path; ours are empty."""
    hooks: str = "/etc/mpsd/slurm"
    """The directory of our hooks."""
    comment: bool = True
    """Whether Prolog believes comments (`comment` of slurm.toml)."""
    is_scripted: bool = True
    """Whether job_submit.lua calls mpsd's script."""
    grace: float = 10.0
    """Seconds that Epilog gives clients to end."""
    wait: float = 30.0
    """Seconds that Prolog waits at most."""
    node: str = ""
    """The name of this node in Slurm."""
    gpus: frozenset[int] | None = None
    """The numbers of the device files of the GPUs that mpsd shares; None where it does not answer."""
    one_user: bool | None = None
    """Whether mpsd serves one user at a time on a GPU of this node; None where it does not answer."""


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
    for kind in there:
        if not seen.configuration.of_gres(kind):
            yield _fail(f"gres.conf has no line for {kind}", f"Name={kind} Count=100 File=/dev/nvidia0")
    listed = {name for node in seen.configuration.nodes for name in resources(node.get("gres", ""))}
    for kind in there:
        if kind not in listed:
            yield _fail(f"no node of slurm.conf has {kind} in its Gres=", f"NodeName=... Gres=gpu:1,{kind}:100")


def _sharing(seen: Seen) -> Iterator[Finding]:
    for kind in _SHARED:
        lines = seen.configuration.of_gres(kind)
        gpus = max((resources(each.get("gres", "")).get("gpu", 1) for each in seen.configuration.nodes), default=1)
        if gpus > 1 and lines and not all("all_sharing" in each.flags for each in lines):
            because = f"one GPU of a node serves {kind} at a time (one_sharing), and nodes have {gpus}"
            yield _warn(because, f"add Flags=all_sharing to each line of {kind} in gres.conf")


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
        path, wanted = seen.configuration.value(name), f"{seen.hooks}/{program}"
        if not path:
            yield _fail(f"slurm.conf has no {name}", f"{name}={wanted}")
        elif path != wanted and wanted not in seen.scripts.get(path, ""):
            yield _fail(f"{name}={path} does not call mpsd's {program}", f"call {wanted} in it, or: {name}={wanted}")
    flags = seen.configuration.words("PrologFlags")
    if "contain" not in flags:
        because = "PrologFlags has no Contain: Prolog then runs at a job's first step, and a job has no control group"
        yield _fail(because, f"PrologFlags={','.join([*seen.configuration.value('PrologFlags').split(), 'Contain'])}")
    if "nohold" in flags:
        yield _warn("PrologFlags has NoHold: srun starts before Prolog has ended", "remove NoHold from PrologFlags")
    if seen.configuration.value("HealthCheckProgram") != f"{seen.hooks}/{HEALTH}":
        because = "HealthCheckProgram is not mpsd's: a node whose mpsd is away still gets jobs"
        yield _warn(because, f"HealthCheckProgram={seen.hooks}/{HEALTH}, with HealthCheckInterval=60")


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
    for name in _SCRIPTS:
        path = seen.configuration.value(name)
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


def _script(seen: Seen) -> Iterator[Finding]:
    is_loaded = "lua" in seen.configuration.words("JobSubmitPlugins")
    if seen.comment and not (is_loaded and seen.is_scripted):
        missing = "job_submit.lua does not call mpsd.lua" if is_loaded else "JobSubmitPlugins has no lua"
        because = f"Prolog believes comments (comment in slurm.toml), and {missing}: users can forge them"
        yield _fail(because, "mpsctl slurm install shows both; without the script: comment = false in slurm.toml")
    elif not seen.comment:
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


def _places(seen: Seen) -> tuple[Mapping[str, str], ...]:
    return (*seen.configuration.partitions, *seen.configuration.nodes)


def _version(seen: Seen) -> Iterator[Finding]:
    release = ".".join(seen.version.split(".")[:2])
    if not release:
        yield _warn("the version of Slurm is not known: no slurmd and no scontrol is here", "run this on the node")
    elif release not in SEEN:
        because = f"mpsd has not seen Slurm {seen.version}; it was run with {', '.join(SEEN)}"
        yield _warn(because, "try a job on one node first: its output has what TaskProlog says")


_LOOKS: Final[tuple[Callable[[Seen], Iterator[Finding]], ...]] = (
    _types, _sharing, _gpus, _hooks, _tracking, _devices, _other_daemons, _times, _script, _users, _version,
)  # fmt: skip


def _fail(because: str, remedy: str) -> Finding:
    return Finding(Verdict.FAIL, because, remedy)


def _warn(because: str, remedy: str) -> Finding:
    return Finding(Verdict.WARN, because, remedy)
