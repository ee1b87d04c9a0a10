"""Checks of the GPUs and of their driver: whether they can run MPS, their condition, and the processes on them."""

from collections.abc import Iterator
from typing import Final

from mpsd.core import compute_mode, gpus
from mpsd.core.compute_mode import ComputeMode, ComputeModeStep, step
from mpsd.core.doctor.finding import (
    AS_ROOT,
    Finding,
    GpuSeen,
    Means,
    Mend,
    NodeGpus,
    Observed,
    Verdict,
    check,
    fail,
    known,
    unknown,
    unread,
    warn,
)
from mpsd.core.doctor.parts import SERVER
from mpsd.core.gpus import driver_branch
from mpsd.core.model import Unknown
from mpsd.core.mps.daemon_flags import MANY_USERS
from mpsd.core.mps_facts import VOLTA
from mpsd.core.settings import Users


def _name(each: GpuSeen) -> str:
    return f"GPU {each.gpu.index}"


def _gpus(seen: Observed) -> tuple[GpuSeen, ...]:
    node = known(seen.gpus.node)
    return node.gpus if node is not None else ()


@check(
    "architecture",
    "mpsd can share every GPU, with limits",
    "mpsd does not use a GPU in MIG mode; older ones than Volta have no limits; integrated ones share host memory.",
)
def _architecture(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen.gpus.node)
    for each in _gpus(seen):
        gpu, name = each.gpu, each.gpu.name
        capability = ".".join(map(str, gpu.compute_capability))
        evidence = {"name": name, "compute_capability": capability, "mig": gpu.mig}
        none = gpus.unsupported(gpu)
        if none is not None and known(seen.service.answers) is None:
            yield warn(none[0], none[1], _name(each), **evidence)
        elif none is None and gpu.compute_capability < VOLTA:
            most = gpus.clients_max(gpu)
            because = (
                f"{name} (compute capability {capability}) is older than Volta: it supports neither limit,"
                f" admits {most} clients, and a fault of one client ends all of them"
            )
            yield fail(because, "use this GPU for work that does not share it", _name(each), **evidence)
        if gpu.integrated:
            because = gpus.unmeasured(name)
            usage = known(each.usage)
            if usage is not None and usage.compute_mode is None:
                because += "; it has no compute mode, and the MPS of a Tegra has no terminate_client"
            remedy = "set memory limits by the processes' control groups as well; see docs/gpu.md"
            yield warn(because, remedy, _name(each), **evidence)


@check(
    "compute-mode",
    "every GPU has a compute mode in which processes can use it",
    "Processes fail with CUDA_ERROR_DEVICE_UNAVAILABLE (46), or mpsd does not grant the GPU.",
    unwatched=True,
)
def _compute_mode(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen.gpus.node)
    for each in _gpus(seen):
        usage = known(each.usage)
        mode = usage.compute_mode if usage is not None else None
        verdict = Verdict.WARN
        if mode is ComputeMode.PROHIBITED:
            because, verdict = "its compute mode is prohibited: no process can use it", Verdict.FAIL
        elif mode is ComputeMode.EXCLUSIVE_THREAD:
            because = "its compute mode is exclusive-thread, which NVIDIA no longer supports"
        elif mode is ComputeMode.EXCLUSIVE_PROCESS and not _is_left(seen):
            because = (
                "its compute mode is exclusive-process, but was not set by mpsd: only one process can use it, others"
                " fail with 46"
            )
        else:
            continue
        remedy = f"as root: {compute_mode.command(each.gpu.index, ComputeMode.DEFAULT)}"
        yield Finding(
            verdict, because, {"index": each.gpu.index, "compute_mode": str(mode)}, remedy, subject=_name(each)
        )


def _is_left(seen: Observed) -> bool:
    """Tell whether mpsd recorded, or may have recorded, a change of a mode; another check reports that."""
    left = seen.gpus.left
    return left is not None and known(left.found) != {}


