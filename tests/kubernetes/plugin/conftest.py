"""Nodes of a cluster for the tests: each a real mpsd, the plugin, and a stand-in for kubelet."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ForkServer
from tests.kubernetes.plugin.cluster import StandIn
from tests.node import Node

MakeCluster = Callable[..., StandIn]
"""Makes a running node of a cluster; takes the arguments of `Node`, and the plugin's `settings` and `durations`."""


@pytest.fixture
def make_cluster(short_tmp: Path, fork_server: ForkServer, kubernetes_fork_server: ForkServer) -> Iterator[MakeCluster]:
    """Return a maker of nodes. After the test the nodes and all that they started are ended."""
    made: list[StandIn] = []

    def make(
        *,
        settings: dict[str, str] | None = None,
        durations: dict[str, float] | None = None,
        release: str = "1.36",
        start: bool = True,
        **options: Any,
    ) -> StandIn:
        root = short_tmp / f"k{len(made)}"
        root.mkdir()
        short_tmp.chmod(0o711)
        node = Node(**{"root": root, "simulate": 1, "fork_server": fork_server, **options})
        cluster = StandIn(node, root / "kubelet", kubernetes_fork_server, release, settings or {}, durations or {})
        made.append(cluster)
        node.start()
        return cluster.start() if start else cluster

    yield make
    for each in made:
        try:
            each.close()
        finally:
            each.node.clean_up()
