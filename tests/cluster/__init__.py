"""A real cluster of one node, for tests of what runs on one: Kubernetes' own programs, etcd, containerd and runc.

No package brings a kubelet, but Debian's source package of kubectl has the whole tree of Kubernetes 1.20.2 in it. Its
programs are built once, without a network, into a cache outside the tree; what they stand on are packages of Debian's,
unpacked there and not installed. `python3 -m tests.cluster` does it, before anything else is installed: this module
imports no pytest.
"""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

from tests import real

CACHE: Final = "MPSD_KUBERNETES"
"""Names the cache; `no` leaves the tests of the cluster out, also where everything is required."""

VERSION: Final = "1.20.2"

BUILT: Final = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
"""What is built of Kubernetes itself."""

NEWER: Final = "trixie"
"""The release of Debian whose kubectl knows today's kustomize; it is in a folder of this name."""

UNPACKED: Final = (
    "usr/bin/kubectl", "usr/bin/etcd", "usr/bin/containerd", "usr/bin/ctr", "usr/lib/cni/bridge", "usr/sbin/runc",
    f"{NEWER}/usr/bin/kubectl",
)  # fmt: skip
"""What comes from packages of Debian's, where it is in the cache."""


def unwanted() -> bool:
    """Tell whether the tests of the cluster were left out in so many words."""
    return os.environ.get(CACHE) == "no"


def cache_directory() -> Path:
    """Return where Kubernetes is, or is to be."""
    return real.cache(CACHE, "kubernetes")


def programs() -> Path | None:
    """Return the directory of the programs, or None where they are not built, or by another recipe than today's."""
    place = cache_directory() / f"{VERSION}-{recipe()}"
    return place if place.exists() else None


def recipe() -> str:
    """Return a name for what they are made from, and how."""
    return hashlib.sha256(Path(__file__).with_name("building.py").read_bytes()).hexdigest()[:12]


def missing() -> str | None:
    """Say what this machine lacks to run a cluster, or None when all is there."""
    needed = ("podman", "unshare", "nsenter", "setpriv", "ip", "openssl")
    absent = [program for program in needed if shutil.which(program) is None]
    if absent:
        return f"no {' and no '.join(absent)} here"
    return None if programs() else f"Kubernetes is not built in {cache_directory()}: python3 -m tests.cluster"
