"""The counters after each event, for single lines and for sequences of lines."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from mpsd.core.metrics import families
from mpsd.core.metrics.families import FAMILIES
from mpsd.core.metrics.tally import Tally
from mpsd.core.model import ViolationKind
from mpsd.daemon.record.log import EventName

NOW: Final = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)

Story = list[tuple[float, str, Mapping[str, Any]]]

OF_GPU0: Final = {"daemon": "gpu0"}


def tally() -> Tally:
    """Return a tally that has counted nothing."""
    return Tally(NOW, EventName, ViolationKind)


def told(story: Story) -> Tally:
    """Return a tally that has counted these lines, each with its time in seconds, its event and its facts."""
    counted = tally()
    for seconds, event, facts in story:
        counted.count([(NOW + timedelta(seconds=seconds), "info", event, facts)])
    return counted


def values(counted: Tally, *daemons: str) -> dict[str, float]:
    """Return every sample that is not 0, by its text."""
    blocks = counted.blocks(daemons or ("gpu0",))
    return {f"{block.family.name}{key}": value for block in blocks.values() for key, value in block.samples if value}


def state(on: str, name: str = "gpu0") -> Mapping[str, Any]:
    """Return the facts, of a step in a control daemon's life, that are counted."""
    return {"daemon": name, "on": on, "state": "", "before": "", "because": ""}


STORIES: Final[dict[str, tuple[Story, dict[str, float]]]] = {
    "a grant": (
        [(0, "lease_granted", {"lease": "lease-1"})],
        {
            'mpsd_admissions_total{outcome="granted",code=""}': 1,
            'mpsd_lease_wait_duration_seconds_bucket{le="0.01"}': 1,
            "mpsd_lease_wait_duration_seconds_count": 1,
        },
    ),
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
    "refused at once, and in the queue": (
        [(0, "lease_refused", {"code": "quota"}), (1, "lease_ended", {"code": "does_not_fit"}), (2, "lease_ended", {})],
        {
            'mpsd_admissions_total{outcome="refused",code="quota"}': 1,
            'mpsd_admissions_total{outcome="refused",code="does_not_fit"}': 1,
            "mpsd_leases_ended_total": 2,
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
    "drift, with what was too much to tell": (
        [
            (0, "foreign_command", OF_GPU0),
            (0, "limit_drift", {**OF_GPU0, "limit": "active_thread_percentage", "left_out": 3}),
            (1, "limit_drift_ended", {**OF_GPU0, "limits": ["active_thread_percentage", "pinned_device_mem_limit"]}),
            (2, "limit_drift_ended", OF_GPU0),
        ],
        {
            'mpsd_foreign_commands_total{daemon="gpu0"}': 1,
            'mpsd_limit_drift_found_total{daemon="gpu0",limit="active_thread_percentage"}': 4,
            'mpsd_limit_drift_undone_total{daemon="gpu0",limit="active_thread_percentage"}': 1,
            'mpsd_limit_drift_undone_total{daemon="gpu0",limit="pinned_device_mem_limit"}': 1,
        },
    ),
    "the rest": (
        [
            (0, "violation", {"kind": "memory"}),
            (0, "client_ended", {}),
            (0, "gpu_xid", {"uuid": "GPU-0", "xid": 79}),
            (0, "gpu_xid", {"uuid": "GPU-0", "xid": 31, "left_out": 4}),
            (0, "lines_left_out", {"left_out": 5}),
        ],
        {
            'mpsd_violations_total{kind="memory"}': 1,
            "mpsd_clients_ended_total": 1,
            'mpsd_gpu_xids_total{gpu="GPU-0",xid="79"}': 1,
            'mpsd_gpu_xids_total{gpu="GPU-0",xid="31"}': 5,
            "mpsd_log_lines_left_out_total": 5,
            'mpsd_events_total{event="gpu_xid"}': 2,
            'mpsd_log_lines_total{level="info"}': 5,
        },
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_a_story(name: str) -> None:
    """Each sequence of events gives these samples."""
    story, expected = STORIES[name]
    found = values(told(story))
    assert {key: found.get(key, 0) for key in expected} == expected


def test_nothing_is_told_of_another() -> None:
    """An event counts for its own control daemon only, and each control daemon has its series from the start."""
    counted = told([(0, "daemon_death", {"daemon": "gpu1", "cause": "exit"})])
    deaths = counted.blocks(("gpu0", "gpu1"))[families.DEATHS].samples
    assert [key for key, value in deaths if value] == ['_total{daemon="gpu1",cause="exit"}']
    assert any(key.startswith('_total{daemon="gpu0"') for key, _ in deaths)


def test_what_was_left_out_of_the_log_counts() -> None:
    """Grants count although their user has too many lines; only the counter of events follows the log."""
    counted = tally()
    counted.count_omitted("lease_granted", {"waited": 2.0})
    counted.count_omitted("lease_refused", {"code": "quota"})
    counted.count_omitted("lease_ended", {})
    found = values(counted)
    assert found['mpsd_admissions_total{outcome="granted",code=""}'] == 1
    assert found['mpsd_admissions_total{outcome="refused",code="quota"}'] == 1
    assert found["mpsd_leases_ended_total"] == 1
    assert found["mpsd_lease_wait_duration_seconds_sum"] == 2
    assert not any(key.startswith("mpsd_events") for key in found)


def test_conversations() -> None:
    """A conversation counts with its duration, and with its error if it has one."""
    counted = tally()
    counted.conversation("gpu0", 0.02, None)
    counted.conversation("gpu0", 3.0, "control_unresponsive")
    found = values(counted)
    assert found['mpsd_control_conversation_duration_seconds_count{daemon="gpu0"}'] == 2
    assert found['mpsd_control_conversation_duration_seconds_bucket{daemon="gpu0",le="0.025"}'] == 1
    assert found['mpsd_control_conversation_failures_total{daemon="gpu0",code="control_unresponsive"}'] == 1


def test_events_that_are_followed_exist() -> None:
    """Each event with counted facts is in the catalogue, and each counter is in the table."""
    assert {*tally()._followed} <= {*EventName}
    assert {*tally().blocks(("gpu0",))} <= {*FAMILIES}
