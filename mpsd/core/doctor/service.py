"""Checks of mpsd itself: whether it runs and answers, its configuration, and its own report of the node."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Final

from mpsd.core import reload
from mpsd.core.doctor.finding import Check, Finding, Verdict, unknown
from mpsd.core.doctor.observed import Answers, Observed
from mpsd.core.health import Kind
from mpsd.core.model import Known, Unknown, ViolationKind
from mpsd.core.settings import Settings

_GPU_KINDS: Final = frozenset({Kind.GPU_UNKNOWN, Kind.GPU, Kind.GPU_UNSUPPORTED, Kind.GPU_NOT_RESTORED})
_DAEMON_KINDS: Final = frozenset({Kind.SERVER_STOPPED, Kind.DAEMON, Kind.OPERATION, Kind.HOLD})
_LIMIT_KINDS: Final = frozenset({Kind.DRIFT})
_WEDGE_KINDS: Final = frozenset({Kind.WEDGED})

_WARNED: Final = frozenset({Kind.GPU_UNSUPPORTED, Kind.HOLD})
"""Reasons that an operator chose, or that are not decided yet; every other reason fails its check."""

_STOPPED_BY_HAND: Final = {"inactive", "deactivating"}

_SERVICE: Final = "mpsd.service"

_OWN: Final = frozenset({_SERVICE, "mpsd.socket"})
"""The units of mpsd itself."""

_STATES: Final = ("LoadState", "ActiveState", "SubState", "Result", "UnitFileState")
"""Properties of a unit in `systemctl show`."""

_AGAIN: Final = "systemctl restart mpsd.socket, or restart mpsd in the way it was started (clients are not affected)"

_FREE_TASKS: Final = 1000
"""Threads that 48 clients and their servers may need; the default of containers (2048) leaves little."""


def _answers(seen: Observed) -> Answers | None:
    answers = seen.service.answers
    return answers.value if isinstance(answers, Known) else None


def _mpsd(seen: Observed) -> Iterator[Finding]:
    service = seen.service
    if isinstance(service.answers, Known):
        return
    holder = service.lock_holder.value if isinstance(service.lock_holder, Known) else None
    evidence = {"socket": str(service.socket.path), "lock_holder": holder}
    because, remedy = service.answers.reason, service.remedy or "systemctl status mpsd; or, as root: mpsd run"
    if holder is not None:
        where = seen.settings.paths.runtime_dir
        if _is_lost(seen):
            because += f"; pid {holder} holds the lock of {where}: it is running, but its socket was removed"
            remedy = _AGAIN
        else:
            because += f"; pid {holder} holds the lock of {where}, so it is another mpsd, or it hangs"
    yield Finding(Verdict.FAIL, because, evidence, remedy)


def _is_lost(seen: Observed) -> bool:
    """Tell whether an mpsd runs whose socket was removed."""
    service = seen.service
    holder = service.lock_holder.value if isinstance(service.lock_holder, Known) else None
    there = service.socket.path.parent == seen.settings.paths.runtime_dir
    return service.socket.kind is None and service.socket.closed is None and holder is not None and there


def _socket(seen: Observed) -> Iterator[Finding]:
    socket = seen.service.socket
    evidence = {"path": str(socket.path), "mode": f"{socket.mode:04o}", "owner": socket.owner, "uid": seen.host.uid}
    if socket.closed is not None:
        because = f"uid {seen.host.uid} may not traverse {socket.closed} to reach {socket.path}"
        yield Finding(Verdict.FAIL, because, {**evidence, "closed": str(socket.closed)}, f"chmod o+x {socket.closed}")
    elif socket.kind is None:
        remedy = _AGAIN if _is_lost(seen) else "start mpsd, or name its socket: MPSD_SOCKET, --socket"
        yield Finding(Verdict.FAIL, f"{socket.path} does not exist", {"path": str(socket.path)}, remedy)
    elif socket.kind != "socket":
        yield Finding(Verdict.FAIL, f"{socket.path} is a {socket.kind}, not a socket", evidence, f"rm {socket.path}")
    elif socket.refused is not None:
        because = f"{socket.path} (mode {socket.mode:04o}, uid {socket.owner}): {socket.refused}"
        yield Finding(
            Verdict.FAIL,
            because,
            evidence,
            "check api.mode and api.group, which decide who may connect"
            if "ermission" in socket.refused
            else "start mpsd",
        )
    elif socket.listener is not None and socket.untrusted:
        pid, uid = socket.listener
        because = f"pid {pid} of uid {uid} listens on {socket.path}, and this caller does not trust that user"
        remedy = f"to trust the mpsd of uid {uid}: --trust-uid {uid}; otherwise name another socket (--socket)"
        yield Finding(Verdict.FAIL, because, {**evidence, "listener": pid, "listener_uid": uid}, remedy)
    elif socket.listener is not None and socket.listener[1] not in {0, socket.owner}:
        pid, uid = socket.listener
        because = f"pid {pid} of uid {uid} listens on {socket.path}, which belongs to uid {socket.owner}"
        yield Finding(Verdict.WARN, because, {**evidence, "listener": pid, "listener_uid": uid}, f"see ps -p {pid}")


def _version(seen: Observed) -> Iterator[Finding]:
    answers = _answers(seen)
    if answers is None:
        yield unknown("mpsd does not answer")
    elif answers.version != seen.service.version:
        yield Finding(
            Verdict.WARN,
            f"mpsd has version {answers.version}, but mpsctl has {seen.service.version}",
            {"mpsd": answers.version, "mpsctl": seen.service.version},
            "systemctl restart mpsd, or restart it in the way it was started (clients are not affected)",
        )


def _configuration(seen: Observed) -> Iterator[Finding]:
    file = seen.configuration
    if isinstance(file.settings, Unknown):
        yield Finding(Verdict.FAIL, file.settings.reason, {"path": str(file.path)}, file.remedy)


def _reload(seen: Observed) -> Iterator[Finding]:
    file, in_force = seen.configuration.settings, seen.service.in_force
    if isinstance(in_force, Unknown):
        yield unknown(f"the settings of mpsd are unknown: {in_force.reason}")
        return
    if isinstance(file, Unknown):
        yield unknown(f"the settings in the configuration file are unknown: {file.reason}")
        return
    applied, waiting = reload.changed(_located(in_force.value), _located(file.value))
    if not applied and not waiting:
        return
    remedy = "systemctl restart mpsd (clients are not affected)" if waiting else reload.RELOAD
    if "paths.runtime_dir" in waiting:
        remedy = "control daemons are found by this path: restore it, systemctl start mpsd-stop-daemons, change it,"
        remedy += " systemctl start mpsd"
    yield Finding(
        Verdict.WARN,
        f"the settings in force differ from {seen.configuration.path}: {', '.join((*applied, *waiting))}",
        {"path": str(seen.configuration.path), "reload": list(applied), "restart": list(waiting)},
        remedy,
    )


def _located(settings: Settings) -> Settings:
    """Set the path of the socket explicitly, also where it is the default."""
    return replace(settings, api=replace(settings.api, socket=settings.socket))


def _unit(seen: Observed) -> Iterator[Finding]:
    if isinstance(seen.service.units, Unknown):
        yield unknown(seen.service.units.reason)
        return
    for name, unit in seen.service.units.value.items():
        if name not in _OWN:
            continue
        found = _of_unit(name, unit, answers=_answers(seen) is not None)
        if found is not None:
            verdict, because, remedy = found
            evidence = {each: unit.get(each, "") for each in (*_STATES, "NRestarts", "ExecMainStatus")}
            yield Finding(verdict, because, evidence, remedy, name)


def _of_unit(name: str, unit: Mapping[str, str], *, answers: bool) -> tuple[Verdict, str, str] | None:
    """Return what is wrong with a unit, and the remedy; None where nothing is."""
    load, state, sub, result, enabled = (unit.get(each, "") for each in _STATES)
    found = None
    if load == "masked":
        found = Verdict.FAIL, "it is masked, so nothing can start it", f"systemctl unmask {name}"
    elif load != "loaded":
        found = Verdict.FAIL, f"systemd cannot load it: {load}", f"systemd-analyze verify {name}"
    elif state == "failed":
        status = unit.get("ExecMainStatus", "0")
        why = "too many starts within a short time" if "start-limit" in result else result
        why += f", status {status}" if result == "exit-code" else ""
        remedy = f"journalctl -u {name} -e; then systemctl reset-failed {name} && systemctl start {name}"
        found = Verdict.FAIL, f"it failed: {why}", remedy
    elif sub == "auto-restart":
        again = f"it ended ({result}), and systemd has restarted it {unit.get('NRestarts', '0')} times so far"
        found = Verdict.FAIL, again, f"journalctl -u {name} -e"
    elif name == _SERVICE and state in _STOPPED_BY_HAND and not answers:
        found = Verdict.WARN, f"it is {state}", f"systemctl start {name}"
    elif enabled == "disabled" and state == "active":
        found = Verdict.WARN, "it is running, but is not started at boot", f"systemctl enable {name}"
    return found


def _unit_settings(seen: Observed) -> Iterator[Finding]:
    if isinstance(seen.service.units, Unknown):
        yield unknown(seen.service.units.reason)
        return
    unit = seen.service.units.value.get(_SERVICE, {})
    wrong = {
        "KillMode": ("process", "stopping mpsd would end the control daemons and all their clients"),
        "PrivateDevices": ("no", "no GPU would be visible"),
        "PrivateIPC": ("no", "servers and clients would not share /dev/shm"),
        "PrivateUsers": ("no", "all uids would appear as one, and no server could run as its client's uid"),
        "PrivateTmp": ("no", "a restart would remove the /tmp of control daemons and clients that keep running"),
        "RuntimeDirectoryPreserve": (
            "yes",
            "stopping mpsd would remove the sockets of control daemons that keep running",
        ),
    }
    for key, (right, harm) in wrong.items():
        value = unit.get(key, right)
        if key == "RuntimeDirectoryPreserve" and not unit.get("RuntimeDirectory"):
            continue
        if value != right:
            yield Finding(
                Verdict.FAIL,
                f"{key}={value}: {harm}",
                {key: value, "FragmentPath": unit.get("FragmentPath", ""), "DropInPaths": unit.get("DropInPaths", "")},
                f"systemctl edit {_SERVICE}: [Service] {key}={right}; then systemctl restart mpsd",
                subject=_SERVICE,
            )


def _tasks(seen: Observed) -> Iterator[Finding]:
    tasks = seen.service.tasks
    if isinstance(tasks, Unknown):
        yield unknown(tasks.reason if seen.service.process is not None else "no mpsd process is visible")
        return
    group, there, most = tasks.value.group, tasks.value.there, tasks.value.most
    if most is not None and most - there < _FREE_TASKS:
        because = (
            f"{group} has {there} of at most {most} processes and threads, and MPS servers need some for each client"
        )
        evidence = {"group": str(group), "tasks": there, "most": most}
        remedy = "set TasksMax=infinity in mpsd's unit (--pids-limit=-1 for a container)"
        yield Finding(Verdict.FAIL if there >= most else Verdict.WARN, because, evidence, remedy)


def _node(seen: Observed) -> Iterator[Finding]:
    answers = _answers(seen)
    if answers is None:
        yield unknown("mpsd does not answer")
    elif not answers.healthy:
        yield Finding(Verdict.FAIL, answers.because, {}, "see the other checks, and mpsctl status")


def _gpu_health(seen: Observed) -> Iterator[Finding]:
    answers = _answers(seen)
    gpus = answers.gpus if answers is not None else ()
    yield from _reasons(
        answers, _GPU_KINDS, {f"GPU {each.index}": {"uuid": each.uuid, "health": each.health} for each in gpus}
    )


def _daemon(seen: Observed) -> Iterator[Finding]:
    answers = _answers(seen)
    yield from _reasons(answers, _DAEMON_KINDS, _daemons(answers))


def _wedge(seen: Observed) -> Iterator[Finding]:
    answers = _answers(seen)
    yield from _reasons(answers, _WEDGE_KINDS, _daemons(answers))


def _limits(seen: Observed) -> Iterator[Finding]:
    answers = _answers(seen)
    yield from _reasons(answers, _LIMIT_KINDS, _daemons(answers))


def _log_lines(seen: Observed) -> Iterator[Finding]:
    answers = _answers(seen)
    if answers is None:
        yield unknown("mpsd does not answer")
        return
    for each in answers.daemons:
        if each.unknown_lines:
            count = f"{each.unknown_lines} line{'s' if each.unknown_lines > 1 else ''}"
            because = f"the logs of {each.name} have {count} that mpsd does not know: {each.latest_unknown_line!r}"
            remedy = (
                "see latest_unknown_lines in: mpsctl daemons -o json; a newer mpsd may know the words of this driver"
            )
            yield Finding(Verdict.WARN, because, {"lines": each.unknown_lines}, remedy, each.name)


_OTHERS: Final = frozenset({ViolationKind.SHORT, ViolationKind.LIMITS})


def _violations(seen: Observed) -> Iterator[Finding]:
    answers = _answers(seen)
    if answers is None:
        yield unknown("mpsd does not answer")
        return
    for each in answers.violations:
        if each.kind in _OTHERS:
            continue  # another check reports it
        yield Finding(Verdict.WARN, each.because, {"pid": each.pid}, each.hint, f"pid {each.pid}")


def _daemons(answers: Answers | None) -> dict[str, dict[str, object]]:
    """Return the values to report for each control daemon."""
    return {
        each.name: {"state": each.state, "pid": each.pid, "pipe_directory": each.pipe_directory}
        for each in (answers.daemons if answers is not None else ())
    }


def _reasons(
    answers: Answers | None, kinds: Collection[Kind], evidence: Mapping[str, Mapping[str, object]]
) -> Iterator[Finding]:
    """Yield mpsd's reasons of these kinds, with the values of each subject."""
    if answers is None:
        yield unknown("mpsd does not answer")
        return
    for each in answers.reasons:
        if each.kind in kinds:
            verdict = Verdict.WARN if each.kind in _WARNED else Verdict.FAIL
            yield Finding(verdict, each.because, evidence.get(each.subject, {}), each.hint, each.subject)


