"""Limits: a caller that exceeds one gets a refusal that names it, and other callers are unaffected."""

import contextlib
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from tests.daemon.api.conftest import MakeLine
from tests.daemon.caller import needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import branches, is_running, kill, next_ready
from tests.daemon.leases.holding import asleep
from tests.daemon.leases.line import OWN_UID, Line, Talk, message
from tests.descriptors import starved
from tests.harness import wait_until
from tests.node import Answer, Node
from tests.real import RealDaemon
from tests.simulated_clients import leased

pytestmark = [pytest.mark.real_daemon(535), pytest.mark.thorough]

ANN, BOB = OWN_UID or 2501, 2502

SMALL: Final[dict[str, Any]] = {"threads": 1, "memory": "1GiB"}
MIB: Final = 1024 * 1024
LABELS: Final = {f"k{number}" + "x" * 60: "v" * 128 for number in range(32)}
"""Labels of the greatest number and length."""

KNOCK: Final = """
import os, socket, sys
path, uid = sys.argv[1], int(sys.argv[2])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
with socket.socket(socket.AF_UNIX) as first:
    first.connect(path)
    print(first.makefile().readline().split()[1], flush=True)
while True:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
"""
"""Connects as a user, prints the status of the answer, and then connects again and again."""

CONFIG: Final = """
[api]
header_deadline = 1.0
requests_per_uid = 8
events = 100
[enforcement]
unadmitted = "allow"
"""
"""With "deny", a control daemon would be replaced for each other user, in the middle of a test."""

QUICK: Final = """
[daemon]
probe_interval = 0.1
"""

OFTEN: Final = {"mpsd.daemon.gpu.gpus._INTERVAL": 0.2}
"""`Node.durations` for an mpsd that reads the GPUs often."""

Connect: TypeAlias = Callable[..., Talk]
"""Connects to a node as some user; the connection stays until the test ends."""


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start the node that the tests of this module share, with short deadlines and a short history."""
    return node_for_all(config=CONFIG).start()


@pytest.fixture
def line(node: Node, make_line: MakeLine) -> Iterator[Line]:
    """Return a line in front of it; after each test mpsd must run, be healthy, and have logged no defect."""
    before = node.unharmed()
    yield make_line(node)
    assert node.exited() is None
    assert node.unharmed() == before
    assert node.events("api_defect") == []


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Return a function that connects to a node."""
    with contextlib.ExitStack() as stack:
        yield lambda node, uid=None: stack.enter_context(Talk(node.socket, uid=uid))


def too_many(answer: Answer, limit: str) -> None:
    """Check that this is the refusal of too many requests at a time."""
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = answer.json
    assert (answer.status, problem["code"], problem["limit"]) == (429, "too_many_requests", limit), problem
    assert problem["hint"]


def served(line: Line, uid: int) -> bool:
    """Return whether a user is answered."""
    return line.call("GET", "/healthz", uid=uid).answer().status == 200


def closed(talk: Talk) -> bool:
    """Return whether the other side has closed a connection, without reading from it."""
    poll = select.poll()
    poll.register(talk, select.POLLRDHUP)
    return bool(poll.poll(0))


def readable(talk: Talk, seconds: float = 0) -> bool:
    """Wait for so long; return whether there are bytes to read on a connection."""
    return bool(select.select([talk], [], [], seconds)[0])


def patient(node: Node) -> bool:
    """Return whether a new caller is answered that waits to be accepted, as mpsctl does."""
    with socket.socket(socket.AF_UNIX) as newcomer:
        newcomer.connect(str(node.socket))
        newcomer.sendall(message("GET", "/healthz"))
        return newcomer.recv(1000).startswith(b"HTTP/1.1 200 ")


def memory(node: Node) -> int:
    """Return mpsd's memory in bytes."""
    status = Path(f"/proc/{node.pid}/status").read_text()
    return int(next(each.split()[1] for each in status.splitlines() if each.startswith("VmRSS:"))) * 1024


def descriptors(node: Node) -> int:
    """Count mpsd's open descriptors."""
    return len(list(Path(f"/proc/{node.pid}/fd").iterdir()))


