"""`mpsctl service wrap` without systemd; `tests/systemd/wrapping.py` tests it on a booted machine."""

from math import inf

import pytest

from mpsd.core.errors import ConfigurationError
from mpsd.system import systemd_units
from tests.cli.conftest import run_mpsctl


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("user.slice", "--fraction", "0.25"), "mpsctl admit --unit user.slice"),
        (("../x", "--fraction", "0.25"), "is not the name of a unit"),
        (("train", "--fraction", "0.25", "--user", "0"), "omit --user"),
        (("train", "--fraction", "0.25", "--ttl", "10"), "omit --ttl"),
        (("train", "--fraction", "0.25", "--end-clients", "--on-restart", "keep"), "use --on-restart renew"),
    ],
)
def test_refused(arguments: tuple[str, ...], says: str) -> None:
    """Invalid input for a unit is refused before anything is read, with a remedy."""
    done = run_mpsctl("none.sock", "service", "wrap", *arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_nothing_to_wrap() -> None:
    """Without root, without systemd, or without the unit it says so, and writes nothing."""
    done = run_mpsctl("none.sock", "service", "wrap", "mpsd-no-such-unit", "--fraction", "0.25")
    assert done.returncode in {1, 77, 78}
    assert "hint:" in done.stderr


@pytest.mark.parametrize(
    ("span", "seconds"),
    [("1min 30s", 90.0), ("infinity", inf), ("0", 0.0), ("100ms", 0.1), ("1w 2d 3h 4min 5s", 788645.0), ("1.5s", 1.5)],
)
def test_time_spans(span: str, seconds: float) -> None:
    """A span is parsed in systemctl's format."""
    assert systemd_units.seconds(span) == pytest.approx(seconds)


@pytest.mark.parametrize("span", ["1 fortnight", "-1s", "1min30s", "s"])
def test_other_words(span: str) -> None:
    """Any other text is refused, and not taken for zero."""
    with pytest.raises(ConfigurationError):
        systemd_units.seconds(span)
