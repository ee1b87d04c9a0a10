"""Events are selected by time, lease, control daemon, GPU, user and kind; an invalid selection is refused."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mpsd.cli.history.sentences import GpuNames, Selector, matching_kinds
from mpsd.cli.options import parse_moment
from mpsd.core.errors import InvalidRequestError

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
DAY = timedelta(days=1)


def local(*parts: int) -> datetime:
    """Return a time of this machine's clock."""
    return datetime(*parts).astimezone()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2h", NOW - timedelta(hours=2)),
        ("90", NOW - timedelta(seconds=90)),
        ("1h30m ago", NOW - timedelta(hours=1, minutes=30)),
        ("now", NOW),
        ("2026-11-20", local(2026, 11, 20)),
        ("2026-11-20 03:15", local(2026, 11, 20, 3, 15)),
        ("2026-11-20T03:15:00Z", datetime(2026, 11, 20, 3, 15, tzinfo=UTC)),
        ("2026-11-20T03:15:00+02:00", datetime(2026, 11, 20, 1, 15, tzinfo=UTC)),
    ],
)
def test_moments(text: str, moment: datetime) -> None:
    """A time is a span back from now, or a date-time; one without a zone is in local time."""
    assert parse_moment(text, NOW) == moment


def test_times_of_the_day() -> None:
    """A time of day is the last one that has passed, and a day begins at its midnight."""
    here = NOW.astimezone()
    for text in ("00:00", "23:59", "03:15:30"):
        moment = parse_moment(text, NOW)
        assert NOW - DAY < moment <= NOW
        assert f"{moment:%H:%M:%S}".startswith(text)
    assert parse_moment("today", NOW) == here.replace(hour=0, minute=0)
    assert parse_moment("yesterday", NOW) == here.replace(hour=0, minute=0) - DAY


@pytest.mark.parametrize("text", ["", "-5", "0", "25:00", "2026-13-01", "tomorrow", "1 week", "9" * 400, "1e300"])
def test_what_is_no_time(text: str) -> None:
    """An invalid time is refused with a valid example."""
    with pytest.raises(InvalidRequestError) as refused:
        parse_moment(text, NOW)
    assert "2h (so long ago), 03:15, today, or 2026-11-23T03:15" in refused.value.hint


def test_kinds() -> None:
    """A kind is a name or a pattern; an unknown one is refused with a similar name."""
    assert matching_kinds("lease_granted") == matching_kinds("lease-granted") == {"lease_granted"}
    assert {"lease_granted", "lease_ended"} < matching_kinds("lease_*")
    for wrong, near in (("lease_grant", "lease_granted"), ("deth", "daemon_death"), ("death", "daemon_death")):
        with pytest.raises(InvalidRequestError) as refused:
            matching_kinds(wrong)
        assert near in refused.value.hint or "mpsctl events --kinds" in refused.value.hint
    with pytest.raises(InvalidRequestError) as refused:
        matching_kinds("not_stored")
    assert refused.value.hint.startswith("did you mean ")


A, B = "GPU-a", "GPU-b"
EVENTS: list[Any] = [
    {"event": "gpu_found", "index": 1, "uuid": B},
    {"event": "daemon_death", "daemon": "gpu0", "suspects": [7]},
    {"event": "lease_granted", "lease": "lease-1", "uid": 7, "gpus": [A]},
    {"event": "lease_granted", "lease": "lease-2", "uid": 8, "gpus": [B]},
    {"event": "violation", "lease": "lease-1", "daemon": "gpu0"},
    {"event": "leases_faulted", "leases": ["lease-1", "lease-2"], "daemon": "gpu0"},
    {"event": "lease_ended", "lease": "lease-2", "uid": 8},
    {"event": "lease_refused", "uid": 7},
    {"event": "supervisor_stuck", "daemons": ["gpu0", "gpu1"]},
]
for _number, _each in enumerate(EVENTS):
    _each["at"] = f"{(NOW + timedelta(minutes=_number)).isoformat()}"


@pytest.mark.parametrize(
    ("selector", "numbers"),
    [
        (Selector(), range(9)),
        (Selector(leases=("lease-1",)), [2, 4, 5]),
        (Selector(leases=("lease-",)), [2, 3, 4, 5, 6]),
        (Selector(daemon="gpu0"), [1, 4, 5, 8]),
        (Selector(gpu=GpuNames(1, B, "gpu1")), [0, 3, 5, 6, 8]),
        (Selector(gpu=GpuNames(0, A, "gpu0")), [1, 2, 4, 5, 8]),
        (Selector(uid=7), [1, 2, 4, 5, 7]),
        (Selector(uid=8), [3, 5, 6]),
        (Selector(kinds={"violation", "lease_ended"}), [4, 6]),
        (Selector(kinds={"lease_granted"}, uid=8), [3]),
        (Selector(since=NOW + timedelta(minutes=7)), [7, 8]),
        (Selector(until=NOW + timedelta(minutes=1)), [0, 1]),
        (Selector(since=NOW + timedelta(minutes=1), until=NOW + timedelta(minutes=2)), [1, 2]),
    ],
)
def test_choosing(selector: Selector, numbers: list[int]) -> None:
    """Later events of a lease also count for its owner and its GPUs, though they do not name them."""
    assert [number for number, event in enumerate(EVENTS) if selector.takes(event)] == [*numbers]
