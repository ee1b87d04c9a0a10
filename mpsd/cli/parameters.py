"""The types of option values: durations, percentages and sizes, in their usual notations."""

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Final

import click

from mpsd.core.errors import InvalidRequestError

if TYPE_CHECKING:
    _FloatType = click.ParamType[float]
    _StrType = click.ParamType[str]
else:
    _FloatType = _StrType = click.ParamType  # it is not generic before click 8.4

Callback = Callable[[click.Context, click.Parameter, Any], object]


_LONGEST: Final = 1e9
"""Seconds of the longest duration that mpsd accepts."""


class Single(click.Option):
    """An option with one value: two different values are an error, because mpsctl cannot know the right one."""

    def __init__(self, names: Sequence[str], callback: Callback | None = None, **attributes: Any) -> None:  # noqa: ANN401 - click's own
        """Take the arguments of click.Option except a default."""
        attributes["multiple"] = True  # so that each value is seen
        super().__init__(names, callback=self._only_value, **attributes)
        self._then = callback

    def _only_value(self, context: click.Context, _: click.Parameter, values: Sequence[object]) -> object:
        if len(set(values)) > 1:
            given = " and ".join(f"{each}" for each in values)
            raise click.BadParameter(f"it takes one value, and was given {given}", context, self)
        value = values[0] if values else None
        return value if self._then is None else self._then(context, self, value)


class _Filled(_StrType):
    """A text that is not empty: an empty one comes from a variable of a script that is not set."""

    name = "text"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return f"{value}" or self.fail(
            "it is empty; if a variable gives it, check that the variable is set", param, ctx
        )


_FREE: Final = "TEXT"
"""The metavar of options whose value may be empty, such as the name of a lease."""


def refuse_empty(command: click.Command) -> None:
    """Have a command, and those below it, refuse empty texts, except where any text is valid."""
    for each in command.params:
        if each.type is click.STRING and each.metavar != _FREE:
            each.type = _FILLED
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        refuse_empty(below)


class _Quantity(_FloatType):
    """A number with a unit; an invalid one is refused with the valid notations."""

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return self._parse(f"{value}")
        except InvalidRequestError as error:
            self.fail(f"{error.detail}: {error.hint}", param, ctx)


def _duration(text: str, *, zero: bool = False) -> float:
    from mpsd.core.units import briefly, parse_duration  # imports decimal, which other commands do without

    seconds = parse_duration(text, zero=zero)
    if seconds > _LONGEST:
        raise InvalidRequestError(f"{briefly(text)} is longer than {_LONGEST:.0f} s", hint="give at most 11574d")
    return seconds


def _percentage(text: str) -> float:
    from mpsd.core.units import parse_percentage

    return parse_percentage(text)


def _duration_or_0(text: str) -> float:
    return _duration(text, zero=True)


def _wait(text: str) -> float:
    if text == "forever":
        return inf
    try:
        return _duration_or_0(text)
    except InvalidRequestError as error:
        error.hint += ", or forever"
        raise


_FILLED: Final = _Filled()

DURATION: Final = _Quantity("duration", _duration)
"""Seconds above 0, from `90`, `90s`, `10m`, `2h` or `1h30m`."""

DURATION_OR_0: Final = _Quantity("duration", _duration_or_0)
"""As DURATION, or 0."""

WAIT: Final = _Quantity("duration", _wait)
"""As DURATION, or 0, or `forever`, which is infinite."""

PERCENTAGE: Final = _Quantity("percentage", _percentage)
"""Percent, from `25` or `25%`."""
