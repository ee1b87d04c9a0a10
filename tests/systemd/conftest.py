"""A machine for the tests of a class, of the suite that the class names."""

import os
from collections.abc import Iterator

import pytest

from tests.systemd import keeper
from tests.systemd.machine import Machine


@pytest.fixture(scope="class")
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Boot a machine of the class's `SUITE`, and see that nothing is left of it."""
    suite = request.cls.SUITE
    name = f"{request.cls.__name__.lower()}-{os.getpid()}"
    with Machine(suite, name, tmp_path_factory.mktemp("machine")) as machine:
        yield machine
    assert machine.is_gone()
    assert not [group for group in keeper.groups(name) if group.exists()]
