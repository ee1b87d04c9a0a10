"""The client accepts every form of HTTP answer, and reports clearly when the input is no answer."""

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from math import inf
from pathlib import Path

import pytest

from mpsd.cli.group import mpsctl
from mpsd.client import Client
from mpsd.client.connection import MOST_IDLE, SOCKET, Connection
from mpsd.client.exchange import error_of, segment
from mpsd.core.errors import DoesNotFitError, InvalidRequestError, MpsdError, UnreachableError, catalogue
from mpsd.core.settings import Settings
from tests.cli.answering import Answering, answering, http
from tests.cli.conftest import ROOT
from tests.harness import wait_until
from tests.node import Node

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: Chunked\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([http({"a": 1})], id="length"),
        pytest.param([bytes([byte]) for byte in http({"a": 1})], id="byte by byte"),
        pytest.param([CHUNKED, b'5\r\n{"a":\r\n', b"3;why=not\r\n 1}\r\n", b"0\r\nTrailer: x\r\n\r\n"], id="chunked"),
        pytest.param([HEAD + b'\r\n{"a": 1}', Answering.hang_up], id="until the end"),
        pytest.param([b"HTTP/1.1 100 Continue\r\n\r\n", http({"a": 1})], id="after 100"),
        pytest.param([HEAD.replace(b"\r", b"") + b'content-length:8\n\n{"a": 1}'], id="bare newlines"),
    ],
)
def test_bodies(short_tmp: Path, answer: Sequence[bytes]) -> None:
    """A body arrives whole, however its end is marked and in any pieces."""
    with answering(short_tmp / "s", answer), Connection(str(short_tmp / "s")) as client:
        assert client.get("/v1/status") == {"a": 1}


def test_default_socket() -> None:
    """The socket that mpsctl and the client try first is the one that mpsd makes by default."""
    (option,) = (parameter for parameter in mpsctl.params if parameter.name == "socket")
    assert option.default == SOCKET == str(Settings().socket)


def test_requests(short_tmp: Path) -> None:
    """Requests use one connection, each whole, with the length and the type of its body."""
    created = http({"id": "x"}, "201 Created")
    with answering(short_tmp / "s", http(1), created, b"HTTP/1.1 204 No Content\r\n\r\n") as server:
        with Connection(str(short_tmp / "s")) as client:
            client.get("/v1/status")
            client.post("/v1/leases", {"name": "ü"})
            client.delete("/v1/leases/x")
        assert server.connections == 1
    get, post, delete = server.requests
    assert get.startswith(b"GET /v1/status HTTP/1.1\r\nHost: mpsd\r\n")
    assert get.endswith(b"\r\n\r\n")
    head, _, body = post.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b"Content-Type: application/json" in head
    assert json.loads(body) == {"name": "ü"}
    assert delete.startswith(b"DELETE /v1/leases/x HTTP/1.1\r\n")


def test_closed_connections(short_tmp: Path) -> None:
    """When a server closes the connection after its answer, the client connects again."""
    closing = [http(1, "200 OK", "Connection: close"), Answering.hang_up]
    with answering(short_tmp / "s", closing, closing) as server, Connection(str(short_tmp / "s")) as client:
        assert client.get("/") == client.get("/") == 1
        assert server.connections == 2


def test_closed_between_requests(short_tmp: Path) -> None:
    """A connection that the server has closed since its answer carries no request: nothing is sent there."""
    with answering(short_tmp / "s", [http(1), Answering.hang_up], http(2)) as server:
        with Connection(str(short_tmp / "s")) as client:
            client.get("/")
            (first,) = client._idle
            wait_until(first.is_over, what="the server to close")
            assert client.post("/v1/leases", {}) == 2
        assert (server.connections, len(server.requests)) == (2, 2)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([Answering.hang_up], id="nothing"),
        pytest.param([HEAD, Answering.hang_up], id="headers"),
        pytest.param([HEAD + b"content-length: 9\r\n\r\n{", Answering.hang_up], id="body"),
        pytest.param([CHUNKED + b"9\r\n{", Answering.hang_up], id="chunk"),
        pytest.param([CHUNKED + b"1\r\n1\r\n", Answering.hang_up], id="last chunk"),
    ],
)
def test_broken_off(short_tmp: Path, answer: Sequence[bytes]) -> None:
    """A truncated answer is reported as such; only a request that changes something may have had an effect."""
    with answering(short_tmp / "s", answer, answer), Connection(str(short_tmp / "s")) as client:
        with pytest.raises(UnreachableError, match="broke before the answer arrived") as reading:
            client.get("/")
        with pytest.raises(UnreachableError, match="broke before the answer arrived") as changing:
            client.post("/", {})
        assert ["unknown" in each.value.detail for each in (reading, changing)] == [False, True]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([b"SSH-2.0-OpenSSH_9.2\r\n"], id="another protocol"),
        pytest.param([b"HTTP/1.1 abc\r\n\r\n"], id="no status"),
        pytest.param([HEAD + b"content-length: many\r\n\r\n"], id="no length"),
        pytest.param([CHUNKED + b"zz\r\n"], id="no chunk"),
        pytest.param([HEAD + b"content-length: 5\r\n\r\nhello"], id="no JSON"),
        pytest.param([HEAD + b"content-length: 1\r\n\r\n\xff"], id="no UTF-8"),
        pytest.param([b"x" * 200_000], id="a line without an end"),
    ],
)
def test_not_mpsd(short_tmp: Path, answer: Sequence[bytes]) -> None:
    """An answer that is not mpsd's is distinguished from an absent mpsd, with the option for another socket."""
    with answering(short_tmp / "s", answer), Connection(str(short_tmp / "s")) as client:
        with pytest.raises(UnreachableError, match="does not answer as mpsd does") as error:
            client.get("/")
        assert "MPSD_SOCKET" in error.value.hint


