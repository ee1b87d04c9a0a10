"""Facts about MPS that depend on the driver."""

import pytest

from mpsd.core.mps_facts import Binds, binds


@pytest.mark.parametrize(
    ("driver_branch", "expected"),
    [(580, Binds.CONNECT), (535, Binds.CONTEXT), (575, Binds.CONTEXT), (590, Binds.CONTEXT), (None, Binds.CONTEXT)],
)
def test_binds(driver_branch: int | None, expected: Binds) -> None:
    """Only where it was measured does a connection bind the limits."""
    assert binds(driver_branch) is expected
