"""A real cluster of one node, for tests: Kubernetes' own programs, etcd, containerd and runc.

No package contains a kubelet, but Debian's source package of kubectl has the whole tree of Kubernetes 1.20.2. Its
programs are built once, without a network, into a cache outside the tree; their dependencies are packages of Debian,
unpacked there and not installed. `python3 -m tests.cluster` does this, before anything else is installed: this module
imports no pytest.
"""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

from tests import real

CACHE: Final = "MPSD_KUBERNETES"
"""Names the cache; `no` leaves the tests of the cluster out, even where everything is required."""

VERSION: Final = "1.20.2"

BUILT: Final = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
"""The programs that are built from Kubernetes' source."""

NEWER: Final = "trixie"
"""The release of Debian whose kubectl has a current kustomize; it is in a folder of this name."""

UNPACKED: Final = (
    "usr/bin/kubectl", "usr/bin/etcd", "usr/bin/containerd", "usr/bin/ctr", "usr/lib/cni/bridge", "usr/sbin/runc",
    f"{NEWER}/usr/bin/kubectl",
)  # fmt: skip
"""Files from packages of Debian, and their paths in the cache."""


def unwanted() -> bool:
    """Return whether the tests of the cluster were left out explicitly."""
    return os.environ.get(CACHE) == "no"


def cache_directory() -> Path:
    return real.cache(CACHE, "kubernetes")


def programs() -> Path | None:
    """Return the directory of the programs, or None if they are missing, or were built by another recipe."""
    place = cache_directory() / f"{VERSION}-{recipe()}"
    return place if place.exists() else None


def recipe() -> str:
    """Return a name for their inputs and their recipe."""
    return hashlib.sha256(Path(__file__).with_name("building.py").read_bytes()).hexdigest()[:12]


def missing() -> str | None:
    """Return what this machine lacks to run a cluster, or None if it lacks nothing."""
    needed = ("podman", "unshare", "nsenter", "setpriv", "ip", "openssl")
    absent = [program for program in needed if shutil.which(program) is None]
    if absent:
        return f"no {' and no '.join(absent)} here"
    return None if programs() else f"Kubernetes is not built in {cache_directory()}: python3 -m tests.cluster"
