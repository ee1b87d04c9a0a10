"""The foundations of the tests work: waiting, and skips for things that a machine lacks."""

import asyncio
import os
import re
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
import os
import pytest
from tests import real

@pytest.mark.parametrize("daemon", real.real_daemon_params())
def test_each(daemon):
    assert daemon.control.name == "nvidia-cuda-mps-control"

@pytest.mark.real_daemon
def test_any():
    pass

@pytest.mark.root("be another user")
def test_another_user():
    os.seteuid(65534)
    os.seteuid(0)
"""


def test_wait_until_says_what_it_waited_for() -> None:
    """On a timeout, the message names the condition and the last result, a value or an error."""

    def refused() -> bool:
        raise ConnectionRefusedError("nobody listens")

    with pytest.raises(AssertionError, match=r"waited 0\.02 s for the moon; the last look saw \[\]"):
        wait_until(list, what="the moon", deadline=0.02)
    with pytest.raises(AssertionError, match=r"the last look saw ConnectionRefusedError\('nobody listens'\)"):
        wait_until(refused, what="the socket", deadline=0.02, not_yet=(OSError,))
    with pytest.raises(ConnectionRefusedError):  # an error that was not named
        wait_until(refused, what="something", not_yet=(ZeroDivisionError,))


def test_eventually() -> None:
    """Inside an event loop a wait ends the same ways."""
    seen = iter([None, "there"])
    assert asyncio.run(eventually(lambda: next(seen), what="something")) == "there"
    with pytest.raises(AssertionError, match="for the moon"):
        asyncio.run(eventually(lambda: None, what="the moon", deadline=0.02))


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


@pytest.mark.parametrize("required", ["", "1"])
def test_what_is_missing(tmp_path: Path, lonely: Path, required: str) -> None:
    """Without a real daemon its tests skip, which the end of the run says in capitals; or they fail where required.

    A test that needs root skips for any other user, whatever is required.
    """
    said = inner_pytest(tmp_path, NEEDY, MPSD_REAL_DAEMONS=str(lonely), MPSD_REQUIRE_REAL_DAEMON=required)
    as_root = os.geteuid() == 0
    passed, skipped = 2 + as_root, (0 if required else 3) + (not as_root)
    assert f" {passed} passed" in said, said
    assert f" {skipped} skipped" in said or not skipped, said
    assert as_root or re.search(r"^ +1  only root can be another user$", said, re.MULTILINE), said
    for branch in (470, 550, 555):
        missing = f"no control daemon of driver branch {branch} in {lonely}: run tests/real/fetch"
        assert (missing if required else f"1  NOT TESTED AGAINST NVIDIA'S OWN CONTROL DAEMON: {missing}\n") in said


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