class TestConnections:
    """Connections of one user."""

    @needs_root
    def test_the_257th(self, line: Line, connect: Connect) -> None:
        """A user has 256 connections; the next one is refused before it sends anything, and other users are served."""
        kept = []
        for _ in range(256):
            kept.append(connect(line.node, ANN))
            assert kept[-1].ask("GET", "/healthz").status == 200
        too_many(connect(line.node, ANN).answer(), "api.connections_per_uid")
        assert line.call("GET", "/v1/status", uid=BOB).answer().status == 200
        assert line.node.get("/v1/status").status == 200
        kept.pop().close()
        # Until mpsd has noticed, new connections are turned away, perhaps before they have sent anything.
        wait_until(lambda: served(line, ANN), what="room for another one", not_yet=(OSError, EOFError))

    @needs_root
    def test_at_the_door(self, line: Line, connect: Connect) -> None:
        """However fast processes connect whose user has too many connections, other users connect and are answered."""
        inside = connect(line.node, BOB)
        assert inside.ask("GET", "/healthz").status == 200  # from now on, the deadline is that of an idle connection
        for _ in range(256):
            assert connect(line.node, ANN).ask("GET", "/healthz").status == 200
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                argv = [sys.executable, "-c", KNOCK, str(line.node.socket), str(ANN)]
                knocking = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE))
                stack.callback(knocking.kill)
                assert knocking.stdout is not None
                assert knocking.stdout.readline() == b"429\n"
            assert [inside.ask("GET", "/healthz").status for _ in range(10)] == [200] * 10
            for _ in range(50):
                assert patient(line.node)
            assert line.node.mpsctl("status").returncode == 0
        # mpsd first has to turn the backlog away: until then the kernel accepts no more waiting connections.
        wait_until(lambda: served(line, BOB), what="room at the door", not_yet=(OSError, EOFError))

    @needs_root
    def test_silence(self, line: Line, connect: Connect) -> None:
        """A caller that does not end its first request's head is disconnected at its deadline; others stay."""
        kept = connect(line.node)
        assert kept.ask("GET", "/healthz").status == 200
        silent = [connect(line.node, uid) for uid in (ANN, BOB) for _ in range(50)]
        head = message("POST", "/v1/leases", SMALL)
        for number, talk in enumerate(silent):
            talk.send(head[: number % 40])
        assert line.granted(uid=ANN, **SMALL)
        wait_until(lambda: all(closed(each) for each in silent), what="the silent ones to be shown out")
        assert {each.rest() for each in silent} == {b""}
        assert kept.ask("GET", "/healthz").status == 200

    def test_one_byte_at_a_time(self, line: Line, connect: Connect) -> None:
        """Sending a byte now and then does not extend the deadline."""
        slow = connect(line.node, ANN)
        head = iter(b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * 1000)

        def drip() -> bool:
            with contextlib.suppress(BrokenPipeError):
                slow.send(bytes([next(head)]))
            return closed(slow)

        wait_until(drip, what="the slow one to be shown out")
        with contextlib.suppress(ConnectionResetError):  # a byte that mpsd has not read resets the connection
            assert slow.rest() == b""

    @needs_root
    def test_coming_and_going(self, line: Line) -> None:
        """Thousands of callers that connect and leave at any moment of their request leave no descriptor open."""
        before, request = descriptors(line.node), message("GET", "/healthz")
        for number in range(2000):
            with Talk(line.node.socket, uid=ANN) as talk, contextlib.suppress(BrokenPipeError):
                talk.send(request[: number % (len(request) + 1)])
            if number % 100 == 0:
                assert served(line, BOB)  # no more than the kernel's backlog holds
        wait_until(lambda: descriptors(line.node) <= before + 1, what="mpsd to close what its callers closed")


