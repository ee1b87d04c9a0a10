"""The foundations of the tests work: waiting, and skips for things that a machine lacks."""

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests import real
from tests.conftest import HEAVY
from tests.gate.inner import inner_pytest
from tests.gate.source import ROOT
from tests.harness import eventually, wait_until

pytestmark = pytest.mark.thorough

NEEDY: Final = """
import pytest
from tests import real
from tests.conftest import HEAVY

@pytest.mark.parametrize("daemon", real.real_daemon_params())
def test_each(daemon):
    assert daemon.control.name == "nvidia-cuda-mps-control"

@pytest.mark.real_daemon
def test_any():
    pass
"""


def looks(*values: object) -> Iterator[object]:
    """Yield one value for each check, and raise those that are errors."""
    for value in values:
        if isinstance(value, Exception):
            raise value
        yield value


def test_wait_until_returns_what_it_saw() -> None:
    """The first true value ends the wait and is its result."""
    seen = looks(None, 0, "", "there")
    assert wait_until(lambda: next(seen), what="something") == "there"


def test_wait_until_says_what_it_waited_for() -> None:
    """On a timeout, the message names the condition and the last result, a value or an error."""

    def refused() -> bool:
        raise ConnectionRefusedError("nobody listens")

    with pytest.raises(AssertionError, match=r"waited 0\.02 s for the moon; the last look saw \[\]"):
        wait_until(list, what="the moon", deadline=0.02)
    with pytest.raises(AssertionError, match=r"the last look saw ConnectionRefusedError\('nobody listens'\)"):
        wait_until(refused, what="the socket", deadline=0.02, not_yet=(OSError,))


def test_wait_until_hides_no_error() -> None:
    """An error that was not named ends the wait at once."""
    seen = looks(None, ZeroDivisionError("a defect"))
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: next(seen), what="something", not_yet=(OSError,))


def test_eventually_takes_functions_and_coroutines() -> None:
    """Inside an event loop the condition may be either, and the wait ends the same way."""

    async def main() -> None:
        seen = looks(None, "there", None, "here")

        async def look() -> object:
            return next(seen)

        assert await eventually(look, what="something") == "there"
        assert await eventually(lambda: next(seen), what="something") == "here"
        with pytest.raises(AssertionError, match="for the moon"):
            await eventually(lambda: None, what="the moon", deadline=0.02)

    asyncio.run(main())


@pytest.fixture
def lonely(tmp_path: Path) -> Path:
    """Make a cache that holds the control daemon of one branch only, beside other files."""
    for name in ("535.1.02", "535.261.03"):
        control = tmp_path / "cache" / name / real.CONTROL
        control.parent.mkdir(parents=True)
        control.write_text("#!/bin/sh\n", encoding="utf-8")
        control.chmod(0o755)
    for name in (".fetching-470-x", "550.163.01", "555"):
        (tmp_path / "cache" / name).mkdir()
    return tmp_path / "cache"


def test_missing_daemons_skip_loudly(tmp_path: Path, lonely: Path) -> None:
    """Without a real daemon its tests skip, and the end of the run says so in capitals, with the remedy."""
    said = inner_pytest(tmp_path, NEEDY, MPSD_REAL_DAEMONS=str(lonely), MPSD_REQUIRE_REAL_DAEMON="")
    assert re.search(r"\b2 passed, 3 skipped\b", said), said
    assert "NOT TESTED AGAINST NVIDIA'S OWN CONTROL DAEMON" in said
    missing = "missing: driver branch 470, 550, 555. To have those tests run as well: tests/real/fetch"
    assert f"{missing}\n" in said


def test_missing_daemons_fail_where_they_are_required(tmp_path: Path, lonely: Path) -> None:
    """With MPSD_REQUIRE_REAL_DAEMON=1 the same run fails, and names each missing one."""
    said = inner_pytest(tmp_path, NEEDY, MPSD_REAL_DAEMONS=str(lonely), MPSD_REQUIRE_REAL_DAEMON="1")
    assert re.search(r"\b2 passed, 3 errors\b", said), said
    for branch in (470, 550, 555):
        assert f"no control daemon of driver branch {branch} in {lonely}" in said


ROOT_ONLY: Final = """
import os
import pytest

@pytest.mark.root("be another user")
def test_another_user():
    os.seteuid(65534)
    os.seteuid(0)

@pytest.mark.parametrize("number", range(30))
def test_anybody(number):
    if number:
        pytest.skip("of another reason")
    assert number == 1
"""


def test_root_alone(tmp_path: Path) -> None:
    """A test that needs root runs for root, and skips for any other user, whatever is required."""
    said = inner_pytest(tmp_path, ROOT_ONLY, "-k", "another", MPSD_REQUIRE_REAL_DAEMON="1")
    if os.geteuid() == 0:
        assert re.search(r"\b1 passed\b", said), said
    else:
        assert re.search(r"\b1 skipped\b", said), said
        assert re.search(r"^ +1  only root can be another user$", said, re.MULTILINE), said


def test_each_reason_once(tmp_path: Path) -> None:
    """A reason for skips is one line, with the number of its tests, before the names of failed tests."""
    said = inner_pytest(tmp_path, ROOT_ONLY, "-k", "anybody")
    assert re.search(r"^!+ 29 SKIPPED !+$\n^   29  of another reason$", said, re.MULTILINE), said
    assert len(re.findall(r"^.*\d+ +of another reason$|^SKIPPED", said, re.MULTILINE)) == 1, said
    assert re.search(r"29 SKIPPED.*^FAILED \S*test_inner\.py::test_anybody\[0\]", said, re.MULTILINE | re.DOTALL), said


def test_the_newest_point_release_is_taken(lonely: Path) -> None:
    """Of two point releases of a branch the newer counts, by number and not by spelling."""
    assert (real.version_of(lonely / "535.261.03") or ()) > (real.version_of(lonely / "535.1.02") or ())
    assert real.version_of(lonely / ".fetching-470-x") is None
    assert real.version_of(lonely / "555") is None


def test_what_is_left_out_runs_in_ci() -> None:
    """Each mark that a usual run leaves out is chosen by a run of `.ci/run`, so that no test runs nowhere."""
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
    chosen = {
        word
        for expression in re.findall(r'-m "?([\w ]+)"?|^thorough="\(([\w ]+)\)', ci, re.MULTILINE)
        for word in " ".join(expression).split()
    }
    assert {*HEAVY} <= chosen - {"or"}
