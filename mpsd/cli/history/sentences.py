"""Events as sentences: one for each kind, with the names of mpsctl's tables, and times in this machine's zone."""

from functools import cache
from typing import TYPE_CHECKING, Final

from mpsd.cli.render import as_here, fact, fold, limit, percent, size, when
from mpsd.cli.tables import Look
from mpsd.cli.users import name_of

if TYPE_CHECKING:
    from mpsd.cli import answer_types

_BECAUSE: Final = "{because}"
_OF_DAEMON: Final = "{daemon}: {because}"
_OF_LEASE: Final = "{lease}: {because}"

SENTENCES: Final = {
    # the node
    "node_started": "mpsd started",
    "node_stopping": "mpsd is stopping{daemons}",
    "node_stopped": "mpsd stopped",
    "api_listening": "mpsd listens on {socket}",
    "metrics_listening": "mpsd offers its metrics on {address}",
    "metrics_not_listening": _BECAUSE,
    "node_not_closed": _BECAUSE,
    "host_requirement_missing": _BECAUSE,
    "socket_replaced": "the socket {socket} of {user} was replaced",
    "peer_refused": "{user}, pid {pid}, was refused {asked}: {because}",
    "api_defect": "mpsd failed to answer {path}",
    "settings_reloaded": "the configuration was reloaded: {changes}",
    "settings_refused": "the configuration was not reloaded: {because}",
    "names_unknown": _BECAUSE,
    "supervisor_stuck": "mpsd's supervision does not advance: {daemons}",
    "listener_stuck": "mpsd accepts no connections: {because}",
    "library_report": "a library of mpsd reports: {because}",
    # what mpsd stores
    "store_full": "nothing can be stored: {because}",
    "store_writable": "leases can be stored again",
    "store_set_aside": "a damaged store was set aside: {because}",
    "store_rewritten": "mpsd rewrote a store: {because}",
    "file_not_stored": "{file} cannot be written: {because}",
    "file_damaged": "a file of mpsd is damaged: {because}",
    "history_not_stored": "the history of granted and held amounts is not stored: {because}",
    "history_stored": "the history of granted and held amounts is stored again",
    "events_lost": _BECAUSE,
    "lines_left_out": "{left_out} lines are not shown: {because}",
    "log_lines_lost": "{lines} lines of mpsd's log were lost: {because}",
    # GPUs
    "gpu_found": "GPU {index} is a {name} ({uuid})",
    "gpu_xid": "{uuid} reported Xid {xid}: {because}",
    "gpu_health": "GPU {index} is {health}: {because}",
    "gpu_admission": "GPU {index} admits {requests}: {because}",
    "compute_mode_set": "GPU {index}: its compute mode is {mode}",
    "compute_mode_restored": "GPU {index}: its compute mode is {mode} again: {because}",
    "compute_mode_left": "GPU {index}: its compute mode was left as it is, {mode}: {because}",
    "compute_mode_trouble": "GPU {index}: its compute mode is {mode}: {because}",
    "compute_mode_not_stored": "the compute modes cannot be stored: {because}",
    # control daemons
    "daemon_state": "{daemon} is {state}: {because}",
    "daemon_death": "{daemon} died: {how}; {verdict}",
    "daemon_forced": "mpsd is ending {daemon} ({step}): {because}",
    "operation_begun": "{daemon}: {verb} began: {because}",
    "operation_resumed": "{daemon}: {verb} continues: {because}",
    "operation_ended": "{daemon}: {verb} {state}: {because}",
    "limits_verified": "{daemon}: its limits are {limits}, read back",
    "limits_not_held": "{daemon}: a limit does not hold: {because}",
    "limits_not_given": "{daemon}: server {server} gave a client {given}, and mpsd had set {command}",
    "answer_unforeseen": "{daemon}: server {server} answers {command!r} with {answer}, which mpsd does not know",
    "limit_drift": "{daemon}: {drift}",
    "limit_drift_ended": _OF_DAEMON,
    "foreign_command": "{daemon}: a foreign front-end sent the command {command}",
    "pipe_access_drift": "{daemon}: another program changed the access to {path}: it is {found} instead of {wanted}",
    "pipe_access_not_held": "{daemon}: the access to its pipe directory does not hold: {because}",
    "server_orphaned": "{daemon}: server {server} is an orphan: its control daemon is dead",
    "server_stopped": "{daemon}: server {server} of {user} was stopped (SIGSTOP), and no client is served",
    "server_continued": "{daemon}: server {server} of {user} has continued",
    "server_killed": "{daemon}: mpsd ended server {server}: {because}",
    "server_exited": "{daemon}: server {server} ended with status {status}",
    "server_failed": "{daemon}: server {server} failed: {words}",
    "server_faulted": "{daemon}: the log of server {server} reports a fatal GPU fault",
    "leases_faulted": "{daemon}: the fault affected {leases}: {because}",
    "server_recovered": "{daemon}: server {server} has recovered from its fault",
    "server_suspect": "{daemon}: a canary has to examine its server: {because}",
    "canary_ended": "{daemon}: a canary ended ({proof}): {because}",
    "server_wedged": "{daemon}: its server serves no client: {because}",
    "server_serves": "{daemon}: its server serves clients: {because}",
    "log_shortened": "{daemon}: its log was shortened by {bytes}",
    "log_not_shortened": "{daemon}: its log cannot be shortened: {because}",
    "log_silent": "{daemon}: its log shows nothing: {because}",
    "log_resumed": _OF_DAEMON,
    "log_not_watched": "{daemon}: its log cannot be watched: {because}",
    "uid_quarantined": "{user} is quarantined: {because}",
    "uid_pardoned": "{user} is no longer quarantined: {because}",
    "shared_memory_differs": _BECAUSE,
    "mounts_unknown": _BECAUSE,
    # leases and their clients
    "lease_granted": "{lease}: granted to {user}, pid {pid}: {because}",
    "lease_refused": "{user}, pid {pid}, was refused a lease: {because} [{code}]",
    "lease_waits": "{lease}: {user}, pid {pid}, waits for it: {because}",
    "lease_renewed": "{lease}: renewed for {ttl} s",
    "lease_claimed": "{lease}: pid {pid} took its claim",
    "lease_claim_returned": "{lease}: its claim can be taken again: {because}",
    "lease_claim_expired": _OF_LEASE,
    "lease_holder_added": _OF_LEASE,
    "lease_handed_over": _OF_LEASE,
    "lease_closing": "{lease}: mpsd is ending its clients: {because}",
    "lease_borne": "{lease}: {because}",
    "lease_clients_lost": "{lease}: the work of its clients (pid {pids}) on {daemon} has ended: {because}",
    "lease_user_changed": _OF_LEASE,
    "lease_expiring": "{lease} expires soon: {because}",
    "lease_expired": _OF_LEASE,
    "leases_restored": "{leases} leases of the previous mpsd continue, and {ended} have ended",
    "lease_not_restored": "{lease} could not be restored: {because}",
    "lease_not_restored_ended": _OF_LEASE,
    "leases_incomplete": "{daemon} is held, since its leases may be incomplete: {because}",
    "leases_complete": "{gpu}: its leases are complete: {because}",
    "client_attributed": "{lease}: process {client} is its client",
    "violation": "{daemon}: violation ({kind}): {because}",
    "violation_ended": "{daemon}: violation ({kind}) of process {pid} has ended",
    "client_forced": "mpsd is ending process {pid} ({step}): {because}",
    "client_not_ended": "mpsd cannot end process {pid} now: {because}",
    "client_let_go": "mpsd no longer ends process {pid}: {because}",
    "client_end_resumed": "mpsd continues to end process {pid}: {because}",
    "client_ended": "process {pid} was ended: {because}",
    "lease_ended": "{lease}: ended: {because}",
}
"""The sentence of each kind of event, with placeholders for its facts and for those that `_facts` adds."""

