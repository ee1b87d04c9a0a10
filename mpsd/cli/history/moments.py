"""Times as users type them: an age, a time of the last 24 hours, a day, or a date-time."""

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import click

from mpsd.core.errors import InvalidRequestError
from mpsd.core.units import briefly, parse_duration

if TYPE_CHECKING:
    _Type = click.ParamType[datetime]
else:
    _Type = click.ParamType  # it is not generic before click 8.4

_CLOCK: Final = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?", re.ASCII)
_DAYS: Final = {"today": 0, "yesterday": 1}


def parse_moment(text: str, now: datetime) -> datetime:
    """Return a time: an age (`2h`), a time of the last 24 hours (`03:15`), a day, or a date-time of ISO 8601.

    A time without a zone is in this machine's zone. Raises InvalidRequestError for anything else.
    """
    local, text = now.astimezone(), text.strip()
    if text == "now":
        return now
    if text in _DAYS:
        return local.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=_DAYS[text])
    if found := _CLOCK.fullmatch(text):
        hour, minute, second = (int(each or 0) for each in found.groups())
        moment = local.replace(hour=hour, minute=minute, second=second, microsecond=0)
        return moment if moment <= now else moment - timedelta(days=1)
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        pass
    try:
        return now - timedelta(seconds=parse_duration(text.removesuffix(" ago")))
    except (InvalidRequestError, OverflowError):
        raise InvalidRequestError(
            f"{briefly(text)} is not a time",
            hint="give one such as 2h (so long ago), 03:15, today, or 2026-11-23T03:15",
        ) from None


class _Moment(_Type):
    """A time; an invalid one is refused with the valid notations."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        try:
            return parse_moment(f"{value}", datetime.now(UTC))
        except InvalidRequestError as error:
            self.fail(f"{error.detail}: {error.hint}", param, ctx)


MOMENT: Final = _Moment()
"""A time, as an option takes one."""

TIME: Final = "TIME is 2h (so long ago), 03:15, today, 2026-11-23, or 2026-11-23T03:15Z; without a zone, it is local."
"""The description of TIME in the help of an option."""
