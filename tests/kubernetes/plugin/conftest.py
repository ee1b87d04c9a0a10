"""Nodes of a cluster for the tests: each a real mpsd, the plugin, and a stand-in for kubelet."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.kubernetes.conftest import clusters
from tests.kubernetes.plugin.cluster import StandIn

MakeCluster = Callable[..., StandIn]
"""Makes a running node of a cluster; takes the arguments of `Node`, and the plugin's `settings` and `durations`."""


@pytest.fixture
def make_cluster(short_tmp: Path, fork_server: ForkServer, kubernetes_fork_server: ForkServer) -> Iterator[MakeCluster]:
    with clusters(StandIn, short_tmp, fork_server, kubernetes_fork_server) as make:
        yield make