class TestRequests:
    """Concurrent requests of one user, and their bodies."""

    @needs_root
    def test_the_ninth(self, line: Line, connect: Connect) -> None:
        """A user has a limit of concurrent requests, waiting and following ones included; other users are served."""
        line.granted(threads=100, memory="1GiB", gpu="0")
        waiting = [line.waits(uid=ANN, **SMALL, gpu="0")[0] for _ in range(4)]
        followers = [connect(line.node, ANN) for _ in range(4)]
        for each in followers:
            each.send(message("GET", "/v1/events?follow=true"))
            assert readable(each, 10)
        for method, target, body in (("GET", "/healthz", None), ("POST", "/v1/leases", SMALL), ("DELETE", "/x", None)):
            too_many(line.call(method, target, body, uid=ANN).answer(), "api.requests_per_uid")
        assert line.call("GET", "/v1/status", uid=BOB).answer().status == 200
        followers[0].close()
        wait_until(lambda: served(line, ANN), what="a request to be over")
        waiting[0].hang_up()
        wait_until(lambda: len(line.queue()) == 3, what="the queue to be shorter")

    @pytest.mark.parametrize(("size", "status"), [(64 * 1024, 422), (64 * 1024 + 1, 413), (1024 * 1024, 413)])
    @pytest.mark.parametrize("how", ["announced", "chunked"])
    def test_body(self, line: Line, connect: Connect, size: int, status: int, how: str) -> None:
        """A body has 64 KiB at most, whether its size was announced or not."""
        body, talk = b" " * size, connect(line.node, ANN)
        with contextlib.suppress(BrokenPipeError):
            if how == "chunked":
                talk.send(b"POST /v1/leases HTTP/1.1\r\nHost: mpsd\r\nTransfer-Encoding: chunked\r\n\r\n")
                for piece in (body[start : start + 4096] for start in range(0, size, 4096)):
                    talk.send(b"%x\r\n%b\r\n" % (len(piece), piece))
                talk.send(b"0\r\n\r\n")
            else:
                talk.send(message("POST", "/v1/leases", body))
        answer = talk.answer()
        assert (answer.status, answer.json["limit"]) == (status, "body" if status == 413 else None)

    def test_body_that_does_not_come(self, line: Line, connect: Connect) -> None:
        """An announced body that does not come, or comes a byte at a time, has the same deadline as a head."""
        slow = [connect(line.node, ANN) for _ in range(8)]
        for each in slow:
            each.send(b"POST /v1/leases HTTP/1.1\r\nHost: mpsd\r\nContent-Length: 60000\r\n\r\n{")
        too_many(line.call("GET", "/healthz", uid=ANN).answer(), "api.requests_per_uid")

        def drip() -> bool:
            slow[0].send(b" ")
            return readable(slow[0])

        wait_until(drip, what="an answer to come")
        for answer in (each.answer() for each in slow):
            assert (answer.status, answer.json["limit"]) == (422, "api.header_deadline")
        assert served(line, ANN)


class TestReaders:
    """Callers that send requests and do not read the answers."""

    @pytest.mark.parametrize("behind", [b"x" * 65536, message("GET", "/healthz") * 1000], ids=["noise", "requests"])
    def test_behind_one_that_waits(self, line: Line, connect: Connect, behind: bytes) -> None:
        """Bytes that a caller sends while it waits for its lease are not read meanwhile."""
        line.granted(threads=100, memory="1GiB", gpu="0")
        deaf, sent, before = connect(line.node, ANN), 0, memory(line.node)
        deaf.send(message("POST", "/v1/leases", {**SMALL, "gpu": "0", "wait": None}))
        deaf.connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(500):
                sent += deaf.connection.send(behind)
                assert line.node.get("/healthz").status == 200  # mpsd has had the time to read it
        assert sent < 4 * MIB
        assert memory(line.node) - before < 8 * MIB

    def test_large_answers(self, make_node: Start, make_line: MakeLine, connect: Connect) -> None:
        """A caller that does not read a large answer is disconnected; mpsd does not keep the answer without limit."""
        line = make_line(make_node(simulate=1, config="[api]\nrequests_per_uid = 50\n").start())
        for _ in range(40):
            line.granted(uid=ANN, **SMALL, labels=LABELS)
        size = len(line.call("GET", "/v1/leases", uid=ANN).answer().body)
        assert size > 200_000  # more than fits between mpsd and its reader
        before = memory(line.node)
        deaf = [connect(line.node, ANN) for _ in range(50)]
        for each in deaf:
            each.send(message("GET", "/v1/leases"))
        assert all(readable(each, 20) for each in deaf)
        too_many(line.call("GET", "/healthz", uid=ANN).answer(), "api.requests_per_uid")
        assert memory(line.node) - before < 50 * 2 * size + 8 * MIB
        wait_until(lambda: all(closed(each) for each in deaf), what="the deaf ones to be hung up on", deadline=20)
        assert served(line, ANN)

    def test_large_answer_to_one_that_reads(self, make_node: Start, make_line: MakeLine, connect: Connect) -> None:
        """A caller that reads a large answer slowly gets all of it, however long that takes, and may go on."""
        durations = {"mpsd.daemon.http.connection._SLOW": 2.0}
        line = make_line(make_node(simulate=4, durations=durations, config="[api]\nrequests_per_uid = 50\n").start())
        for number in range(160):
            line.granted(**SMALL, gpu=f"{number % 4}", labels=LABELS)
        slow, received = connect(line.node), b""
        slow.send(message("GET", "/v1/leases"))

        def whole() -> bool:
            nonlocal received
            piece = slow.connection.recv(16384)
            assert piece, f"the connection was closed after {len(received)} bytes"
            received += piece
            head, _, body = received.partition(b"\r\n\r\n")
            return len(body) == int(head.partition(b"Content-Length: ")[2].split()[0])

        began = time.monotonic()
        wait_until(whole, what="the whole answer", deadline=60)
        assert time.monotonic() - began > durations["mpsd.daemon.http.connection._SLOW"]  # or nothing was tried
        assert slow.ask("GET", "/healthz").status == 200


