"""Checks of the GPUs: whether they can run MPS, how they are, and who is on them."""

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
from mpsd.core.settings import WantedComputeMode

_FULL: Final = 0.9
"""The part of the clients that a GPU admits from which on it is nearly full."""


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index}"


def _gpus(seen: Observed) -> Iterator[GpuSeen]:
    node = node_of(seen)
    return iter(node.gpus if node is not None else ())


def _architecture(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen)
    for each in _gpus(seen):
        capability = ".".join(map(str, each.gpu.compute_capability))
        evidence = {"name": each.gpu.name, "compute_capability": capability}
        none = gpus.unsupported(each.gpu)
        if none is not None and not each.gpu.mig:
            yield Finding(Verdict.WARN, none[0], evidence, none[1], _name(each.gpu))
        elif each.gpu.compute_capability < VOLTA:
            most = clients_max(each.gpu.compute_capability, gpus.driver_branch(each.gpu.driver_version))
            because = (
                f"{each.gpu.name} (compute capability {capability}) is older than Volta: it refuses both limits, admits"
            )
            because += f" {most} clients, and a fault of one ends all"
            yield Finding(
                Verdict.FAIL, because, evidence, "leave this GPU to work that shares nothing", _name(each.gpu)
            )


def _mig(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen)
    for each in _gpus(seen):
        none = gpus.unsupported(each.gpu) if each.gpu.mig else None
        if none is not None:
            yield Finding(Verdict.WARN, none[0], {"uuid": each.gpu.uuid}, none[1], _name(each.gpu))


def _compute_mode(seen: Observed) -> Iterator[Finding]:
    answers = seen.service.answers
    if isinstance(answers, Known) and (seen.gpus.simulated or node_of(seen) is None):
        modes = {each.index: each.compute_mode for each in answers.value.gpus}
    else:
        yield from unread(seen)
        modes = {
            each.gpu.index: each.usage.value.compute_mode if isinstance(each.usage, Known) else None
            for each in _gpus(seen)
        }
    leave = seen.settings.daemon.compute_mode is WantedComputeMode.LEAVE
    for index, mode in modes.items():
        evidence = {"index": index, "compute_mode": str(mode) if mode else None}
        if mode == ComputeMode.PROHIBITED:
            remedy = f"as root: {compute_mode.command(index, ComputeMode.DEFAULT)}"
            yield Finding(Verdict.FAIL, "it is prohibited: no process can use it", evidence, remedy, f"GPU {index}")
        elif mode == ComputeMode.EXCLUSIVE_PROCESS and isinstance(answers, Unknown) and not _is_left(seen):
            because = "it is exclusive-process, and not by mpsd: every process but the first on it fails with 46"
            remedy = f"start mpsd; or, as root: {compute_mode.command(index, ComputeMode.DEFAULT)}"
            yield Finding(Verdict.WARN, because, evidence, remedy, f"GPU {index}")
        elif mode == ComputeMode.EXCLUSIVE_THREAD:
            remedy = f"as root: {compute_mode.command(index, ComputeMode.DEFAULT)}"
            because = "it is exclusive-thread, which NVIDIA no longer supports"
            yield Finding(Verdict.WARN, because, evidence, remedy, f"GPU {index}")
        elif mode == ComputeMode.DEFAULT and leave:
            because = "it is default: a process that misses MPS runs beside it without limits"
            remedy = 'daemon.compute_mode = "exclusive-process", then systemctl reload mpsd, or SIGHUP'
            yield Finding(Verdict.WARN, because, evidence, remedy, f"GPU {index}")


def _is_left(seen: Observed) -> bool:
    """Tell whether mpsd wrote down, or may have, that it changed a mode: that is told by another check."""
    left = seen.gpus.left
    return left is not None and (isinstance(left.found, Unknown) or bool(left.found.value))


def _left(seen: Observed) -> Iterator[Finding]:
    left = seen.gpus.left
    if left is None or isinstance(seen.service.answers, Known):
        return  # a running mpsd keeps it or gives it back, and says in gpu-health where it cannot
    holder = seen.service.lock_holder
    if isinstance(holder, Known) and holder.value is not None:
        yield unknown(
            f"pid {holder.value} has mpsd's lock, and does not answer: it may keep the mode", "see check mpsd"
        )
        return
    look = "see nvidia-smi -q -d COMPUTE; then remove"
    if left.aside is not None:
        because = f"{left.aside} could not be understood, so it is not known which GPUs mpsd changed"
        yield Finding(Verdict.WARN, because, {"path": str(left.aside)}, f"{look} {left.aside}", "record")
    if isinstance(left.found, Unknown) and left.damaged:
        because = f"{left.path} cannot be understood, so it is not known which GPUs mpsd changed: {left.found.reason}"
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
        because = f"mpsd changed that of {uuid}, which cannot be read now; it was {found}"
        return Finding(Verdict.FAIL, because, evidence, "see what nvidia-smi says of that GPU, and look again", uuid)
    name = _name(seen.gpu)
    if isinstance(seen.usage, Unknown):
        because = f"it cannot be read: {seen.usage.reason}"
        return Finding(Verdict.FAIL, because, evidence, "see nvidia-smi, and look again", name)
    now = seen.usage.value.compute_mode
    mend = Mend(Means.GIVE_BACK, (uuid,))
    if step(wanted=False, found=found, now=now, held=False) is ComputeModeStep.FORGET:
        return Finding(
            Verdict.OK, f"it is {now}, and not what mpsd set", {**evidence, "now": str(now)}, None, name, mend
        )
    because = f"it was left {now} by an mpsd that found it {found}"
    remedy = "start mpsd, which keeps it or gives it back as its settings say; or, as root: mpsctl doctor --fix"
    return Finding(Verdict.FAIL, because, {**evidence, "now": str(now)}, remedy, name, mend)


