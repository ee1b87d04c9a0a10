"""Values are printed as users write them, and text that others chose has no effect on a terminal."""

import json
import subprocess
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.cli.render import (
    age,
    as_env_file,
    as_exports,
    as_here,
    as_json,
    fact,
    percent,
    plural,
    size,
    span,
    until,
)
from mpsd.core.errors import InternalError, InvalidRequestError
from mpsd.core.units import parse_duration, parse_size

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)

SURROGATE = st.characters(categories=["Cs"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("count", "printed"),
    [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (1536 * 1024, "1.5MiB"), (512 * 1024**2, "512MiB"),
     (8 * 1024**3, "8GiB"), (80 * 1024**3 - 1, "79.99GiB"), (1024**4, "1TiB"), (5000 * 1024**4, "5000TiB")],
)  # fmt: skip
def test_sizes(count: int, printed: str) -> None:
    """A size is printed in its largest unit, rounded down: an amount printed as free is free."""
    assert size(count) == printed


@given(st.integers(1, 2**50))
def test_sizes_never_promise_more(count: int) -> None:
    """A printed size, typed in again, is never more than the original."""
    assert parse_size(size(count).replace("TiB", "GiB")) <= count


@pytest.mark.parametrize(
    ("value", "printed"), [(25.0, "25%"), (33.3, "33.3%"), (0.1, "0.1%"), (100.0, "100%"), (0, "0%")]
)
def test_percentages(value: float, printed: str) -> None:
    """A percentage has as many decimals as it needs."""
    assert percent(value) == printed


@pytest.mark.parametrize(
    ("seconds", "printed"),
    [
        (-5, "0s"),
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (61, "1m 1s"),
        (3599, "59m 59s"),
        (3600, "1h"),
        (7199, "1h 59m"),
        (86399, "23h 59m"),
        (86400, "1d"),
        (100 * 86400 - 1, "99d 23h"),
    ],
)
def test_durations(seconds: float, printed: str) -> None:
    """An age and a remaining time have two units, rounded down; one that the clock has made negative is none."""
    assert age((NOW - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z"), NOW) == printed
    assert until((NOW + timedelta(seconds=seconds)).isoformat(), NOW) == printed


@given(st.floats(0, 1e9))
def test_durations_mislead_nobody(seconds: float) -> None:
    """A printed duration, typed in again, is never more than the original, and never a second unit less."""
    printed = parse_duration(span(seconds).replace(" ", ""), zero=True)
    assert printed <= seconds < printed + max(1, seconds / 24)


@given(st.text() | st.integers() | st.lists(st.text() | st.integers(), min_size=1))
def test_facts(value: object) -> None:
    """A fact prints unambiguously: text that looks like several words, or like none, is in quotes."""
    printed = fact(value)
    parts = json.JSONDecoder()
    rest, found = printed, []
    while rest:
        if rest.startswith('"'):
            part, end = parts.raw_decode(rest)
        else:
            part = rest.partition(",")[0]
            end = len(part)
        found.append(part)
        assert rest[end : end + 1] in {"", ","}
        rest = rest[end + 1 :]
    assert found == [str(each) for each in (value if isinstance(value, list) else [value])]


def test_plurals() -> None:
    """One thing has no plural."""
    assert [plural(count, "lease") for count in range(3)] == ["0 leases", "1 lease", "2 leases"]


@given(JSON | st.text(SURROGATE))
def test_json_is_the_same_document(answer: object) -> None:
    """JSON output is the same document as the input, with its keys in order, and without control characters."""
    text = as_json(answer)
    assert json.dumps(json.loads(text)) == json.dumps(answer)
    assert text.replace("\n", "").isprintable()


def test_json_is_indented() -> None:
    """JSON is indented, and text in other scripts stays text."""
    assert as_json({"name": "ü", "n": 25.0}) == '{\n  "name": "ü",\n  "n": 25.0\n}'


HOSTILE = (
    "plain",
    "",
    "a b",
    "it's",
    '"$(echo no)"',
    "`id`",
    "$HOME",
    "a\nb",
    "a;b&c|d",
    "*",
    "!x",
    "\\",
    "~",
    "ü",
    "-n",
)


@pytest.mark.parametrize("shell", ["sh", "bash", "dash"])
def test_exports(shell: str) -> None:
    """Export lines, evaluated by a shell, give programs each value unchanged, whatever it contains."""
    variables = {f"V{number}": value for number, value in enumerate(HOSTILE)}
    script = 'eval "$1"; exec env -0'
    done = subprocess.run(
        [shell, "-c", script, shell, as_exports(variables)], capture_output=True, text=True, check=True
    )
    seen = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)
    assert {name: seen.get(name) for name in variables} == variables


@pytest.mark.parametrize("name", ["", "A B", "A;rm", "1A", "A=B", "Ä"])
def test_exports_of_nonsense(name: str) -> None:
    """A name that is no variable's is refused, and never passed to a shell or a runtime."""
    with pytest.raises(InternalError):
        as_exports({name: "x"})
    with pytest.raises(InternalError):
        as_env_file({name: "x"})


def test_env_file() -> None:
    """Each variable is a separate line, without quotes."""
    assert as_env_file({"A": "/run/mpsd/mps/gpu0", "B": "0 2601", "C": "", "D": "0=8G"}) == (
        "A=/run/mpsd/mps/gpu0\nB=0 2601\nC=\nD=0=8G"
    )


@pytest.mark.parametrize(
    "value", ["a\nb", "a\rb", "a\0b", "a\u2028b", " a", "a ", "it's", '"a"', "a # b", "$HOME", "`id`", "\\n", "\udcff"]
)
def test_env_file_of_what_it_cannot_have(value: str) -> None:
    """A value that one of the readers would take for another value or variable is refused by name."""
    with pytest.raises(InvalidRequestError, match="the value of ODD is"):
        as_env_file({"A": "1", "ODD": value})


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("uid 0 released it", "root released it"),
        ("lease-0 (train, uid 0) has 50 %", "lease-0 (train, root) has 50 %"),
        ("uid 65534 holds leases on the GPU", "user nobody holds leases on the GPU"),
        ("pid 7 of uid 61777 listens: --trust-uid 0, or MPSD_TRUST_UID=0", None),
        ("uid 0 of the container is not mapped", None),
        ("setuid 0, uid 0x5, a squid 0", None),
    ],
)
def test_users_by_their_names(said: str, read: str | None) -> None:
    """A sentence names users of this machine.

    A user without a name, an option, and a container's user are unchanged. `nobody` is not taken for the English word.
    """
    assert as_here(said) == (said if read is None else read)
