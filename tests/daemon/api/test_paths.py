"""The table of routes finds each path, and the names in it, and no other path."""

from typing import Final

import pytest

from mpsd.daemon.api.routes import ROUTES
from mpsd.daemon.api.table import Table

PATHS: Final = ("/leases", "/leases/{id}", "/leases/{id}/renew", "/leases/all", "/openapi.json")


def table(*paths: str) -> Table[str]:
    """Return a table with a row for each path, which has that path as its value."""
    made = Table[str]()
    for path in paths:
        made.add("GET", path, path)
    return made


@pytest.mark.parametrize(
    ("path", "row", "names"),
    [
        ("/leases", "/leases", {}),
        ("/leases/lease-1", "/leases/{id}", {"id": "lease-1"}),
        ("/leases/leases", "/leases/{id}", {"id": "leases"}),
        ("/leases/{id}", "/leases/{id}", {"id": "{id}"}),
        ("/leases/ü\n%2F", "/leases/{id}", {"id": "ü\n%2F"}),
        ("/leases/lease-1/renew", "/leases/{id}/renew", {"id": "lease-1"}),
        ("/leases/all", "/leases/all", {}),
        ("/openapi.json", "/openapi.json", {}),
    ],
)
def test_found(path: str, row: str, names: dict[str, str]) -> None:
    """A path leads to its row, for GET and for HEAD, with the names in it."""
    assert table(*PATHS).find(path) == ({"GET": row, "HEAD": row}, names)


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "leases", "//leases", "/leases/", "/leases//renew", "/leases/lease-1/", "/leases/lease-1/renew/now"),
        *("/openapi-json", "/Leases", "/leases /", "/leases/all/renew"),
    ],
)
def test_not_found(path: str) -> None:
    """No other path leads anywhere."""
    rows, names = table(*PATHS).find(path)
    assert not rows
    assert not names


def test_two_names() -> None:
    """The same part of a path cannot have two names."""
    with pytest.raises(ValueError, match="this part has the name id in another path"):
        table(*PATHS, "/leases/{name}/end")


def test_routes() -> None:
    """Each route of mpsd is found, alone for its method, also where a name in its path has the text of another path."""
    made = Table[str]()
    for route in ROUTES:
        made.add(route.method, route.path, route.path)
    for route in ROUTES:
        for text in ("some", *{part for other in ROUTES for part in other.path.split("/") if part}):
            path = "/".join(text if part.startswith("{") else part for part in route.path.split("/"))
            rows, _ = made.find(path)
            assert rows[route.method] == route.path, path
