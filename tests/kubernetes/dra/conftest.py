"""Nodes with the DRA driver for the tests: each a real mpsd, the driver, and stand-ins for kubelet and API server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fork_server import ForkServer
from tests.kubernetes.dra.cluster import DraCluster
from tests.node import Node

MakeCluster = Callable[..., DraCluster]
"""Makes a running node of a cluster; takes the arguments of `Node`, and the driver's `settings` and `durations`."""


@pytest.fixture
def make_cluster(short_tmp: Path, fork_server: ForkServer, kubernetes_fork_server: ForkServer) -> Iterator[MakeCluster]:
    """Return a maker of nodes. After the test the nodes and all that they started are ended."""
    made: list[DraCluster] = []

    def make(
        *,
        settings: dict[str, str] | None = None,
        durations: dict[str, float] | None = None,
        start: bool = True,
        **options: Any,
    ) -> DraCluster:
        root = short_tmp / f"d{len(made)}"
        root.mkdir()
        short_tmp.chmod(0o711)
        node = Node(**{"root": root, "simulate": 1, "fork_server": fork_server, **options})
        cluster = DraCluster(
            node, root / "kubelet", kubernetes_fork_server, settings=settings or {}, durations=durations or {}
        )
        made.append(cluster)
        node.start()
        return cluster.start() if start else cluster

    yield make
    for each in made:
        try:
            each.close()
        finally:
            each.node.clean_up()


BRISK: Final = {"mpsd.kubernetes.dra.publisher._PACE": 0.2}
"""`durations` for tests that wait for several writes of the slice."""


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> DraCluster:
    """Return a running node with one GPU."""
    return make_cluster()
