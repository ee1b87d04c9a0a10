"""mpsctl's types of mpsd's answers agree with the answers."""

import inspect
from collections.abc import Mapping
from datetime import datetime
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from mpsd.cli.group import mpsctl
from mpsd.client import answer_types
from mpsd.core.settings import Settings
from mpsd.daemon.api import event_handlers, lease_schema, operator_handlers, schema

SHAPES = [shape for _, shape in inspect.getmembers(answer_types, is_typeddict)]
"""Each shape has the name of the API's struct, less its `Out`."""


def takes(believed: Any, answered: Any) -> bool:
    """Return whether an answered type, as JSON, fits the expected one: times are text, and unions may be wider.

    JSON turns a read-only mapping into a plain one.
    """
    if get_origin(answered) in {UnionType, Union}:
        return all(takes(believed, each) for each in get_args(answered))
    if get_origin(believed) in {UnionType, Union}:
        return any(takes(each, answered) for each in get_args(believed))
    if is_typeddict(believed):
        return bool(believed.__name__ == answered.__name__.removesuffix("Out"))
    if get_origin(believed) in {list, dict}:
        pairs = zip(get_args(believed), get_args(answered), strict=True)
        origin = {Mapping: dict}.get(get_origin(answered), get_origin(answered))
        return get_origin(believed) is origin and all(takes(*pair) for pair in pairs)
    if believed is object:
        return True
    return bool(believed is (str if answered is datetime else answered))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_shapes(shape: Any) -> None:
    """Each shape has fields of the types that mpsd answers with, and accepts their values; it may omit fields."""
    names = (f"{shape.__name__}Out", shape.__name__)
    struct = next(
        getattr(module, name)
        for module in (schema, lease_schema, operator_handlers, event_handlers)
        for name in names
        if hasattr(module, name)
    )
    answered, believed = get_type_hints(struct), get_type_hints(shape)
    assert believed.keys() <= answered.keys()
    assert [name for name, hint in believed.items() if not takes(hint, answered[name])] == []


def test_differences_are_seen() -> None:
    """The comparison above rejects types that differ."""
    assert takes(dict[str, list[int | None]], dict[str, list[int]])
    assert takes(answer_types.Lease | None, lease_schema.LeaseOut)
    assert takes(str | None, datetime | None)
    assert takes(dict[str, str], Mapping[str, str])
    assert not takes(int, int | None)
    assert not takes(list[int | None], list[str])
    assert not takes(list[int], dict[str, int])
    assert not takes(dict[str, str], Mapping[str, int])
    assert not takes(answer_types.Lease, schema.GpuOut)
    assert not takes(float, datetime)


def test_every_shape_is_compared() -> None:
    """There are shapes; otherwise the test above would prove nothing."""
    assert {shape.__name__ for shape in SHAPES} >= {"Status", "Gpu", "Daemon", "Lease", "Share", "Client"}


def test_default_socket() -> None:
    """The socket that mpsctl tries first is the one that mpsd makes by default."""
    (option,) = (parameter for parameter in mpsctl.params if parameter.name == "socket")
    assert option.default == str(Settings().socket)
