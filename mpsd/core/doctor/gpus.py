"""Checks of the driver and its GPUs: whether they can run MPS, hold its limits, and who is on them."""

from collections.abc import Iterator
from typing import Final

from mpsd.core import compute_mode, gpus
from mpsd.core.commands import TABLE
from mpsd.core.compute_mode import Step, step
from mpsd.core.doctor.finding import Check, Finding, Means, Mend, Verdict, unknown
from mpsd.core.doctor.observed import GpuSeen, NodeGpus, Observed
from mpsd.core.doctor.processes import SERVER
from mpsd.core.limits import VOLTA, clients_max
from mpsd.core.model import ComputeMode, Gpu, Known, Unknown
from mpsd.core.settings import Users, WantedComputeMode

_MANY_USERS: Final = 555
"""The first driver whose control daemon takes -multiuser-server (NVIDIA's man page)."""

_MEMORY_LIMIT: Final = 495
"""The first driver that can have a pinned device memory limit: CUDA 11.5 (NVIDIA's documentation); measured in 535."""

_FULL: Final = 0.9
"""The part of the clients that a GPU admits from which on it is nearly full."""


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index}"


def _node(seen: Observed) -> NodeGpus | None:
    node = seen.gpus.node
    return node.value if isinstance(node, Known) else None


def _unread(seen: Observed) -> Iterator[Finding]:
    """Yield that the GPUs could not be looked at, where they could not."""
    if isinstance(seen.gpus.node, Unknown):
        yield unknown(seen.gpus.node.reason)


def _gpus(seen: Observed) -> Iterator[GpuSeen]:
    node = _node(seen)
    return iter(node.gpus if node is not None else ())


def _driver(seen: Observed) -> Iterator[Finding]:
    if seen.gpus.simulated:
        yield unknown("the GPUs are simulated")
    elif isinstance(seen.gpus.node, Unknown):
        yield Finding(Verdict.FAIL, seen.gpus.node.reason, {}, seen.gpus.remedy or "see what nvidia-smi says")
    else:
        for index, because in seen.gpus.node.value.unreadable.items():
            remedy = f"nvidia-smi -i {index} -q; dmesg | grep -i -e nvrm -e xid"
            yield Finding(Verdict.FAIL, f"it cannot be read: {because}", {"index": index}, remedy, f"GPU {index}")


def _program(seen: Observed) -> Iterator[Finding]:
    if seen.gpus.program is None and not seen.gpus.simulated:
        name = seen.settings.daemon.control
        remedy = (
            "install the part of NVIDIA's driver that has it (nvidia-cuda-mps, nvidia-compute-utils), or daemon.control"
        )
        yield Finding(Verdict.FAIL, f"there is no program {name!r} to execute", {"control": name}, remedy)
    elif seen.gpus.server is None and not seen.gpus.simulated:
        because = f"there is no nvidia-cuda-mps-server in PATH, beside {seen.gpus.program} or in its root"
        remedy = "install it of the same version, or put it beside the control program"
        yield Finding(Verdict.FAIL, because, {"program": str(seen.gpus.program)}, remedy)


def _versions(seen: Observed) -> Iterator[Finding]:
    yield from _unread(seen)
    node = _node(seen)
    if node is None:
        return
    found = [*_of_package(seen, node), *_of_logs(seen, node)]
    yield from (each for each in found if each.verdict is not Verdict.OK)
    if not found:
        yield unknown("neither a package nor a log tells of which version the control program is")


def _of_package(seen: Observed, node: NodeGpus) -> Iterator[Finding]:
    """Compare the driver with the package that the control program is of."""
    package, version = seen.gpus.package or ("", "")
    upstream = version.rpartition(":")[2].partition("-")[0]
    branch = gpus.driver_branch(upstream)
    if branch is None:
        return
    because = f"{seen.gpus.program} is of {package} {version}, and the driver is {node.driver}"
    evidence = {"package": package, "version": version, "driver": node.driver}
    same = Verdict.OK if upstream == node.driver else Verdict.WARN
    verdict = same if branch == gpus.driver_branch(node.driver) else Verdict.FAIL
    yield Finding(verdict, because, evidence, f"install {package} of the driver's version, then mpsctl restart")


