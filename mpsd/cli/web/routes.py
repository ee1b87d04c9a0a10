"""The requests of the API that the server passes on to mpsd for the page. It passes on no others.

The server compares a path as it was sent and decodes nothing in it, so it passes on no other spelling of a path.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

NAME: Final = r"(?!\.+(?:/|\Z))[A-Za-z0-9._-]{1,128}"
"""The name of a lease, a control daemon or an operation, as one segment of a path."""


class Row(NamedTuple):
    """A route of mpsd's API."""

    method: str
    path: re.Pattern[str]


def _row(method: str, path: str) -> Row:
    return Row(method, re.compile(re.sub(r"\{\w+\}", lambda _: NAME, path), re.ASCII))


PASSED_ON: Final[Sequence[Row]] = (
    _row("GET", "/v1/operations/{id}"),
    _row("POST", "/v1/leases/{id}/renew"),
    _row("DELETE", "/v1/leases/{id}"),
    _row("POST", "/v1/daemons/{name}/hold"),
    _row("POST", "/v1/daemons/{name}/drain"),
    _row("POST", "/v1/daemons/{name}/resume"),
    _row("POST", "/v1/daemons/{name}/restart"),
    _row("POST", "/v1/daemons/{name}/reset"),
)


def methods_of(target: str) -> frozenset[str]:
    """Return the methods allowed for a path of the API; an empty set for all other paths, and for any query."""
    return frozenset(each.method for each in PASSED_ON if each.path.fullmatch(target))
