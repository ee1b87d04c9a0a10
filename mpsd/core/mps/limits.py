"""The limits of MPS, one row for each: commands, variable, log line, and the reading and writing of its value.

Every part of mpsd that sets a limit, reads it back, compares or reports it uses this table. A further limit needs a row
here (its commands are in `core/mps/commands.py`), a field in `model.Limits` and `model.ReadBack`, and its place in the
simulator; where a field is missing, mypy and tests/core/mps/test_limits.py report it.

Setting a limit is not enough: a control daemon silently ignores a wrong value, so a limit holds only once it was read
back.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final, Generic, TypeAlias, TypeVar

from mpsd.core.model import Limits, ReadBack
from mpsd.core.mps import variables as names
from mpsd.core.mps.commands import TABLE, Command, check_refusal, command, garbled, one_line
from mpsd.core.units import GIB, MIB, format_alike

T = TypeVar("T")

LimitValue: TypeAlias = int | None
"""The value of a limit in its own unit: tenths of a percent, or bytes. None is no limit: wider than any number."""

DEVICE: Final = 0
"""The ordinal of the one GPU that a control daemon of mpsd sees, and that its clients see."""


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """A value to set: the command that sets it, the one that reads it back, and the value that must come back."""

    limit: str
    wanted: T
    setter: str
    getter: Command[T]

    @property
    def script(self) -> tuple[str, ...]:
        """The lines to send."""
        return self.setter, self.getter.line

    @property
    def expects(self) -> int | None:
        """The number of lines that come back in any case, or None when it is not known in advance.

        A memory limit that the daemon ignored, or does not support, reads back as no line, or as error messages of any
        length.
        """
        return 2 if self._setter_lines and self.getter.row.one_line else None

    @property
    def _setter_lines(self) -> int:
        """A setter echoes the value now in force, or prints nothing at all."""
        return 1 if TABLE[self.setter.split(" ", 1)[0]].one_line else 0

    def read_back(self, lines: Sequence[str]) -> T:
        """Return the getter's value: the last line, after any lines of the setter."""
        check_refusal(self.setter, lines)
        return self.getter.parse(lines[self._setter_lines :])


