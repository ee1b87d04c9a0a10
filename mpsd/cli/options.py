"""The values of options and arguments: their types, in their usual notations, and what the shell completes them to.

Completions are the names that a running mpsd has. On any failure, there are none.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import click

from mpsd.cli.users import uid_of
from mpsd.client import Client
from mpsd.core.errors import InvalidRequestError, MpsdError
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    _Type = click.ParamType[object]
else:
    _Type = click.ParamType  # it is not generic before click 8.4


T = TypeVar("T")

# -- one value, and no empty one ---------------------------------------------------------------------------------------

Callback: TypeAlias = Callable[[click.Context, click.Parameter, Any], object]


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


class _Filled(_Type):
    """A text that is not empty: an empty one comes from a variable of a script that is not set."""

    name = "text"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        return f"{value}" or self.fail(
            "it is empty; if a variable gives it, check that the variable is set", param, ctx
        )


_FILLED: Final = _Filled()

_FREE: Final = "TEXT"
"""The metavar of options whose value may be empty, such as the name of a lease."""


Adds: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]
"""Adds options or arguments to the function of a command."""


def together(*options: Adds) -> Adds:
    """Return what adds several options, whose order in the help is this one."""
    return lambda function: reduce(lambda inner, option: option(inner), reversed(options), function)


def given(**options: T | None) -> dict[str, T]:
    """Return the options that a user gave, for a request: mpsd has the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}


def refuse_empty(command: click.Command) -> None:
    """Have a command, and those below it, refuse empty texts, except where any text is valid."""
    for each in command.params:
        if each.type is click.STRING and each.metavar != _FREE:
            each.type = _FILLED
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        refuse_empty(below)


# -- durations, percentages and times ----------------------------------------------------------------------------------


class _Notation(_Type):
    """A value with a notation of its own; an invalid one is refused with the valid notations."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        """`parse` raises InvalidRequestError for an invalid text."""
        self.name = name
        self._parse = parse

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        try:
            return self._parse(f"{_FILLED.convert(value, param, ctx)}")
        except InvalidRequestError as error:
            self.fail(f"{error.detail}: {error.hint}", param, ctx)


def _duration(text: str, *, zero: bool = False) -> float:
    from mpsd.core.units import parse_span  # imports decimal, which other commands do without

    return parse_span(text, zero=zero)


def _wait(text: str) -> float:
    from mpsd.core.units import parse_wait

    return parse_wait(text)


def _percentage(text: str) -> float:
    from mpsd.core.units import parse_percentage

    return parse_percentage(text)


def _fraction(text: str) -> float:
    from mpsd.core.units import parse_fraction

    return parse_fraction(text)


def _threads(text: str) -> float:
    from mpsd.core.quantities import ActiveThreadPercentage

    return float(ActiveThreadPercentage.parse(text))


def _memory(text: str) -> int:
    from mpsd.core.quantities import PinnedDeviceMemLimit

    return PinnedDeviceMemLimit.parse(text).bytes


def _nodes(text: str) -> object:
    from mpsd.core.kubernetes.upgrade import max_unavailable

    return max_unavailable(text)


def _uid(text: str) -> int:
    found = uid_of(text)
    if found is None:
        raise InvalidRequestError(f"there is no user {text!r}", hint="give a name that `getent passwd` has, or a uid")
    return found


_CLOCK: Final = r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?"
_DAYS: Final = {"today": 0, "yesterday": 1}


def parse_moment(text: str, now: datetime) -> datetime:
    """Return a time: an age (`2h`), a time of the last 24 hours (`03:15`), a day, or a date-time of ISO 8601.

    A time without a zone is in this machine's zone. Raises InvalidRequestError for anything else.
    """
    from mpsd.core.units import briefly, parse_duration

    local, text = now.astimezone(), text.strip()
    if text == "now":
        return now
    if text in _DAYS:
        return local.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=_DAYS[text])
    if found := re.fullmatch(_CLOCK, text, re.ASCII):
        hour, minute, second = (int(each or 0) for each in found.groups())
        moment = local.replace(hour=hour, minute=minute, second=second, microsecond=0)
        return moment if moment <= now else moment - timedelta(days=1)
    with contextlib.suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text).astimezone()
    try:
        return now - timedelta(seconds=parse_duration(text.removesuffix(" ago")))
    except (InvalidRequestError, OverflowError):
        raise InvalidRequestError(
            f"{briefly(text)} is not a time",
            hint="give one such as 2h (so long ago), 03:15, today, or 2026-11-23T03:15",
        ) from None


DURATION: Final = _Notation("duration", _duration)
"""Seconds above 0, from `90`, `90s`, `10m`, `2h` or `1h30m`."""

DURATION_OR_0: Final = _Notation("duration", partial(_duration, zero=True))
"""As DURATION, or 0."""

WAIT: Final = _Notation("duration", _wait)
"""As DURATION, or 0, or `forever`, which is infinite."""

PERCENTAGE: Final = _Notation("percentage", _percentage)
"""Percent, from `25` or `25%`."""

FRACTION: Final = _Notation("fraction", _fraction)
"""A part of a GPU, from `0.25`, `0,25`, `25%` or `1/4`."""

THREADS: Final = _Notation("percentage", _threads)
"""Percent of a GPU's threads, as mpsd takes it, where the command itself makes the request for a lease of it."""

