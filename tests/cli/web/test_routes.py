"""The server passes on only requests that are spelled as in the API's document."""

import re
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from mpsd.cli.web.guard import methods_of

_PIECES: Final = (
    "/v1",
    "/leases",
    "/daemons",
    "/history",  # which the page reads by a request of its own
    "/operations",
    "/clients",
    "/4711",
    "/end",
    "/lease-1",
    "/gpu0",
    "/hold",
    "/renew",
    "?by=gpu",
    "&",
)
_ODD: Final = ("/..", "/.", "//", "%2e", "%2f", "\\", "\r\n", "\0", "#", " ", "é", "/cdi", "?untaken=true", ";x")

TARGETS: Final = st.lists(st.sampled_from((*_PIECES, *_ODD)) | st.text(max_size=3), max_size=8).map("".join)

_PLAIN: Final = re.compile(r"(/[A-Za-z0-9._-]+)+", re.ASCII)


@given(TARGETS)
def test_one_spelling(target: str) -> None:
    """A path that is passed on has only plain segments that stay in place, and no query."""
    if methods_of(target):
        assert _PLAIN.fullmatch(target)
        assert not {"", ".", ".."} & {*target.split("/")[1:]}


def test_some_are_passed_on() -> None:
    """The routes that the page needs are passed on, and no others."""
    assert methods_of("/v1/leases/lease-1") == {"DELETE"}
    assert methods_of("/v1/daemons/gpu0/hold") == {"POST"}
    assert methods_of("/v1/clients/4711/end") == {"POST"}
    assert methods_of("/v1/clients") == set()
    assert methods_of("/v1/history?by=gpu&since=86400") == set()
