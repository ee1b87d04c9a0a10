"""A job, as Slurm's hooks tell of it in their environment, and the share of each of its GPUs that it has. Pure.

The variables of Prolog and Epilog are set by slurmd. Source: Slurm, "Prolog and Epilog Guide"; run on 22.05, 24.11 and
26.05.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from math import ceil
from typing import Final, NamedTuple

from mpsd.core.errors import InvalidRequestError
from mpsd.core.mps.variables import ACTIVE_THREAD_PERCENTAGE, PINNED_DEVICE_MEM_LIMIT

MIB: Final = 2**20

PREFIX: Final = "mpsd:"
"""The beginning of the part of a job's comment that the job_submit plugin writes."""

_REQUEST: Final = re.compile(r"mpsd:threads=([0-9]{1,3}(?:\.[0-9])?)(?:,memory=([0-9]{1,16}))?(?:\s|\Z)")

_GROUP: Final = re.compile(r"job_([0-9]+)\Z|(s[0-9A-Z]{13})\Z")
"""The control group of a job: by its id in version 1, and before 26.05 in version 2; by its SLUID since."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]{1,60}\Z")

JOB: Final = "slurm/job"
"""The label with the id of a job."""
IDENTITY: Final = "slurm/identity"
"""The label with the identity of a job."""


class Request(NamedTuple):
    """What a job has of each of its GPUs."""

    threads: float
    """Percent."""
    memory: int | None
    """Bytes; None: in proportion to the threads."""


class Job(NamedTuple):
    """A job on this node."""

    id: str
    identity: str
    """No other job has it, even one that Slurm gave the same id, where `is_certain`."""
    is_certain: bool
    """Whether Slurm tells hooks more of it than its id and user, which a later job may have too."""
    uid: int
    gid: int
    user: str
    places: tuple[int, ...]
    """Its GPUs, by their places in Slurm's order."""
    threads: float | None
    """Its percentage by gres/mps."""
    comment: str
    groups: tuple[str, ...]
    """The names that its control group may have."""


def of(environment: Mapping[str, str]) -> Job:
    """Return the job of Prolog or Epilog. Raises InvalidRequestError where these variables name none.

    It is identified by its SLUID, or by its id and start time; 22.05 tells hooks neither.
    """
    number, uid = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_UID", "")
    if not number.isdecimal() or not uid.isdecimal():
        raise InvalidRequestError(
            "SLURM_JOB_ID and SLURM_JOB_UID name no job", hint="let slurmd run this program, as Prolog= and Epilog="
        )
    gid, sluid = environment.get("SLURM_JOB_GID", uid), environment.get("SLURM_JOB_SLUID", "")
    places, start = environment.get("SLURM_JOB_GPUS", ""), environment.get("SLURM_JOB_START_TIME", "")
    threads = environment.get(ACTIVE_THREAD_PERCENTAGE, "")
    uncertain = f"{number}.u{uid}"
    identity = sluid if _PLAIN.match(sluid) else f"{number}.{start}" if start.isdecimal() else uncertain
    return Job(
        id=number,
        identity=identity,
        is_certain=identity != uncertain,
        uid=int(uid),
        gid=int(gid) if gid.isdecimal() else int(uid),
        user=environment.get("SLURM_JOB_USER", ""),
        places=tuple(int(each) for each in places.split(",") if each.isdecimal()),
        threads=float(threads) if threads.isdecimal() else None,
        comment=environment.get("SLURM_JOB_COMMENT", ""),
        groups=(f"job_{number}", *([sluid] if _PLAIN.match(sluid) else [])),
    )


def is_of(identity: str, job: Job) -> bool:
    """Tell whether an identity, as Prolog has recorded it, is that of a job, or may be.

    22.05 tells hooks neither SLUID nor start time, so Prolog adds something of its own to what they know. The number of
    restarts tells no job from another: the Epilog of a job that is requeued has that of the next run.
    """
    return identity == job.identity or (not job.is_certain and identity.startswith(f"{job.identity}."))