_VERDICTS: Final = {
    "at_once": "mpsd starts it again at once",
    "later": "mpsd starts it again in {delay:.1f} s",
    "give_up": "mpsd does not start it again, because it died too often",
}
_LEFT: Final = {"never": "; the control daemons keep running", "drain": ", and drains the control daemons"}
_MARKS: Final = {"warning": "! ", "error": "!!"}
_COLOURS: Final = {"warning": "yellow", "error": "red"}


@cache
def _name_of(uid: int) -> str:
    """Return a user's name, looked up once: there may be thousands of events."""
    return name_of(uid)


class _Facts(dict[str, str]):
    """The facts of an event as words; a missing fact shows as missing."""

    def __missing__(self, name: str) -> str:
        return f"(no {name})"


def sentence(event: "answer_types.Event") -> str:
    """Return an event as a sentence, with its hint; for an unknown kind, its facts."""
    kind = str(event["event"])
    facts = _facts(event)
    template = SENTENCES.get(kind)
    if kind == "lease_refused" and "lease" in event:
        template = "{lease}: refused: {because} [{code}]"
    if template is None:
        said = " ".join(f"{name}={fact(value)}" for name, value in event.items() if name not in _USUAL)
        return f"{kind.replace('_', ' ')}: {said}".rstrip(": ")
    if "because" not in facts and template.endswith(": {because}"):
        template = template.removesuffix(": {because}")
    hint = f" ({event['hint']})" if event.get("hint") else ""
    return f"{template.format_map(facts)}{hint}"


