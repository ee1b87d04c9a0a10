"""A node to call, and the ways in which users call mpsctl: as a program, and as a command in a shell."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from tests import real
from tests.daemon.caller import NOBODY
from tests.daemon.conftest import make_node  # noqa: F401 - a fixture
from tests.fork_server import ForkServer
from tests.harness import remove_tree
from tests.node import Node, running

ROOT = Path(__file__).parents[2]

_numbers = count(1)


def run_mpsctl(socket: Path | str | None, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run mpsctl to its end, against any listener at this socket, or at the socket that mpsctl finds by itself."""
    where = [] if socket is None else ["--socket", str(socket)]
    return subprocess.run(
        [sys.executable, "-m", "mpsd.cli.main", *where, *arguments],
        check=False,
        **{"capture_output": True, "text": True, "timeout": 60, "cwd": ROOT, **options},
    )


def start_mpsctl(
    socket: Path | str, *arguments: str, before: Sequence[str] = ("-m", "mpsd.cli.main"), **options: Any
) -> "subprocess.Popen[str]":
    """Start mpsctl, with pipes for all its output; `before` are the arguments by which Python runs it."""
    return subprocess.Popen(
        [sys.executable, *before, "--socket", str(socket), *arguments],
        **{
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "cwd": ROOT,
            **options,
        },
    )


AS_USER: Final = """
import email.parser, encodings.idna, http.server, os  # modules that the other user may not read
import csv, decimal, difflib, locale, mpsd.cli.main, mpsd.cli.web.serve
from mpsd.cli.commands import admit, events, lists, operate, status
uid = int(os.environ["MPSD_TEST_UID"])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
mpsd.cli.main.main()
"""
"""Runs mpsctl as the user MPSD_TEST_UID, who may have no access to the tests' own directories."""


def mpsctl_as_nobody(node: Node, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run mpsctl as a user without rights, who owns nothing."""
    command = [sys.executable, "-c", AS_USER, "--socket", str(node.socket), *arguments]
    environment = {**os.environ, "MPSD_TEST_UID": f"{NOBODY}"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env=environment)


def end(process: "subprocess.Popen[str]") -> None:
    """End a process that may have ended already, and close its pipes."""
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


@pytest.fixture(scope="module")
def shared_node(private_root: Path, fork_server: ForkServer) -> Iterator[Node]:
    """Start a node that all tests of a module share."""
    root = private_root / f"cli{next(_numbers)}"
    root.mkdir()
    yield from running(root=root, control=real.real_daemons().get(535), fork_server=fork_server)
    remove_tree(root)


@pytest.fixture
def node(shared_node: Node) -> Iterator[Node]:
    """Return the shared node, without leases; those that a test leaves are released."""
    yield shared_node
    for lease in shared_node.leases():
        shared_node.request("DELETE", f"/v1/leases/{lease['id']}")


@pytest.fixture
def in_path(node: Node, short_tmp: Path) -> dict[str, str]:
    """Return an environment in which `mpsctl` is a command that calls the node, as after an installation."""
    program = short_tmp / "bin" / "mpsctl"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom mpsd.cli.main import main\nmain()\n")
    program.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MPSD_SOCKET": str(node.socket),
    }