def requested(job: Job, *, believes_comment: bool) -> Request | None:
    """Return what a job has of each of its GPUs; None for a job without a share of a GPU.

    slurmd's own percentage comes before the one in the comment. Raises InvalidRequestError for a job whose GPUs are
    unknown.
    """
    found = _REQUEST.match(job.comment) if believes_comment else None
    threads = job.threads
    memory = int(found[2]) if found is not None and found[2] is not None else None
    if threads is None and found is not None:  # a share by gres/shard, of which slurmd tells no count
        parts = max(len(job.places), 1)
        threads = int(float(found[1]) * 10 / parts) / 10
        memory = None if memory is None else memory // parts
    if threads is None:
        return None
    if not job.places:
        raise InvalidRequestError(
            f"Slurm gave job {job.id} a share of a GPU, and does not say of which",
            hint="submit the job again: slurmctld forgets this where it is restarted, or where GresTypes has both mps"
            " and shard",
            limit="gpus",
        )
    return Request(min(max(threads, 0.1), 100.0), memory)


def memory_of(request: Request, total: int, grantable: int) -> int:
    """Return the bytes that a request comes to on a GPU, in whole MiB.

    `total` is the memory of the GPU, of which mpsd grants `grantable` at most: it keeps the rest free. Slurm counts the
    whole, so that a request in proportion to its threads is one in proportion to what mpsd grants.
    """
    part = request.threads / 100
    own = int(grantable * part)
    memory = request.memory
    if memory is None or own < memory <= total * part or (memory > grantable and request.threads >= 100):  # noqa: PLR2004
        memory = own
    return max(memory // MIB, 1) * MIB


def processes_of(request: Request, places: int | None) -> int | None:
    """Return the maximum of client processes that a request comes to on a GPU with so many places for clients.

    They are in proportion to the threads, so that no small job takes the places of all others.
    """
    return None if places is None else max(ceil(places * request.threads / 100), 1)


def job_in(groups: Collection[str], environment: Mapping[str, str]) -> str:
    """Return the id or the SLUID of a task's job, by the paths of its control groups, or by its environment.

    Each task of a heterogeneous job has the id of the first component in SLURM_JOB_ID, and the SLUID of its own one.
    """
    for path in groups:
        for part in reversed(path.split("/")):
            if (found := _GROUP.match(part)) is not None:
                return found[1] or found[2]
    named = (environment.get(each, "") for each in ("SLURM_JOB_SLUID", "SLURM_JOB_ID"))
    return next((each for each in named if each.isalnum()), "")


def has_share(environment: Mapping[str, str], *, believes_comment: bool) -> bool:
    """Tell whether Slurm gave a task a share of a GPU of which Prolog knows, as far as its environment tells.

    The number of shards is in the environment of tasks alone: Prolog has it by the comment.
    """
    gpus = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES")
    shared = (ACTIVE_THREAD_PERCENTAGE, *(["SLURM_SHARDS_ON_NODE"] if believes_comment else []))
    return any(each in environment for each in shared) and any(environment.get(each) for each in gpus)


def chosen(count: int, environment: Mapping[str, str]) -> int:
    """Return which of a job's leases a task has: its tasks on a node take them in turn, one each."""
    local = environment.get("SLURM_LOCALID", "")
    return int(local) % count if local.isdecimal() else 0


# -- the environment of a task -----------------------------------------------------------------------------------------

_LIMIT: Final = re.compile(r"([0-9]+)=([0-9]+)M\Z")


def lowered(lease: Mapping[str, str], task: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a lease for a task whose step asked Slurm for less, with memory in proportion."""
    found = dict(lease)
    try:
        own, asked = float(lease.get(ACTIVE_THREAD_PERCENTAGE, "")), float(task.get(ACTIVE_THREAD_PERCENTAGE, ""))
    except ValueError:
        return found
    if not 0 < asked < own:
        return found
    found[ACTIVE_THREAD_PERCENTAGE] = f"{asked:g}"
    parts = []
    for each in lease.get(PINNED_DEVICE_MEM_LIMIT, "").split(","):
        if (limit := _LIMIT.match(each)) is None:
            return found
        parts.append(f"{limit[1]}={max(int(int(limit[2]) * asked / own), 1)}M")
    found[PINNED_DEVICE_MEM_LIMIT] = ",".join(parts)
    return found


def lines(variables: Mapping[str, str], unset: Sequence[str]) -> str:
    """Return the lines by which TaskProlog has slurmstepd change a task's environment.

    Raises InvalidRequestError for a value of several lines.
    """
    if any("\n" in f"{name}{value}" for name, value in variables.items()):
        raise InvalidRequestError("the lease's environment has a line break", hint="report this to mpsd's authors")
    return "".join(
        [*(f"unset {name}\n" for name in unset), *(f"export {name}={value}\n" for name, value in variables.items())]
    )
