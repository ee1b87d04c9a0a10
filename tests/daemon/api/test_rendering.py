"""Values of mpsd as answers of the API."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from mpsd.daemon.api import rendering
from mpsd.system.files.encoding import to_json

NOON = datetime(2026, 11, 27, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (NOON, "2026-11-27T12:00:00Z"),
        (NOON + timedelta(microseconds=250), "2026-11-27T12:00:00.000250Z"),
        (NOON.astimezone(timezone(timedelta(hours=1))), "2026-11-27T13:00:00+01:00"),
    ],
)
def test_times(moment: datetime, text: str) -> None:
    """A time of an answer has the form that it has in events and in mpsd's log."""
    assert rendering.time(moment) == text
    assert to_json(moment) == f'"{text}"'.encode()