@pytest.mark.parametrize(
    "answer", [None, [http(1)[:20]], [CHUNKED + b"1\r\n1\r\n"]], ids=["silent", "headers", "chunks"]
)
def test_deadline(short_tmp: Path, answer: Sequence[bytes] | None) -> None:
    """The client waits until its deadline for a server that takes a request and does not finish its answer."""
    late = pytest.raises(UnreachableError, match=r"did not answer within 0\.2 s")
    with answering(short_tmp / "s", answer), Connection(str(short_tmp / "s"), deadline=0.2) as client, late:
        client.get("/")


def test_deadline_is_for_the_whole(short_tmp: Path) -> None:
    """A server that keeps sending single bytes delays its caller no longer than a silent one."""
    endless = chain([HEAD + b"content-length: 1000000000\r\n\r\n"], repeat(b"x"))
    late = pytest.raises(UnreachableError, match=r"did not answer within 0\.2 s")
    with answering(short_tmp / "s", endless), Connection(str(short_tmp / "s"), deadline=0.2) as client, late:
        client.get("/")


def test_after_a_failure(short_tmp: Path) -> None:
    """A request after a failed one does not read the rest of the old answer."""
    with (
        answering(short_tmp / "s", [b"junk\r\n" + http(1)], http(2)) as server,
        Connection(str(short_tmp / "s")) as client,
    ):
        with pytest.raises(UnreachableError):
            client.get("/")
        assert client.get("/") == 2
        assert server.connections == 2


# -- answers that take their time --------------------------------------------------------------------------------------


def test_a_deadline_of_its_own(short_tmp: Path) -> None:
    """A request that may take longer is given that time, and other work is done meanwhile at intervals."""
    enough = threading.Event()
    pauses = iter([0.0, 0.0, 60.0])
    done: list[int] = []

    def meanwhile() -> float:
        done.append(len(done))
        pause = next(pauses)
        if pause:
            enough.set()
        return pause

    def answer() -> Iterator[bytes]:
        assert enough.wait(30)
        yield http(1)

    with answering(short_tmp / "s", answer(), http(2)), Connection(str(short_tmp / "s"), deadline=0.2) as client:
        assert client.post("/v1/leases", {}, deadline=60, meanwhile=meanwhile) == 1
        assert done == [0, 1, 2]
        assert client.get("/") == 2


def test_the_end_of_a_long_wait(short_tmp: Path) -> None:
    """Such a request also ends at its deadline, whatever is done meanwhile."""
    late = pytest.raises(UnreachableError, match=r"did not answer within 0\.6 s")
    with answering(short_tmp / "s", None), Connection(str(short_tmp / "s")) as client, late:
        client.post("/v1/leases", {}, deadline=0.6, meanwhile=lambda: 0.01)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        pytest.param([CHUNKED + b'4\r\n{"a"\r\n', b"4\r\n: 1}\r\n4\r\n\n2\n3\r\n1\r\n\n\r\n0\r\n\r\n"],
                     [{"a": 1}, 2, 3], id="across chunks"),
        pytest.param([HEAD + b"content-length: 4\r\n\r\n1\n2\n"], [1, 2], id="at once"),
        pytest.param([HEAD + b"\r\n1\n2", b"2\n", Answering.hang_up], [1, 22], id="until the end"),
        pytest.param([CHUNKED + b"0\r\n\r\n"], [], id="none"),
    ],
)  # fmt: skip
def test_lines(short_tmp: Path, answer: Sequence[bytes], wanted: list[object]) -> None:
    """Lines arrive whole, raw and decoded, however they were cut."""
    with answering(short_tmp / "s", answer), Connection(str(short_tmp / "s")) as client:
        assert [document for _, document in client.lines("/v1/events")] == wanted


