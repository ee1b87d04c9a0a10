"""`mpsctl service wrap` without systemd; `tests/systemd/wrapping.py` tests it on a booted machine."""

import os
import signal
from math import inf
from pathlib import Path

import pytest

from mpsd.core.errors import ConfigurationError
from mpsd.system.host import systemd_units
from tests.cli.answering import answering, http
from tests.cli.conftest import run_mpsctl, start_mpsctl
from tests.harness import wait_until


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


_SYSTEMCTL = """\
#!/bin/sh
printf '%s\\n' LoadState=loaded ControlGroup=/system.slice/train.service ActiveState=activating User= Group=
"""


def test_stopped_while_it_waits(short_tmp: Path) -> None:
    """The start of a unit that is stopped while it waits for its lease ends by the signal, without a traceback."""
    (short_tmp / "systemctl").write_text(_SYSTEMCTL)
    (short_tmp / "systemctl").chmod(0o755)
    options = ("--fraction", "0.25", "--wait", "60")
    environment = {**os.environ, "PATH": f"{short_tmp}:{os.environ['PATH']}"}
    with (
        answering(short_tmp / "s", http({"leases": []}), None, None, None) as mpsd,
        start_mpsctl(short_tmp / "s", "service", "unit-start", "none.service", *options, env=environment) as process,
    ):
        wait_until(lambda: len(mpsd.requests) == 2 or process.poll() is not None, what="the request for a lease")
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    assert "Traceback" not in stderr
    assert "mpsctl: interrupted; " in stderr


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
