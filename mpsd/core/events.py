"""The events of mpsd: of each kind, its name, its levels, its facts, its meaning and its sentence. Pure.

The log, the API, mpsctl's sentences and lists, and the page have them from here. A gate compares the
calls of the logger with this table, and every test compares the events that its node logged.
"""

from enum import StrEnum
from typing import Final, Self

_GROUP: Final = "cgroup? unit? container? pod?"
_LEASE: Final = "lease uid pid"
_MODE: Final = "index uuid mode"


class EventName(StrEnum):
    """The kinds of events; a line of mpsd's log has one of these and nothing else."""

    levels: str
    """Its possible levels, of `info`, `warning` and `error`."""
    facts: str
    """The names of its facts; a `?` marks a fact that can be absent."""
    meaning: str
    sentence: str
    """What happened, with placeholders for its facts and for those that mpsctl makes of them."""

    def __new__(cls, name: str, levels: str, facts: str, meaning: str, sentence: str) -> Self:
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.levels, kind.facts, kind.meaning, kind.sentence = levels, facts, meaning, sentence
        return kind

    # fmt: off
    NODE_STARTED = ("node_started", "info", "program server? nvml? simulated", "mpsd has started.", "mpsd started")
    NODE_STOPPING = ("node_stopping", "info", "stop_daemons", "mpsd begins to stop.", "mpsd is stopping{daemons}")
    NODE_STOPPED = ("node_stopped", "info", "because", "This is the last event of this mpsd.", "mpsd stopped")
    API_LISTENING = ("api_listening", "info", "socket mode", "mpsd answers on its socket.", "mpsd listens on {socket}")
    METRICS_LISTENING = ("metrics_listening", "info", "address", "mpsd offers its metrics on TCP.",
        "mpsd offers its metrics on {address}")
    METRICS_NOT_LISTENING = ("metrics_not_listening", "warning error", "address because hint",
        "mpsd cannot offer its metrics on TCP.", "{because}")
    METRICS_CROWDED = ("metrics_crowded", "warning", "because",
        "The TCP listener of the metrics has too many connections, and mpsd closes the oldest.", "{because}")
    NODE_NOT_CLOSED = ("node_not_closed", "warning", "because hint", "A program that misses MPS gets a whole GPU.",
        "{because}")
    HOST_REQUIREMENT_MISSING = ("host_requirement_missing", "warning", "missing because hint",
        "The machine lacks something that mpsd needs.", "{because}")
    SOCKET_REPLACED = ("socket_replaced", "warning", "socket uid",
        "mpsd replaced another user's socket at its own path.", "the socket {socket} of {user} was replaced")
    PEER_REFUSED = ("peer_refused", "warning", "uid pid asked because", "A caller lacks the role for its request.",
        "{user}, pid {pid}, was refused {asked}: {because}")
    API_DEFECT = ("api_defect", "error", "path exception left_out?", "A defect in mpsd made a request fail.",
        "mpsd failed to answer {path}")
    GPU_FOUND = ("gpu_found", "info", "index uuid name", "mpsd has found a GPU.", "GPU {index} is a {name} ({uuid})")
    GPU_XID = ("gpu_xid", "error", "uuid xid because left_out?", "A GPU reported a fault.",
        "{uuid} reported Xid {xid}: {because}")
    GPU_HEALTH = ("gpu_health", "info error", "index uuid health because?",
        "A GPU became readable, or is no longer readable.", "GPU {index} is {health}: {because}")
    GPU_ADMISSION = ("gpu_admission", "info warning", "index uuid? admits because?",
        "Requests for a GPU are admitted again, or all are refused.", "GPU {index} admits {requests}: {because}")
    COMPUTE_MODE_SET = ("compute_mode_set", "info", f"{_MODE} found because", "mpsd has set the compute mode of a GPU.",
        "GPU {index}: its compute mode is {mode}")
    COMPUTE_MODE_RESTORED = ("compute_mode_restored", "info", f"{_MODE} because",
        "A GPU has its own compute mode again.", "GPU {index}: its compute mode is {mode} again: {because}")
    COMPUTE_MODE_LEFT = ("compute_mode_left", "info", f"{_MODE} found because",
        "mpsd leaves a compute mode that another program has set.",
        "GPU {index}: its compute mode was left as it is, {mode}: {because}")
    COMPUTE_MODE_TROUBLE = ("compute_mode_trouble", "error", f"{_MODE} because", "A compute mode is not as configured.",
        "GPU {index}: its compute mode is {mode}: {because}")
    COMPUTE_MODE_NOT_STORED = ("compute_mode_not_stored", "error", "because",
        "The record of compute modes cannot be stored.", "the compute modes cannot be stored: {because}")
    DAEMON_STATE = ("daemon_state", "info warning error", "daemon state before on because pid",
        "The state of a control daemon has changed.", "{daemon} is {state}: {because}")
    DAEMON_DEATH = ("daemon_death", "warning",
        "daemon how cause verdict delay suspects cgroups command? clients? hint? uid? lease?",
        "A control daemon has died.", "{daemon} died: {how}; {verdict}")
    OPERATION_BEGUN = ("operation_begun", "info", "daemon operation verb because",
        "An operator's command takes effect on a control daemon.", "{daemon}: {verb} began: {because}")
    OPERATION_RESUMED = ("operation_resumed", "info", "daemon operation verb because",
        "A new mpsd continues an operation.", "{daemon}: {verb} continues: {because}")
    OPERATION_ENDED = ("operation_ended", "info", "daemon operation verb state because",
        "An operation has finished or failed, or another replaced it.", "{daemon}: {verb} {state}: {because}")
    DAEMON_FORCED = ("daemon_forced", "warning", "daemon step pid? because?", "mpsd ends a control daemon by force.",
        "mpsd is ending {daemon} ({step}): {because}")
    LIMITS_VERIFIED = ("limits_verified", "info", "daemon active_thread_percentage pinned_device_mem_limit",
        "The limits read back as mpsd set them.", "{daemon}: its limits are {limits}, read back")
    LIMITS_NOT_HELD = ("limits_not_held", "error", "daemon because", "A control daemon does not accept its limits.",
        "{daemon}: a limit does not hold: {because}")
    LIMITS_NOT_GIVEN = ("limits_not_given", "error", "daemon server command given left_out?",
        "A server gave a client other limits than mpsd had set.",
        "{daemon}: server {server} gave a client {given}, and mpsd had set {command}")
    ANSWER_UNFORESEEN = ("answer_unforeseen", "warning", "daemon server command answer left_out?",
        "A server answers in a form that mpsd does not know; logged once for each form.",
        "{daemon}: server {server} answers {command!r} with {answer}, which mpsd does not know")
    LIMIT_DRIFT = ("limit_drift", "warning", "daemon limit wanted found command", "A limit is not as mpsd set it.",
        "{daemon}: {drift}")
    LIMIT_DRIFT_ENDED = ("limit_drift_ended", "info", "daemon limits? because",
        "The limits are as mpsd set them again.", "{daemon}: {because}")
    PIPE_ACCESS_DRIFT = ("pipe_access_drift", "warning", "daemon path wanted found",
        "Another program has changed the access to a control daemon.",
        "{daemon}: another program changed the access to {path}: it is {found} instead of {wanted}")
    PIPE_ACCESS_NOT_HELD = ("pipe_access_not_held", "error", "daemon because",
        "The pipe directory does not stay closed.",
        "{daemon}: the access to its pipe directory does not hold: {because}")
    SERVER_ORPHANED = ("server_orphaned", "warning", "daemon server", "A server has outlived its control daemon.",
        "{daemon}: server {server} is an orphan: its control daemon is dead")
    SERVER_STOPPED = ("server_stopped", "warning", "daemon server uid left_out?",
        "A server was stopped, by its user or root, and no client is served.",
        "{daemon}: server {server} of {user} was stopped (SIGSTOP), and no client is served")
    SERVER_CONTINUED = ("server_continued", "info", "daemon server uid left_out?", "A stopped server has continued.",
        "{daemon}: server {server} of {user} has continued")
    SERVER_KILLED = ("server_killed", "warning", "daemon server uid because left_out?",
        "mpsd has ended a stopped or hung server that nothing used any more.",
        "{daemon}: mpsd ended server {server}: {because}")
    SERVER_EXITED = ("server_exited", "warning", "daemon server status left_out?", "A server exited with an error.",
        "{daemon}: server {server} ended with status {status}")
    SERVER_FAILED = ("server_failed", "warning", "daemon server words left_out?", "A server did not start.",
        "{daemon}: server {server} failed: {words}")
    SERVER_FAULTED = ("server_faulted", "warning", "daemon server left_out?",
        "The log of a server reports a fatal fault.", "{daemon}: the log of server {server} reports a fatal GPU fault")
    LEASES_FAULTED = ("leases_faulted", "error", "daemon server leases clients because hint",
        "A fatal fault has ended the work of all clients of a server.",
        "{daemon}: the fault affected {leases}: {because}")
    SERVER_RECOVERED = ("server_recovered", "info", "daemon server", "A server takes clients again after a fault.",
        "{daemon}: server {server} has recovered from its fault")
    SERVER_SUSPECT = ("server_suspect", "info", "daemon cause uid because", "A canary has to examine a server.",
        "{daemon}: a canary has to examine its server: {because}")
    CANARY_ENDED = ("canary_ended", "info warning", "daemon proof mps cause because", "A canary has ended.",
        "{daemon}: a canary ended ({proof}): {because}")
    SERVER_WEDGED = ("server_wedged", "error", "daemon because", "A server serves no client: a canary got no answer.",
        "{daemon}: its server serves no client: {because}")
    SERVER_SERVES = ("server_serves", "info", "daemon because", "A server that was suspect serves clients.",
        "{daemon}: its server serves clients: {because}")
    FOREIGN_COMMAND = ("foreign_command", "warning", "daemon command left_out?",
        "A program other than mpsd gave a control daemon a command.",
        "{daemon}: a foreign front-end sent the command {command}")
    LOG_SHORTENED = ("log_shortened", "info", "daemon bytes", "mpsd has shortened the log of a control daemon.",
        "{daemon}: its log was shortened by {bytes}")
    LOG_NOT_SHORTENED = ("log_not_shortened", "warning", "daemon because",
        "The log of a control daemon stays too long.", "{daemon}: its log cannot be shortened: {because}")
    LOG_SILENT = ("log_silent", "warning", "daemon because suspects",
        "The log of a control daemon no longer shows its activity.", "{daemon}: its log shows nothing: {because}")
    LOG_RESUMED = ("log_resumed", "info", "daemon because", "The log of a control daemon shows its activity again.",
        "{daemon}: {because}")
    LOG_NOT_WATCHED = ("log_not_watched", "warning", "daemon because", "The log of a control daemon is only polled.",
        "{daemon}: its log cannot be watched: {because}")
    FILE_NOT_STORED = ("file_not_stored", "error", "daemon? file because", "A file of mpsd cannot be written.",
        "{file} cannot be written: {because}")
    FILE_DAMAGED = ("file_damaged", "warning", "daemon? because", "A file of mpsd is damaged.",
        "a file of mpsd is damaged: {because}")
    UID_QUARANTINED = ("uid_quarantined", "error", "uid daemon because",
        "A uid has lost access to all control daemons.", "{user} is quarantined: {because}")
    UID_PARDONED = ("uid_pardoned", "warning", "uid because", "The quarantine of a uid has ended.",
        "{user} is no longer quarantined: {because}")
    GROUP_QUARANTINED = ("group_quarantined", "error", "cgroup daemon because",
        "A container's control group gets no lease any more.", "control group {cgroup} is quarantined: {because}")
    GROUP_PARDONED = ("group_pardoned", "warning", "cgroup because", "The quarantine of a control group has ended.",
        "control group {cgroup} is no longer quarantined: {because}")
    SHARED_MEMORY_DIFFERS = ("shared_memory_differs", "warning", "pid because hint",
        "A container and its MPS server have different /dev/shm.", "{because}")
    MOUNTS_UNKNOWN = ("mounts_unknown", "warning", "pid because hint",
        "Whether the holder of a lease sees its pipe directory is unknown.", "{because}")
    LEASE_GRANTED = ("lease_granted", "info",
        f"{_LEASE} gpus active_thread_percentage pinned_device_mem_limit processes waited? {_GROUP} because",
        "A lease is granted. Percentage and memory are those on its first GPU.",
        "{lease}: granted to {user}, pid {pid}: {because}")
    LEASE_REFUSED = ("lease_refused", "info", "lease? uid pid code limit? because",
        "A request is refused, or a lease that waited has ended.",
        "{user}, pid {pid}, was refused a lease: {because} [{code}]")
    LEASE_WAITS = ("lease_waits", "info", f"{_LEASE} because", "A request waits in the queue.",
        "{lease}: {user}, pid {pid}, waits for it: {because}")
    LEASE_RENEWED = ("lease_renewed", "info", f"{_LEASE} ttl", "A lease has more time to live.",
        "{lease}: renewed for {ttl} s")
    LEASE_CLAIMED = ("lease_claimed", "info", f"{_LEASE} {_GROUP} because",
        "A user took a claim, and owns the lease from now on.", "{lease}: pid {pid} took its claim")
    LEASE_CLAIM_RETURNED = ("lease_claim_returned", "info", f"{_LEASE} because",
        "A taken claim could not be opened, and can be taken again.",
        "{lease}: its claim can be taken again: {because}")
    LEASE_CLAIM_EXPIRED = ("lease_claim_expired", "info", f"{_LEASE} because", "No process took a claim in time.",
        "{lease}: {because}")
    LEASE_HOLDER_ADDED = ("lease_holder_added", "info", f"{_LEASE} {_GROUP} because",
        "A lease has another holder beside its first.", "{lease}: {because}")
    LEASE_HANDED_OVER = ("lease_handed_over", "info", f"{_LEASE} {_GROUP} because",
        "A lease has another holder instead of its first.", "{lease}: {because}")
    LEASE_CLOSING = ("lease_closing", "info", f"{_LEASE} because",
        "mpsd ends the clients of a lease, and then the lease.", "{lease}: mpsd is ending its clients: {because}")
    LEASE_BORNE = ("lease_borne", "info", f"{_LEASE} pids because",
        "A lease whose holders are gone lives on for its processes.", "{lease}: {because}")
    LEASE_CLIENTS_LOST = ("lease_clients_lost", "warning", f"{_LEASE} daemon pids because",
        "The work of clients of a lease has ended with their server; the processes may live on.",
        "{lease}: the work of its clients (pid {pids}) on {daemon} has ended: {because}")
    LEASE_USER_CHANGED = ("lease_user_changed", "info", f"{_LEASE} pids because hint",
        "A process of a lease of root runs as another user, and so does not reach MPS.", "{lease}: {because}")
    LEASE_EXPIRING = ("lease_expiring", "info", f"{_LEASE} clients because hint",
        "The time to live of a lease expires soon.", "{lease} expires soon: {because}")
    LEASE_EXPIRED = ("lease_expired", "info", f"{_LEASE} clients because", "The time to live of a lease has expired.",
        "{lease}: {because}")
    LEASES_RESTORED = ("leases_restored", "info", "leases ended", "A new mpsd restored the leases of the previous one.",
        "{leases} leases of the previous mpsd continue, and {ended} have ended")
    LEASE_NOT_RESTORED = ("lease_not_restored", "error", "lease gpus because", "A stored lease cannot be parsed.",
        "{lease} could not be restored: {because}")
    LEASE_NOT_RESTORED_ENDED = ("lease_not_restored_ended", "info", "lease because",
        "A GPU is no longer held for an unrestored lease.", "{lease}: {because}")
    LEASES_INCOMPLETE = ("leases_incomplete", "error", "daemon gpu pids because",
        "A GPU may have clients of unknown leases.", "{daemon} is held, since its leases may be incomplete: {because}")
    LEASES_COMPLETE = ("leases_complete", "info", "gpu because", "All leases on a GPU are known.",
        "{gpu}: its leases are complete: {because}")
    CLIENT_ATTRIBUTED = ("client_attributed", "info", f"{_LEASE} client unit? container? pod? by? because?",
        "A client belongs to a lease, and may find no place on its GPU (`because`).",
        "{lease}: process {client} is its client: {because}")
    VIOLATION = ("violation", "warning", "kind pid lease daemon policy because hint",
        "A process violates its lease, or has none.", "{daemon}: violation ({kind}): {because}")
    VIOLATION_ENDED = ("violation_ended", "info", "kind pid lease daemon", "A violation has ended.",
        "{daemon}: violation ({kind}) of process {pid} has ended")
    CLIENT_ENDING = ("client_ending", "warning", "pid uid leases because", "An administrator ends a client.",
        "mpsd ends process {pid}: {because}")
    CLIENT_FORCED = ("client_forced", "warning", "step pid because server? failed?",
        "mpsd takes a step to end a client.", "mpsd is ending process {pid} ({step}): {because}")
    CLIENT_NOT_ENDED = ("client_not_ended", "warning", "pid because stays_because?", "A client cannot be ended yet.",
        "mpsd cannot end process {pid} now: {because}")
    CLIENT_LET_GO = ("client_let_go", "info", "pid because", "mpsd no longer ends a client that it was about to end.",
        "mpsd no longer ends process {pid}: {because}")
    CLIENT_END_RESUMED = ("client_end_resumed", "info", "step pid because", "A new mpsd continues to end a client.",
        "mpsd continues to end process {pid}: {because}")
    CLIENT_ENDED = ("client_ended", "info", "pid because", "A client that mpsd ended is gone.",
        "process {pid} was ended: {because}")
    LEASE_ENDED = ("lease_ended", "info", f"{_LEASE} code? because", "A lease has ended.", "{lease}: ended: {because}")
    LINES_LEFT_OUT = ("lines_left_out", "warning", "uid lines left_out because",
        "A uid has caused more lines than its share; the rest are counted.",
        "{left_out} lines are not shown: {because}")
    RESOURCE_LACKING = ("resource_lacking", "error", "daemon? because left_out?",
        "mpsd has no free descriptor, or no memory, for one of its periodic checks, and repeats it.", "{because}")
    LISTENER_STUCK = ("listener_stuck", "error", "because", "mpsd cannot accept connections.",
        "mpsd accepts no connections: {because}")
    STORE_FULL = ("store_full", "error", "because", "Leases, events or ends of clients cannot be stored.",
        "nothing can be stored: {because}")
    STORE_WRITABLE = ("store_writable", "info", "", "Leases can be stored again.", "leases can be stored again")
    STORE_SET_ASIDE = ("store_set_aside", "error", "because file?", "A store was damaged, and mpsd began a new one.",
        "a damaged store was set aside: {because}")
    STORE_REWRITTEN = ("store_rewritten", "error", "because", "Another program changed a store; mpsd rewrote it.",
        "mpsd rewrote a store: {because}")
    HISTORY_NOT_STORED = ("history_not_stored", "error", "because",
        "Samples of the history cannot be stored; sums of grants stay complete.",
        "the history of granted and held amounts is not stored: {because}")
    HISTORY_NOT_PRUNED = ("history_not_pruned", "error", "because",
        "Old samples of the history cannot be removed; mpsd tries again each minute.",
        "old samples of the history cannot be removed: {because}")
    HISTORY_STORED = ("history_stored", "info", "", "Samples of the history can be stored again.",
        "the history of granted and held amounts is stored again")
    EVENTS_LOST = ("events_lost", "error", "because", "The events before this one are lost.", "{because}")
    SETTINGS_RELOADED = ("settings_reloaded", "info", "applied needs_restart daemons",
        "The configuration was reloaded.", "the configuration was reloaded: {changes}")
    SETTINGS_REFUSED = ("settings_refused", "error", "because hint", "The configuration was not reloaded.",
        "the configuration was not reloaded: {because}")
    NAMES_UNKNOWN = ("names_unknown", "warning", "because hint", "Users or groups of the configuration are unknown.",
        "{because}")
    SUPERVISOR_STUCK = ("supervisor_stuck", "error", "daemons", "The supervision of control daemons does not advance.",
        "mpsd's supervision does not advance: {daemons}")
    LOG_LINES_LOST = ("log_lines_lost", "warning", "lines because", "Lines of mpsd's log were lost.",
        "{lines} lines of mpsd's log were lost: {because}")
    LIBRARY_REPORT = ("library_report", "error", "library because exception?", "A library reports an error.",
        "a library of mpsd reports: {because}")
    # fmt: on


