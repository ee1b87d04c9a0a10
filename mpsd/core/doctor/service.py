"""Checks of mpsd itself: whether it runs and answers, its configuration, its units, and its own report of the node."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from mpsd.core import reload
from mpsd.core.doctor.finding import Check, Finding, Verdict, unknown
from mpsd.core.doctor.observed import Observed
from mpsd.core.model import Known, Unknown
from mpsd.core.settings import Settings

_STOPPED_BY_HAND: Final = {"inactive", "deactivating"}

_SERVICE: Final = "mpsd.service"

_STATES: Final = ("LoadState", "ActiveState", "SubState", "Result", "UnitFileState")
"""Properties of a unit in `systemctl show`."""

_AGAIN: Final = "systemctl restart mpsd.socket, or restart mpsd in the way it was started (clients are not affected)"


def _mpsd(seen: Observed) -> Iterator[Finding]:
    service, socket = seen.service, seen.service.socket
    holder = service.lock_holder.value if isinstance(service.lock_holder, Known) else None
    evidence = {"path": str(socket.path), "mode": f"{socket.mode:04o}", "owner": socket.owner, "uid": seen.host.uid}
    if socket.listener is not None:
        evidence |= {"listener": socket.listener[0], "listener_uid": socket.listener[1]}
    if isinstance(service.answers, Known):
        if socket.listener is not None and socket.listener[1] not in {0, socket.owner}:
            pid, uid = socket.listener
            because = f"pid {pid} of uid {uid} listens on {socket.path}, which belongs to uid {socket.owner}"
            yield Finding(Verdict.WARN, because, evidence, f"see ps -p {pid}")
        return
    # The error of the connection is the reason, unless the path shows a better one. The holder of the lock tells
    # whether an mpsd runs nevertheless: one whose socket was removed looks just like none.
    because, remedy = service.answers.reason, service.remedy
    if socket.closed is not None:
        because = f"uid {seen.host.uid} may not traverse {socket.closed} to reach {socket.path}"
        remedy = f"chmod o+x {socket.closed}"
    elif socket.kind not in {"socket", None}:
        because, remedy = f"{socket.path} is a {socket.kind}, not a socket", f"rm {socket.path}"
    if holder is not None:
        where = seen.settings.paths.runtime_dir
        because += f"; pid {holder} holds the lock of {where}"
        if socket.kind is None and socket.closed is None and socket.path.parent == where:
            because += ": it is running, but its socket was removed"
            remedy = _AGAIN
        else:
            because += ", so it is another mpsd, or it hangs"
    yield Finding(Verdict.FAIL, because, {**evidence, "lock_holder": holder}, remedy)


def _version(seen: Observed) -> Iterator[Finding]:
    answers = seen.service.answers
    if isinstance(answers, Unknown):
        yield unknown("mpsd does not answer")
    elif answers.value.version != seen.service.version:
        yield Finding(
            Verdict.WARN,
            f"mpsd has version {answers.value.version}, but mpsctl has {seen.service.version}",
            {"mpsd": answers.value.version, "mpsctl": seen.service.version},
            "systemctl restart mpsd, or restart it in the way it was started (clients are not affected)",
        )


def _configuration(seen: Observed) -> Iterator[Finding]:
    file, answers = seen.configuration, seen.service.answers
    evidence: dict[str, object] = {"path": str(file.path)}
    if isinstance(file.settings, Unknown):
        yield Finding(Verdict.FAIL, file.settings.reason, evidence, file.remedy)
        return
    if isinstance(answers, Unknown):
        return
    if isinstance(answers.value.settings, Unknown):
        yield unknown(f"the settings of mpsd are unknown: {answers.value.settings.reason}")
        return
    applied, waiting = reload.changed(_located(answers.value.settings.value), _located(file.settings.value))
    if not applied and not waiting:
        return
    remedy = "systemctl restart mpsd (clients are not affected)" if waiting else reload.RELOAD
    if "paths.runtime_dir" in waiting:
        remedy = "control daemons are found by this path: restore it, systemctl start mpsd-stop-daemons, change it,"
        remedy += " systemctl start mpsd"
    because = f"the settings in force differ from {file.path}: {', '.join((*applied, *waiting))}"
    evidence |= {"reload": list(applied), "restart": list(waiting)}
    yield Finding(Verdict.WARN, because, evidence, remedy)


def _located(settings: Settings) -> Settings:
    """Set the path of the socket explicitly, also where it is the default."""
    return replace(settings, api=replace(settings.api, socket=settings.socket))


def _unit(seen: Observed) -> Iterator[Finding]:
    if isinstance(seen.service.units, Unknown):
        yield unknown(seen.service.units.reason)
        return
    units = seen.service.units.value
    for name, unit in units.items():
        found = _of_unit(name, unit, answers=isinstance(seen.service.answers, Known))
        if found is not None:
            verdict, because, remedy = found
            evidence = {each: unit.get(each, "") for each in (*_STATES, "NRestarts", "ExecMainStatus")}
            yield Finding(verdict, because, evidence, remedy, name)
    mpsd = units.get(_SERVICE, {})
    if mpsd.get("LoadState") == "loaded":  # otherwise systemd shows its own defaults
        yield from _of_settings(mpsd)


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


_RIGHT: Final = {
    "KillMode": ("process", "stopping mpsd would end the control daemons and all their clients"),
    "PrivateDevices": ("no", "no GPU would be visible"),
    "PrivateIPC": ("no", "servers and clients would not share /dev/shm"),
    "PrivateUsers": ("no", "all uids would appear as one, and no server could run as its client's uid"),
    "PrivateTmp": ("no", "a restart would remove the /tmp of control daemons and clients that keep running"),
    "RuntimeDirectoryPreserve": ("yes", "stopping mpsd would remove the sockets of control daemons that keep running"),
}
"""The settings of mpsd's unit on which its clients depend, and the consequence of any other value."""