@dataclass(frozen=True, slots=True, eq=False)
class Limit:
    """One of the two limits of MPS, with all that differs between them."""

    name: str
    """Its name in the API, in the configuration, in events and in errors: NVIDIA's word."""
    since: int
    """The first driver branch that has it, by NVIDIA's documentation."""

    # Its commands, its variable and its log line.
    default_setter: str
    """The command that sets the value for the next server."""
    default_getter: str
    server_setter: str
    """The command that sets the value for the next clients of a server; connected ones keep theirs (V2)."""
    server_getter: str
    of_device: bool
    """Whether each device has its own value: commands and the variable then name the device before the value."""
    variable: str
    """The variable with which a client lowers its own limit."""
    log_line: str
    """The server's log line about its value: a regular expression with the group `value`, and `device` where it has
    one."""

    # The values that mpsd wants.
    wanted: Callable[[Limits], LimitValue]
    """Return the value that a control daemon reports when these limits are in force."""
    grammar: Callable[[Limits], str]
    """Write the value as commands and the variable take it."""

    # The values of others.
    parse: Callable[[str, Sequence[str]], LimitValue]
    """Parse the answer to a getter; raises ControlError for an answer of another form."""
    parse_foreign: Callable[[str], LimitValue]
    """Parse another user's value; None where MPS ignores it, takes it for no limit, or may do so."""
    parse_logged: Callable[[str], LimitValue]
    """Parse the `value` of a log line into the value that a getter would report."""
    lowered: Callable[[LimitValue, str, str], LimitValue]
    """Return the limit of a client, from the offered value, the text of its variable, and the GPU that it sees."""

    # Access, and output.
    found: Callable[[ReadBack], LimitValue]
    put: Callable[[ReadBack, LimitValue], ReadBack]
    """Return a reading with another value."""
    shown: Callable[[LimitValue], float | int | None]
    """Convert the value to the API's unit: percent, or bytes."""
    amounts: Callable[[int, int], tuple[str, ...]]
    """Write two values that are compared for output."""
    resource: str
    """The resource that it limits, as the noun of a sentence."""

    def default_setting(self, wanted: Limits) -> Setting[LimitValue]:
        """Give the next server this limit; where none is wanted, remove the limit."""
        setter = command(self.default_setter, (*self._device, self.grammar(wanted)), check_refusal)
        return Setting(self.name, self.wanted(wanted), setter.line, self.ask_default())

    def ask_default(self) -> Command[LimitValue]:
        """Query the value that the next server starts with."""
        return command(self.default_getter, self._device, self.parse)

    def set_on_server(self, server: int, wanted: Limits) -> Command[None]:
        """Give the next clients of a server this limit, which may be wider than the default (V2).

        The answer of a server is not documented, and is ignored here: only `ask_server` shows the result.
        """
        return command(self.server_setter, (server, *self._device, self.grammar(wanted)), check_refusal)

    def ask_server(self, server: int) -> Command[LimitValue]:
        """Query the value for the next clients of a server; the answer of a busy server is empty."""
        return command(self.server_getter, (server, *self._device), self.parse)

    def for_client(self, wanted: Limits) -> str:
        """Write the variable's text for a client that must not exceed these limits."""
        value = self.grammar(wanted)
        return f"{DEVICE}={value}" if self.of_device else value

    def foreign(self, arguments: Sequence[str]) -> LimitValue:
        """Return the value of another user's setter, from its arguments after the pid; None: no limit, or in doubt."""
        return self.parse_foreign(arguments[-1]) if len(arguments) == len(self._device) + 1 else None

    @property
    def _device(self) -> tuple[int, ...]:
        return (DEVICE,) if self.of_device else ()


# -- the active thread percentage --------------------------------------------------------------------------------------

_WHOLE: Final = 1000
"""All threads, in tenths of a percent: the value of MPS where no limit is set (measured)."""

_TENTHS: Final = re.compile(r"([0-9]{1,3})\.([0-9])")
_PERCENT: Final = re.compile(r"[0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,3})?")


def parse_percentage_answer(command: str, lines: Sequence[str]) -> int:
    """Parse `25.0` into 250 tenths of a percent."""
    match = _TENTHS.fullmatch(one_line(command, lines))
    if match is None:
        raise garbled(command, lines)
    return int(match.group(1)) * 10 + int(match.group(2))


