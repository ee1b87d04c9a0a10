"""A site for the tests of one module."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ForkServer
from tests.slurm import building
from tests.slurm.site import Site, Start
from tests.slurm.site import site as running_site

_numbers = count(1)


@pytest.fixture(scope="module")
def places(private_root: Path) -> Iterator[Path]:
    """Return where sites can be made, with short paths."""
    return (private_root / f"s{number}" for number in _numbers)


@pytest.fixture
def place(places: Iterator[Path]) -> Path:
    return next(places)


@pytest.fixture(scope="module", params=building.VERSIONS)
def slurm(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the options of a site for this machine's Slurm, and for newer ones."""
    return {"root": building.found(request.param)} if request.param in building.SUITES else {}


@pytest.fixture(scope="module")
def start(slurm: dict[str, Any], places: Iterator[Path], fork_server: ForkServer) -> Start:
    """Return what starts a site with this Slurm, until the end of a `with`."""
    return lambda **options: running_site(next(places), fork_server, **slurm, **options)


@pytest.fixture(scope="module")
def site(start: Start) -> Iterator[Site]:
    with start() as started:
        yield started


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add what the daemons wrote to the report of a failed test."""
    report = yield
    found = getattr(item, "funcargs", {}).get("site")
    if call.when == "call" and call.excinfo is not None and isinstance(found, Site):
        report.sections.append(("the daemons", found.story()))  # type: ignore[attr-defined]
    return report