_USUAL: Final = frozenset({"seq", "at", "level", "event"})


def _facts(event: "answer_types.Event") -> _Facts:
    """Return the facts of an event as words."""
    facts = _Facts({name: _words(value) for name, value in event.items()})
    if isinstance(uid := event.get("uid"), int):
        facts["user"] = _name_of(uid)
    if isinstance(because := event.get("because"), str):
        facts["because"] = as_here(because)
    facts.update(_of_daemons(event))
    match event["event"], event:
        case "node_stopping", {"stop_daemons": str(stops)}:
            facts["daemons"] = _LEFT.get(stops, "")
        case "settings_reloaded", {"applied": list(applied), "needs_restart": list(waiting)}:
            later = f"; applied by a restart: {', '.join(map(str, waiting))}" if waiting else ""
            facts["changes"] = f"{', '.join(map(str, applied)) or 'nothing has changed'}{later}"
        case "gpu_health", {"health": "ok"} if not event.get("because"):
            facts["because"] = "it answers"
        case "gpu_admission", {"admits": bool(admits)}:
            facts["requests"] = "requests" if admits else "no request"
    return facts


def _of_daemons(event: "answer_types.Event") -> dict[str, str]:
    """Return the facts of an event about a control daemon that need more than one value."""
    match event["event"], event:
        case "daemon_death", {"verdict": str(verdict), "delay": int() | float() as delay}:
            return {"verdict": _VERDICTS.get(verdict, verdict).format(delay=delay)}
        case "limits_verified", {"active_thread_percentage": threads, "pinned_device_mem_limit": memory}:
            said = f"{_limit('active_thread_percentage', threads)} of the threads and "
            return {"limits": said + _limit("pinned_device_mem_limit", memory)}
        case "limit_drift", {"limit": str(name), "wanted": wanted, "found": found, **others}:
            said = f"{name} is {_limit(name, found)} instead of {_limit(name, wanted)}"
            if command := others.get("command"):
                said += f"; the foreign command '{command}' changed it"
            return {"drift": said}
        case "foreign_command", {"command": command}:
            return {"command": f"'{command}'"}
        case "log_shortened", {"bytes": int(count)}:
            return {"bytes": size(count)}
        case _:
            return {}


def _limit(name: str, value: object) -> str:
    return limit(name, value) if value is None or isinstance(value, (int, float)) else str(value)


def _words(value: object) -> str:
    match value:
        case str():
            return value
        case list():
            return ", ".join(map(_words, value)) or "none"
        case None:
            return "none"
        case float():
            return percent(value).removesuffix("%")
        case _:
            return f"{value}"


def line(event: "answer_types.Event", look: Look) -> str:
    """Return an event as a line: time, severity, and the sentence, folded at the width of the terminal."""
    level = str(event.get("level", ""))
    start = f"{when(str(event['at']))} {_MARKS.get(level, '  ')} "
    text = fold(f"{start}{sentence(event)}", look.width, len(start))
    if look.colour and level in _COLOURS:
        import click

        return text[: len(start)] + click.style(text[len(start) :], fg=_COLOURS[level])
    return text