CHECKS: Final = (
    Check("mpsd", "mpsd answers this caller", "No lease can be granted, and no limit is watched.", _mpsd),
    Check(
        "socket",
        "the API socket exists, mpsd listens on it, and this caller may connect",
        "Callers cannot reach mpsd.",
        _socket,
    ),
    Check(
        "version",
        "mpsd and mpsctl have the same version",
        "An upgrade takes effect only when mpsd is restarted.",
        _version,
    ),
    Check(
        "configuration", "the configuration file is readable and valid", "The next start of mpsd fails.", _configuration
    ),
    Check(
        "reload",
        "the settings in force are those of the configuration file",
        "Edited settings are not in force until mpsd is reloaded or restarted.",
        _reload,
    ),
    Check(
        "unit",
        "systemd can start mpsd, and has not given up restarting it",
        "mpsd is not restarted when it ends.",
        _unit,
    ),
    Check(
        "unit-settings",
        "mpsd's unit does not stop the control daemons when mpsd stops",
        "A restart or an upgrade of mpsd ends every client.",
        _unit_settings,
    ),
    Check(
        "tasks",
        "mpsd's control group has room for more processes and threads",
        "Servers cannot create threads for their clients, or mpsd cannot start a control daemon.",
        _tasks,
    ),
    Check("node", "mpsd reports the node as healthy", "mpsd has a reason that no other check covers.", _node),
    Check("gpu-health", "mpsd can grant leases on every GPU", "No lease can be granted on that GPU.", _gpu_health),
    Check("daemon", "every control daemon is ready", "No lease can be granted on its GPU.", _daemon),
    Check(
        "wedge",
        "every server answers the canaries that mpsd sent to it",
        "No lease can be granted on that GPU; a client that connects by itself hangs when it initialises CUDA.",
        _wedge,
    ),
    Check("limits", "every limit reads back as mpsd set it", "A client can use more than its lease grants.", _limits),
    Check(
        "log-lines",
        "mpsd knows every line in the logs of control daemons and servers",
        "mpsd asks a server for each of its unknown lines, once a second at most, and does not know what they say.",
        _log_lines,
    ),
    Check(
        "violations",
        "every process has the lease, the user and the limits that it should have",
        "A process uses what it was not granted, or has less than it was granted.",
        _violations,
    ),
)
"""In the order of the report."""
