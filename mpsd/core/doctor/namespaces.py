"""Checks of the environment of mpsd and the processes of MPS: capabilities, namespaces, and shared directories."""

from collections.abc import Iterator
from typing import Final

from mpsd.core.doctor.driver import without_shm
from mpsd.core.doctor.finding import AS_ROOT, Check, Finding, Verdict, unknown
from mpsd.core.doctor.observed import Observed
from mpsd.core.doctor.processes import DAEMON, FRONT_END, belongs, hidden, living, unreadable_processes
from mpsd.core.model import Known, Unknown


def _capabilities(seen: Observed) -> Iterator[Finding]:
    mpsd = seen.service.process
    if mpsd is None:
        yield unknown("no mpsd process is visible")
        return
    if mpsd.uid != 0:
        because = f"mpsd (pid {mpsd.pid}) runs as uid {mpsd.uid}: it serves only the clients of that uid"
        yield Finding(Verdict.WARN, because, {"pid": mpsd.pid, "uid": mpsd.uid}, "run it as root to serve every user")
        return
    if seen.service.lacking:
        names = [name for name, _ in seen.service.lacking]
        harm = "; ".join(dict.fromkeys(harm for _, harm in seen.service.lacking))
        because = f"mpsd (pid {mpsd.pid}) lacks {', '.join(names)}: {harm}"
        evidence = {"pid": mpsd.pid, "effective": f"{mpsd.capabilities:016x}", "missing": names}
        remedy = "check CapabilityBoundingSet= in its unit; a privileged container has all capabilities"
        yield Finding(Verdict.FAIL, because, evidence, remedy)


def _user_namespace(seen: Observed) -> Iterator[Finding]:
    mpsd, few = seen.service.process, seen.service.few_uids
    if mpsd is None:
        yield unknown("no mpsd process is visible")
    elif isinstance(few, Unknown):
        yield unknown(few.reason, AS_ROOT)
    elif few.value:
        because = f"mpsd (pid {mpsd.pid}) is in a user namespace: all uids that are not mapped there appear as 65534"
        remedy = "run it in the host's user namespace: no --userns, no rootless container"
        yield Finding(Verdict.FAIL, because, {"pid": mpsd.pid}, remedy)


def _pid_namespace(seen: Observed) -> Iterator[Finding]:
    mpsd = seen.service.process
    if not seen.host.first_pid_namespace and mpsd is not None:
        because = f"mpsd (pid {mpsd.pid}) is not in the host's pid namespace: it sees callers outside its own as pid 0"
        yield Finding(Verdict.FAIL, because, {"pid": mpsd.pid}, "run it with hostPID: true (docker run --pid=host)")
        return
    if not seen.host.first_pid_namespace:
        because = f"mpsctl is in its own pid namespace ({seen.host.pid_namespace}), and does not see that of mpsd"
        yield Finding(
            Verdict.WARN,
            because,
            {"pid_namespace": seen.host.pid_namespace},
            "for a complete result, run it on the host; the notes of mpsctl status list what mpsd itself lacks",
        )
        return
    yield from hidden(seen)
    daemons = [each for each in living(seen) if each.part == DAEMON and belongs(seen, each)]
    looked = [*([mpsd] if mpsd else []), *daemons]
    closed = [each for each in looked if isinstance(each.pid_namespace, Unknown)]
    if closed:
        yield unreadable_processes(seen, closed)
    for each in looked:
        if isinstance(each.pid_namespace, Known) and each.pid_namespace.value != seen.host.pid_namespace:
            because = f"pid {each.pid} ({each.part}) is in its own pid namespace, and sees clients outside it as pid 0"
            evidence = {"pid": each.pid, "pid_namespace": each.pid_namespace.value, "own": seen.host.pid_namespace}
            remedy = "run it with hostPID: true (docker run --pid=host)"
            yield Finding(Verdict.FAIL, because, evidence, remedy, f"pid {each.pid}")


def _shm_shared(seen: Observed) -> Iterator[Finding]:
    yield from hidden(seen)
    if seen.service.process is None and not seen.host.first_pid_namespace:
        yield unknown("mpsd and its control daemons are not visible in this pid namespace", AS_ROOT)
    own = seen.host.shared_memory
    if isinstance(own, Unknown):
        yield unknown(own.reason)
        return
    looked = [each for each in living(seen) if each.part != FRONT_END and belongs(seen, each)]
    closed = [each for each in looked if isinstance(each.shared_memory, Unknown)]
    if closed:
        yield unreadable_processes(seen, closed)
    for each in looked:
        if isinstance(each.shared_memory, Known) and each.shared_memory.value != own.value.device:
            because = f"pid {each.pid} ({each.part}) has another /dev/shm than mpsctl: clients that share mpsctl's"
            because += " cannot connect (805)"
            evidence = {"pid": each.pid, "device": each.shared_memory.value, "own_device": own.value.device}
            remedy = "share one /dev/shm: hostIPC: true, or mount the host's into both (docker run --ipc=host)"
            yield without_shm(seen, Finding(Verdict.WARN, because, evidence, remedy, f"pid {each.pid}"))


CHECKS: Final = (
    Check(
        "capabilities",
        "mpsd has the root privileges that it needs",
        "mpsd cannot provide all of its functions.",
        _capabilities,
    ),
    Check(
        "user-namespace",
        "mpsd sees the real uid of every user",
        "All uids that are not mapped appear as one user: each can end the leases of the others.",
        _user_namespace,
    ),
    Check(
        "pid-namespace",
        "mpsd, control daemons and mpsctl are in the host's pid namespace",
        "Callers and clients appear as pid 0, so nothing can be tied to their lives.",
        _pid_namespace,
    ),
    Check(
        "shm-shared",
        "mpsd, control daemons and mpsctl share one /dev/shm",
        "Clients hang or fail with CUDA_ERROR_MPS_CONNECTION_FAILED (805).",
        _shm_shared,
    ),
)
"""In the order of the report."""