@check(
    "compute-mode-left",
    "no GPU was left in a changed compute mode",
    "Processes outside MPS fail with CUDA_ERROR_DEVICE_UNAVAILABLE (46).",
    "restores the mode",
    unwatched=True,
)
def _left(seen: Observed) -> Iterator[Finding]:
    left, holder = seen.gpus.left, known(seen.service.lock_holder)
    if left is None:
        return
    if holder is not None:
        because = f"pid {holder} holds mpsd's lock and does not answer: it may still need the compute mode"
        yield unknown(because, "see check mpsd")
        return
    look, path = "see nvidia-smi -q -d COMPUTE; then remove", str(left.path)
    if left.aside is not None:
        because = f"{left.aside} could not be parsed, so the GPUs that mpsd changed are unknown"
        yield warn(because, f"{look} {left.aside}", "record", path=str(left.aside))
    if isinstance(left.found, Unknown) and left.damaged:
        because = f"{path} cannot be parsed, so the GPUs that mpsd changed are unknown: {left.found.reason}"
        yield fail(because, f"{look} {path}", "record", path=path)
    elif isinstance(left.found, Unknown):
        yield unknown(f"{path} {left.found.reason}", AS_ROOT)
    elif left.found.value and isinstance(seen.gpus.node, Unknown):
        because = f"{path} names GPUs that cannot be read: {seen.gpus.node.reason}"
        yield fail(because, seen.gpus.remedy, path=path)
    else:
        there = {each.gpu.uuid: each for each in _gpus(seen)}
        for uuid, found in left.found.value.items():
            yield _left_on(there.get(uuid), uuid, found)


def _left_on(seen: GpuSeen | None, uuid: str, found: ComputeMode) -> Finding:
    evidence = {"uuid": uuid, "found": str(found)}
    if seen is None:
        because = f"mpsd changed the compute mode of {uuid}, which cannot be read now; the mode was {found} before"
        return fail(because, "see nvidia-smi for that GPU, then try again", uuid, **evidence)
    if isinstance(seen.usage, Unknown):
        because = f"it cannot be read: {seen.usage.reason}"
        return fail(because, "see nvidia-smi, then try again", _name(seen), **evidence)
    now = seen.usage.value.compute_mode
    evidence["now"] = str(now)
    mend = Mend(Means.GIVE_BACK, (uuid,))
    if step(wanted=False, found=found, now=now, held=False) is ComputeModeStep.FORGET:
        because = f"its compute mode is {now}, which mpsd did not set"
        return Finding(Verdict.OK, because, evidence, None, _name(seen), mend)
    because = f"an mpsd that is gone left its compute mode at {now}; it was {found} before"
    remedy = "start mpsd, which keeps or restores the mode according to its settings; or, as root: mpsctl doctor --fix"
    return Finding(Verdict.FAIL, because, evidence, remedy, _name(seen), mend)


@check(
    "persistence",
    "persistence mode is on",
    "The first client waits for seconds, and the compute mode is lost when the last process exits.",
)
def _persistence(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen.gpus.node)
    for each in _gpus(seen):
        yield from unread(each.condition, subject=_name(each))
        condition = known(each.condition)
        if condition is not None and condition.persistence is False:
            because = (
                "persistence mode is off: the driver initialises the GPU anew for the first process, and loses its"
                " compute mode when the last process exits"
            )
            remedy = f"systemctl enable --now nvidia-persistenced; or, as root: nvidia-smi -i {each.gpu.index} -pm 1"
            yield warn(because, remedy, _name(each), uuid=each.gpu.uuid)


_TO_REMAP: Final = "memory rows need a reset to be remapped"