def _persistence(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen)
    for each in _gpus(seen):
        if isinstance(each.condition, Unknown):
            yield unknown(each.condition.reason, subject=_name(each.gpu))
        elif each.condition.value.persistence is False:
            because = (
                "persistence mode is off: the driver sets the GPU up anew for the first of its users, and forgets its"
            )
            because += " compute mode with the last"
            remedy = f"systemctl enable --now nvidia-persistenced; or, as root: nvidia-smi -i {each.gpu.index} -pm 1"
            yield Finding(Verdict.WARN, because, {"uuid": each.gpu.uuid}, remedy, _name(each.gpu))


def _ecc(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen)
    for each in _gpus(seen):
        if isinstance(each.condition, Unknown):
            yield unknown(each.condition.reason, subject=_name(each.gpu))
            continue
        found = each.condition.value
        said = {
            f"{found.uncorrected} ECC errors could not be corrected since the driver was loaded": bool(
                found.uncorrected
            ),
            "memory waits for a reset to be retired": bool(found.retirement_pending),
            "rows of its memory wait for a reset to be remapped": bool(found.remapping_pending),
            "rows of its memory failed, and none is left to remap them to": bool(found.remapping_failed),
        }
        wrong = [each for each, is_so in said.items() if is_so]
        if wrong:
            evidence = {"uuid": each.gpu.uuid, "uncorrected": found.uncorrected}
            remedy = f"drain it (mpsctl drain gpu{each.gpu.index}), then nvidia-smi -i {each.gpu.index} --gpu-reset"
            if found.remapping_failed:
                remedy = "have this GPU replaced"
            yield Finding(Verdict.FAIL, "; ".join(wrong), evidence, remedy, _name(each.gpu))


def _clients(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen)
    for each in _gpus(seen):
        if isinstance(each.usage, Unknown):
            yield unknown(each.usage.reason, subject=_name(each.gpu))
            continue
        most = clients_max(each.gpu.compute_capability, gpus.driver_branch(each.gpu.driver_version))
        clients = sorted(pid for pid, process in each.usage.value.processes.items() if process.mps)
        if len(clients) >= most * _FULL:
            because = f"{len(clients)} of at most {most} clients are on it: the next fails with 808 or 809"
            verdict = Verdict.FAIL if len(clients) >= most else Verdict.WARN
            remedy = "grant larger shares, or use fewer processes; each context of a process counts"
            evidence = {"clients": len(clients), "most": most, "pids": clients}
            yield Finding(verdict, because, evidence, remedy, _name(each.gpu))


def _outside(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen)
    servers = (
        {each.pid for each in seen.processes.value if each.part == SERVER}
        if isinstance(seen.processes, Known)
        else None
    )
    if servers is None and node_of(seen) is not None:
        yield unknown("which of the GPUs' processes are servers of MPS cannot be told without all processes", AS_ROOT)
        return
    for each in _gpus(seen):
        if isinstance(each.usage, Unknown):
            yield unknown(each.usage.reason, subject=_name(each.gpu))
            continue
        usage = each.usage.value
        outside = sorted(
            pid for pid, process in usage.processes.items() if not process.mps and pid not in (servers or ())
        )
        if outside:
            exclusive = usage.compute_mode is ComputeMode.EXCLUSIVE_PROCESS
            because = f"pid {', '.join(map(str, outside))} uses it outside MPS, without limits"
            because += (
                ", and no server can start beside it, since the compute mode is exclusive-process" if exclusive else ""
            )
            evidence = {"pids": outside, "compute_mode": str(usage.compute_mode), "uuid": each.gpu.uuid}
            remedy = f"ps -fp {','.join(map(str, outside))}; run it by mpsctl run, or end it"
            verdict = Verdict.FAIL if exclusive else Verdict.WARN
            yield Finding(verdict, because, evidence, remedy, _name(each.gpu))


CHECKS: Final = (
    Check(
        "architecture",
        "every GPU is of Volta or newer",
        "Before Volta limits are refused, 16 clients are the most, and one client's fault ends all.",
        _architecture,
    ),
    Check("mig", "MIG mode is off", "mpsd shares whole GPUs, and leaves one with MIG alone.", _mig),
    Check(
        "compute-mode",
        "no GPU is open to processes that miss MPS, unless that was asked for",
        "MPS fails open: such a process runs on the whole GPU without limits.",
        _compute_mode,
    ),
    Check(
        "compute-mode-left",
        "no GPU was left in another compute mode than its own",
        "Whatever is not under MPS fails with CUDA_ERROR_DEVICE_UNAVAILABLE (46).",
        _left,
        "gives it back, where no mpsd runs",
    ),
    Check(
        "persistence",
        "persistence mode is on",
        "First clients wait for seconds, and the compute mode is lost with the last user.",
        _persistence,
    ),
    Check("ecc", "no GPU has errors in its memory that were not corrected", "Work fails, or is wrong.", _ecc),
    Check(
        "clients",
        "no GPU has as many clients as its architecture admits",
        "One more fails with 808 or 809, whatever shares are left.",
        _clients,
    ),
    Check(
        "outside",
        "no process uses a GPU outside MPS",
        "It has no limits; in exclusive-process no server can start beside it.",
        _outside,
    ),
)
"""In the order in which they are told."""