def parse_foreign_percentage(text: str) -> int | None:
    """Return another user's percentage in tenths, rounded up; None for a text that MPS ignores, or may ignore."""
    value = float(text) if _PERCENT.fullmatch(text) else 0.0
    return -int(-value * 10 // 1) if 0 < value <= 100 else None  # noqa: PLR2004 - it is a percentage


def _lowered_percentage(offered: LimitValue, text: str, _gpu: str) -> LimitValue:
    own = parse_foreign_percentage(text)
    return offered if own is None else narrower(offered, own)


def _put_percentage(found: ReadBack, value: LimitValue) -> ReadBack:
    return ReadBack(_WHOLE if value is None else value, found.pinned_device_mem_limit)


ACTIVE_THREAD_PERCENTAGE: Final = Limit(
    name="active_thread_percentage",
    since=390,  # NVIDIA's man page of driver 390
    default_setter="set_default_active_thread_percentage",
    default_getter="get_default_active_thread_percentage",
    server_setter="set_active_thread_percentage",
    server_getter="get_active_thread_percentage",
    of_device=False,
    variable=names.ACTIVE_THREAD_PERCENTAGE,
    log_line=r"Active Threads Percentage set to (?P<value>[0-9]{1,3}\.[0-9]{1,6})",  # R580
    wanted=lambda limits: limits.active_thread_percentage.tenths,
    grammar=lambda limits: str(limits.active_thread_percentage),
    parse=parse_percentage_answer,
    parse_foreign=parse_foreign_percentage,
    parse_logged=lambda text: int(float(text) * 10),
    lowered=_lowered_percentage,
    found=lambda found: found.active_thread_percentage_tenths,
    put=_put_percentage,
    shown=lambda value: (_WHOLE if value is None else value) / 10,
    amounts=lambda *values: tuple(f"{each / 10:g} %" for each in values),
    resource="the threads",
)


# -- the pinned device memory limit ------------------------------------------------------------------------------------

_LIMIT: Final = re.compile(r"([0-9]{1,20})([GM])")
"""As many digits as the largest known value has, and more: `-1G` reads back as 17179869184G (measured)."""

_SIZE: Final = re.compile(r"([1-9][0-9]{0,9})([GMgm])")
"""The form that MPS reads exactly as written. Ten digits of G stay below 64 bits, where its numbers wrap around."""


def parse_mem_limit_answer(command: str, lines: Sequence[str]) -> int | None:
    """Parse `8G` or `512M` into bytes; an empty answer means that no limit is set."""
    if not lines:
        return None
    match = _LIMIT.fullmatch(one_line(command, lines))
    if match is None:
        raise garbled(command, lines)
    return int(match.group(1)) * (GIB if match.group(2) == "G" else MIB)


def parse_foreign_mem_limit(text: str) -> int | None:
    """Return another user's memory limit in bytes; None for a text that is no limit to MPS, or may be none."""
    found = _SIZE.fullmatch(text)
    return int(found[1]) * (GIB if found[2] in "gG" else MIB) if found is not None else None


def _parse_logged_mem_limit(text: str) -> int:
    """Return a limit as the pipe reports it: from 1 GiB on in whole GiB, rounded down; the log has the exact bytes."""
    size = int(text, 16)
    return size // GIB * GIB if size >= GIB else size


def _lowered_mem_limit(offered: LimitValue, text: str, gpu: str) -> LimitValue:
    """Apply the entries of a client's variable, unless one of them drops every limit."""
    if invisible_entry(text, gpu) is not None:
        return None
    own = (parse_foreign_mem_limit(entry.partition("=")[2]) for entry in filter(None, text.split(",")))
    return reduce(narrower, own, offered)


def invisible_entry(text: str, gpu: str) -> str | None:
    """Return the entry of a client's memory variable that names another GPU than the one it sees; None without one.

    Such an entry makes the client drop every pinned device memory limit, including its server's (NVIDIA
    measured 96,768 MiB under a limit of 10G on driver 615).
    """
    entries = (entry for entry in text.split(",") if entry)
    return next((entry for entry in entries if not _is_its_gpu(entry.partition("=")[0].strip(), gpu)), None)


def _is_its_gpu(device: str, gpu: str) -> bool:
    """Tell whether an entry names the one GPU that a client of this control daemon sees, which is its first."""
    return (device != "" and not device.strip(str(DEVICE))) or (device.startswith("GPU-") and gpu.startswith(device))


def _wanted_mem_limit(limits: Limits) -> LimitValue:
    wanted = limits.pinned_device_mem_limit
    return None if wanted is None else wanted.as_reported.bytes


def _mem_limit_grammar(limits: Limits) -> str:
    """Write `8G` or `512M`; `0` removes a limit (measured on 535, 550 and 555)."""
    wanted = limits.pinned_device_mem_limit
    return "0" if wanted is None else wanted.grammar


def _put_mem_limit(found: ReadBack, value: LimitValue) -> ReadBack:
    return ReadBack(found.active_thread_percentage_tenths, value)


PINNED_DEVICE_MEM_LIMIT: Final = Limit(
    name="pinned_device_mem_limit",
    since=495,  # CUDA 11.5 (NVIDIA's documentation)
    default_setter="set_default_device_pinned_mem_limit",
    default_getter="get_default_device_pinned_mem_limit",
    server_setter="set_device_pinned_mem_limit",
    server_getter="get_device_pinned_mem_limit",
    of_device=True,
    variable=names.PINNED_DEVICE_MEM_LIMIT,
    log_line=(  # R580
        r"Device pinned memory limit for device (?P<device>[0-9]{1,10}) set to 0x(?P<value>[0-9a-f]{1,16}) bytes"
    ),
    wanted=_wanted_mem_limit,
    grammar=_mem_limit_grammar,
    parse=parse_mem_limit_answer,
    parse_foreign=parse_foreign_mem_limit,
    parse_logged=_parse_logged_mem_limit,
    lowered=_lowered_mem_limit,
    found=lambda found: found.pinned_device_mem_limit,
    put=_put_mem_limit,
    shown=lambda value: value,
    amounts=format_alike,
    resource="memory",
)


# -- the client priority -----------------------------------------------------------------------------------------------


def _parse_priority(command: str, lines: Sequence[str]) -> int:
    """Parse `0` or `1`."""
    line = one_line(command, lines)
    if line not in {"0", "1"}:
        raise garbled(command, lines)
    return int(line)


CLIENT_PRIORITY: Final = Setting(
    "default_client_priority",
    0,
    "set_default_client_priority 0",
    command("get_default_client_priority", (), _parse_priority),
)
"""The initial priority of the next clients: 0 is normal, 1 is below it. It is a hint and not a limit; mpsd keeps it at
0, since a change of it slows down the clients of all other users."""


# -- all of them -------------------------------------------------------------------------------------------------------

LIMITS: Final[tuple[Limit, ...]] = (ACTIVE_THREAD_PERCENTAGE, PINNED_DEVICE_MEM_LIMIT)
"""All limits, in the order in which mpsd sets, queries and reports them."""

EVERYTHING: Final = ReadBack(_WHOLE, None)
"""The reading where nothing is limited."""

NOTHING: Final = ReadBack(0, 0)
"""A reading that is narrower than any real one: the start value for widening."""


def reading_of(values: Mapping[Limit, LimitValue]) -> ReadBack:
    """Combine the values of several limits; any other one is unlimited."""
    result = EVERYTHING
    for limit, value in values.items():
        result = limit.put(result, value)
    return result


def wider(one: LimitValue, other: LimitValue) -> LimitValue:
    """Return the wider of two values of one limit."""
    return None if one is None or other is None else max(one, other)


def narrower(one: LimitValue, other: LimitValue) -> LimitValue:
    """Return the narrower of two values of one limit."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def widest_read_back(one: ReadBack, other: ReadBack) -> ReadBack:
    """Return the wider of each limit, from two readings."""
    return reading_of({limit: wider(limit.found(one), limit.found(other)) for limit in LIMITS})


def narrowest_read_back(one: ReadBack, other: ReadBack) -> ReadBack:
    """Return the narrower of each limit, from two readings."""
    return reading_of({limit: narrower(limit.found(one), limit.found(other)) for limit in LIMITS})


def widest_limits(one: Limits, other: Limits) -> Limits:
    """Return the wider of each limit, from two values to set. It is called for each lease that is granted."""
    if one == other:
        return one
    memory = (one.pinned_device_mem_limit, other.pinned_device_mem_limit)
    return Limits(
        max(one.active_thread_percentage, other.active_thread_percentage),
        None if memory[0] is None or memory[1] is None else max(memory[0], memory[1]),
    )


def variables(wanted: Limits) -> dict[str, str]:
    """Return the environment that holds a client to these limits, wherever its server's are wider."""
    return {limit.variable: limit.for_client(wanted) for limit in LIMITS}


def shown(found: ReadBack) -> dict[str, float | int | None]:
    """Return a reading by the names and in the units of the API."""
    return {limit.name: limit.shown(limit.found(found)) for limit in LIMITS}