@check("ecc", "no GPU has uncorrected memory errors", "Work fails, or its results are wrong.")
def _ecc(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen.gpus.node)
    for each in _gpus(seen):
        yield from unread(each.condition, subject=_name(each))
        found = known(each.condition)
        if found is None:
            continue
        said = {
            f"{found.uncorrected} uncorrected ECC errors since the driver was loaded": found.uncorrected,
            "memory pages need a reset to be retired": found.retirement_pending,
            _TO_REMAP: found.remapping_pending,
            "memory rows failed, and no spare row is left for them": found.remapping_failed,
        }
        wrong = [each for each, is_so in said.items() if is_so]
        if wrong:
            remedy = f"drain it (mpsctl drain gpu{each.gpu.index}), then nvidia-smi -i {each.gpu.index} --gpu-reset"
            if found.remapping_failed:
                remedy = "replace this GPU"
            # Rows that wait for remapping are out of use, and work is not affected (GPU Memory Error Management).
            verdict = Verdict.WARN if wrong == [_TO_REMAP] else Verdict.FAIL
            evidence = {"uuid": each.gpu.uuid, "uncorrected": found.uncorrected}
            yield Finding(verdict, "; ".join(wrong), evidence, remedy, _name(each))


@check(
    "outside",
    "no process uses a GPU outside MPS",
    "Such a process has no limits; in exclusive-process mode, no server can start beside it.",
)
def _outside(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen.gpus.node)
    processes, answers = known(seen.processes), known(seen.service.answers)
    if processes is None and known(seen.gpus.node) is not None:
        because = "the MPS servers among the processes on the GPUs can be determined only if all processes are visible"
        yield unknown(because, AS_ROOT)
        return
    servers = {each.pid for each in processes or () if each.part == SERVER}
    reported = {each.subject for each in answers.reports} if answers is not None else set()
    for each in _gpus(seen):
        yield from unread(each.usage, subject=_name(each))
        usage = known(each.usage)
        if usage is None:
            continue
        if not usage.listed:
            yield unknown(gpus.UNLISTED, subject=_name(each))
        outside = sorted(
            pid
            for pid, process in usage.processes.items()
            if not process.mps and pid not in servers and f"pid {pid}" not in reported
        )
        if outside:
            because = f"pid {', '.join(map(str, outside))} uses it outside MPS, without limits"
            pids = [*map(str, outside)]
            remedy = (
                f"ps -fp {','.join(pids)}; start it with mpsctl run;"
                f" to end it, and the clients of an MPS server: kill {' '.join(pids)}"
            )
            evidence = {"pids": outside, "compute_mode": str(usage.compute_mode), "uuid": each.gpu.uuid}
            verdict = Verdict.WARN
            if usage.compute_mode is ComputeMode.EXCLUSIVE_PROCESS:
                because += ", and no server can start beside it because the compute mode is exclusive-process"
                verdict = Verdict.FAIL
            yield Finding(verdict, because, evidence, remedy, _name(each))


CHECKS: Final = (_architecture, _compute_mode, _left, _persistence, _ecc, _outside)
"""In the order of the report."""


# -- the driver --------------------------------------------------------------------------------------------------------


@check("driver", "NVIDIA's driver answers, and every GPU can be read", "mpsd does not start, or does not use that GPU.")
def _driver(seen: Observed) -> Iterator[Finding]:
    if seen.gpus.simulated:
        yield unknown("the GPUs are simulated")
    elif isinstance(seen.gpus.node, Unknown):
        yield fail(seen.gpus.node.reason, seen.gpus.remedy or "see nvidia-smi")
    else:
        for index, because in seen.gpus.node.value.unreadable.items():
            remedy = f"nvidia-smi -i {index} -q; dmesg | grep -i -e nvrm -e xid"
            yield fail(f"it cannot be read: {because}", remedy, f"GPU {index}", index=index)


@check(
    "control-program",
    "NVIDIA's control and server programs are installed",
    "No control daemon can start, or no server.",
)
def _program(seen: Observed) -> Iterator[Finding]:
    if seen.files.apart:
        yield unknown(
            "mpsd is in another container than mpsctl, and looks for the program there",
            "run mpsctl doctor where mpsd runs",
        )
    elif seen.gpus.simulated:
        return
    elif seen.gpus.program is None:
        name = seen.settings.daemon.control
        remedy = "install the driver package that contains it (nvidia-cuda-mps, nvidia-compute-utils), or set"
        remedy += " daemon.control; in a container, mount it (NVIDIA's runtime, capabilities utility,compute)"
        yield fail(f"there is no executable program {name!r}", remedy, control=name)
    elif seen.gpus.server is None:
        because = f"there is no nvidia-cuda-mps-server in PATH, beside {seen.gpus.program} or in its root"
        remedy = "install the same version of it, or put it beside the control program"
        yield fail(because, remedy, program=str(seen.gpus.program))


