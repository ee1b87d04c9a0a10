"""A holder in its own mount namespace gets a lease only if it sees the directories that the lease names."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.caller import Caller, calling, needs_root
from tests.daemon.conftest import Start
from tests.node import Node

pytestmark = [pytest.mark.real_daemon(535), needs_root]

SMALL: Final[dict[str, Any]] = {"threads": 1, "memory": "1GiB"}

CONTAINER: Final = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, target, kind, flags):
    assert libc.mount(source.encode(), target.encode(), kind, flags, None) == 0, os.strerror(ctypes.get_errno())
assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
mount("none", "/", None, 0x4000 | 0x40000)  # MS_REC | MS_PRIVATE
BIND = 0x1000
"""

Container = Callable[[str], Caller]


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start the node that the tests of this module share."""
    return node_for_all(simulate=2).start()


@pytest.fixture
def container(node: Node) -> Iterator[Container]:
    """Return a maker of callers that mount something before they call."""
    with ExitStack() as callers:
        yield lambda script: callers.enter_context(calling(node.socket, before=CONTAINER + script))


def hide(node: Node, *, but: Path | None = None) -> str:
    """Return a command that mounts an empty directory over all pipe directories, and puts one of them back."""
    mps = node.root / "run" / "mps"
    script = f"mount('none', '{mps}', b'tmpfs', 0)\n"
    if but is not None:
        script = f"mount('{but}', '/mnt', None, BIND)\n{script}os.mkdir('{but}')\nmount('/mnt', '{but}', None, BIND)\n"
    return script


def test_nothing_there(node: Node, container: Container) -> None:
    """A caller that sees no pipe directory is refused, with the mount that it lacks."""
    caller = container(hide(node))
    answer = caller.admit(**SMALL)
    assert (answer.status, answer.json["code"], answer.json["limit"]) == (403, "not_permitted", "pipe_directory")
    assert f"start its container with {node.root}/run under the same path: " in answer.json["hint"]
    assert node.events("lease_refused", pid=caller.pid)
    assert caller.request("GET", "/v1/status").json["healthy"]


def test_one_there(node: Node, container: Container) -> None:
    """A caller that sees one pipe directory is granted a lease on that GPU, and on no other."""
    caller = container(hide(node, but=node.pipe_directory("gpu1")))
    assert [share["daemon"] for share in caller.admit(**SMALL).json["shares"]] == ["gpu1"]
    assert caller.admit(**SMALL, gpu="1").status == 201
    answer = caller.admit(**SMALL, gpu="0")
    assert (answer.status, answer.json["limit"]) == (403, "pipe_directory")
    assert "run/mps/gpu0" in answer.json["detail"]


def test_other_shared_memory(node: Node, container: Container) -> None:
    """A caller with its own /dev/shm is granted a lease, and the log warns: CUDA may need a shared one."""
    caller = container("mount('none', '/dev/shm', b'tmpfs', 0)")
    assert caller.admit(**SMALL).status == 201
    (told,) = node.events("shared_memory_differs", pid=caller.pid)
    assert "hostIPC: true" in told["hint"]
