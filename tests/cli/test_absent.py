"""Without mpsd, mpsctl names the one thing that this caller can do on this machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from mpsd.cli.absent import DEMO, Situation, remedy, situation
from mpsd.client.connection import SOCKET
from tests.cli.conftest import ROOT, run_mpsctl

HERE: Final = Situation(SOCKET)
DEMO_SOCKET: Final = f"/tmp/{DEMO}1/run/mpsd.sock"


@pytest.mark.parametrize(
    ("found", "command"),
    [
        (HERE._replace(is_root=True, is_installed=True), "systemctl start mpsd"),
        (HERE._replace(is_installed=True), "ask an administrator to start mpsd: systemctl start mpsd"),
        (HERE._replace(is_root=True), "mpsctl service install && systemctl enable --now mpsd.socket mpsd"),
        (HERE._replace(is_root=True, has_systemd=False), "mpsd run"),
        (HERE, "mpsd demo"),
        (
            HERE._replace(is_contained=True, is_root=True, has_systemd=False),
            "mount the directory /run/mpsd of the host",
        ),
        (HERE._replace(demo=DEMO_SOCKET, is_root=True), f"export MPSD_SOCKET={DEMO_SOCKET}"),
        (Situation(DEMO_SOCKET, is_installed=True), "unset MPSD_SOCKET"),
        (Situation("/tmp/other.sock", is_root=True, is_installed=True), "--socket PATH"),
    ],
)
def test_remedy(found: Situation, command: str) -> None:
    """Each caller reads one remedy."""
    assert command in remedy(found)
    assert "doctor" not in remedy(found)


def test_the_machine(short_tmp: Path) -> None:
    """The unit of mpsd, systemd, and a container are known by their files."""
    bare = situation(SOCKET, short_tmp, {})
    assert (bare.is_installed, bare.has_systemd, bare.is_contained) == (False, False, False)
    assert bare.is_root is (os.geteuid() == 0)
    (short_tmp / "run/systemd/system").mkdir(parents=True)
    (short_tmp / "usr/local/lib/systemd/system").mkdir(parents=True)
    (short_tmp / "usr/local/lib/systemd/system/mpsd.service").touch()
    found = situation(SOCKET, short_tmp, {})
    assert (found.is_installed, found.has_systemd, found.is_contained) == (True, True, False)
    (short_tmp / ".dockerenv").touch()
    assert situation(SOCKET, short_tmp, {}).is_contained
    assert situation(SOCKET, Path("/nonexistent"), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).is_contained


FIND: Final = "import json; from mpsd.cli.absent import situation; print(json.dumps(situation('/s').demo))"


def demo_of(directory: Path) -> object:
    """Return the demo that mpsctl would find among the temporary files of a directory."""
    environment = {**os.environ, "TMPDIR": str(directory)}
    command = [sys.executable, "-c", FIND]
    return json.loads(subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True).stdout)


@pytest.mark.root("give a directory to another user")
def test_a_demo(short_tmp: Path) -> None:
    """A demo of the caller is found as long as it runs; a directory of another user is none."""
    path = short_tmp / f"{DEMO}1" / "run" / "mpsd.sock"
    path.parent.mkdir(parents=True)
    assert demo_of(short_tmp) is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert demo_of(short_tmp) is None, "nothing listens yet"
        listener.listen()
        assert demo_of(short_tmp) == str(path)
        os.chown(path.parents[1], 65534, 65534)
        assert demo_of(short_tmp) is None


def test_the_answer(short_tmp: Path) -> None:
    """The hint of a command is the remedy."""
    done = run_mpsctl(short_tmp / "none", "status")
    assert done.returncode == 69
    assert done.stderr.splitlines()[1] == f"  hint: {remedy(Situation(str(short_tmp / 'none')))}"
