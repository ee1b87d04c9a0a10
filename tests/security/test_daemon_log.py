"""Others can write to a control daemon's log, and stop it: its text decides nothing by itself, nor does its silence.

The subjects are NVIDIA's own control daemons.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.daemon.caller import calling, granted, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import Gate, branches, event, kill, next_ready, program, stopped
from tests.daemon.leases.line import Talk, message
from tests.harness import look_at, pids, wait_until
from tests.node import Node
from tests.real import RealDaemon
from tests.simulated_clients import WAITS, SimulatedClient, variables

pytestmark = pytest.mark.thorough

ANN: Final = 61201

QUIET: Final = '[daemon]\nusers = "one"\nprobe_interval = 600\n[enforcement]\nunadmitted = "deny"\n'
"""During the test mpsd does not probe a daemon without a reason, and the server of a user can write to the log."""

STAMP: Final = b"[2026-11-22 01:02:03.004 Control     1] "

SETS: Final = "set_default_active_thread_percentage 77"

WRITE: Final = """
import os, sys
uid = int(sys.argv[1])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
fifo = os.open(sys.argv[2], os.O_WRONLY | os.O_NONBLOCK)
os.write(fifo, bytes.fromhex(sys.argv[3]))
"""


def write(uid: int, fifo: Path, what: bytes) -> None:
    subprocess.run([sys.executable, "-I", "-c", WRITE, str(uid), str(fifo), what.hex()], check=True, timeout=30)


def reasons(node: Node) -> list[str]:
    return [each["kind"] for each in node.get("/v1/status").json["reasons"]]


def is_put_back(node: Node) -> bool:
    """Return whether the daemon itself reports the changed limit as mpsd wants it."""
    wanted = node.daemons()["gpu0"]["limits_wanted"]["active_thread_percentage"]
    return node.ask("gpu0", "get_default_active_thread_percentage") == [str(wanted)]


def children(pid: int) -> set[int]:
    found = {child: look_at(child) for child in pids()}
    return {child for child, each in found.items() if each is not None and each.parent == pid and not each.zombie}


def is_free(node: Node) -> bool:
    """Return whether the lock of the runtime directory is free."""
    with (node.root / "run/mpsd.lock").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def conversations(node: Node) -> int:
    key = json.loads((node.root / "run/gpu0.reading.json").read_text())["record"]["key"]
    return node.control_log("gpu0").read_text(errors="replace").count(f"Cmd:mpsd-{key}")


@needs_root
@pytest.mark.parametrize("real", branches(470, 555))
class TestSilence:
    """A lease holder stops the log of its control daemon."""

    def test_it_is_noticed(self, make_node: Start, real: RealDaemon) -> None:
        """The silence is reported, limits are still restored, grants continue, and a restart repairs it."""
        node = make_node(simulate=1, control=real.control, config=QUIET).start()
        with calling(node.socket, uid=ANN) as ann:
            lease = granted(ann)
            write(ANN, node.pipe_directory("gpu0") / "log", b"x")
            # The last command that the log could have shown.
            node.ask("gpu0", SETS)
            silent = event(node, "log_silent", daemon="gpu0")
            assert silent["suspects"] == [ANN]
            assert f"uid {ANN} had pipe access" in silent["because"]
            wait_until(lambda: is_put_back(node), what="the limit to be put back")
            assert reasons(node) == ["log_silent"]
            assert granted(ann)
            node.ask("gpu0", SETS)
            wait_until(lambda: is_put_back(node), what="the next one to be put back")
            assert node.daemons()["gpu0"]["state"] == "ready"
            ann.request("DELETE", f"/v1/leases/{lease}")
        before = node.daemons()["gpu0"]["pid"]
        assert node.mpsctl("restart", "gpu0", "--timeout", "0").returncode == 0
        next_ready(node, "gpu0", before)
        wait_until(lambda: not reasons(node), what="the node to be healthy")

    def test_it_never_waits_for_itself(self, make_node: Start, real: RealDaemon) -> None:
        """mpsd empties the FIFO that has no reader, so that a daemon without a log answers for any length of time."""
        config = QUIET.replace("[daemon]", "[daemon]\nanswer_deadline = 1.0")
        node = make_node(simulate=1, control=real.control, config=config).start()
        log = node.control_log("gpu0")
        with calling(node.socket, uid=ANN) as ann:
            granted(ann)
            write(ANN, node.pipe_directory("gpu0") / "log", os.urandom(64))
            size = log.stat().st_size

            def is_moved() -> bool:
                node.front_end("gpu0", "get_server_list\n" * 500)
                return log.stat().st_size > size + 256 * 1024

            wait_until(is_moved, what="four times what the FIFO holds to be in the log", deadline=50)
            assert event(node, "log_silent")["daemon"] == "gpu0"
            node.ask("gpu0", SETS)
            wait_until(lambda: is_put_back(node), what="the limit to be put back")


@pytest.mark.parametrize("real", branches(535))
def test_front_end_that_ends_late(make_node: Start, short_tmp: Path, real: RealDaemon) -> None:
    """A log that shows a conversation before its front-end has ended is not silent; that happens on a busy machine."""
    late = f'[ "$1" = -f ] && exec {real.control} "$@"\n{real.control} "$@"\nstatus=$?\nsleep 0.3\nexit $status'
    config = "[daemon]\nprobe_interval = 600\n"
    node = make_node(simulate=1, control=program(short_tmp / "late", late), config=config).start()
    answer = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "ttl": 3})
    assert answer.status == 201, answer.body
    event(node, "lease_ended", lease=answer.json["id"])
    assert not node.events("log_silent")


@pytest.mark.parametrize("real", branches(470, 555))
class TestWhatItSays:
    """Lines that any process can have written."""

    def hidden(self, node: Node, change: str, line: bytes) -> None:
        """Change a limit by this command, and have the log show only this line of it."""
        log, daemon = node.control_log("gpu0"), node.daemons()["gpu0"]["pid"]
        with stopped(node.pid):
            wait_until(lambda: children(node.pid) == {daemon}, what="a front-end of mpsd's to end")
            wait_until(lambda: log.read_bytes().endswith(b"UI closed\n"), what="the log to be whole")
            size = log.stat().st_size
            node.ask("gpu0", change)
            wait_until(lambda: log.read_bytes()[size:].endswith(b"UI closed\n"), what="the change to be logged")
            os.truncate(log, size)
            with log.open("ab") as file:
                file.write(line)

    @pytest.mark.parametrize(
        "line",
        [
            b"a line that has no stamp\n",
            b"".join(STAMP + text for text in (b"NEW UI\n", b"Cmd:ps\n", b"UI closed\n")),
        ],
        ids=["no stamp", "a question"],
    )
    def test_more_than_shows(self, make_node: Start, real: RealDaemon, line: bytes) -> None:
        """A foreign conversation, or a part of a line, can hide any command, so mpsd queries the daemon at once."""
        node = make_node(simulate=1, control=real.control, config=QUIET).start()
        self.hidden(node, SETS, line)
        wait_until(lambda: is_put_back(node), what="the limit to be put back")
        assert event(node, "limit_drift")["command"] is None

    def test_ends_of_servers(self, make_node: Start, real: RealDaemon) -> None:
        """Lines about the ends of servers that only the log knows close no GPU."""
        node = make_node(simulate=1, control=real.control, config=QUIET).start()
        forged = [f"Server {server} exited with status 1" for server in (1, os.getpid(), 4194305, 77, 78, 79, 80)]
        forged += ["Starting new server 1 for user 0", "Server 1 exited with status 1"]
        stamp, its = "[2026-11-22 01:02:03.004 Control     1]", "[2026-11-22 01:02:03.004 Server     1]"
        lines = [f"{stamp} {each}" for each in forged]
        lines += [f"{its} Volta MPS: Server is handling a fatal GPU error.", f"{its} MPS server failed to start"]
        with node.control_log("gpu0").open("a") as log:
            log.write("".join(f"{each}\n" for each in lines))
        event(node, "server_faulted")
        assert not reasons(node)
        answer = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
        assert answer.status == 201, answer.body

    def test_a_key_for_each(self, make_node: Start, real: RealDaemon) -> None:
        """The marks of mpsd's conversations with one daemon do not reveal those with the next."""
        node = make_node(simulate=1, control=real.control, config=QUIET).start()
        reading = node.root / "run/gpu0.reading.json"
        key, pid = json.loads(reading.read_text())["record"]["key"], node.daemons()["gpu0"]["pid"]
        kill(pid)
        next_ready(node, "gpu0", pid)
        wait_until(lambda: conversations(node), what="a conversation with the new key")
        assert json.loads(reading.read_text())["record"]["key"] != key
        node.ask("gpu0", f"mpsd-{key}00000000-0\n{SETS}")
        assert event(node, "foreign_command")["command"] == SETS
        # The next mpsd recognises its marks: it finds only that one foreign command, which may be read twice.
        node.end(signal.SIGKILL)
        wait_until(lambda: is_free(node), what="a front-end of the dead mpsd's to begin, which has its lock until then")
        node.start()
        assert {each["command"] for each in node.events("foreign_command")} == {SETS}


