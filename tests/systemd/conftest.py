"""A machine for the tests of a class, of the class's suite."""

import os
from collections.abc import Iterator

import pytest

from tests.systemd import keeper
from tests.systemd.machine import Machine
from tests.systemd.node import Service
from tests.systemd.packages.packages import Packages, build, renumbered


@pytest.fixture(scope="class")
def service(machine: Machine) -> Service:
    """Return mpsd in it, installed and enabled like an operator does, with a lease and its holder."""
    machine.install()
    machine.install_units()
    service = Service(machine)
    service.start()
    service.hold()
    return service


@pytest.fixture
def unharmed(service: Service) -> Iterator[None]:
    """Check that a test leaves each control daemon and each lease unchanged."""
    for gpu in ("0", "1"):  # after another user's test, the daemon is replaced for root now, and not later
        service.machine.run("mpsctl", "run", "--threads", "1", "--memory", "1MiB", "--gpu", gpu, "--", "true")
    before = service.daemons(), service.running(), service.leases()
    yield
    assert (service.daemons(), service.running(), service.leases()) == before


@pytest.fixture(scope="class")
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Boot a machine of the class's `SUITE`, and check that nothing is left of it."""
    suite = request.cls.SUITE
    name = f"{request.cls.__name__.lower()}-{os.getpid()}"
    with Machine(suite, name, tmp_path_factory.mktemp("machine")) as machine:
        yield machine
    assert machine.is_gone()
    assert not [group for group in keeper.groups(name) if group.exists()]


@pytest.fixture(scope="class")
def packages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Build the package of the class's `SUITE`, and a renumbered one for an upgrade."""
    first = build(request.cls.SUITE.name, tmp_path_factory.mktemp("package"))
    return Packages(first, renumbered(first, tmp_path_factory.mktemp("later"), 2))
