"""The values of mpsd as answers of the API, each in the type of `answer_types` of the same name."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Final, TypeVar

from mpsd.client import answer_types
from mpsd.core import holders
from mpsd.core.admission.ledger import QueuePlace
from mpsd.core.enforcement.attribution import LEASE, TOKEN
from mpsd.core.enforcement.verification import Verdict, VerifiedProcess
from mpsd.core.enforcement.violations import Violation
from mpsd.core.errors import MpsdError
from mpsd.core.health import LIMITS, REFUSED_HINT, Reason, drifted, hint_for
from mpsd.core.model import (
    Claim,
    Daemon,
    Drift,
    Gpu,
    Holder,
    HoldingGroup,
    HoldingProcess,
    Lease,
    LeaseState,
    Quarantined,
    ReadBack,
    Server,
    Share,
    Suspect,
    Who,
)
from mpsd.core.supervision.drain import Operation
from mpsd.daemon.canary.watch import Examination
from mpsd.system import clock
from mpsd.system.files.encoding import to_json

_GPU_OF: Final = attrgetter("gpu")
_PID_OF: Final = attrgetter("pid")


def time(moment: datetime) -> str:
    """Return a time in RFC 3339, with Z for UTC."""
    return to_json(moment)[1:-1].decode()


def time_or_none(moment: datetime | None) -> str | None:
    return None if moment is None else time(moment)


def quarantine(found: Quarantined) -> answer_types.Quarantine:
    return _named(answer_types.Quarantine(since=time(found.since), because=found.because), found.who)


def suspect(found: Suspect) -> answer_types.Suspect:
    return _named(answer_types.Suspect(crashes=found.crashes, alone=found.alone), found.who)


_Named = TypeVar("_Named", answer_types.Quarantine, answer_types.Suspect)


def _named(answer: _Named, who: Who) -> _Named:
    if isinstance(who, str):
        answer["cgroup"] = who
    else:
        answer["uid"] = who
    return answer


# -- the node ----------------------------------------------------------------------------------------------------------


def reason(reason: Reason, *, operator: bool) -> answer_types.Reason:
    """`operator`: whether the reader is an operator."""
    return {
        "kind": reason.kind,
        "subject": reason.subject,
        "because": reason.because,
        "hint": reason.hint_for(operator=operator),
    }


def limits(found: ReadBack | None) -> answer_types.Limits:
    """None: no limits were read back."""
    if found is None:
        return {"active_thread_percentage": None, "pinned_device_mem_limit": None}
    return {
        "active_thread_percentage": found.active_thread_percentage_tenths / 10,
        "pinned_device_mem_limit": found.pinned_device_mem_limit,
    }


def hardware(gpu: Gpu) -> answer_types.Hardware:
    """Render what a GPU is."""
    (major, minor), found = gpu.compute_capability, gpu.hardware
    return answer_types.Hardware(
        brand=found.brand,
        architecture=found.architecture,
        compute_capability=f"{major}.{minor}",
        cuda_version=found.cuda_version,
        pci_bus_id=found.pci_bus_id,
        pcie_root=found.pcie_root,
    )


def obstacle(error: MpsdError, *, operator: bool) -> answer_types.Obstacle:
    """`operator`: whether the reader is an operator."""
    hint = error.hint if operator or error.limit not in LIMITS else REFUSED_HINT
    return {"code": error.code, "limit": error.limit, "because": error.detail, "hint": hint}


def drift(daemon: str, drift: Drift) -> answer_types.Drift:
    return {
        "limit": drift.limit,
        "wanted": drift.wanted,
        "found": drift.found,
        "since": time(drift.since),
        "command": drift.command,
        "server": drift.server,
        "undone": time_or_none(drift.undone),
        "because": drifted(daemon, drift),
    }


def server(server: Server) -> answer_types.Server:
    return {
        "pid": server.pid,
        "status": server.status,
        "clients": list(server.clients),
        "orphan": server.orphan and not server.dying,
        "dying": server.dying,
        "limits": limits(server.limits),
    }


def daemon(daemon: Daemon, *, operator: bool) -> answer_types.Daemon:
    """`operator`: whether the reader is an operator."""
    memory = daemon.wanted.pinned_device_mem_limit
    return {
        "name": daemon.name,
        "gpu": daemon.gpu,
        "state": daemon.state,
        "because": daemon.because,
        "hint": hint_for(daemon.hint, refuses=True, operator=operator),
        "pid": daemon.process.identity.pid if daemon.process else None,
        "start_time": time(daemon.process.started) if daemon.process else None,
        "pipe_directory": daemon.pipe_directory,
        "since": time(daemon.since),
        "ready_since": time_or_none(daemon.ready_since),
        "limits": limits(daemon.limits),
        "limits_wanted": {
            "active_thread_percentage": float(daemon.wanted.active_thread_percentage),
            "pinned_device_mem_limit": memory.bytes if memory else None,
        },
        "verified": daemon.verified,
        "drift": [drift(daemon.name, each) for each in daemon.drift],
        "undone": [drift(daemon.name, each) for each in daemon.undone],
        "servers": [server(each) for each in daemon.servers],
        "version": daemon.version,
        "log_silent_since": time_or_none(daemon.log_silent_since),
        "unknown_lines": daemon.unknown_lines.count,
        "latest_unknown_lines": list(daemon.unknown_lines.latest),
        "operation": daemon.operation,
        "restart_for": list(daemon.restart_for),
        "unserved": daemon.unserved,
        "wedged": daemon.unserved is not None,
        "drained": daemon.drained,
    }


def canary(daemon: str, found: Examination) -> answer_types.Canary:
    return {
        "daemon": daemon,
        "verdict": found.verdict,
        "because": found.end.because,
        "mps": found.end.mps,
        "at": time(found.at),
    }


def operation(operation: Operation) -> answer_types.Operation:
    return {
        "id": operation.id,
        "daemon": operation.daemon,
        "verb": operation.verb,
        "state": operation.state,
        "because": operation.because,
        "started": time(operation.started),
        "ended": time_or_none(operation.ended),
        "waits_for": [
            {"what": each.what, "lease": each.lease, "pid": each.pid, "since": time(each.since)}
            for each in operation.waits_for
        ],
    }


# -- leases ------------------------------------------------------------------------------------------------------------


def violation(violation: Violation) -> answer_types.Violation:
    return {
        "kind": violation.kind,
        "pid": violation.process.pid,
        "lease": violation.lease,
        "daemon": violation.daemon,
        "because": violation.because,
        "hint": violation.hint,
    }


def process(process: VerifiedProcess, name: str) -> answer_types.Process:
    return {
        "pid": process.pid,
        "name": name,
        "daemon": process.daemon,
        "gpu": process.gpu,
        "server": process.server,
        "mps": process.mps,
        "limits_granted": limits(process.granted),
        "limits_in_force": None if process.in_force is None else limits(process.in_force),
        "limits_at_least": None if process.at_least is None else limits(process.at_least),
        "memory_held": process.held,
        "ok": process.verdict is Verdict.OK,
        "verdict": process.verdict,
        "because": process.because,
    }


def holder(holder: Holder | Claim) -> answer_types.Holder:
    found: answer_types.Holder
    match holder:
        case HoldingProcess(identity, started):
            found = {"kind": "process", "pid": identity.pid}
            if started is not None:
                found["start_time"] = time(started)
        case HoldingGroup(group, life):
            found = {"kind": "cgroup", "cgroup": group.path, "while": life.value}
            unit, container, pod = holders.group_name(group.path)
            if unit:
                found["unit"] = unit
            if container:
                found["container"] = container
            if pod:
                found["pod"] = pod
        case Claim(uid=uid, deadline=deadline):
            found = {"kind": "claim"}
            if uid is not None:
                found["uid"] = uid
            if deadline is not None:
                found["deadline"] = _wall_clock(deadline)
    return found


def _wall_clock(deadline: float) -> str:
    """Return a time of the monotonic clock as a time of day, for display."""
    return time(clock.now() + timedelta(seconds=deadline - clock.monotonic()))


def _share(share: Share, own: Mapping[str, str]) -> answer_types.Share:
    return {
        "gpu": share.gpu,
        "daemon": share.daemon,
        "active_thread_percentage": share.threads.tenths / 10,
        "pinned_device_mem_limit": share.memory.bytes,
        "env": {**share.env, **own},
    }


def outline(found: Lease, place: QueuePlace | None) -> answer_types.Lease:
    """Return what other users may see of a lease: owner, name, shares, times and clients.

    What its owner wrote or runs is left out: labels, environment, holders and bearers.
    """
    answer = lease(found, place, secret=False)
    answer["owner"] |= {"pid": 0, "start_time": None}
    answer |= {"env": {}, "labels": {}, "holders": [], "bearers": [], "request_id": None}
    for share in answer["shares"]:
        share["env"] = {}
    return answer


def lease(lease: Lease, place: QueuePlace | None = None, *, secret: bool = True) -> answer_types.Lease:
    """`secret`: whether the answer is about this lease alone, and for its owner or an administrator."""
    own = {LEASE: lease.id, TOKEN: lease.token} if secret and lease.token else {LEASE: lease.id}
    request, owner, shares = lease.request, lease.owner, [_share(share, own) for share in lease.shares]
    amounts = lease.shares[0] if lease.shares else request
    has_ended = lease.state is LeaseState.ENDED
    is_closing = lease.closing and not has_ended
    waits = None
    if place is not None:
        short = place.waits_for
        waits = answer_types.Wait(position=place.position, waits_for=short.limit, because=short.because)
    return {
        "id": lease.id,
        "state": lease.state,
        "because": f"its clients are being ended: {lease.closing}" if is_closing else lease.because,
        "gpus": [*map(_GPU_OF, lease.shares)],
        "daemon": shares[0]["daemon"] if shares else None,
        "owner": {"uid": owner.uid, "gid": owner.gid, "pid": owner.pid, "start_time": time_or_none(owner.started)},
        "holders": [*map(holder, holders.bound_to(lease))],
        "active_thread_percentage": None if amounts.threads is None else float(amounts.threads),
        "pinned_device_mem_limit": None if amounts.memory is None else amounts.memory.bytes,
        "env": shares[0]["env"] if shares else {},
        "shares": shares,
        "clients": [*map(_PID_OF, lease.clients)],
        "bearers": [*map(_PID_OF, lease.bearers)],
        "processes": request.processes or 0,
        "priority": request.priority,
        "client_priority": request.client_priority,
        "connections": request.connections,
        "visible": request.visible,
        "stop": request.stop,
        "name": request.name,
        "labels": {**request.labels},
        "created": time(lease.created),
        "granted": time_or_none(lease.granted),
        "ended": time_or_none(lease.ended),
        "expires": None if lease.expires is None or has_ended else _wall_clock(lease.expires),
        "request_id": request.request_id,
        "claimed_for": lease.claimed_for,
        "wait": waits,
        "violations": [],
        "unknown": [],
        "lost": [*map(_PID_OF, lease.lost)],
        "keepers": [],
    }
