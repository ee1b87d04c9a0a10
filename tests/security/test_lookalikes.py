"""Processes that call themselves control daemons, front-ends or servers: none is believed, and none is in the way."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.caller import needs_root
from tests.daemon.conftest import Start
from tests.daemon.control.operations import begin, ended
from tests.daemon.helpers import BRISK, branches, is_running, kill, next_ready
from tests.harness import look_at, wait_until
from tests.node import Node
from tests.real import RealDaemon

ANN: Final = 2601

CONTROL: Final = ("nvidia-cuda-mps-control", "-f")
SERVER: Final = ("nvidia-cuda-mps-server", "-f")

WAITS: Final = "/usr/bin/tail"
"""A program that takes `-f`, and waits for what comes on its stdin."""


@contextlib.contextmanager
def disguised(
    *arguments: str, env: Mapping[str, str], program: bytes | str = WAITS, uid: int = ANN
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process of another user under another name, with an environment of its own making."""
    process = subprocess.Popen(
        arguments,
        executable=program,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        user=uid,
        group=uid,
        extra_groups=[],
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def record(node: Node) -> Path:
    """Say where mpsd writes down which process it started."""
    return node.root / "run" / "gpu0.process.json"


def environment(node: Node, name: str = "gpu0") -> dict[str, str]:
    """Return the CUDA_* environment of a control daemon, as mpsd made it."""
    raw = Path(f"/proc/{node.daemons()[name]['pid']}/environ").read_text()
    pairs = (each.partition("=") for each in raw.split("\0") if each.startswith("CUDA_"))
    return {key: value for key, _, value in pairs}


def setuid(directory: Path) -> Path:
    """Make a program that anybody runs as root, as su is: effective uid 0, and the environment of who started it."""
    program = directory / "su"
    shutil.copyfile(WAITS, program)
    program.chmod(0o4755)
    return program


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("real", branches())
class TestStranger:
    """A user without a lease, and without a role."""

    def test_control_daemon(self, make_node: Start, short_tmp: Path, real: RealDaemon) -> None:
        """Processes in the disguise of control daemons keep mpsd from nothing, however exactly they imitate one."""
        node = make_node(control=real.control, simulate=1).start()
        exact, program, before = environment(node), setuid(short_tmp), node.daemons()["gpu0"]["pid"]
        node.end()
        kill(before)
        with (
            disguised(*CONTROL, env=exact),
            disguised(*CONTROL, env={"CUDA_MPS_PIPE_DIRECTORY": exact["CUDA_MPS_PIPE_DIRECTORY"]}),
            disguised(*CONTROL, env=exact, program=str(program)) as su,
        ):
            status = Path(f"/proc/{su.pid}/status").read_text()
            assert f"Uid:\t{ANN}\t0\t0\t0" in status
            for _ in ("with the record", "without"):
                node.start()
                found = look_at(node.daemons()["gpu0"]["pid"])
                assert found is not None
                assert found.parent == node.pid
                node.end()
                kill(found.pid)
                record(node).unlink(missing_ok=True)
            node.start()
            assert node.get("/v1/status").json["healthy"] is True

    def test_server(self, make_node: Start, real: RealDaemon) -> None:
        """Processes in the disguise of servers are no orphans: nobody waits for them, before a restart or after it."""
        node = make_node(control=real.control, simulate=1).start()
        before, env = node.daemons()["gpu0"]["pid"], environment(node)
        with disguised(*SERVER, env=env), disguised(str(real.control.with_name(SERVER[0])), "-f", env=env):
            ended(node, begin(node, "restart"))
            after = next_ready(node, "gpu0", before)
            node.end()
            kill(after["pid"])
            node.start()
            assert node.daemons()["gpu0"]["servers"] == []
            assert node.events("server_orphaned") == []
            assert node.get("/v1/status").json["healthy"] is True
            ended(node, begin(node, "restart"))


@needs_root
@pytest.mark.real_daemon(535)
def test_doctor(make_node: Start) -> None:
    """The doctor mentions who looks like a part of MPS, and finds nothing wrong for it."""
    node = make_node(simulate=1).start()
    env = environment(node)
    checks = ("foreign-daemon", "orphans", "front-end", "other-daemon", "stopped", "look-alikes")
    with disguised(*CONTROL, env=env) as control, disguised(*SERVER, env=env) as server:
        os.kill(server.pid, signal.SIGSTOP)
        done = node.mpsctl("doctor", "-o", "json", *(each for check in checks for each in ("--only", check)))
        # Others on this machine may run control daemons of their own, beside these tests.
        pids = {control.pid, server.pid}
        found = [each for each in json.loads(done.stdout)["checks"] if each["evidence"].get("pid") in pids]
        assert {each["evidence"]["pid"] for each in found} == pids
        assert {(each["id"], each["verdict"]) for each in found} == {("look-alikes", "note")}
        assert "note" in node.mpsctl("doctor", "--only", "look-alikes").stdout


@needs_root
@pytest.mark.real_daemon(535)
class TestAnyBytes:
    """A stranger's executable at a path that is not UTF-8."""

    def test_start(self, make_node: Start, short_tmp: Path) -> None:
        """It keeps mpsd from nothing: neither from a start, nor from an answer."""
        node = make_node(simulate=1).start()
        env = environment(node)
        program = os.fsencode(short_tmp) + b"/\xff\xed\xb0\x80"
        shutil.copyfile(WAITS, program)
        os.chmod(program, 0o755)  # noqa: PTH101, S103 - a path of any bytes, for anybody to run
        node.end()
        record(node).unlink(missing_ok=True)
        with disguised(*CONTROL, env=env, program=program), disguised(*SERVER, env=env, program=program):
            node.start()
            assert node.get("/v1/status").json["healthy"] is True


@pytest.mark.slow
@pytest.mark.parametrize("real", branches())
class TestRecord:
    """What mpsd wrote down of the process that it started."""

    def test_killed_before_it_was_written(self, make_node: Start, real: RealDaemon) -> None:
        """An mpsd killed between the start of a daemon and the note of its pid leaves one that the next one finds."""
        node = make_node(control=real.control, simulate=1).start()
        before = node.daemons()["gpu0"]["pid"]
        node.end(signal.SIGKILL)
        text = json.loads(record(node).read_text())
        text["start"]["process"] = None
        record(node).write_text(json.dumps(text))
        # It is found by the token even where it does not listen, as one does not that was started a moment ago.
        (node.pipe_directory("gpu0") / "control").rename(node.pipe_directory("gpu0") / "away")
        node.start(ready=False)
        wait_until(lambda: node.daemons()["gpu0"]["pid"] == before, what="it to be found")
        (node.pipe_directory("gpu0") / "away").rename(node.pipe_directory("gpu0") / "control")
        node.wait_for_state("gpu0", "ready")
        assert json.loads(record(node).read_text())["start"]["process"]["pid"] == before

    @pytest.mark.parametrize("damage", [None, b"", b"\xff\xfe{", b"[" * 100_000, b'{"boot_id": 1}'])
    def test_lost(self, make_node: Start, real: RealDaemon, damage: bytes | None) -> None:
        """Without the record, or with one that is damaged, a daemon is found as the one that listens there."""
        node = make_node(control=real.control, simulate=1).start()
        before = node.daemons()["gpu0"]["pid"]
        node.end(signal.SIGKILL)
        record(node).unlink()
        if damage is not None:
            record(node).write_bytes(damage)
        node.start()
        assert node.daemons()["gpu0"]["pid"] == before
        assert bool(node.events("file_damaged", daemon="gpu0")) is (damage is not None)
        assert json.loads(record(node).read_text())["start"]["process"]["pid"] == before


@pytest.mark.slow
@pytest.mark.parametrize("real", branches())
def test_seat(make_node: Start, real: RealDaemon) -> None:
    """Who keeps a daemon's only seat by a connection that says nothing is named, though it is no front-end."""
    node = make_node(control=real.control, simulate=1, config=BRISK).start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as held:
        held.connect(os.fspath(node.pipe_directory("gpu0") / "control"))
        daemon = node.wait_for_state("gpu0", "unresponsive")
        assert f"connected to it: pid {os.getpid()} (uid {os.getuid()})" in daemon["because"]
    node.wait_for_state("gpu0", "ready")


@needs_root
@pytest.mark.real_daemon(535)
class TestOthers:
    """Processes of root's, or of mpsd's own uid, that are not what they look like."""

    def lookalike(self, env: Mapping[str, str]) -> Any:
        """Run one of the same uid as mpsd."""
        return disguised(*CONTROL, env=env, uid=os.geteuid())

    def test_of_mpsd_s_own_uid(self, make_node: Start) -> None:
        """Who does not listen on the directory's socket does not have it, whatever it is called."""
        node = make_node(simulate=1).start()
        before, env = node.daemons()["gpu0"]["pid"], environment(node)
        node.end()
        record(node).unlink(missing_ok=True)
        kill(before)
        wait_until(lambda: not is_running(before), what="the control daemon to be gone")
        with self.lookalike(env) as other:
            node.start()
            assert node.daemons()["gpu0"]["pid"] not in {before, other.pid}

    def test_reused_pid(self, make_node: Start) -> None:
        """A process that has the pid that is written down, and another start time, is another process."""
        node = make_node(simulate=1).start()
        before = node.daemons()["gpu0"]["pid"]
        node.end()
        with self.lookalike({}) as other:
            text = json.loads(record(node).read_text())
            text["start"]["process"]["pid"] = other.pid
            record(node).write_text(json.dumps(text))
            node.start()
            assert node.daemons()["gpu0"]["pid"] == before
            assert node.events("daemon_death") == []
