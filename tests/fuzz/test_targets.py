"""Every parser with the fuzzer's inputs, with inputs too long for these, and with Hypothesis."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import kept
from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.thorough

DIGITS: Final = b"9" * 5000
"""More digits than Python parses as a number."""
DEEP: Final = b"[" * 5000
"""Deeper than Python's stack."""

LONG: Final = {
    "command": [b"set_active_thread_percentage %b 80" % DIGITS, b"set_device_pinned_mem_limit 7 0 %bG" % DIGITS],
    "answers": [b"\0\0\0@0\n%b\n@1\n@2\n@3" % DIGITS, b"\4\0\0@0\n%bG\n@1\n@2\n@3" % DIGITS],
    "configuration": [b"x=" + DIGITS, b"x=" + DEEP, b"[admission]\nmemory_reserve=" + DIGITS],
    "body": [b'\0{"memory":"%b"}' % DIGITS, b'\0{"threads":%b}' % DIGITS, b'\0{"labels":' + DEEP],
    "units": [DIGITS, DIGITS + b"GiB"],
    "environment": [b"%b\n0=1G" % DIGITS, b"25.0\n0=%bG" % DIGITS, b"\n%b=1G" % DIGITS],
    "intention": [b'{"desired":{"x":' + DEEP * 100, b'{"desired":{"deadline":' + DIGITS],
}


@pytest.mark.parametrize("target", TARGETS)
def test_corpus(target: str) -> None:
    """Inputs of the fuzzer, stored because they take a new path or once failed, are handled."""
    inputs = [*kept.load(target), *LONG.get(target, [])]
    assert inputs
    for data in inputs:
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_any_input(target: str) -> None:
    """Any input is handled, alone or within a valid one."""
    some = st.sampled_from(kept.load(target))
    piece = st.binary(max_size=12) | st.text(max_size=6).map(str.encode) | some

    @given(some, piece, st.integers(0, 400), st.integers(0, 400))
    def check(before: bytes, new: bytes, start: int, end: int) -> None:
        TARGETS[target](before[:start] + new + before[end:])

    check()
