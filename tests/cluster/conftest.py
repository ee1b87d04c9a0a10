"""The cluster, one for a test run, with mpsd's image on its node."""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import programs as found_programs
from tests.cluster.cluster import Cluster
from tests.container.images import build, image, inputs, podman
from tests.container.podman import Podman
from tests.harness import remove_tree

__all__ = ["build", "image", "inputs", "podman"]


@pytest.fixture(scope="session")
def images(podman: Podman, image: str) -> Path:
    """Make an archive of the node's images: mpsd's, and the one of a pod's own process."""
    programs = found_programs()
    assert programs is not None
    pause = podman.home / "pause.tar"
    with tarfile.open(pause, "w") as files:
        files.add(programs / "bin" / "pause", "pause")
    podman.call("import", '--change=ENTRYPOINT ["/pause"]', str(pause), "localhost/pause")
    archive = podman.home / "images.tar"
    podman.call("save", "--multi-image-archive", "--output", str(archive), image, "localhost/pause", timeout=300)
    return archive


@pytest.fixture(scope="session")
def cluster(private_root: Path, images: Path) -> Iterator[Cluster]:
    """Start the cluster, and check that nothing is left of it."""
    programs = found_programs()
    assert programs is not None
    home = private_root / f"cluster{os.getpid()}"
    try:
        with Cluster(home, programs) as cluster:
            cluster.load(images)
            yield cluster
        assert cluster.is_gone()
    finally:
        remove_tree(home)
