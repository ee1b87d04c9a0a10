"""The hooks of slurmd: Prolog, TaskProlog and Epilog of a job.

Prolog and Epilog run as root, and never fail: Slurm would drain the node. Prolog takes a lease out for each GPU of the
job, which the first task takes for the job's control group; what stands against it is left to TaskProlog, which runs as
the user, and fails the job alone. None of them calls Slurm, and each ends within a bounded time.
"""

import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from mpsd.client import waiting
from mpsd.client.client import Client
from mpsd.core import mps_facts
from mpsd.core.errors import AlreadyClaimedError, MpsdError, NotFoundError, NotPermittedError, UnreachableError
from mpsd.core.slurm import job as jobs
from mpsd.core.slurm.job import Job, Request
from mpsd.core.slurm.settings import Settings
from mpsd.slurm.records import Record, Records

if TYPE_CHECKING:
    from mpsd.client import answer_types

_ANSWER: Final = 5.0
"""Seconds for mpsd's answer to a request, in addition to the wait that the request contains."""

_UNTAKEN: Final = 1e6
"""Seconds until a lease ends that no task of the job has taken: an allocation may be idle for days. Epilog ends it."""

_DRIVER: Final = "/proc/driver/nvidia/gpus"

_NOTICED: Final = 1.0
"""Seconds within which mpsd sees that a control group is gone."""

_MOST_LATE: Final = 16
"""Maximum jobs of which one hook ends what an Epilog without mpsd could not."""


# -- Prolog ------------------------------------------------------------------------------------------------------------


def prolog(settings: Settings, environment: Mapping[str, str]) -> None:
    """Take out the leases of a job, or note why it has none. Raises MpsdError and OSError where it cannot even that."""
    job, records = jobs.of(environment), Records(settings.state_dir)
    refusal: MpsdError | None = None
    request = None
    try:
        request = jobs.requested(job, believes_comment=settings.comment)
    except MpsdError as error:
        refusal = error
    asked = "" if request is None else f"{job.places} {request.threads} {request.memory}"
    with Client(settings.socket, deadline=_ANSWER) as api:
        record = records.read(job.id)
        if record is not None and not _is_same_run(api, record, job, asked):
            _end_earlier(api, records, record)
            record = None
        if request is None and refusal is None:
            return
        if record is None:
            record = Record(job.id, _identity(job), asked, (), over=False)
            records.write(record)
        job = job._replace(identity=record.identity)
        leases: list[answer_types.Lease] = []
        if request is not None:
            try:
                leases = _leases(settings, environment, api, job, request, kept=record.leases)
            except MpsdError as error:
                refusal = error
        if isinstance(refusal, UnreachableError) and settings.without_mpsd == "run":
            records.tell(job, {"without": f"mpsd does not answer ({refusal.detail}), so this job has no lease"})
        elif refusal is not None:
            records.tell(job, {"refusal": refusal.detail, "hint": refusal.hint})
        else:
            ids = [str(each["id"]) for each in leases]
            records.write(record._replace(leases=tuple(ids)))
            tokens = [each["env"].get("MPSD_LEASE_TOKEN", "") for each in leases]
            records.tell(job, {"socket": settings.socket, "leases": ids, "tokens": tokens})


def _end_earlier(api: Client, records: Records, earlier: Record) -> None:
    """End the leases of an earlier job with the same id; where mpsd does not, the service ends them: no record does."""
    records.forget_task(earlier.job)
    with suppress(MpsdError):
        _end(api, earlier, 0)
    records.remove(earlier.job, earlier.identity)


def _identity(job: Job) -> str:
    """Return what no other job has, and no other run of it that Slurm's hooks could tell from this one."""
    return job.identity if job.is_certain else f"{job.identity}.{os.urandom(4).hex()}"


def _is_same_run(api: Client, earlier: Record, job: Job, asked: str) -> bool:
    """Tell whether a record is of the run of the job that Prolog runs for, again.

    slurmd repeats Prolog where it was restarted. Where Slurm does not tell jobs with the same id and user apart, it is
    another one if it asks for something else, or if a lease has ended: mpsd has seen the end of its processes. While
    they live, slurmd starts no other job with their id.
    """
    if earlier.over or not jobs.is_of(earlier.identity, job):
        return False
    if job.is_certain:
        return True
    with suppress(UnreachableError):
        return earlier.asked == asked and not any(waiting.ended(api, each, within=0) for each in earlier.leases)
    return earlier.asked == asked


