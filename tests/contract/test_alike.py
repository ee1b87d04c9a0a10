"""The simulator's model of a control daemon answers and logs the same as NVIDIA's own, for any input."""

from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpsd.core.mps.commands import TABLE
from mpsd.simulator.answers import BRANCHES, ControlDaemon
from tests import real
from tests.contract.subjects import OWNER, STRANGER, Bench, Exchange, as_root, subjects

pytestmark = pytest.mark.thorough

# Without the commands that would start or end something; and with correct and wrong arguments.
NAMES: Final = [name for name in TABLE if name not in {"start_server", "quit"}]
NUMBERS: Final = st.from_regex(
    r"[+-]?(0x)?[0-9]{0,22}(\.[0-9]{0,3})?(e[+-]?[0-9]{1,3})?[GgMmKT%a-f]{0,2}", fullmatch=True
)
WORDS: Final = st.sampled_from(
    ["-p", "-p3", "-f", "-t", "-uid", "abc", "GPU-1", "0", "1", "2", "31", "32", "999", "100", "G"]
)
LINES: Final = st.builds(
    lambda name, arguments: " ".join([name, *arguments]).rstrip(),
    st.sampled_from(NAMES),
    st.lists(NUMBERS | WORDS, max_size=4),
)


def assert_alike(bench: Bench, lines: list[str], *, as_stranger: bool) -> None:
    model = ControlDaemon(bench.subject.branch, owner=OWNER)
    # Settings of an earlier example are still in force in the daemon, so both are first set to the same values.
    same = ["set_default_active_thread_percentage 100", "set_default_client_priority 0"]
    same += [f"set_default_device_pinned_mem_limit {device} 0" for device in range(32)]
    for line in same:
        model.answer(line, uid=OWNER)
    bench.exchange(same)
    expected = []
    for line in lines:
        reply = model.answer(line, uid=STRANGER if as_stranger else OWNER)
        expected.append(Exchange(line, reply.printed, reply.logged))
    assert bench.exchange(lines, as_stranger=as_stranger) == expected


@pytest.mark.parametrize("as_stranger", [False, pytest.param(True, marks=as_root)], ids=["owner", "stranger"])
@pytest.mark.parametrize("subject", subjects(), indirect=True)
# The same examples each time: a developer looks for new differences, not a gate.
@settings(max_examples=3, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, min_size=30, max_size=60))
def test_alike(bench: Bench, as_stranger: bool, lines: list[str]) -> None:  # noqa: FBT001 - a parameter of pytest's
    """Any conversation of known and unknown commands with any arguments is answered and logged alike by both."""
    assert_alike(bench, lines, as_stranger=as_stranger)


@pytest.mark.parametrize("subject", subjects(), indirect=True)
def test_spaces(bench: Bench) -> None:
    """Both accept the same characters as space between two words, and before the first: those of C, not of Unicode."""
    model = ControlDaemon(bench.subject.branch, owner=OWNER)
    ask = "get_default_active_thread_percentage"
    for spaces, percentage in ((" \t\v\f\r", "50.0"), ("\x1c\x1f\x85\xa0\u2028\u3000", "100.0")):
        for space in spaces:
            for line in (
                f"set_default_active_thread_percentage{space}50",
                f"{space}set_default_active_thread_percentage 50",
            ):
                script = ["set_default_active_thread_percentage 100", line, ask]
                assert bench.front_end(*script).printed[-1] == percentage
                assert [model.answer(each, uid=OWNER).printed for each in script][-1] == [percentage]


def test_every_branch_is_there() -> None:
    """The simulator imitates the branches of NVIDIA's control daemons that the tests have, and 580 by its logs."""
    assert set(BRANCHES) == {*real.BRANCHES, 580}
