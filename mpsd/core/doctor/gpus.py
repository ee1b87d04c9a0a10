"""Checks of the GPUs: whether they can run MPS, their condition, and the processes on them."""

from collections.abc import Iterator
from typing import Final

from mpsd.core import compute_mode, gpus
from mpsd.core.compute_mode import ComputeMode, ComputeModeStep, step
from mpsd.core.doctor.driver import node_of, unread
from mpsd.core.doctor.finding import AS_ROOT, Check, Finding, Means, Mend, Verdict, unknown
from mpsd.core.doctor.observed import GpuSeen, Observed
from mpsd.core.doctor.processes import SERVER
from mpsd.core.model import Gpu, Known, Unknown
from mpsd.core.mps_facts import VOLTA, clients_max


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index}"


def _gpus(seen: Observed) -> Iterator[GpuSeen]:
    node = node_of(seen)
    return iter(node.gpus if node is not None else ())


def _architecture(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen)
    watched = isinstance(seen.service.answers, Known)
    for each in _gpus(seen):
        capability = ".".join(map(str, each.gpu.compute_capability))
        evidence = {"name": each.gpu.name, "compute_capability": capability, "mig": each.gpu.mig}
        none = gpus.unsupported(each.gpu)
        if none is not None and not watched:
            yield Finding(Verdict.WARN, none[0], evidence, none[1], _name(each.gpu))
        elif none is None and each.gpu.compute_capability < VOLTA:
            most = clients_max(each.gpu.compute_capability, gpus.driver_branch(each.gpu.driver_version))
            because = (
                f"{each.gpu.name} (compute capability {capability}) is older than Volta: it supports neither limit,"
                f" admits {most} clients, and a fault of one client ends all of them"
            )
            remedy = "use this GPU for work that does not share it"
            yield Finding(Verdict.FAIL, because, evidence, remedy, _name(each.gpu))
        if any(word in each.gpu.name for word in _INTEGRATED):
            because = (
                f"{each.gpu.name} shares its memory with the node: NVML reports no memory of its processes, so mpsd"
                " cannot see how much they hold"
            )
            if not any(word in each.gpu.name for word in _DESKTOP):
                because += "; a Tegra has no compute mode, and its MPS no terminate_client"
            remedy = "set memory limits by the processes' control groups as well; see docs/gpu.md"
            yield Finding(Verdict.WARN, because, evidence, remedy, _name(each.gpu))


_DESKTOP: Final = ("GB10",)
_INTEGRATED: Final = (*_DESKTOP, "Tegra", "Orin", "Xavier", "Thor")
"""Words in the names of GPUs that share the node's memory."""


def _compute_mode(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen)
    for each in _gpus(seen):
        index, mode = each.gpu.index, each.usage.value.compute_mode if isinstance(each.usage, Known) else None
        because, verdict = "", Verdict.WARN
        if mode is ComputeMode.PROHIBITED:
            because, verdict = "its compute mode is prohibited: no process can use it", Verdict.FAIL
        elif mode is ComputeMode.EXCLUSIVE_THREAD:
            because = "its compute mode is exclusive-thread, which NVIDIA no longer supports"
        elif mode is ComputeMode.EXCLUSIVE_PROCESS and not _is_left(seen):
            because = (
                "its compute mode is exclusive-process, but was not set by mpsd: only one process can use it, others"
                " fail with 46"
            )
        if because:
            remedy = f"as root: {compute_mode.command(index, ComputeMode.DEFAULT)}"
            yield Finding(verdict, because, {"index": index, "compute_mode": str(mode)}, remedy, _name(each.gpu))


def _is_left(seen: Observed) -> bool:
    """Tell whether mpsd recorded, or may have recorded, a change of a mode; another check reports that."""
    left = seen.gpus.left
    return left is not None and (isinstance(left.found, Unknown) or bool(left.found.value))


def _left(seen: Observed) -> Iterator[Finding]:
    left = seen.gpus.left
    if left is None:
        return
    holder = seen.service.lock_holder
    if isinstance(holder, Known) and holder.value is not None:
        yield unknown(
            f"pid {holder.value} holds mpsd's lock and does not answer: it may still need the compute mode",
            "see check mpsd",
        )
        return
    look = "see nvidia-smi -q -d COMPUTE; then remove"
    if left.aside is not None:
        because = f"{left.aside} could not be parsed, so the GPUs that mpsd changed are unknown"
        yield Finding(Verdict.WARN, because, {"path": str(left.aside)}, f"{look} {left.aside}", "record")
    if isinstance(left.found, Unknown) and left.damaged:
        because = f"{left.path} cannot be parsed, so the GPUs that mpsd changed are unknown: {left.found.reason}"
        yield Finding(Verdict.FAIL, because, {"path": str(left.path)}, f"{look} {left.path}", "record")
    elif isinstance(left.found, Unknown):
        yield unknown(f"{left.path} {left.found.reason}", AS_ROOT)
    elif left.found.value and node_of(seen) is None:
        reason = seen.gpus.node.reason if isinstance(seen.gpus.node, Unknown) else ""
        because = f"{left.path} names GPUs that cannot be read: {reason}"
        yield Finding(Verdict.FAIL, because, {"path": str(left.path)}, seen.gpus.remedy)
    else:
        there = {each.gpu.uuid: each for each in _gpus(seen)}
        for uuid, found in left.found.value.items():
            yield _left_on(there.get(uuid), uuid, found)