def _of_logs(seen: Observed, node: NodeGpus) -> Iterator[Finding]:
    """Compare the driver with what control daemons and servers said of themselves (R580 on)."""
    for each in seen.files.servers.value if isinstance(seen.files.servers, Known) else ():
        met = gpus.driver_branch(each.driver or "")
        if met is not None:
            because = f"its last server met driver {each.driver}, and the driver is {node.driver}"
            evidence: dict[str, object] = {"log": str(each.log), "server": each.driver, "driver": node.driver}
            verdict = Verdict.OK if met == gpus.driver_branch(node.driver) else Verdict.WARN
            yield Finding(verdict, because, evidence, "mpsctl restart, which waits for its clients", each.name)
        if each.cuda is not None and node.cuda is not None:
            because = f"the control program is of CUDA {_cuda(each.cuda)}, and the driver of CUDA {_cuda(node.cuda)}"
            evidence = {"log": str(each.log), "control": each.cuda, "driver": node.cuda}
            verdict = Verdict.OK if each.cuda == node.cuda else Verdict.FAIL
            yield Finding(verdict, because, evidence, "install both of one version, then mpsctl restart", each.name)


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _memory_limit(seen: Observed) -> Iterator[Finding]:
    yield from _unread(seen)
    node = _node(seen)
    branch = gpus.driver_branch(node.driver) if node is not None else None
    if node is None or branch is None or branch >= TABLE["set_default_device_pinned_mem_limit"].since:
        return
    evidence = {"driver": node.driver, "since": _MEMORY_LIMIT}
    if branch >= _MEMORY_LIMIT:
        measured = TABLE["set_default_device_pinned_mem_limit"].since
        yield unknown(
            f"whether driver {node.driver} holds a memory limit was never tried; {measured} does", "mpsctl verify"
        )
        return
    asked = seen.settings.limits.pinned_device_mem_limit is not None
    because = f"driver {node.driver} knows no pinned device memory limit: it comes with {_MEMORY_LIMIT}"
    because += ", and limits.pinned_device_mem_limit asks for one" if asked else ""
    remedy = "install driver 535 or newer, or do without a memory limit"
    yield Finding(Verdict.FAIL if asked else Verdict.WARN, because, evidence, remedy)


def _many_users(seen: Observed) -> Iterator[Finding]:
    if seen.settings.daemon.users is not Users.MANY:
        return
    yield from _unread(seen)
    node = _node(seen)
    branch = gpus.driver_branch(node.driver) if node is not None else None
    if node is not None and branch is not None and branch < _MANY_USERS:
        because = f'daemon.users = "many" needs driver {_MANY_USERS}, and this is {node.driver}'
        yield Finding(Verdict.FAIL, because, {"driver": node.driver, "since": _MANY_USERS}, 'daemon.users = "one"')


def _architecture(seen: Observed) -> Iterator[Finding]:
    yield from _unread(seen)
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
    yield from _unread(seen)
    for each in _gpus(seen):
        none = gpus.unsupported(each.gpu) if each.gpu.mig else None
        if none is not None:
            yield Finding(Verdict.WARN, none[0], {"uuid": each.gpu.uuid}, none[1], _name(each.gpu))


def _compute_mode(seen: Observed) -> Iterator[Finding]:
    answers = seen.service.answers
    if isinstance(answers, Known) and (seen.gpus.simulated or _node(seen) is None):
        modes = {each.index: each.compute_mode for each in answers.value.gpus}
    else:
        yield from _unread(seen)
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
        elif mode == ComputeMode.DEFAULT and leave:
            because = "it is default: a process that misses MPS runs beside it without limits"
            remedy = 'daemon.compute_mode = "exclusive-process", then systemctl reload mpsd, or SIGHUP'
            yield Finding(Verdict.WARN, because, evidence, remedy, f"GPU {index}")


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
        yield unknown(f"{left.path} {left.found.reason}", "look as root")
    elif left.found.value and _node(seen) is None:
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
    if step(wanted=False, found=found, now=now, held=False) is Step.FORGET:
        return Finding(
            Verdict.OK, f"it is {now}, and not what mpsd set", {**evidence, "now": str(now)}, None, name, mend
        )
    because = f"it was left {now} by an mpsd that found it {found}"
    remedy = "start mpsd, which keeps it or gives it back as its settings say; or, as root: mpsctl doctor --fix"
    return Finding(Verdict.FAIL, because, {**evidence, "now": str(now)}, remedy, name, mend)


def _persistence(seen: Observed) -> Iterator[Finding]:
    yield from _unread(seen)
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
    yield from _unread(seen)
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
    yield from _unread(seen)
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
    yield from _unread(seen)
    servers = (
        {each.pid for each in seen.processes.value if each.part == SERVER}
        if isinstance(seen.processes, Known)
        else None
    )
    if servers is None and _node(seen) is not None:
        yield unknown(
            "which of the GPUs' processes are servers of MPS cannot be told without all processes", "look as root"
        )
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
        "driver", "NVIDIA's driver answers, and reads every GPU", "mpsd does not start, or not for that GPU.", _driver
    ),
    Check(
        "control-program",
        "NVIDIA's control and server programs are there",
        "No control daemon starts, or no server.",
        _program,
    ),
    Check(
        "versions",
        "the control program is of the driver's version",
        "Servers exit with status 1, and clients fail with 805.",
        _versions,
    ),
    Check(
        "memory-limit",
        "the driver knows a pinned device memory limit",
        "A limit that was asked for is answered with nothing, and does not hold.",
        _memory_limit,
    ),
    Check(
        "many-users",
        'the driver can do what daemon.users = "many" asks for',
        "The control daemon does not start, or serves one uid at a time.",
        _many_users,
    ),
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
