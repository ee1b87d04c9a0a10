"""Of all that can be asked for, `routes` passes on what is spelled as the API's document spells it."""

import re
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from mpsd.cli.web.routes import methods_of

_PIECES: Final = (
    "/v1",
    "/leases",
    "/daemons",
    "/history",
    "/operations",
    "/lease-1",
    "/gpu0",
    "/hold",
    "/renew",
    "?by=gpu",
    "&",
)
_ODD: Final = ("/..", "/.", "//", "%2e", "%2f", "\\", "\r\n", "\0", "#", " ", "é", "/cdi", "?untaken=true", ";x")

TARGETS: Final = st.lists(st.sampled_from((*_PIECES, *_ODD)) | st.text(max_size=3), max_size=8).map("".join)

_PLAIN: Final = re.compile(r"(/[A-Za-z0-9._-]+)+(\?[A-Za-z0-9_=&:.+-]*)?", re.ASCII)


@given(TARGETS)
def test_one_spelling(target: str) -> None:
    """Whatever is passed on has plain segments that lead nowhere else, and a query for the history alone."""
    if methods_of(target):
        assert _PLAIN.fullmatch(target)
        assert not {"", ".", ".."} & {*target.partition("?")[0].split("/")[1:]}
        assert "?" not in target or target.startswith("/v1/history?")


def test_some_are_passed_on() -> None:
    """The routes that the page needs are."""
    assert methods_of("/v1/leases/lease-1") == {"DELETE"}
    assert methods_of("/v1/daemons/gpu0/hold") == {"POST"}
    assert methods_of("/v1/history?by=gpu&since=86400") == {"GET"}
