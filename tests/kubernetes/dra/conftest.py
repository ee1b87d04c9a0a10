"""Nodes with the DRA driver for the tests: each a real mpsd, the driver, and stand-ins for kubelet and API server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fork_server import ForkServer
from tests.kubernetes.conftest import clusters
from tests.kubernetes.dra.cluster import DraCluster

MakeCluster = Callable[..., DraCluster]
"""Makes a running node of a cluster; takes the arguments of `Node`, and the driver's `settings` and `durations`."""


@pytest.fixture
def make_cluster(short_tmp: Path, fork_server: ForkServer, kubernetes_fork_server: ForkServer) -> Iterator[MakeCluster]:
    with clusters(DraCluster, short_tmp, fork_server, kubernetes_fork_server) as make:
        yield make


BRISK: Final = {"mpsd.kubernetes.dra.publisher._PACE": 0.2}
"""`durations` for tests that wait for several writes of the slice."""


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> DraCluster:
    """Return a running node with one GPU."""
    return make_cluster()
