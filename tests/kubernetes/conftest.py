"""The fixtures of both: the tests of the device plugin, and those of the DRA driver."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests import real
from tests.fork_server import ForkServer, running_fork_server
from tests.kubernetes.plugin.cluster import StandIn
from tests.node import Node


@pytest.fixture(scope="session")
def kubernetes_fork_server(private_root: Path) -> Iterator[ForkServer]:  # noqa: ARG001 - it ends before what is left behind is looked for
    """Yield a process that forks mpsd-kubernetes, and stand-ins for kubelet."""
    with running_fork_server("kubernetes") as started:
        yield started


_Made = TypeVar("_Made", bound=StandIn)


@contextmanager
def clusters(
    kind: type[_Made], place: Path, fork_server: ForkServer, kubernetes_fork_server: ForkServer
) -> Iterator[Callable[..., _Made]]:
    """Yield a maker of running nodes of a cluster, which takes the arguments of the node's mpsd, and of its kind.

    At the end the nodes and all that they started are ended.
    """
    made: list[_Made] = []

    def make(*, start: bool = True, release: str = "1.36", **options: Any) -> _Made:
        root = place / f"k{len(made)}"
        root.mkdir()
        place.chmod(0o711)
        own = {name: options.pop(name, {}) for name in ("settings", "durations")}
        control = real.real_daemons().get(535)
        node = Node(**{"root": root, "simulate": 1, "control": control, "fork_server": fork_server, **options})
        made.append(kind(node, root / "kubelet", kubernetes_fork_server, release, **own))
        node.start()
        if start:
            made[-1].start()
        return made[-1]

    yield make
    for each in made:
        try:
            each.close()
        finally:
            each.node.clean_up()