def test_a_line_that_breaks_off(short_tmp: Path) -> None:
    """Lines before a break have been passed on, the broken line is not, and the break is an error."""
    with answering(short_tmp / "s", [CHUNKED + b"3\r\n1\n2\r\n", Answering.hang_up]):
        lines = Connection(str(short_tmp / "s")).lines("/v1/events")
        assert next(lines) == ("1", 1)
        with pytest.raises(UnreachableError, match="broke before the answer arrived") as error:
            next(lines)
    assert error.value.retryable


def test_silence_between_lines(short_tmp: Path) -> None:
    """An answer that has begun may pause for as long as its caller allows, and other work continues meanwhile."""
    heard = threading.Event()

    def meanwhile() -> float:
        heard.set()
        return 60.0

    def answer() -> Iterator[bytes]:
        yield CHUNKED
        assert heard.wait(30)
        yield b"2\r\n1\n\r\n"
        yield b"0\r\n\r\n"

    with answering(short_tmp / "s", answer(), [CHUNKED]), Connection(str(short_tmp / "s"), deadline=0.2) as client:
        assert list(client.lines("/v1/events", silence=inf, meanwhile=meanwhile)) == [("1", 1)]
        with pytest.raises(UnreachableError, match="did not answer"):
            list(client.lines("/v1/events", silence=0.2))


def test_lines_are_refused(short_tmp: Path) -> None:
    """A refusal is raised as for any other request; an answer without lines of JSON is an error, too."""
    problem = http({"code": "invalid_request", "detail": "too old", "hint": "ask later"}, "422 Unprocessable Entity")
    with answering(short_tmp / "s", problem, [HEAD + b"content-length: 6\r\n\r\nhello\n"]):
        client = Connection(str(short_tmp / "s"))
        with pytest.raises(InvalidRequestError, match="too old"):
            list(client.lines("/v1/events"))
        with pytest.raises(UnreachableError, match="does not answer as mpsd does") as error:
            list(client.lines("/v1/events"))
    assert not error.value.retryable


# -- several requests at once ------------------------------------------------------------------------------------------


def test_threads(node: Node) -> None:
    """Threads that share a client each get the answers to their own requests, and few sockets stay open after that."""
    together = threading.Barrier(12)
    with Client(str(node.socket)) as client:
        leases = [client.admit({"threads": 1, "memory": "1MiB"})["id"] for _ in range(12)]

        def ask(lease: str) -> set[str]:
            together.wait(30)
            return {client.lease(lease)["id"] for _ in range(50)}

        with ThreadPoolExecutor(12) as threads:
            assert list(threads.map(ask, leases)) == [{lease} for lease in leases]
        assert 1 <= len(client._idle) <= MOST_IDLE


FORKS = """
import os, mpsd
with mpsd.Client() as api:
    ours = api.admit({"threads": 1, "memory": "1MiB"})
    child = os.fork()
    if not child:
        theirs = api.admit({"threads": 1, "memory": "1MiB"})
        print(theirs["owner"]["pid"] == os.getpid(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(api.lease(ours["id"])["owner"]["pid"] == os.getpid(), len(api._idle))
"""


def test_fork(node: Node) -> None:
    """A child's requests are its own, by which mpsd knows it, and its parent's go on over the parent's socket."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "MPSD_SOCKET": str(node.socket)},
    )  # fmt: skip
    assert done.stdout.split("\n") == ["True", "True 1", ""], done.stderr


FORKS_LATER = """
import os, sys, threading, mpsd
threading.Thread(target=mpsd.Client(sys.argv[1]).status, daemon=True).start()
sys.stdin.read(1)
if os.fork():
    os._exit(0)
print("forked", flush=True)
sys.stdin.read(1)
"""


def test_a_fork_within_a_request(short_tmp: Path) -> None:
    """A child keeps no copy of a socket on which a thread of its parent waits: mpsd sees that the parent is gone."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{short_tmp}/s")
        listener.listen()
        listener.settimeout(30)
        command = [sys.executable, "-c", FORKS_LATER, f"{short_tmp}/s"]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(30)
                assert connection.recv(65536).startswith(b"GET /v1/status ")
                program.stdin.write("-")
                program.stdin.flush()
                assert program.stdout.readline() == "forked\n"
                assert connection.recv(1) == b""
            program.stdin.close()
            assert program.stdout.read() == ""


# -- connecting --------------------------------------------------------------------------------------------------------