def _leases(
    settings: Settings,
    environment: Mapping[str, str],
    api: Client,
    job: Job,
    request: Request,
    *,
    kept: Collection[str],
) -> list["answer_types.Lease"]:
    """Return the leases of a job, one for each of its GPUs, or none but those that it had before. Raises MpsdError."""
    until = time.monotonic() + settings.wait
    gpus = waiting.through_a_restart(lambda: api.gpus()["gpus"], within=settings.wait)
    by_uuid = {each["uuid"]: each for each in gpus}
    from mpsd.core.slurm import gres  # most hooks run without it

    order, by_minor = _order(settings, environment), _by_minor(gpus)
    leases: list[answer_types.Lease] = []
    try:
        for place in job.places:
            gpu = by_uuid[gres.uuid_at(place, order, by_minor)]
            total = gpu["memory_total"] or 0
            memory = jobs.memory_of(request, total, total - gpu["memory_reserved"])
            asked = {
                "threads": request.threads,
                "memory": memory,
                "gpu": gpu["uuid"],
                "processes": "any",
                "processes_max": jobs.processes_of(request, gpu["clients_max"]),
                "name": f"slurm-{job.id}",
                "labels": {jobs.JOB: job.id, jobs.IDENTITY: job.identity},
                "request_id": f"slurm/{job.identity}/{place}",
                "owner": {"uid": job.uid, "gid": job.gid, "groups": _groups(job)},
                "holder": {"claim": {"deadline": _UNTAKEN, "groups": job.groups}},
            }
            left = max(until - time.monotonic(), 0.0)
            if settings.several_users == "fail" and any(uid != job.uid for uid in gpu["users"]):
                left = 0.0
            leases.append(waiting.take(api, asked, wait=left) if left else api.admit({**asked, "wait": 0}))
    except MpsdError:
        for each in leases:
            if each["id"] not in kept:
                api.release(each["id"])
        raise
    return leases


def _order(settings: Settings, environment: Mapping[str, str]) -> list[int]:
    """Return the minor numbers of the GPUs in Slurm's order; empty where gres.conf does not tell."""
    from mpsd.core.slurm import gres
    from mpsd.system.host import slurm_files

    beside = os.path.dirname(environment.get("SLURM_CONF") or "/etc/slurm/slurm.conf") + "/gres.conf"
    return gres.minors(slurm_files.text(settings.gres_conf or beside), environment.get("SLURMD_NODENAME", ""))


def _by_minor(gpus: list["answer_types.Gpu"]) -> dict[int, str]:
    """Return the UUIDs of mpsd's GPUs by their minor numbers; without the driver's word, these are NVML's indices."""
    from mpsd.core.slurm import gres

    told: dict[int, str] = {}
    with suppress(OSError):
        told = gres.uuids_by_minor(_text(f"{_DRIVER}/{each}/information") for each in os.listdir(_DRIVER))
    known = {each["uuid"]: each["index"] for each in gpus if each["uuid"] is not None}
    if known.keys() <= {*told.values()}:
        return told
    return {index: uuid for uuid, index in known.items()}


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _groups(job: Job) -> list[int]:
    """Return the further groups of the user, by which mpsd finds its quota."""
    with suppress(KeyError, OSError):
        return os.getgrouplist(job.user, job.gid)
    return []


# -- TaskProlog --------------------------------------------------------------------------------------------------------


def task_prolog(settings: Settings, environment: Mapping[str, str]) -> str:
    """Take the lease of the task's job, and return what slurmstepd reads: the environment of the task.

    Raises MpsdError for a task that may not run.
    """
    number = jobs.job_in(_own_groups(), environment)
    told = Records(settings.state_dir).told(number) if number else None
    if told is None:
        if jobs.has_share(environment, believes_comment=settings.comment):
            raise NotFoundError(
                f"job {number} has a share of a GPU by Slurm, and no lease: its Prolog has not run here, or failed",
                hint="submit the job again: Slurm 22.05 may start one that it had lost without Prolog; an administrator"
                " finds more in the log of slurmd, and by mpsctl slurm check",
            )
        return ""
    if "refusal" in told:
        raise NotPermittedError(str(told["refusal"]), hint=str(told.get("hint", "")))
    if "without" in told:
        return f"print mpsd: {told['without']}\n"
    leases, tokens = told["leases"], told["tokens"]
    assert isinstance(leases, list)  # noqa: S101 - as Prolog wrote it
    assert isinstance(tokens, list)  # noqa: S101 - likewise
    which = jobs.chosen(len(leases), environment)
    with Client(str(told["socket"]), deadline=_ANSWER) as api:
        lease = waiting.through_a_restart(lambda: _taken(api, leases[which], tokens[which]), within=settings.wait)
    variables = jobs.lowered(lease["env"], environment)
    if settings.socket != Settings().socket:
        variables["MPSD_SOCKET"] = settings.socket
    return jobs.lines(variables, [name for name in mps_facts.UNASKED if name not in variables])


