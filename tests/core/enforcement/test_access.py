"""Pipe access to a control daemon."""

from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.enforcement.access import admitted
from mpsd.core.settings import Unadmitted

_UIDS = st.integers(0, 2**32 - 2)


@given(holders=st.sets(_UIDS), own=_UIDS)
def test_denied(holders: set[int], own: int) -> None:
    """Holders of leases have access, and no other uid; root and mpsd's own uid need no permission."""
    assert admitted(Unadmitted.DENY, holders, own) == frozenset(holders) - {0, own}


@given(holders=st.sets(_UIDS), own=_UIDS)
def test_not_denied(holders: set[int], own: int) -> None:
    """Where processes without a lease are admitted, all uids have access, whichever hold leases."""
    for unadmitted in (Unadmitted.DEFAULTS, Unadmitted.ALLOW):
        assert admitted(unadmitted, holders, own) is None