def test_no_socket(short_tmp: Path) -> None:
    """Without a socket the error names the path, and how to start mpsd or to name another."""
    with pytest.raises(UnreachableError, match=f"there is no socket {short_tmp}/s") as error:
        Connection(f"{short_tmp}/s").get("/")
    assert "if mpsd is not running, start it" in error.value.hint
    assert "mount the directory of the socket" in error.value.hint
    assert "--socket" in error.value.hint
    assert error.value.exit_code == 69


def test_nobody_listens(short_tmp: Path) -> None:
    """A socket that a dead mpsd left, and a file that is no socket, are distinguished from no socket at all."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{short_tmp}/s")
    (short_tmp / "file").touch()
    for name in ("s", "file"):
        with pytest.raises(UnreachableError, match="nothing listens on"):
            Connection(f"{short_tmp}/{name}").get("/")


def test_path_too_long() -> None:
    """A path too long for a unix socket is refused with a reason, not with a traceback."""
    with pytest.raises(UnreachableError, match="too long"):
        Connection("/" + 200 * "x").get("/")


def test_no_room_in_the_queue(short_tmp: Path) -> None:
    """An mpsd that does not accept connections at the moment has until the deadline to accept one."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{short_tmp}/s")
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(f"{short_tmp}/s")
            with pytest.raises(UnreachableError, match="did not accept a connection"):
                Connection(f"{short_tmp}/s", deadline=0.2).get("/")


@pytest.mark.root("call as another user")
def test_permission_denied(short_tmp: Path) -> None:
    """A socket that a uid may not connect to is reported as such: mpsd may be running well."""
    with answering(short_tmp / "s"):
        (short_tmp / "s").chmod(stat.S_IRWXU)
        short_tmp.chmod(0o711)
        script = (
            "import os, sys; sys.path.insert(0, sys.argv[2]); from mpsd.client.connection import Connection"
            "\nos.setuid(65534)"
            "\ntry: Connection(sys.argv[1]).get('/')\nexcept Exception as error: print(error, error.hint)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(short_tmp / "s"), str(ROOT)], capture_output=True, text=True, check=False
        )
    assert "uid 65534 is not permitted to connect" in done.stdout, done.stderr
    assert "api.group" in done.stdout


# -- what mpsd answers when it says no ---------------------------------------------------------------------------------


@pytest.mark.parametrize("known", catalogue(), ids=lambda known: known.code)
def test_errors_arrive_as_they_left(known: type[MpsdError]) -> None:
    """Every error of the catalogue is raised here as its class in mpsd, with all its members."""
    document = {"status": known.status, "code": known.code, "detail": "why", "hint": "what to do", "limit": "threads"}
    error = error_of(known.status, document)
    assert type(error) is known
    assert (error.detail, error.hint, error.limit) == ("why", "what to do", "threads")
    assert error.exit_code == known.exit_code


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [(400, 2), (403, 77), (404, 1), (409, 75), (422, 2), (429, 75), (500, 1), (502, 1), (503, 75)],
)
def test_errors_of_another_version(status: int, exit_code: int) -> None:
    """An unknown code is reported unchanged, with the exit code for its HTTP status."""
    error = error_of(status, {"code": "new_kind", "detail": "why", "hint": "what to do"})
    assert (error.code, error.detail, error.exit_code) == ("new_kind", "why", exit_code)
    assert MpsdError.code == "error"


@pytest.mark.parametrize("document", [None, [], "text", {}, {"message": "page not found"}])
def test_errors_of_somebody_else(document: object) -> None:
    """An error without a reason is reported with its status, and with the question who answered."""
    error = error_of(404, document)
    assert "404" in error.detail
    assert "is mpsd; otherwise" in error.hint


def test_an_error_is_raised(short_tmp: Path) -> None:
    """A problem document is raised by the request that it answers, and the connection stays open."""
    problem = http({"code": "does_not_fit", "detail": "10 % are left", "hint": "ask for less"}, "409 Conflict")
    with answering(short_tmp / "s", problem, http(1)) as server, Connection(str(short_tmp / "s")) as client:
        with pytest.raises(DoesNotFitError, match="10 % are left"):
            client.post("/v1/leases", {})
        assert client.get("/") == 1
        assert server.connections == 1


@pytest.mark.parametrize(
    ("text", "quoted"),
    [("lease-1.a_b~c", "lease-1.a_b~c"), ("a/b", "a%2Fb"), ("a b?c#d", "a%20b%3Fc%23d"), ("\r\nX: y", "%0D%0AX%3A%20y"),
     ("ü", "%C3%BC"), ("\udcff", "%FF")],
)  # fmt: skip
def test_segments(text: str, quoted: str) -> None:
    """A name stays one segment of the path, whatever it contains."""
    assert segment(text) == quoted
