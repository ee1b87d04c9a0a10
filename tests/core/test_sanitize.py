"""No text that others chose has an effect on a terminal."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.sanitize import harmless_json, plain

SURROGATE = st.characters(categories=["Cs"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "printed"),
    [("plain ü 漢", "plain ü 漢"), ("\x1b[2J\x1b[1A", "\\x1b[2J\\x1b[1A"), ("a\nb\tc\r", "a\\nb\\tc\\r"),
     ("\x9b31m", "\\x9b31m"),
     ("\x7f", "\\x7f"), ("\u202egnp.exe", "\\u202egnp.exe"), ("\u2028", "\\u2028"), ("\ud800", "\\ud800")],
)  # fmt: skip
def test_harmless_text(text: str, printed: str) -> None:
    """Escape sequences, line breaks, C1 controls and changes of direction are displayed, not executed."""
    assert plain(text) == printed


@given(JSON)
def test_harmless_answers(answer: object) -> None:
    """Every text anywhere in a decoded answer prints harmlessly; the other values are unchanged."""

    def walk(before: object, after: object) -> None:
        match before, after:
            case str(), str():
                assert after.isprintable()
                assert after == before or not before.isprintable()
            case list(), list():
                for pair in zip(before, after, strict=True):
                    walk(*pair)
            case dict(), dict():
                assert all(key.isprintable() for key in after)
                if len(before) == len(after):
                    walk(list(before.values()), list(after.values()))
            case _:
                assert before is after

    walk(answer, plain(answer))


@given(JSON | st.text(SURROGATE))
def test_lines_of_json(answer: object) -> None:
    """A line of JSON stays the same document in one line, without control characters; one without any is unchanged."""
    text = json.dumps(answer, ensure_ascii=False)
    line = harmless_json(text)
    assert json.dumps(json.loads(line)) == json.dumps(answer)
    assert line.isprintable()
    assert line == text or not text.isprintable()
