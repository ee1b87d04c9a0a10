"""The meanings of the facts of events, for docs/reference/events.md, and a check of the events of a test's node.

Each event that a node logs must be in the catalogue (mpsd/core/events.py), with its level and its facts.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from mpsd.core.events import EventName

COMMON: Final = {
    "seq": "The number of the event, one more than that of the previous event. Lines of the log have none.",
    "at": "The time of the event, in RFC 3339 and UTC.",
    "level": "`info`, `warning` or `error`.",
    "event": "The kind of the event.",
}
"""The fields of every event."""

FACTS: Final = {
    "active_thread_percentage": "Percent of a GPU's threads.",
    "admits": "Whether requests for the GPU are admitted.",
    "address": "The address and port on TCP.",
    "answer": "An answer on the control pipe, as a literal, cut short.",
    "applied": "Settings that are in force from now on.",
    "asked": "The request, cut short.",
    "because": "The reason, in a sentence.",
    "before": "The previous state.",
    "by": "`token` if only the lease's token shows that the process belongs to it.",
    "bytes": "The number of bytes removed.",
    "cause": "The reason why a server is suspect; of a death, the signal, `exit`, or `start` if it could not start.",
    "cgroup": "The control group that holds the lease.",
    "client": "The pid of a client process.",
    "clients": "The pids of client processes.",
    "code": "The code of the error, as in the API.",
    "command": "A command to a control daemon, or the limit that it set.",
    "container": "The id of the container, as the control group's path names it.",
    "daemon": "The control daemon, such as `gpu0`.",
    "daemons": "Control daemons, each with its details.",
    "delay": "Seconds until the control daemon is started again.",
    "ended": "The number of leases that ended while mpsd did not run.",
    "exception": "The traceback. Only the log has such a line; the API does not.",
    "failed": "The reason why the previous step did not end the client.",
    "file": "The path of a file.",
    "found": "The value that was found.",
    "given": "The limits that the server gave, according to its log.",
    "gpu": "The UUID of a GPU.",
    "gpus": "The UUIDs of GPUs.",
    "health": "`ok`, `unknown`, `faulty`, `unsupported` or `misconfigured`.",
    "hint": "The remedy.",
    "how": "The end of a process, such as its exit status or its signal.",
    "index": "The index of a GPU.",
    "kind": "The kind of the violation.",
    "lease": "The id of a lease.",
    "leases": "Leases, or their number.",
    "left_out": "The number of lines of the same kind that were left out before this one.",
    "library": "The library's name.",
    "limit": "The limit that was hit, or that differs.",
    "limits": "Names of limits.",
    "lines": "The number of lines, or their kind.",
    "missing": "The requirement that is missing.",
    "mode": "A compute mode, or the mode of the socket.",
    "mps": "Whether CUDA says that the canary uses MPS; null if it does not say.",
    "name": "The name of the GPU's model.",
    "needs_restart": "Settings that take effect when mpsd is restarted.",
    "nvml": "The library of NVML.",
    "on": "The step of the control daemon's life that led to the state.",
    "operation": "The id of the operation.",
    "path": "The path of a file, or of a request.",
    "pid": "The pid of a process.",
    "pids": "The pids of processes.",
    "pinned_device_mem_limit": "Bytes of a GPU's memory.",
    "pod": "The pod's uid, as the control group's path names it.",
    "policy": "`report` or `terminate`.",
    "processes": "The number of client processes that the lease may have; 0: any number.",
    "program": "The control program.",
    "proof": "The proof by a canary.",
    "server": "The pid of an MPS server; for `node_started`, the server's program.",
    "simulated": "Whether the GPUs are simulated.",
    "socket": "The path of the API's socket.",
    "state": "The state from now on, or the outcome of an operation.",
    "status": "The server's exit status.",
    "stays_because": "The reason why the client still runs.",
    "step": "The step that mpsd takes.",
    "stop_daemons": "The treatment of the control daemons: `never`, `drain` or `at once`.",
    "suspects": "The uids that may have caused it.",
    "ttl": "Seconds.",
    "uid": "The uid of a user.",
    "unit": "The systemd unit, as the control group's path names it.",
    "uuid": "The UUID of a GPU.",
    "verb": "The command of an operator: `hold`, `drain`, `resume`, `restart` or `reset`.",
    "verdict": "The consequence of a death: `at_once`, `later` or `give_up`.",
    "waited": "Seconds that the request waited.",
    "wanted": "The value that mpsd had set.",
    "words": "The words of the server's log.",
    "xid": "The number of the fault in NVIDIA's list of XID errors.",
}
"""The meaning of each fact, the same for all events that have it."""


def facts_of(kind: EventName) -> dict[str, bool]:
    """Return the facts of an event by name; True marks a fact that is always present."""
    return {each.rstrip("?"): not each.endswith("?") for each in kind.facts.split()}


def wrong_facts(line: Mapping[str, Any]) -> str:
    """Return the differences between an event and the catalogue; an empty text for none."""
    if line["event"] not in set(EventName):
        return f"{line['event']} is not in the catalogue"
    name = EventName[line["event"].upper()]
    facts, there = facts_of(name), line.keys() - COMMON.keys()
    wrong = [f"the unknown fact {each}" for each in sorted(there - facts.keys())]
    wrong += [f"no fact {each}" for each, always in facts.items() if always and each not in there]
    if line["level"] not in name.levels.split():
        wrong.append(f"the level {line['level']}")
    return f"{name} has {', '.join(wrong)}: see mpsd/core/events.py" if wrong else ""


def check_events(lines: Iterable[Mapping[str, Any]]) -> None:
    """Fail if a node has logged an event that differs from the catalogue."""
    wrong = {found for line in lines if (found := wrong_facts(line))}
    assert not wrong, "\n".join(sorted(wrong))
