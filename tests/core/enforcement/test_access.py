"""Who is let in to a control daemon."""

from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.enforcement.access import admitted
from mpsd.core.settings import Unadmitted

_UIDS = st.integers(0, 2**32 - 2)


@given(holders=st.sets(_UIDS), own=_UIDS)
def test_denied(holders: set[int], own: int) -> None:
    """Whoever holds a lease is let in, and nobody else; root and mpsd's own uid need nobody's leave."""
    assert admitted(Unadmitted.DENY, holders, own) == frozenset(holders) - {0, own}


@given(holders=st.sets(_UIDS), own=_UIDS)
def test_not_denied(holders: set[int], own: int) -> None:
    """Where processes without a lease are let in, everybody is, whoever holds one."""
    for unadmitted in (Unadmitted.DEFAULTS, Unadmitted.ALLOW):
        assert admitted(unadmitted, holders, own) is None
