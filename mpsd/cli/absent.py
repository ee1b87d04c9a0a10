"""The one thing to do where no mpsd listens on the socket, which depends on the machine and on who asks."""

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from mpsd.client.connection import SOCKET

_UNITS: Final = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)
"""Where systemd looks for units. Source: systemd.unit(5)."""

_CONTAINER: Final = ("run/.containerenv", ".dockerenv", "run/secrets/kubernetes.io")
"""What podman, Docker and Kubernetes put into a container."""

DEMO: Final = "mpsd-demo-"
"""The beginning of the names of the directories of `mpsd demo`."""


class Situation(NamedTuple):
    """What is known of the caller and its machine."""

    path: str
    """The path of the socket."""
    is_root: bool = False
    is_installed: bool = False
    """Whether systemd has the unit of mpsd."""
    has_systemd: bool = True
    is_contained: bool = False
    demo: str | None = None
    """The socket of a demo of this user that runs."""


def situation(path: str, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Situation:
    """Look at the machine, below `root`."""
    return Situation(
        path,
        is_root=os.geteuid() == 0,
        is_installed=any((root / each[1:] / "mpsd.service").exists() for each in _UNITS),
        has_systemd=(root / "run/systemd/system").is_dir(),  # as sd_booted(3) does
        is_contained=any((root / each).exists() for each in _CONTAINER) or "KUBERNETES_SERVICE_HOST" in environment,
        demo=_demo(),
    )


def _demo() -> str | None:
    """Return the socket of a demo that runs as this user; other users can make such directories too."""
    import tempfile

    for path in Path(tempfile.gettempdir()).glob(f"{DEMO}*/run/mpsd.sock"):
        try:
            found = path.lstat()
            if not stat.S_ISSOCK(found.st_mode) or path.parents[1].lstat().st_uid != os.geteuid():
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
                connection.connect(str(path))
        except OSError:  # it is gone, or its queue is full
            continue
        return str(path)
    return None


def remedy(found: Situation) -> str:
    """Return what this caller can do."""
    match found:
        case Situation(path=path) if path != SOCKET and f"/{DEMO}" in path:
            said = "that demo has ended; start another: mpsd demo, or leave it: unset MPSD_SOCKET"
        case Situation(path=path) if path != SOCKET:
            said = "name the socket of an mpsd that runs: --socket PATH, or MPSD_SOCKET"
        case Situation(demo=str(demo)):
            said = f"to call the demo that you run: export MPSD_SOCKET={demo}"
        case Situation(is_contained=True):
            said = f"mount the directory {Path(SOCKET).parent} of the host into the container, and not the socket alone"
        case Situation(is_installed=True, is_root=True):
            said = "systemctl start mpsd"
        case Situation(is_installed=True):
            said = "ask an administrator to start mpsd: systemctl start mpsd"
        case Situation(is_root=False):
            said = "ask an administrator to install mpsd; without a GPU and without rights: mpsd demo"
        case Situation(has_systemd=True):
            said = "mpsctl service install && systemctl enable --now mpsd.socket mpsd"
        case _:
            said = "mpsd run"
    return said
