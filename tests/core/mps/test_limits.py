"""The table of limits: complete, true for each driver, and the only place with a limit's names."""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.errors import ControlGarbledError, ControlNoAnswerError, ControlUnknownCommandError
from mpsd.core.model import Limits, ReadBack
from mpsd.core.mps import limits
from mpsd.core.mps.commands import ROWS, TABLE, echo_of
from mpsd.core.mps.limits import (
    ACTIVE_THREAD_PERCENTAGE,
    EVERYTHING,
    LIMITS,
    NOTHING,
    PINNED_DEVICE_MEM_LIMIT,
    Limit,
    LimitValue,
    narrower,
    widest_limits,
    widest_read_back,
)
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.units import GIB, MIB

MPSD: Final = Path(limits.__file__).parents[2]

NO_LIMITS: Final = {"set_default_client_priority"}
"""Setters that limit nothing: a client may take a higher priority than the default (NVIDIA's documentation)."""

GPU: Final = "GPU-11111111-2222-3333-4444-555555555555"
QUARTER: Final = Limits(ActiveThreadPercentage(250), PinnedDeviceMemLimit(1536))
OPEN: Final = Limits(ActiveThreadPercentage(1000), None)

EACH: Final = pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.name)

PERCENTAGES: Final = st.integers(1, 1000).map(ActiveThreadPercentage)
MEM_LIMITS: Final = st.none() | st.integers(1, 2**20).map(PinnedDeviceMemLimit)
WANTED: Final = st.builds(Limits, PERCENTAGES, MEM_LIMITS)
READ_BACK: Final = st.builds(ReadBack, st.integers(0, 1000), st.none() | st.integers(0, 2**50))


def commands_of(limit: Limit) -> tuple[str, str, str, str]:
    """Return the names of the commands that belong to a limit."""
    return limit.default_setter, limit.default_getter, limit.server_setter, limit.server_getter


# -- the table is complete ---------------------------------------------------------------------------------------------


def test_every_setter_is_in_the_table() -> None:
    """Each command that sets a limit is in exactly one row, and each row's commands are in the table of commands."""
    setters = [name for limit in LIMITS for name in (limit.default_setter, limit.server_setter)]
    assert sorted(setters) == sorted({row.name for row in ROWS if row.name.startswith("set_")} - NO_LIMITS)
    assert {name for limit in LIMITS for name in commands_of(limit)} <= TABLE.keys()


@EACH
def test_a_setter_has_its_getter(limit: Limit) -> None:
    """A setter and its getter came with the same driver, and take the same arguments but for the value."""
    for setter, getter in ((limit.default_setter, limit.default_getter), (limit.server_setter, limit.server_getter)):
        sets, gets = TABLE[setter], TABLE[getter]
        assert getter == setter.replace("set_", "get_", 1)
        assert (sets.changes, gets.changes) == (True, False)
        assert sets.since == gets.since >= limit.since
        assert sets.grammar.split()[:-1] == gets.grammar.split()
        assert ("DEVICE" in sets.grammar) == limit.of_device


def test_every_limit_has_its_fields() -> None:
    """The wanted and the read-back limits have a field for each limit, and no other."""
    assert Limits.__struct_fields__ == tuple(limit.name for limit in LIMITS)
    for limit, field in zip(LIMITS, dataclasses.fields(ReadBack), strict=True):
        assert field.name.startswith(limit.name)
        changed = limit.put(NOTHING, 7)
        assert (limit.found(changed), changed) == (7, replace(NOTHING, **{field.name: 7}))
        assert limit.found(limit.put(NOTHING, None)) == limit.found(EVERYTHING)
        assert limit.found(NOTHING) == 0


def test_its_names_stand_nowhere_else() -> None:
    """No module of mpsd but the table, that of the commands, and the simulator names a limit's command or variable."""
    names = [name for limit in LIMITS for name in (*commands_of(limit), limit.variable)]
    pattern = re.compile("|".join(rf"\b{name}\b" for name in names))
    elsewhere = [
        f"{path.relative_to(MPSD)}:{number}: {line.strip()}"
        for path in sorted(MPSD.rglob("*.py"))
        if path.relative_to(MPSD).parts[0] != "simulator" and path.parent != MPSD / "core" / "mps"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not elsewhere, "\n".join(elsewhere)


# -- what is said and heard --------------------------------------------------------------------------------------------


def test_what_is_said() -> None:
    """A limit is set, queried and given to a client in NVIDIA's grammar."""
    percentage, memory = ACTIVE_THREAD_PERCENTAGE, PINNED_DEVICE_MEM_LIMIT
    assert percentage.default_setting(QUARTER).script == (
        "set_default_active_thread_percentage 25.0",
        "get_default_active_thread_percentage",
    )
    assert memory.default_setting(QUARTER).script == (
        "set_default_device_pinned_mem_limit 0 1536M",
        "get_default_device_pinned_mem_limit 0",
    )
    assert memory.default_setting(OPEN).setter == "set_default_device_pinned_mem_limit 0 0"
    assert [limit.set_on_server(7, QUARTER).line for limit in LIMITS] == [
        "set_active_thread_percentage 7 25.0",
        "set_device_pinned_mem_limit 7 0 1536M",
    ]
    assert [limit.ask_server(7).line for limit in LIMITS] == [
        "get_active_thread_percentage 7",
        "get_device_pinned_mem_limit 7 0",
    ]
    assert limits.variables(QUARTER) == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25.0",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1536M",
    }


