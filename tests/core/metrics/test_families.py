"""The table of metrics keeps Prometheus' rules for names, and the values of every label are bounded."""

import re
from typing import Final

import pytest

from mpsd.core.metrics.families import FAMILIES, Family

BOUNDED: Final = {
    "version", "kind", "gpu", "index", "name", "driver", "xid", "daemon", "cause", "code", "limit", "state",
    "outcome", "class", "event", "level", "lease", "uid", "pid",
}  # fmt: skip
"""The labels. Users choose none of their values: `name` is a GPU's, and `class` is in the configuration."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_name(family: Family) -> None:
    """A name is mpsd's and has no suffix of its own; its help is a sentence. What lasts or has a size has a unit."""
    assert re.fullmatch(r"mpsd(_[a-z]+)+", family.name)
    assert bool(family.unit) == bool(re.search("seconds|bytes|ratio|memory|duration|threads", family.name))
    assert not family.name.endswith(("_total", "_info", "_count", "_sum", "_bucket"))
    assert re.fullmatch(r"[A-Z1].*\.", family.help)
    assert {*family.labels} <= BOUNDED


def test_what_is_about_users() -> None:
    """A family with a lease, a uid or a process among its labels is about users, and hidden from readers of sums."""
    for family in FAMILIES:
        assert family.about_users == bool({"lease", "uid", "pid", "class"} & {*family.labels}), family.name
