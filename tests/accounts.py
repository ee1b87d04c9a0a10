"""A check that the history agrees with the accounts that follow from the events alone."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import pytest

from tests.node import Node

AMOUNTS: Final = ("leases", "threads_granted", "memory_granted")


def from_events(events: Iterable[Mapping[str, Any]], by: str, until: datetime) -> dict[str, dict[str, float]]:
    """Return the granted amounts of each GPU or user, by the times of the events."""
    sums = defaultdict[str, dict[str, float]](lambda: dict.fromkeys(AMOUNTS, 0.0))
    begun: dict[str, tuple[datetime, Mapping[str, Any]]] = {}

    def count(granted: datetime, event: Mapping[str, Any], end: datetime) -> None:
        seconds = (end - granted).total_seconds()
        for key in event["gpus"] if by == "gpu" else [str(event["uid"])]:
            times = 1 if by == "gpu" else len(event["gpus"])
            sums[key]["leases"] += 1
            sums[key]["threads_granted"] += times * seconds * event["active_thread_percentage"]
            sums[key]["memory_granted"] += times * seconds * event["pinned_device_mem_limit"]

    for event in events:
        at = datetime.fromisoformat(event["at"])
        if event["event"] == "lease_granted":
            begun[event["lease"]] = (at, event)
        elif event["event"] == "lease_ended" and event["lease"] in begun:
            count(*begun.pop(event["lease"]), at)
    for granted, event in begun.values():
        count(granted, event, until)
    return dict(sums)


def history(node: Node, by: str, **query: object) -> Any:
    more = "".join(f"&{name}={value}" for name, value in query.items())
    answer = node.get(f"/v1/history?by={by}{more}")
    assert answer.status == 200, answer.json
    return answer.json


def totals(answer: Any) -> dict[str, dict[str, float]]:
    """Return the totals of granted amounts, by key, without keys that were granted nothing."""
    found = {each["key"]: {name: each["total"][name] for name in AMOUNTS} for each in answer["history"]}
    return {key: amounts for key, amounts in found.items() if amounts["leases"]}


def check_one_story(node: Node, lines: Iterable[str | bytes] = ()) -> None:
    """Check that the history agrees with the events, and that its samples add up to its totals.

    `lines` are all events of a node that may have had more than mpsd keeps.
    """
    for by in ("gpu", "user"):
        answer = history(node, by, since=86_000)
        events = map(json.loads, lines or node.get("/v1/events").body.splitlines())
        expected = from_events(events, by, datetime.fromisoformat(answer["until"]))
        found = totals(answer)
        assert found.keys() == expected.keys()
        for key, amounts in expected.items():
            assert found[key] == pytest.approx(amounts, rel=1e-9, abs=1e-3), (by, key, found[key], amounts)
        for each in answer["history"]:
            summed = sum(sample["threads_granted"] * sample["seconds"] for sample in each["samples"])
            assert summed == pytest.approx(each["total"]["threads_granted"], rel=1e-9, abs=1e-6)
