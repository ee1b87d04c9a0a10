"""Look-alikes of control daemons, front-ends and servers: mpsd believes none, and none hinders it."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from functools import partial
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

pytestmark = pytest.mark.thorough

ANN: Final = 2601

CONTROL: Final = ("nvidia-cuda-mps-control", "-f")
SERVER: Final = ("nvidia-cuda-mps-server", "-f")

DAMAGES: Final = (None, b"", b"\xff\xfe{", b"[" * 100_000, b'{"boot_id": 1}')
"""The remains of a record: none first, then files that cannot be decoded."""

WAITS: Final = "/usr/bin/tail"
"""A program that takes `-f`, and waits for its stdin."""


@contextlib.contextmanager
def disguised(
    *arguments: str, env: Mapping[str, str], program: bytes | str = WAITS, uid: int = ANN
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process of another user under another name, with an invented environment."""
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
    return node.root / "run" / "gpu0.process.json"


def environment(node: Node, name: str = "gpu0") -> dict[str, str]:
    """Return the CUDA_* environment of a control daemon, as mpsd made it."""
    raw = Path(f"/proc/{node.daemons()[name]['pid']}/environ").read_text()
    pairs = (each.partition("=") for each in raw.split("\0") if each.startswith("CUDA_"))
    return {key: value for key, _, value in pairs}


def setuid(directory: Path) -> Path:
    """Make a setuid program, like su: effective uid 0, and the environment of the user that started it."""
    program = directory / "su"
    shutil.copyfile(WAITS, program)
    program.chmod(0o4755)
    return program


@needs_root
@pytest.mark.thorough
@pytest.mark.parametrize("real", branches(470, 555))
class TestStranger:
    """A user without a lease, and without a role."""

    def test_control_daemon(self, make_node: Start, short_tmp: Path, real: RealDaemon) -> None:
        """Look-alikes of control daemons do not hinder mpsd, however exactly they imitate one."""
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
        """Look-alikes of servers are no orphans: mpsd does not wait for them, before or after a restart."""
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
def test_doctor(make_node: Start, short_tmp: Path) -> None:
    """The doctor mentions look-alikes of MPS, and reports no fault for them."""
    node = make_node(simulate=1).start()
    env, program = environment(node), short_tmp / CONTROL[0]
    short_tmp.chmod(0o755)
    shutil.copyfile(WAITS, program)
    program.chmod(0o755)
    checks = ("foreign-daemon", "orphans", "other-daemon", "stopped", "look-alikes")
    run = partial(disguised, env=env, program=str(program))
    with run(*CONTROL) as control, run(*SERVER) as server:
        os.kill(server.pid, signal.SIGSTOP)
        done = node.mpsctl("doctor", "-o", "json", *(each for check in checks for each in ("--only", check)))
        # Other users of this machine may run their own control daemons beside these tests.
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
        """A stranger's path hinders neither mpsd's start nor an answer."""
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


@pytest.mark.thorough
@pytest.mark.parametrize("real", branches(470, 555))
class TestRecord:
    """mpsd's record of the process that it started."""

    def test_killed_before_it_was_written(self, make_node: Start, real: RealDaemon) -> None:
        """When mpsd is killed between a daemon's start and the record of its pid, the next mpsd finds the daemon."""
        node = make_node(control=real.control, simulate=1, config=BRISK).start()
        before = node.daemons()["gpu0"]["pid"]
        node.end(signal.SIGKILL)
        text = json.loads(record(node).read_text())
        text["record"]["start"]["process"] = None
        record(node).write_text(json.dumps(text))
        # The token identifies it even while it does not listen, as just after its start.
        (node.pipe_directory("gpu0") / "control").rename(node.pipe_directory("gpu0") / "away")
        node.start(ready=False)
        wait_until(lambda: node.daemons()["gpu0"]["pid"] == before, what="it to be found")
        (node.pipe_directory("gpu0") / "away").rename(node.pipe_directory("gpu0") / "control")
        node.wait_for_state("gpu0", "ready")
        assert json.loads(record(node).read_text())["record"]["start"]["process"]["pid"] == before

    def test_lost(self, make_node: Start, real: RealDaemon) -> None:
        """Without the record, or with a damaged one, the daemon is found as the process that listens there."""
        node = make_node(control=real.control, simulate=1).start()
        before = node.daemons()["gpu0"]["pid"]
        for number, damage in enumerate(DAMAGES):
            node.end(signal.SIGKILL)
            record(node).unlink()
            if damage is not None:
                record(node).write_bytes(damage)
            node.start()
            assert node.daemons()["gpu0"]["pid"] == before
            assert len(node.events("file_damaged", daemon="gpu0")) == number
            assert json.loads(record(node).read_text())["record"]["start"]["process"]["pid"] == before


@pytest.mark.thorough
@pytest.mark.parametrize("real", branches(470, 555))
def test_seat(make_node: Start, real: RealDaemon) -> None:
    """A process that occupies a daemon's only connection silently is named, though it is no front-end."""
    node = make_node(control=real.control, simulate=1, config=BRISK).start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as held:
        held.connect(os.fspath(node.pipe_directory("gpu0") / "control"))
        daemon = node.wait_for_state("gpu0", "unresponsive")
        assert f"connected to it: pid {os.getpid()} (uid {os.getuid()})" in daemon["because"]
    node.wait_for_state("gpu0", "ready")


@needs_root
@pytest.mark.real_daemon(535)
class TestOthers:
    """Processes of root, or of mpsd's own uid, that are look-alikes."""

    def lookalike(self, env: Mapping[str, str]) -> Any:
        """Run a look-alike of the same uid as mpsd."""
        return disguised(*CONTROL, env=env, uid=os.geteuid())

    def test_of_mpsd_s_own_uid(self, make_node: Start) -> None:
        """A process that does not listen on the directory's socket is no control daemon of it, whatever its name."""
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
        """A process with the recorded pid and another start time is another process."""
        node = make_node(simulate=1).start()
        before = node.daemons()["gpu0"]["pid"]
        node.end()
        with self.lookalike({}) as other:
            text = json.loads(record(node).read_text())
            text["record"]["start"]["process"]["pid"] = other.pid
            record(node).write_text(json.dumps(text))
            node.start()
            assert node.daemons()["gpu0"]["pid"] == before
            assert node.events("daemon_death") == []