def lacking(node: Node, *checks: str) -> None:
    """Wait until mpsd lacks descriptors for its control daemon, and for each of these checks."""

    def are_left_out() -> bool:
        assert node.exited() is None
        lines = [line["because"] for line in node.events("resource_lacking")]
        return bool(node.events("daemon_state", state="unresponsive")) and all(
            any(line.startswith(f"{each} cannot be checked now: ") for line in lines) for each in checks
        )

    wait_until(are_left_out, what=f"mpsd to lack descriptors; the log is {node.stderr}")


def unharmed(node: Node, before: dict[str, Any]) -> bool:
    """Wait until a node is well again; tell whether control daemon and server are the same, and nobody was ended."""
    wait_until(lambda: node.exited() is None and node.get("/readyz").status == 200, what="mpsd to be well")
    after, ends = node.daemons()["gpu0"], ("client_forced", "daemon_forced", "daemon_death", "library_report")
    pids = [(each["pid"], [server["pid"] for server in each["servers"]]) for each in (before, after)]
    return pids[0] == pids[1] and not any(map(node.events, ends))


class TestDescriptors:
    """mpsd without free descriptors."""

    @needs_root
    def test_many_connections(self, make_node: Start, make_line: MakeLine, connect: Connect) -> None:
        """Many users with many connections use up the descriptors for connections, and no others; then all recovers."""
        config = "[api]\nconnections_per_uid = 1000\n[daemon]\nprobe_interval = 0.2\n"
        line = make_line(make_node(simulate=1, config=config).start())
        most = 64
        lease, before, pid = line.granted(uid=ANN, **SMALL), descriptors(line.node), line.node.daemons()["gpu0"]["pid"]
        _, hard = resource.prlimit(line.node.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(line.node.pid, resource.RLIMIT_NOFILE, (most, hard))
        crowd = [connect(line.node, ANN if number == 0 else 2600 + number % 20) for number in range(200)]
        too_many(crowd[-1].answer(), "descriptors")
        inside = [each for each in crowd if not readable(each)]
        assert most // 4 < len(inside) < most - before
        # Enough are left for a lease, and for mpsd to query its control daemon meanwhile.
        assert inside[0] is crowd[0]
        assert inside[0].ask("POST", "/v1/leases", SMALL).status == 201
        assert descriptors(line.node) < most
        for each in crowd:
            each.close()
        wait_until(lambda: served(line, BOB), what="room", not_yet=(OSError, EOFError))
        assert line.lease(lease)["state"] == "granted"
        wait_until(lambda: descriptors(line.node) <= before + 2, what="the descriptors to be given back")
        assert line.node.daemons()["gpu0"]["pid"] == pid
        assert line.node.events("daemon_state", state="unresponsive") == []
        assert 0 < len(line.node.events("listener_stuck")) < 5

    def test_none_left(self, make_node: Start, connect: Connect) -> None:
        """An mpsd without free descriptors waits until it has some: it ends neither itself nor a control daemon."""
        node = make_node(simulate=1, config="[daemon]\nprobe_interval = 0.1\n").start()
        pid = node.daemons()["gpu0"]["pid"]
        soft, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
        least = soft

        def in_trouble() -> bool:
            # A front-end takes more than two. While there is one, or an answer, the count is above mpsd's at rest.
            nonlocal least
            least = min(least, descriptors(node) + 1)
            resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (least, hard))
            return bool(node.events("daemon_state", state="unresponsive"))

        in_trouble()
        for _ in range(20):
            connect(node)
        wait_until(in_trouble, what="mpsd to be in trouble")
        assert node.exited() is None
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert node.wait_for_state("gpu0", "ready")["pid"] == pid
        assert is_running(pid)

    def test_none_for_a_node_in_use(self, make_node: Start) -> None:
        """Without any descriptor, mpsd lives, says what it lacks, and ends nobody; then it is well again."""
        node = make_node(simulate=1, control=None, config=QUICK, durations=OFTEN).start()
        with (
            leased(node, "--threads", "10", "--memory", "1GiB") as client,
            asleep() as other,
            contextlib.ExitStack() as at_end,
        ):
            at_end.callback(other.kill)
            client.alloc("64MiB")
            kept = wait_until(lambda: next((each for each in node.leases() if each["clients"]), None), what="a client")
            short, before = node.lease(pid=other.pid), node.daemons()["gpu0"]
            with Talk(node.socket) as talk:
                assert talk.ask("GET", "/v1/status").json["healthy"]
                with starved(node.pid):
                    lacking(node, "the processes on the GPUs", "the offers of the GPUs", "the server of gpu0")
                    status = talk.ask("GET", "/v1/status").json
                    assert not status["healthy"]
                    assert "Too many open files" in status["because"]
                    other.kill()
                    wait_until(lambda: node.events("lease_ended", lease=short["id"]), what="its lease to end")
            assert unharmed(node, before)
            assert client.alloc("64MiB")["ok"]
            assert [(each["id"], each["clients"]) for each in node.leases()] == [(kept["id"], kept["clients"])]

    @pytest.mark.parametrize("real", branches(555))
    def test_none_for_a_real_control_daemon(self, make_node: Start, real: RealDaemon) -> None:
        """The same for NVIDIA's own control daemon and a lease on it."""
        node = make_node(simulate=1, control=real.control, config=QUICK, durations=OFTEN).start()
        lease, before = node.lease(), node.daemons()["gpu0"]
        with starved(node.pid):
            lacking(node)
            wait_until(lambda: node.events("gpu_health", health="unknown"), what="the GPU to be unreadable")
        assert unharmed(node, before)
        assert [each["id"] for each in node.leases()] == [lease["id"]]

    def test_death_without_any(self, make_node: Start) -> None:
        """A control daemon that dies meanwhile is replaced: its death counts once, and its clients are reported."""
        node = make_node(simulate=1, control=None, config=QUICK, durations=OFTEN).start()
        with leased(node, "--threads", "10", "--memory", "1GiB") as client:
            client.alloc("64MiB")
            lease = wait_until(lambda: next((each for each in node.leases() if each["clients"]), None), what="a client")
            pid = node.daemons()["gpu0"]["pid"]
            with starved(node.pid):
                lacking(node, "the offers of the GPUs")
                kill(pid)
                wait_until(lambda: not is_running(pid), what="its end")
                before = len(node.events("resource_lacking"))
                wait_until(lambda: len(node.events("resource_lacking")) > before + 2, what="mpsd to check again")
            next_ready(node, "gpu0", pid)
            assert len(node.events("daemon_death")) == 1
            wait_until(lambda: node.events("lease_clients_lost", lease=lease["id"]), what="its client to be reported")
        assert node.events("library_report") == []