@EACH
@given(wanted=WANTED)
def test_what_is_wanted_is_understood(limit: Limit, wanted: Limits) -> None:
    """mpsd's commands parse to the intended value, also as foreign commands, and do not lower a client further."""
    reported, said = limit.wanted(wanted), limit.foreign(limit.default_setting(wanted).setter.split()[1:])
    exact = said if limit is ACTIVE_THREAD_PERCENTAGE or said is None else said // GIB * GIB if said >= GIB else said
    assert exact == reported
    assert limit.foreign(limit.set_on_server(7, wanted).line.split()[2:]) == said
    assert limit.lowered(limit.found(EVERYTHING), limit.for_client(wanted), GPU) == said


@pytest.mark.parametrize(
    ("limit", "lines", "expected"),
    [
        (ACTIVE_THREAD_PERCENTAGE, ["25.0"], 250),
        (ACTIVE_THREAD_PERCENTAGE, ["0.0"], 0),
        (ACTIVE_THREAD_PERCENTAGE, [], ControlNoAnswerError),
        (ACTIVE_THREAD_PERCENTAGE, ["25"], ControlGarbledError),
        (ACTIVE_THREAD_PERCENTAGE, ["25.0", "25.0"], ControlGarbledError),
        (PINNED_DEVICE_MEM_LIMIT, ["8G"], 8 * GIB),
        (PINNED_DEVICE_MEM_LIMIT, ["512M"], 512 * MIB),
        (PINNED_DEVICE_MEM_LIMIT, ["17179869183G"], 17179869183 * GIB),
        (PINNED_DEVICE_MEM_LIMIT, [], None),
        (PINNED_DEVICE_MEM_LIMIT, ["8"], ControlGarbledError),
        (PINNED_DEVICE_MEM_LIMIT, [echo_of("get_default_device_pinned_mem_limit")], ControlUnknownCommandError),
    ],
)
def test_answers(limit: Limit, lines: list[str], expected: LimitValue | type[Exception]) -> None:
    """An answer is a value, no limit, or an error; never a guess."""
    if isinstance(expected, type):
        with pytest.raises(expected):
            limit.ask_default().parse(lines)
    else:
        assert limit.ask_default().parse(lines) == expected


def test_what_is_told() -> None:
    """A value is shown in the API's unit: percent as a fraction, memory as bytes; no limit is all threads, or null."""
    names = ("active_thread_percentage", "pinned_device_mem_limit")
    assert limits.shown(ReadBack(333, 5 * GIB)) == dict(zip(names, (33.3, 5 * GIB), strict=True))
    assert limits.shown(EVERYTHING) == dict(zip(names, (100.0, None), strict=True))


# -- which is wider ----------------------------------------------------------------------------------------------------


@given(READ_BACK, READ_BACK)
def test_the_wider_of_what_is_read_back(one: ReadBack, other: ReadBack) -> None:
    """Each limit is the wider of the two, in either order; `EVERYTHING` is the widest, and `NOTHING` the narrowest."""
    both = widest_read_back(one, other)
    assert both == widest_read_back(other, one)
    for limit in LIMITS:
        assert {limit.found(both), narrower(limit.found(one), limit.found(other))} == {
            limit.found(one),
            limit.found(other),
        }
        assert narrower(limit.found(both), limit.found(one)) == limit.found(one)
    assert widest_read_back(one, EVERYTHING) == EVERYTHING
    assert widest_read_back(one, NOTHING) == one


@given(WANTED, WANTED)
def test_the_wider_of_what_is_wanted(one: Limits, other: Limits) -> None:
    """The wider of two wanted limits reads back as the wider of their read-back values."""
    both = widest_limits(one, other)
    assert both == widest_limits(other, one)
    for limit in LIMITS:
        assert limit.wanted(both) == limits.wider(limit.wanted(one), limit.wanted(other))
