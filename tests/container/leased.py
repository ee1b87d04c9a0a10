"""Helpers for the tests of containers with leases: the lease, its device, and the container's files."""

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

from mpsd.system.files import acl
from tests.container.sidecar import USER
from tests.daemon.helpers import is_running
from tests.fork_server import ForkServer
from tests.harness import pids, wait_until
from tests.node import Node

PYTHON: Final = "/usr/bin/python3"
CLIENT: Final = ("-m", "mpsd.simulator.client")
SLEEPS: Final = ("-c", "import time; time.sleep(600)")

_numbers = count(1)


def container_name() -> str:
    return f"cdi-{os.getpid()}-{next(_numbers)}"


def make_files(place: Path) -> Path:
    """Make the root file system of containers, into which this machine's /usr is mounted."""
    for name in ("usr", "proc", "sys", "dev", "run", "tmp", "etc"):
        (place / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (place / name).symlink_to(f"usr/{name}")
    return place


@contextlib.contextmanager
def leasing_node(place: Path, fork_server: ForkServer, remove_containers: Callable[[], object]) -> Iterator[Node]:
    """Run an mpsd on this machine, with simulated GPUs.

    At the end no device is left, whatever became of its containers.
    """
    place.chmod(0o711)  # clients of other users have to reach their pipe directory
    node = Node(root=place / "n", fork_server=fork_server)
    node.root.mkdir()
    try:
        yield node.start()
        remove_containers()
        for lease in node.leases():
            node.request("DELETE", f"/v1/leases/{lease['id']}")
        assert node.mpsctl("cdi", "list").stdout == "no devices\n"
    finally:
        node.clean_up()


def claim(node: Node, **options: object) -> str:
    """Claim a lease, write its device, and return its id."""
    answer = node.request("POST", "/v1/leases", {"fraction": 0.25, "holder": {"claim": options}})
    assert answer.status == 201, answer.json
    lease = str(answer.json["id"])
    done = node.mpsctl("cdi", "write", lease)
    assert done.returncode == 0, done.stderr
    return lease


def ended(node: Node, lease: str) -> Any:
    """Wait until a lease has ended without a trace, and return it."""
    found = wait_until(
        lambda: (found := node.get(f"/v1/leases/{lease}").json)["state"] == "ended" and found, what=f"{lease} to end"
    )
    wait_until(lambda: USER not in let_in(node), what="the pipe directory to be closed")
    return found


def is_nobodys(node: Node, lease: str) -> bool:
    """Return whether a lease has no holder: it has ended, or can still be taken."""
    found = node.get(f"/v1/leases/{lease}").json
    return bool(found["state"] == "ended" or found["holders"][0]["kind"] == "claim")


def is_gone(pid: int) -> bool:
    """Return whether a process has ended."""
    return not is_running(pid)


def let_in(node: Node) -> set[int]:
    """Return the uids that may traverse the pipe directory of the first control daemon."""
    return {entry.who for entry in acl.read(node.pipe_directory("gpu0")) if entry.tag == acl.Tag.USER}


def process(*words: str) -> int:
    """Wait for a process whose command line contains all of these words, and return its pid."""

    def find() -> int | None:
        for pid in pids():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if pid != os.getpid() and {each.encode() for each in words} <= {*line}:
                return pid
        return None

    found = wait_until(find, what=f"a process {' '.join(words)}")
    assert found is not None
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