class TestMemory:
    """The memory that many requests leave behind: none."""

    @pytest.mark.timeout(180)
    def test_flat(self, line: Line) -> None:
        """After 20,000 requests, ordinary and hostile ones, mpsd has the memory that it had after the first 4,000."""
        sizes = []
        for _ in range(10):
            self.two_thousand(line)
            sizes.append(memory(line.node))

        assert sizes[-1] - sizes[1] < 6 * MIB, [size // 1024 for size in sizes]

    def granted(self, line: Line) -> str | None:
        """Return the id of a lease; None while too many requests of its user are in flight."""
        answer = line.ask(uid=ANN, **SMALL)
        assert answer.status in {201, 429}, answer.json
        return answer.json["id"] if answer.status == 201 else None

    def two_thousand(self, line: Line) -> None:
        """Send 2,000 requests of all kinds."""
        lease = wait_until(lambda: self.granted(line), what="the answers to the rude requests before to end")
        kinds: list[tuple[str, str, object]] = [
            ("GET", "/v1/leases", None),
            ("GET", f"/v1/leases/{lease}", None),
            ("POST", "/v1/leases", {"threads": 1000, "memory": "1GiB"}),
            ("POST", "/v1/leases", {**SMALL, "memory": "100GiB"}),
            ("POST", "/v1/leases", b"[" * 2000),
            ("POST", "/v1/leases", b"\xff" * 60000),
            ("POST", f"/v1/leases/{lease}/renew", {"ttl": 1e9}),
            ("PUT", "/v1/gpus", {}),
            ("GET", "/v1/events?after=99999999999999999999", None),
        ]
        with Talk(line.node.socket, uid=ANN) as talk:
            for number in range(180):
                assert all(talk.ask(*each).status < 500 for each in kinds)
                assert talk.ask("GET", f"/nowhere/{lease}/{number}", None, f"X-{number}: {lease}").status == 404
        status = message("GET", "/v1/leases")
        rude = [b"\x16\x03\x01", b"GET / HTTP/9\r\n\r\n", b"A" * 9000, status[:20], status, status * 9]
        for number in range(200):
            with Talk(line.node.socket, uid=ANN) as talk:
                talk.send(rude[number % len(rude)])
        line.release({"id": lease})