@check(
    "versions",
    "the control program, CUDA's library and the driver have the same version",
    "Clients fail with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803), or servers do not start; that was not measured.",
)
def _versions(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen.gpus.node)
    node = known(seen.gpus.node)
    if node is None:
        return
    found = [*_of_package(seen, node), *_of_logs(seen, node), *_of_library(seen, node)]
    yield from (each for each in found if each.verdict is not Verdict.OK)
    if not found:
        yield unknown("no package, log or library gives a version to compare with the driver's")


def _of_package(seen: Observed, node: NodeGpus) -> Iterator[Finding]:
    """Compare the driver with the package that contains the control program."""
    package, version = seen.gpus.package or ("", "")
    upstream = version.rpartition(":")[2].partition("-")[0]
    branch = driver_branch(upstream)
    if branch is None:
        return
    because = f"{seen.gpus.program} belongs to {package} {version}, but the driver is {node.driver}"
    remedy = f"install the version of {package} that matches the driver, then mpsctl restart"
    evidence = {"package": package, "version": version, "driver": node.driver}
    if branch != driver_branch(node.driver):
        verdict = Verdict.FAIL
    else:
        verdict = Verdict.OK if upstream == node.driver else Verdict.WARN
    yield Finding(verdict, because, evidence, remedy)


def _of_logs(seen: Observed, node: NodeGpus) -> Iterator[Finding]:
    """Compare the driver with the versions in the logs of control daemons and servers (R580 on)."""
    for each in known(seen.files.versions) or ():
        branch = driver_branch(each.driver or "")
        if branch is not None:
            because = f"its last server ran with driver {each.driver}, but the driver is now {node.driver}"
            evidence: dict[str, object] = {"log": str(each.log), "server": each.driver, "driver": node.driver}
            verdict = Verdict.OK if branch == driver_branch(node.driver) else Verdict.WARN
            yield Finding(verdict, because, evidence, "mpsctl restart, which waits for its clients", each.name)
        if each.cuda is not None and node.cuda is not None:
            because = f"the control program is for CUDA {_cuda(each.cuda)}, but the driver for CUDA {_cuda(node.cuda)}"
            evidence = {"log": str(each.log), "control": each.cuda, "driver": node.cuda}
            verdict = Verdict.OK if each.cuda == node.cuda else Verdict.FAIL
            remedy = "install the same version of both, then mpsctl restart"
            yield Finding(verdict, because, evidence, remedy, each.name)


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _of_library(seen: Observed, node: NodeGpus) -> Iterator[Finding]:
    """Compare the driver with CUDA's library, which servers load."""
    library = seen.gpus.library
    if library is not None:
        because = f"{library.path} has version {library.version}, but the kernel driver has {node.driver}"
        evidence = {"path": str(library.path), "version": library.version, "driver": node.driver}
        remedy = "after an upgrade, reboot or reload the driver's kernel module; a container needs the host's libraries"
        verdict = Verdict.OK if library.version == node.driver else Verdict.FAIL
        yield Finding(verdict, because, evidence, remedy)


@check(
    "many-users",
    'the control program knows what daemon.users = "many" needs',
    "The control daemon does not start, or serves one uid at a time.",
)
def _many_users(seen: Observed) -> Iterator[Finding]:
    if seen.settings.daemon.users is Users.MANY:
        yield from unread(seen.gpus.many_users, 'make it answer, or set daemon.users = "one"')
        if known(seen.gpus.many_users) is False:
            because = f'daemon.users = "many" needs {MANY_USERS}, which {seen.gpus.program} does not know'
            yield fail(because, 'set daemon.users = "one"', program=str(seen.gpus.program))


DRIVER_CHECKS: Final = (_driver, _program, _versions, _many_users)
"""In the order of the report."""