def _of_settings(unit: Mapping[str, str]) -> Iterator[Finding]:
    for key, (right, harm) in _RIGHT.items():
        value = unit.get(key, right)
        if value == right or (key == "RuntimeDirectoryPreserve" and not unit.get("RuntimeDirectory")):
            continue
        evidence = {
            key: value,
            "FragmentPath": unit.get("FragmentPath", ""),
            "DropInPaths": unit.get("DropInPaths", ""),
        }
        remedy = f"systemctl edit {_SERVICE}: [Service] {key}={right}; then systemctl restart mpsd"
        yield Finding(Verdict.FAIL, f"{key}={value}: {harm}", evidence, remedy, _SERVICE)


def _node(seen: Observed) -> Iterator[Finding]:
    answers = seen.service.answers
    if isinstance(answers, Unknown):
        yield unknown("mpsd does not answer")
        return
    for each in answers.value.reports:
        yield Finding(Verdict(each.verdict), each.because, {}, each.hint, each.subject)


CHECKS: Final = (
    Check("mpsd", "mpsd answers this caller", "No lease can be granted, and no limit is watched.", _mpsd),
    Check(
        "version",
        "mpsd and mpsctl have the same version",
        "An upgrade takes effect only when mpsd is restarted.",
        _version,
    ),
    Check(
        "configuration",
        "the configuration file is valid, and in force",
        "The next start of mpsd fails, or edited settings take effect only then.",
        _configuration,
    ),
    Check(
        "unit",
        "systemd can start mpsd, has not given up restarting it, and does not stop the control daemons with it",
        "mpsd is not restarted when it ends, or a restart ends every client.",
        _unit,
    ),
    Check(
        "node",
        "mpsd has nothing to report about the node",
        "Each finding is a reason, a warning, a violation or a note of mpsctl status.",
        _node,
    ),
)
"""In the order of the report."""