@pytest.mark.parametrize("disturbed", [False, True])
def test_who_connects_meanwhile(make_node: Start, *, disturbed: bool) -> None:
    """The limits of a client that connected during a foreign conversation are unknown: no proof of a violation."""
    node = make_node(simulate=1, control=None, config='[enforcement]\non_violation = "terminate"\n').start()
    with SimulatedClient(variables(node), before=WAITS) as client:
        answer = node.request("POST", "/v1/leases", {"threads": 20, "memory": "1GiB", "pid": client.pid})
        assert answer.status == 201, answer.body
        with stopped(node.pid):
            if disturbed:
                with node.control_log("gpu0").open("ab") as log:
                    log.write(b"a line that has no stamp\n")
            assert client.process.stdin is not None
            client.process.stdin.write(b"\n")
            assert client.hello["ok"], client.hello
        event(node, "client_attributed", client=client.pid)
        (process,) = node.get(f"/v1/leases/{answer.json['id']}/verify").json["processes"]
        assert process["ok"] is not disturbed
        assert ("mpsd could not see what was open" in process["because"]) is disturbed
        assert not node.events("violation")


def test_who_connects_late_in_a_conversation(make_node: Start, short_tmp: Path) -> None:
    """A foreign line that comes after the answers to mpsd counts for the clients that connect with it."""
    node = make_node(simulate=1, config=QUIET)
    gate = Gate(node, short_tmp)
    node.start()
    with SimulatedClient(variables(node), before=WAITS) as client, Talk(node.socket) as talk:
        lease = node.request("POST", "/v1/leases", {"threads": 20, "memory": "1GiB", "pid": client.pid}).json["id"]
        with gate.shut("get_server_list"):
            talk.send(message("GET", f"/v1/leases/{lease}/verify"))
            wait_until(gate.has_held, what="a front-end that has its answers to be held")
            with node.control_log("gpu0").open("ab") as log:
                log.write(b"a line that has no stamp\n")
            assert client.process.stdin is not None
            client.process.stdin.write(b"\n")
            assert client.hello["ok"], client.hello
        assert not talk.answer().json["ok"]
        event(node, "client_attributed", client=client.pid)
        (process,) = node.get(f"/v1/leases/{lease}/verify").json["processes"]
        assert "mpsd could not see what was open" in process["because"]