MEMORY: Final = _Notation("size", _memory)
"""Bytes of device memory, likewise."""

NODES: Final = _Notation("nodes", _nodes)
"""A number of nodes, or a percentage of them."""


class _User(_Notation):
    """A user; a shell completes the users of this machine."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        return [CompletionItem(each) for each in user_names(ctx, param, incomplete)]


UID: Final = _User("user", _uid)
"""A uid, from the name of a user, or from a number, with or without an account here."""

MOMENT: Final = _Notation("time", lambda text: parse_moment(text, datetime.now(UTC)))
"""A datetime, by `parse_moment`."""

TIME: Final = "TIME is 2h (so long ago), 03:15, today, 2026-11-23, or 2026-11-23T03:15Z; without a zone, it is local."
"""The description of TIME in the help of an option."""


# -- completions -------------------------------------------------------------------------------------------------------

_DEADLINE: Final = 0.5
"""Seconds for mpsd's answer: the user waits for it after pressing Tab."""

_Names: TypeAlias = Callable[[Client], Iterable[tuple[str, str | None]]]
"""Queries mpsd for names, each with a description."""


def _offering(names: _Names) -> Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]:
    """Make a completion with names from mpsd; it is empty where mpsd is absent, late, or gives an unusable answer."""

    def offer(context: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        given = context.find_root().params
        api = Client(given["socket"], trusted=given["trusted"]) if context.obj is None else context.obj
        try:
            with api.another(deadline=_DEADLINE) as api_now:
                found = [(plain(name), plain(text)) for name, text in names(api_now)]
        except (MpsdError, LookupError, TypeError, ValueError):
            return []
        return [CompletionItem(name, help=text) for name, text in found if name.startswith(incomplete)]

    return offer


daemon_names: Final = _offering(lambda api: [(each["name"], each["state"]) for each in api.daemons()["daemons"]])
gpu_names: Final = _offering(lambda api: [(f"{each['index']}", each["name"]) for each in api.gpus()["gpus"]])
client_pids: Final = _offering(lambda api: [(f"{each['pid']}", each["name"]) for each in api.clients()["clients"]])


def _leases(api: Client) -> Iterator[tuple[str, str | None]]:
    """Yield the ids of the leases, and the names that a shell completes as one word, once each."""
    uid = os.geteuid()  # most commands take no lease of another user
    leases = [each for each in api.leases()["leases"] if uid in {0, each["owner"]["uid"]}]
    yield from ((each["id"], each["name"]) for each in leases)
    yield from {each["name"]: each["id"] for each in leases if re.fullmatch(r"[\w.+@%/-]+", each["name"])}.items()


lease_names: Final = _offering(_leases)


def user_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Offer the users of this machine."""
    import pwd

    return sorted({each.pw_name for each in pwd.getpwall() if each.pw_name.startswith(incomplete)})


def programs(beginning: str = "") -> set[str]:
    """Return the names of the programs in PATH that begin so."""
    found = set[str]()
    for directory in os.get_exec_path():
        with contextlib.suppress(OSError):
            listed = [each for each in os.scandir(directory) if each.name.startswith(beginning)]
            found |= {each.name for each in listed if os.access(each, os.X_OK)}
    return found


def program(context: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Offer the programs in PATH for the first word of a command; the shell completes paths and arguments."""
    from click.shell_completion import CompletionItem

    is_first = incomplete and "/" not in incomplete and not context.params.get("command")
    found = programs(incomplete) if is_first else ()
    return [CompletionItem(each) for each in sorted(found)] or [CompletionItem(incomplete, type="file")]
