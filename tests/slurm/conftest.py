"""A site for the tests of one module."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ForkServer
from tests.slurm import building
from tests.slurm.site import Site
from tests.slurm.site import site as running_site

_numbers = count(1)


@pytest.fixture
def place(private_root: Path) -> Path:
    """Return where a site can be made, with a short path."""
    return private_root / f"s{next(_numbers)}"


@pytest.fixture(scope="module", params=["this Debian's", building.SUITE])
def slurm(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the options of a site for this machine's Slurm, and for a newer one.

    That one takes no control groups of version 1 beside version 2, so it follows processes by what /proc tells.
    """
    return {"root": building.found(), "control_groups": False} if request.param == building.SUITE else {}


@pytest.fixture(scope="module")
def site(slurm: dict[str, Any], private_root: Path, fork_server: ForkServer) -> Iterator[Site]:
    with running_site(private_root / f"s{next(_numbers)}", fork_server, **slurm) as started:
        yield started


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add what the daemons wrote to the report of a failed test."""
    report = yield
    found = getattr(item, "funcargs", {}).get("site")
    if call.when == "call" and call.excinfo is not None and isinstance(found, Site):
        report.sections.append(("the daemons", found.story()))  # type: ignore[attr-defined]
    return report
