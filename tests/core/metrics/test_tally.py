"""The counters after each event, for single lines and for sequences of lines."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from mpsd.core.metrics.families import FAMILIES
from mpsd.core.metrics.tally import Tally
from tests.core.metrics.flat import flat

NOW: Final = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)

Story = list[tuple[float, str, Mapping[str, Any]]]

OF_GPU0: Final = {"daemon": "gpu0"}


def tally() -> Tally:
    return Tally(NOW)


def told(story: Story) -> Tally:
    counted = tally()
    for seconds, event, facts in story:
        counted.count(NOW + timedelta(seconds=seconds), "info", event, facts)
    return counted


def values(counted: Tally, *daemons: str) -> dict[str, float]:
    """Return every sample that is not 0, by its text."""
    found = flat(counted.samples(daemons or ("gpu0",)))
    return {text: value for text, value in found.items() if value}


def state(on: str, name: str = "gpu0") -> Mapping[str, Any]:
    """Return the facts, of a step in a control daemon's life, that are counted."""
    return {"daemon": name, "on": on, "state": "", "before": "", "because": ""}


STORIES: Final[dict[str, tuple[Story, dict[str, float]]]] = {
    "a grant after a wait": (
        [(0, "lease_waits", {}), (7, "lease_granted", {"waited": 7.25})],
        {
            "mpsd_admissions_queued_total": 1,
            'mpsd_admissions_total{outcome="granted",code=""}': 1,
            'mpsd_lease_wait_duration_seconds_bucket{le="5.0"}': 0,
            'mpsd_lease_wait_duration_seconds_bucket{le="15.0"}': 1,
            "mpsd_lease_wait_duration_seconds_sum": 7.25,
        },
    ),
    "a death, and the way back": (
        [
            (0, "daemon_state", state("started")),
            (1, "daemon_state", state("verified")),
            (10, "daemon_death", {**OF_GPU0, "cause": "SIGSEGV"}),
            (10, "daemon_state", state("died")),
            (11, "daemon_state", state("started")),
            (12, "daemon_death", {**OF_GPU0, "cause": "exit"}),
            (13, "daemon_state", state("started")),
            (14, "daemon_state", state("verified")),
        ],
        {
            'mpsd_daemon_deaths_total{daemon="gpu0",cause="SIGSEGV"}': 1,
            'mpsd_daemon_deaths_total{daemon="gpu0",cause="exit"}': 1,
            'mpsd_daemon_starts_total{daemon="gpu0",cause="first"}': 1,
            'mpsd_daemon_starts_total{daemon="gpu0",cause="death"}': 2,
            'mpsd_daemon_recovery_duration_seconds_count{daemon="gpu0"}': 1,
            'mpsd_daemon_recovery_duration_seconds_sum{daemon="gpu0"}': 4,
        },
    ),
    "silence": (
        [(0, "daemon_state", state("silent")), (3, "daemon_state", state("verified"))],
        {
            'mpsd_daemon_hangs_total{daemon="gpu0"}': 1,
            'mpsd_daemon_recovery_duration_seconds_sum{daemon="gpu0"}': 3,
        },
    ),
    "an operator's restart is no recovery": (
        [
            (0, "daemon_state", state("silent")),
            (1, "operation_begun", {**OF_GPU0, "verb": "restart"}),
            (1, "daemon_state", state("stop")),
            (2, "daemon_state", state("started")),
            (3, "daemon_state", state("verified")),
            (3, "operation_ended", {**OF_GPU0, "verb": "restart"}),
            (4, "daemon_state", state("stop")),
            (5, "daemon_state", state("started")),
        ],
        {
            'mpsd_daemon_starts_total{daemon="gpu0",cause="operator"}': 1,
            'mpsd_daemon_starts_total{daemon="gpu0",cause="renewal"}': 1,
            'mpsd_daemon_recovery_duration_seconds_count{daemon="gpu0"}': 0,
        },
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_a_story(name: str) -> None:
    """Each sequence of events gives these samples."""
    story, expected = STORIES[name]
    found = values(told(story))
    assert {key: found.get(key, 0) for key in expected} == expected


def test_conversations() -> None:
    """A conversation counts with its duration, and with its error if it has one."""
    counted = tally()
    counted.conversation("gpu0", 0.02, None)
    counted.conversation("gpu0", 3.0, "control_unresponsive")
    found = values(counted)
    assert found['mpsd_control_conversation_duration_seconds_count{daemon="gpu0"}'] == 2
    assert found['mpsd_control_conversation_duration_seconds_bucket{daemon="gpu0",le="0.025"}'] == 1
    assert found['mpsd_control_conversation_failures_total{daemon="gpu0",code="control_unresponsive"}'] == 1


def test_counters_are_in_the_table() -> None:
    """Each counter is in the table of metrics."""
    numbers, histograms = tally().samples(("gpu0",))
    assert {*numbers, *histograms} <= {*FAMILIES}
