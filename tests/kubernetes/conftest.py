"""The fixtures of both: the tests of the device plugin, and those of the DRA driver."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer, running_fork_server


@pytest.fixture(scope="session")
def kubernetes_fork_server(private_root: Path) -> Iterator[ForkServer]:  # noqa: ARG001 - it ends before what is left behind is looked for
    """Yield a process that forks mpsd-kubernetes, and stand-ins for kubelet."""
    with running_fork_server("kubernetes") as started:
        yield started