def _left_on(seen: GpuSeen | None, uuid: str, found: ComputeMode) -> Finding:
    evidence = {"uuid": uuid, "found": str(found)}
    if seen is None:
        because = f"mpsd changed the compute mode of {uuid}, which cannot be read now; the mode was {found} before"
        return Finding(Verdict.FAIL, because, evidence, "see nvidia-smi for that GPU, then try again", uuid)
    name = _name(seen.gpu)
    if isinstance(seen.usage, Unknown):
        because = f"it cannot be read: {seen.usage.reason}"
        return Finding(Verdict.FAIL, because, evidence, "see nvidia-smi, then try again", name)
    now = seen.usage.value.compute_mode
    mend = Mend(Means.GIVE_BACK, (uuid,))
    if step(wanted=False, found=found, now=now, held=False) is ComputeModeStep.FORGET:
        return Finding(
            Verdict.OK,
            f"its compute mode is {now}, which mpsd did not set",
            {**evidence, "now": str(now)},
            None,
            name,
            mend,
        )
    because = f"an mpsd that is gone left its compute mode at {now}; it was {found} before"
    remedy = "start mpsd, which keeps or restores the mode according to its settings; or, as root: mpsctl doctor --fix"
    return Finding(Verdict.FAIL, because, {**evidence, "now": str(now)}, remedy, name, mend)


def _persistence(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen)
    for each in _gpus(seen):
        if isinstance(each.condition, Unknown):
            yield unknown(each.condition.reason, subject=_name(each.gpu))
        elif each.condition.value.persistence is False:
            because = (
                "persistence mode is off: the driver initialises the GPU anew for the first process, and loses its"
            )
            because += " compute mode when the last process exits"
            remedy = f"systemctl enable --now nvidia-persistenced; or, as root: nvidia-smi -i {each.gpu.index} -pm 1"
            yield Finding(Verdict.WARN, because, {"uuid": each.gpu.uuid}, remedy, _name(each.gpu))


_TO_REMAP: Final = "memory rows need a reset to be remapped"


def _ecc(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen)
    for each in _gpus(seen):
        if isinstance(each.condition, Unknown):
            yield unknown(each.condition.reason, subject=_name(each.gpu))
            continue
        found = each.condition.value
        said = {
            f"{found.uncorrected} uncorrected ECC errors since the driver was loaded": bool(found.uncorrected),
            "memory pages need a reset to be retired": bool(found.retirement_pending),
            _TO_REMAP: bool(found.remapping_pending),
            "memory rows failed, and no spare row is left for them": bool(found.remapping_failed),
        }
        wrong = [each for each, is_so in said.items() if is_so]
        if wrong:
            evidence = {"uuid": each.gpu.uuid, "uncorrected": found.uncorrected}
            remedy = f"drain it (mpsctl drain gpu{each.gpu.index}), then nvidia-smi -i {each.gpu.index} --gpu-reset"
            if found.remapping_failed:
                remedy = "replace this GPU"
            # Rows that wait for remapping are out of use, and work is not affected (GPU Memory Error Management).
            verdict = Verdict.WARN if wrong == [_TO_REMAP] else Verdict.FAIL
            yield Finding(verdict, "; ".join(wrong), evidence, remedy, _name(each.gpu))


def _outside(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen)
    servers = (
        {each.pid for each in seen.processes.value if each.part == SERVER}
        if isinstance(seen.processes, Known)
        else None
    )
    if servers is None and node_of(seen) is not None:
        yield unknown(
            "the MPS servers among the processes on the GPUs can be determined only if all processes are visible",
            AS_ROOT,
        )
        return
    answers = seen.service.answers
    reported = {each.subject for each in answers.value.reports} if isinstance(answers, Known) else set()
    for each in _gpus(seen):
        if isinstance(each.usage, Unknown):
            yield unknown(each.usage.reason, subject=_name(each.gpu))
            continue
        usage = each.usage.value
        outside = sorted(
            pid
            for pid, process in usage.processes.items()
            if not process.mps and pid not in (servers or ()) and f"pid {pid}" not in reported
        )
        if outside:
            exclusive = usage.compute_mode is ComputeMode.EXCLUSIVE_PROCESS
            because = f"pid {', '.join(map(str, outside))} uses it outside MPS, without limits"
            because += (
                ", and no server can start beside it because the compute mode is exclusive-process" if exclusive else ""
            )
            evidence = {"pids": outside, "compute_mode": str(usage.compute_mode), "uuid": each.gpu.uuid}
            remedy = f"ps -fp {','.join(map(str, outside))}; start it with mpsctl run, or end it"
            verdict = Verdict.FAIL if exclusive else Verdict.WARN
            yield Finding(verdict, because, evidence, remedy, _name(each.gpu))


CHECKS: Final = (
    Check(
        "architecture",
        "mpsd can share every GPU, with limits",
        "mpsd does not use a GPU in MIG mode; older ones than Volta have no limits; integrated ones hide held memory.",
        _architecture,
    ),
    Check(
        "compute-mode",
        "every GPU has a compute mode in which processes can use it",
        "Processes fail with CUDA_ERROR_DEVICE_UNAVAILABLE (46), or mpsd does not grant the GPU.",
        _compute_mode,
        unwatched=True,
    ),
    Check(
        "compute-mode-left",
        "no GPU was left in a changed compute mode",
        "Processes outside MPS fail with CUDA_ERROR_DEVICE_UNAVAILABLE (46).",
        _left,
        "restores the mode",
        unwatched=True,
    ),
    Check(
        "persistence",
        "persistence mode is on",
        "The first client waits for seconds, and the compute mode is lost when the last process exits.",
        _persistence,
    ),
    Check("ecc", "no GPU has uncorrected memory errors", "Work fails, or its results are wrong.", _ecc),
    Check(
        "outside",
        "no process uses a GPU outside MPS",
        "Such a process has no limits; in exclusive-process mode, no server can start beside it.",
        _outside,
    ),
)
"""In the order of the report."""
