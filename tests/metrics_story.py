"""A check that the metrics of a node agree with its events, by an independent count of the events.

The count reads GET /v1/events line by line, with code of its own.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import dropwhile
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from tests.node import Node

_SLACK: Final = 1e-5
"""Seconds by which a sum of floats may differ."""

Samples = dict[str, float]
"""Values by name and labels, in the syntax of a query."""


def metrics(node: Node) -> Samples:
    answer = node.get("/metrics")
    assert answer.status == 200, answer.body
    return parsed(answer.body.decode())


def parsed(text: str) -> Samples:
    found: Samples = {}
    parse: Callable[[str], Iterable[Any]] = text_string_to_metric_families
    for family in parse(text):
        for sample in family.samples:
            name = key(sample.name, sample.labels)
            assert name not in found, name
            found[name] = sample.value
    return found


def key(name: str, labels: Mapping[str, object]) -> str:
    """Return the text of a sample, with its labels sorted by name."""
    inner = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{name}{{{inner}}}" if inner else name


Event = Mapping[str, Any]

_COUNTED: Final[dict[str, Callable[[Event], Iterable[tuple[str, Mapping[str, object]]]]]] = {
    "lease_granted": lambda _: [
        ("mpsd_admissions_total", {"outcome": "granted", "code": ""}),
        ("mpsd_lease_wait_duration_seconds_count", {}),
    ],
    "lease_refused": lambda event: [("mpsd_admissions_total", {"outcome": "refused", "code": event["code"]})],
    "lease_ended": lambda event: [
        ("mpsd_leases_ended_total", {}),
        *([("mpsd_admissions_total", {"outcome": "refused", "code": event["code"]})] if "code" in event else ()),
    ],
    "lease_waits": lambda _: [("mpsd_admissions_queued_total", {})],
    "violation": lambda event: [("mpsd_violations_total", {"kind": event["kind"]})],
    "client_ended": lambda _: [("mpsd_clients_ended_total", {})],
    "daemon_death": lambda event: [("mpsd_daemon_deaths_total", {"daemon": event["daemon"], "cause": event["cause"]})],
    "foreign_command": lambda event: [("mpsd_foreign_commands_total", {"daemon": event["daemon"]})],
    "limit_drift": lambda event: [
        ("mpsd_limit_drift_found_total", {"daemon": event["daemon"], "limit": event["limit"]})
    ],
    "limit_drift_ended": lambda event: [
        ("mpsd_limit_drift_undone_total", {"daemon": event["daemon"], "limit": limit})
        for limit in event.get("limits", ())
    ],
    "daemon_state": lambda event: (
        [("mpsd_daemon_hangs_total", {"daemon": event["daemon"]})] if event["on"] == "silent" else []
    ),
}
"""The counters that each event increases by one."""


def retold(events: Iterable[Event]) -> Samples:
    """Return the counters that follow from the events."""
    counted: Counter[str] = Counter()
    waited = 0.0
    recoveries: dict[str, list[float]] = {}
    down: dict[str, datetime] = {}
    for event in events:
        name, daemon = event["event"], str(event.get("daemon"))
        counted[key("mpsd_events_total", {"event": name})] += 1
        counted[key("mpsd_log_lines_total", {"level": event["level"]})] += 1
        for metric, labels in _COUNTED[name](event) if name in _COUNTED else ():
            counted[key(metric, labels)] += 1 + (0 if name == "lines_left_out" else event.get("left_out", 0))
        waited += event.get("waited", 0.0) if name == "lease_granted" else 0.0
        step, at = event.get("on") if name == "daemon_state" else name, datetime.fromisoformat(event["at"])
        if step in {"daemon_death", "silent"}:
            down.setdefault(daemon, at)
        elif step == "stop":
            down.pop(daemon, None)
        elif step == "verified" and daemon in down:
            recoveries.setdefault(daemon, []).append((at - down.pop(daemon)).total_seconds())
    sums = {"mpsd_lease_wait_duration_seconds_sum": waited}
    for daemon, took in recoveries.items():
        sums[key("mpsd_daemon_recovery_duration_seconds_sum", {"daemon": daemon})] = sum(took)
        sums[key("mpsd_daemon_recovery_duration_seconds_count", {"daemon": daemon})] = len(took)
    return {**counted, **sums}


_RETOLD: Final = (
    "mpsd_events_total", "mpsd_log_lines_total", "mpsd_admissions", "mpsd_lease_wait_duration_seconds_count",
    "mpsd_lease_wait_duration_seconds_sum", "mpsd_leases_ended", "mpsd_violations_total", "mpsd_clients_ended",
    "mpsd_daemon_deaths", "mpsd_daemon_hangs", "mpsd_daemon_recovery_duration_seconds_count",
    "mpsd_daemon_recovery_duration_seconds_sum", "mpsd_foreign_commands", "mpsd_limit_drift",
)  # fmt: skip


def since(events: Iterable[Event], start: float) -> list[Event]:
    """Return the events of the mpsd that started at this time.

    It also writes earlier ones: an mpsd that was killed had stored a change without having written its event yet.
    """
    return list(dropwhile(lambda each: datetime.fromisoformat(each["at"]).timestamp() < start - _SLACK, events))


def differences(
    node: Node, read: Callable[[Node], Sequence[Event]] | None = None
) -> tuple[dict[str, tuple[float, float]], list[Event]]:
    """Return the counters that differ from the events of the running mpsd, each with the value that the events give.

    Events between the two requests are no difference: the check repeats until there are none. `read` is for more events
    than mpsd keeps.
    """
    read = read or _events
    while True:
        before = read(node)
        found = metrics(node)
        events = since(read(node), found["mpsd_start_time_seconds"])
        if len(since(before, found["mpsd_start_time_seconds"])) == len(events):
            break
    expected = retold(events)
    told = {name: value for name, value in found.items() if name.startswith(_RETOLD)}
    differ = {
        name: (told.get(name, 0.0), expected.get(name, 0.0))
        for name in {*told, *expected}
        if abs(told.get(name, 0.0) - expected.get(name, 0.0)) > _SLACK
    }
    return differ, events


def _events(node: Node) -> list[Event]:
    answer = node.get("/v1/events")
    assert answer.status == 200, answer.body
    return [json.loads(line) for line in answer.body.splitlines()]
