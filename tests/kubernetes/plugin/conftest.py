"""Nodes of a cluster for the tests: each a real mpsd, the plugin, and a stand-in for kubelet."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.kubernetes.conftest import clusters
from tests.kubernetes.dra.api_server import ApiServer
from tests.kubernetes.dra.cluster import NODE
from tests.kubernetes.plugin.cluster import StandIn

MakeCluster = Callable[..., StandIn]
"""Makes a running node of a cluster; takes the arguments of `Node`, and the plugin's `settings` and `durations`."""


@pytest.fixture
def make_cluster(short_tmp: Path, fork_server: ForkServer, kubernetes_fork_server: ForkServer) -> Iterator[MakeCluster]:
    with clusters(StandIn, short_tmp, fork_server, kubernetes_fork_server) as make:
        yield make


@pytest.fixture
def api_server(tmp_path: Path) -> Iterator[ApiServer]:
    """Yield an API server with one Node."""
    server = ApiServer(tmp_path / "account").start()
    server.put(f"/api/v1/nodes/{NODE}", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
    yield server
    server.stop()


def account(server: ApiServer) -> dict[str, str]:
    """Return the plugin's settings with which it knows the API server."""
    return {"API_SERVER": server.url, "SERVICE_ACCOUNT": str(server.folder), "NODE": NODE}