def _own_groups() -> list[str]:
    return [line.split(":", 2)[2] for line in _text("/proc/self/cgroup").splitlines()]


def _taken(api: Client, lease: str, token: str) -> "answer_types.Lease":
    """Take a lease for the control group of the job, or, where Slurm makes none, for the process that becomes the task.

    slurmstepd starts TaskProlog from that process. Other tasks find the lease taken by their group, or add themselves.
    """
    try:
        return api.hold(lease, {"token": token, "pid": os.getppid()}, deadline=2 * _ANSWER)
    except NotFoundError as error:
        raise NotFoundError(
            f"the lease of this job has ended: {error.detail}",
            hint="submit the job again; where it ended between two steps, PrologFlags lacks Contain",
        ) from error
    except AlreadyClaimedError:
        return api.hold(lease, {"pid": os.getppid()}, deadline=2 * _ANSWER)


# -- Epilog ------------------------------------------------------------------------------------------------------------


def epilog(settings: Settings, environment: Mapping[str, str]) -> None:
    """End the leases of a job with their clients, and forget the job; without mpsd, this is left to a later hook.

    A job that is unknown, or has ended already, is none of its business. Raises MpsdError and OSError.
    """
    job, records = jobs.of(environment), Records(settings.state_dir)
    record = records.read(job.id)
    if record is None:
        records.remove(job.id, "")  # a Prolog that was killed may have left something
        return
    if not jobs.is_of(record.identity, job):
        _forget_ended(settings, records, record)
        return
    records.forget_task(job.id)
    if not record.asked:
        records.remove(record.job, record.identity)
        return
    with suppress(OSError):  # a full disk: its leases are ended all the same
        records.write(record._replace(over=True))
    with Client(settings.socket, deadline=_ANSWER) as api:
        _end(api, record, settings.grace)
        records.remove(record.job, record.identity)
        end_late(settings, api)


def _forget_ended(settings: Settings, records: Records, record: Record) -> None:
    """Forget a job by the Epilog of another one with the same id, where its leases have ended with its processes.

    The Epilog of a job that is requeued may have the start time of the next run. Raises MpsdError and OSError.
    """
    with Client(settings.socket, deadline=_ANSWER) as api:
        if record.leases and all(waiting.ended(api, each, within=_NOTICED) for each in record.leases):
            records.remove(record.job, record.identity)


def end_late(settings: Settings, api: Client) -> None:
    """End the leases of jobs whose Epilog could not. Raises MpsdError and OSError."""
    records = Records(settings.state_dir)
    late = [each for each in records.all() if each.over]
    for each in late[:_MOST_LATE]:
        _end(api, each, 0)
        records.remove(each.job, each.identity)


def _end(api: Client, record: Record, grace: float) -> None:
    """End the leases of a job with their clients, and wait some time until they have ended. Raises MpsdError."""
    leases: Collection[str] = record.leases
    if record.asked and not leases:  # Prolog was refused, or killed before it had stored what it got
        leases = [each["id"] for each in api.leases()["leases"] if each["labels"].get(jobs.IDENTITY) == record.identity]
    left = []
    for each in leases:
        with suppress(NotFoundError):
            if api.end(each)["state"] != "ended":
                left.append(each)
    until = time.monotonic() + grace
    for each in left:
        waiting.ended(api, each, within=max(until - time.monotonic(), 0.0))


def refusal(error: Exception) -> str:
    """Return the lines by which TaskProlog has slurmstepd print why a task may not run."""
    lines = [f"mpsd: {error}"]
    if isinstance(error, MpsdError):
        lines = [f"mpsd: {error.detail} [{error.code}]", *([f"  hint: {error.hint}"] if error.hint else [])]
    return "".join(f"print {' '.join(each.splitlines())}\n" for each in lines)
