"""Checks of mpsd itself: whether it runs and answers, its configuration, its units, and its own report of the node."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from mpsd.core import reload
from mpsd.core.doctor.finding import Finding, Observed, check, fail, known, unknown, unread, warn
from mpsd.core.model import Unknown
from mpsd.core.settings import Settings, Users

_STOPPED_BY_HAND: Final = {"inactive", "deactivating"}

_SERVICE: Final = "mpsd.service"

_STATES: Final = ("LoadState", "ActiveState", "SubState", "Result", "UnitFileState")
"""Properties of a unit in `systemctl show`."""

_AGAIN: Final = "systemctl restart mpsd.socket, or restart mpsd in the way it was started (clients are not affected)"


@check("mpsd", "mpsd answers this caller", "No lease can be granted, and no limit is watched.")
def _mpsd(seen: Observed) -> Iterator[Finding]:
    service, socket = seen.service, seen.service.socket
    evidence = {"path": str(socket.path), "mode": f"{socket.mode:04o}", "owner": socket.owner, "uid": seen.host.uid}
    if socket.listener is not None:
        evidence |= {"listener": socket.listener[0], "listener_uid": socket.listener[1]}
    if not isinstance(service.answers, Unknown):
        if socket.listener is not None and socket.listener[1] not in {0, socket.owner}:
            pid, uid = socket.listener
            because = f"pid {pid} of uid {uid} listens on {socket.path}, which belongs to uid {socket.owner}"
            yield warn(because, f"see ps -p {pid}", "", **evidence)
        return
    # The error of the connection is the reason, unless the path shows a better one. The holder of the lock tells
    # whether an mpsd runs nevertheless: one whose socket was removed looks just like none.
    because, remedy, holder = service.answers.reason, service.remedy, known(service.lock_holder)
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
    yield fail(because, remedy, "", **evidence, lock_holder=holder)


@check("version", "mpsd and mpsctl have the same version", "An upgrade takes effect only when mpsd is restarted.")
def _version(seen: Observed) -> Iterator[Finding]:
    answers, own = known(seen.service.answers), seen.service.version
    if answers is None:
        yield unknown("mpsd does not answer")
    elif answers.version != own:
        because = f"mpsd has version {answers.version}, but mpsctl has {own}"
        remedy = "systemctl restart mpsd, or restart it in the way it was started (clients are not affected)"
        yield warn(because, remedy, mpsd=answers.version, mpsctl=own)


@check(
    "configuration",
    "the configuration file is valid, and in force",
    "The next start of mpsd fails, or edited settings take effect only then.",
)
def _configuration(seen: Observed) -> Iterator[Finding]:
    file, answers = seen.configuration, known(seen.service.answers)
    path = str(file.path)
    if isinstance(file.settings, Unknown):
        yield fail(file.settings.reason, file.remedy, path=path)
        return
    if answers is None:
        return
    if isinstance(answers.settings, Unknown):
        yield unknown(f"the settings of mpsd are unknown: {answers.settings.reason}")
        return
    now, wanted = answers.settings.value, file.settings.value
    if wanted.daemon.users is Users.AUTO:  # in force is what it means for the control program and the GPUs
        wanted = replace(wanted, daemon=replace(wanted.daemon, users=now.daemon.users))
    applied, waiting = reload.changed(_located(now), _located(wanted))
    if not applied and not waiting:
        return
    remedy = "systemctl restart mpsd (clients are not affected)" if waiting else reload.RELOAD
    if "paths.runtime_dir" in waiting:
        remedy = (
            "control daemons are found by this path: restore it, systemctl start mpsd-stop-daemons, change it,"
            " systemctl start mpsd"
        )
    because = f"the settings in force differ from {path}: {', '.join((*applied, *waiting))}"
    yield warn(because, remedy, path=path, reload=list(applied), restart=list(waiting))


def _located(settings: Settings) -> Settings:
    """Set the path of the socket explicitly, also where it is the default."""
    return replace(settings, api=replace(settings.api, socket=settings.socket))


@check(
    "unit",
    "systemd can start mpsd, has not given up restarting it, and does not stop the control daemons with it",
    "mpsd is not restarted when it ends, or a restart ends every client.",
)
def _unit(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen.service.units)
    units = known(seen.service.units) or {}
    for name, unit in units.items():
        yield from _of_unit(name, unit, answers=known(seen.service.answers) is not None)
    mpsd = units.get(_SERVICE, {})
    if mpsd.get("LoadState") == "loaded":  # otherwise systemd shows its own defaults
        yield from _of_settings(mpsd)


def _of_unit(name: str, unit: Mapping[str, str], *, answers: bool) -> Iterator[Finding]:
    evidence = {each: unit.get(each, "") for each in (*_STATES, "NRestarts", "ExecMainStatus")}
    load, state, sub, result, enabled = (evidence[each] for each in _STATES)
    if load == "masked":
        yield fail("it is masked, so nothing can start it", f"systemctl unmask {name}", name, **evidence)
    elif load != "loaded":
        yield fail(f"systemd cannot load it: {load}", f"systemd-analyze verify {name}", name, **evidence)
    elif state == "failed":
        why = "too many starts within a short time" if "start-limit" in result else result
        why += f", status {unit.get('ExecMainStatus', '0')}" if result == "exit-code" else ""
        remedy = f"journalctl -u {name} -e; then systemctl reset-failed {name} && systemctl start {name}"
        yield fail(f"it failed: {why}", remedy, name, **evidence)
    elif sub == "auto-restart":
        because = f"it ended ({result}), and systemd has restarted it {unit.get('NRestarts', '0')} times so far"
        yield fail(because, f"journalctl -u {name} -e", name, **evidence)
    elif name == _SERVICE and state in _STOPPED_BY_HAND and not answers:
        yield warn(f"it is {state}", f"systemctl start {name}", name, **evidence)
    elif enabled == "disabled" and state == "active":
        yield warn("it is running, but is not started at boot", f"systemctl enable {name}", name, **evidence)


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
        evidence = {key: value, **{each: unit.get(each, "") for each in ("FragmentPath", "DropInPaths")}}
        remedy = f"systemctl edit {_SERVICE}: [Service] {key}={right}; then systemctl restart mpsd"
        yield fail(f"{key}={value}: {harm}", remedy, _SERVICE, **evidence)


@check(
    "node",
    "mpsd has nothing to report about the node",
    "Each finding is a reason, a warning, a violation or a note of mpsctl status.",
)
def _node(seen: Observed) -> Iterator[Finding]:
    answers = known(seen.service.answers)
    if answers is None:
        yield unknown("mpsd does not answer")
        return
    yield from answers.reports


CHECKS: Final = (_mpsd, _version, _configuration, _unit, _node)
"""In the order of the report."""