COMMON: Final = {
    "seq": "The number of the event, one more than that of the previous event. Lines of the log have none.",
    "at": "The time of the event, in RFC 3339 and UTC.",
    "level": "`info`, `warning` or `error`.",
    "event": "The kind of the event.",
}
"""The fields of every event."""

FACTS: Final = {
    "active_thread_percentage": "Percent of a GPU's threads.",
    "admits": "Whether requests are admitted.",
    "address": "Address and port on TCP.",
    "answer": "An answer on the control pipe, cut short.",
    "applied": "Settings in force from now on.",
    "asked": "The request, cut short.",
    "because": "The reason.",
    "before": "The previous state.",
    "by": "`token` if only the lease's token shows it.",
    "bytes": "Bytes removed.",
    "cause": "Why a server is suspect; of a death, the signal, `exit`, `quit` of others, or `start`.",
    "cgroup": "The control group that holds the lease, or is quarantined.",
    "cgroups": "Control groups of containers whose root had access.",
    "client": "The pid of a client.",
    "clients": "The pids of clients.",
    "code": "The error's code, as in the API.",
    "command": "A control command, or the limit that it set.",
    "container": "The container's id, by the control group's path.",
    "daemon": "The control daemon, such as `gpu0`.",
    "daemons": "Control daemons, with details.",
    "delay": "Seconds until the next start.",
    "ended": "Leases that ended while mpsd did not run.",
    "exception": "The traceback, in the log alone.",
    "failed": "Why the previous step failed.",
    "file": "A file's path.",
    "found": "The value found.",
    "given": "The limits that the server gave, by its log.",
    "gpu": "A GPU's UUID.",
    "gpus": "UUIDs of GPUs.",
    "health": "`ok`, `unknown`, `faulty`, `unsupported` or `misconfigured`.",
    "hint": "The remedy.",
    "how": "The end of a process: exit status or signal.",
    "index": "A GPU's index.",
    "kind": "The violation's kind.",
    "lease": "A lease's id.",
    "leases": "Leases, or their number.",
    "left_out": "Lines of the kind that were left out before.",
    "library": "The library's name.",
    "limit": "The limit that was hit, or differs.",
    "limits": "Names of limits.",
    "lines": "The number of lines, or their kind.",
    "missing": "The missing requirement.",
    "mode": "A compute mode, or the mode of the socket.",
    "mps": "Whether CUDA says that the canary uses MPS, or null.",
    "name": "The GPU's model.",
    "needs_restart": "Settings that need a restart of mpsd.",
    "nvml": "NVML's library.",
    "on": "The step that led to the state.",
    "operation": "The operation's id.",
    "path": "The path of a file or request.",
    "pid": "A pid.",
    "pids": "Pids.",
    "pinned_device_mem_limit": "Bytes of a GPU's memory.",
    "pod": "The pod's uid, by the control group's path.",
    "policy": "`report` or `terminate`.",
    "processes": "Client processes that the lease may have; 0: any number.",
    "program": "The control program.",
    "proof": "What a canary proves.",
    "server": "A server's pid; for `node_started`, its program.",
    "simulated": "Whether the GPUs are simulated.",
    "socket": "The path of the API's socket.",
    "state": "The new state, or an operation's outcome.",
    "status": "The server's exit status.",
    "stays_because": "Why the client still runs.",
    "step": "The step.",
    "stop_daemons": "`never`, `drain` or `at once`.",
    "suspects": "Uids that may have caused it.",
    "ttl": "Seconds.",
    "uid": "A uid.",
    "unit": "The systemd unit, by the control group's path.",
    "uuid": "A GPU's UUID.",
    "verb": "`hold`, `drain`, `resume`, `restart` or `reset`.",
    "verdict": "`at_once`, `later` or `give_up`.",
    "waited": "Seconds waited.",
    "wanted": "The value that mpsd had set.",
    "words": "Words of the server's log.",
    "xid": "The fault's number in NVIDIA's list of XID errors.",
}
"""The meaning of each fact, the same for all events that have it."""


def facts_of(kind: EventName) -> dict[str, bool]:
    """Return the facts of an event by name; True marks a fact that is always present."""
    return {each.rstrip("?"): not each.endswith("?") for each in kind.facts.split()}
