"""The server of `mpsctl web` serves neither other users of the node nor pages of other sites."""

import contextlib
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from mpsd.cli.web import guard
from mpsd.cli.web.server import MOST
from tests.cli.conftest import ROOT
from tests.cli.web.conftest import HOST, Web
from tests.daemon.caller import NOBODY, needs_root
from tests.harness import wait_until
from tests.node import TOKEN, Node

pytestmark = [pytest.mark.usefixtures("node"), pytest.mark.thorough]

REQUESTS: Final = (
    ("GET", "/page/node"),
    ("GET", "/page/principal"),
    ("GET", "/page/events"),
    ("GET", "/page/story/gpu0"),
    ("GET", "/v1/operations/op-1"),
    ("POST", "/v1/daemons/gpu0/hold"),
    ("DELETE", "/v1/leases/lease-1"),
)
"""Requests that need a session, one of each kind."""


@pytest.fixture
def web(shared_web: Web) -> Web:
    """Return the `mpsctl web` of the module."""
    return shared_web


def body_of(method: str) -> object:
    return {} if method == "POST" else None


class TestSession:
    """A request without a session gets no data and has no effect."""

    @pytest.mark.parametrize(("method", "path"), REQUESTS)
    @pytest.mark.parametrize("said", [None, "Bearer ", "Bearer x", "Basic eDp4"])
    def test_none(self, web: Web, method: str, path: str, said: str | None) -> None:
        """A missing header, an empty one, a wrong one and one of another kind get the same refusal."""
        headers = {"Authorization": said, "Origin": web.origin}
        answer = web.send(method, path, body_of(method), headers=headers)
        assert answer.status == 401
        assert answer.json["code"] == "no_session"
        assert "Enter" in answer.json["hint"]

    def test_link_is_void_after_its_use(self, node: Node, make_web: Callable[..., Web]) -> None:
        """A link opens one session; a second use is refused with a sentence, and the first session stays."""
        web = make_web(node.socket)
        assert web.ask("GET", "/page/principal").status == 200
        again = web.send("POST", "/page/session", {"token": web.token}, headers={"Origin": web.origin})
        assert again.status == 403
        assert again.json["detail"] == "this link was used before, and a link opens the page once"
        assert web.ask("GET", "/page/principal").status == 200
        assert "a browser opened the page" in web.end()[1]

    @pytest.mark.parametrize("token", ["", "x", "é", "\udcff", None, 1, ["x"]])
    def test_wrong_token(self, web: Web, token: object) -> None:
        """A text that is no token opens no session."""
        answer = web.send("POST", "/page/session", {"token": token}, headers={"Origin": web.origin})
        assert answer.status in {400, 403}
        assert b'"session"' not in answer.body

    def test_links_differ(self, node: Node, make_web: Callable[..., Web]) -> None:
        """Every link has a different token of 256 bits, which appears in no argument and no variable."""
        first, second = make_web(node.socket), make_web(node.socket)
        assert first.token != second.token
        assert len(first.token) == 43
        for name in ("cmdline", "environ"):
            with open(f"/proc/{first.process.pid}/{name}", "rb") as file:  # noqa: PTH123 - /proc is not for pathlib
                assert first.token.encode() not in file.read()


class TestSites:
    """The server refuses every request that another site may have caused, with or without a session."""

    @pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("GET", "/page.js"), *REQUESTS])
    @pytest.mark.parametrize(
        "host", [None, "evil.example", f"{HOST}", "evil.example:{port}", "localhost.evil.example:{port}"]
    )
    def test_host(self, web: Web, method: str, path: str, host: str | None) -> None:
        """A foreign host name that resolves to the loopback address (DNS rebinding) is refused."""
        headers = {"Host": host and host.format(port=web.port), "Origin": web.origin}
        answer = web.ask(method, path, body_of(method), headers=headers)
        assert answer.status == 403
        assert f"ssh -L {web.port}" in answer.json["hint"]

    def test_two_hosts(self, web: Web) -> None:
        """A request with two hosts is refused."""
        with connected(web) as connection:
            own = f"Host: {HOST}:{web.port}\r\n"
            connection.sendall(f"GET /page.js HTTP/1.1\r\n{own}{own}Connection: close\r\n\r\n".encode())
            assert received(connection).startswith(b"HTTP/1.1 403 ")

    def test_localhost_is_the_page_too(self, web: Web) -> None:
        """`localhost` is a valid host name of the server."""
        host = f"localhost:{web.port}"
        answer = web.ask("GET", "/page/node", headers={"Host": host, "Origin": f"http://{host}"})
        assert answer.status == 200

    @pytest.mark.parametrize(("method", "path"), REQUESTS)
    @pytest.mark.parametrize(
        "origin",
        [
            "null",
            "http://evil.example",
            f"http://{HOST}",
            f"http://{HOST}:1",
            "https://{host}",
            "http://localhost:{port}",
        ],
    )
    def test_origin(self, web: Web, method: str, path: str, origin: str) -> None:
        """An origin that differs from the page's own in any letter is refused, even with the server's other name."""
        origin = origin.format(host=f"{HOST}:{web.port}", port=web.port)
        answer = web.ask(method, path, body_of(method), headers={"Origin": origin})
        assert answer.status == 403
        assert answer.json["detail"] == "the request comes from another site"

    @pytest.mark.parametrize("method", ["POST", "DELETE"])
    def test_no_origin(self, web: Web, method: str) -> None:
        """A request that changes anything must have an origin."""
        path = {"POST": "/v1/daemons/gpu0/hold", "DELETE": "/v1/leases/lease-1"}[method]
        assert web.ask(method, path, body_of(method), headers={"Origin": None}).status == 403

    @pytest.mark.parametrize("site", ["cross-site", "same-site", "none", ""])
    @pytest.mark.parametrize(("method", "path"), REQUESTS)
    def test_fetch_metadata(self, web: Web, method: str, path: str, site: str) -> None:
        """The browser's own header about the site of a request has precedence."""
        assert web.ask(method, path, body_of(method), headers={"Sec-Fetch-Site": site}).status == 403

    @pytest.mark.parametrize("destination", ["iframe", "frame", "embed", "object", "script", "image", ""])
    def test_page_as_a_part_of_another(self, web: Web, destination: str) -> None:
        """A link on any site may open the document, but no site may embed it."""
        said = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": destination}
        assert web.send("GET", "/", headers=said).status == 403
        assert web.send("GET", "/", headers={**said, "Sec-Fetch-Dest": "document"}).status == 200

    def test_script_for_another_site(self, web: Web) -> None:
        """No other site may load the page's modules."""
        assert web.send("GET", "/page.js", headers={"Sec-Fetch-Site": "same-site"}).status == 403

    def test_headers(self, web: Web) -> None:
        """Every answer forbids frames, foreign scripts and type sniffing, and allows no other origin."""
        answers = [
            web.send("GET", "/"),
            web.send("GET", "/page.js"),
            web.send("GET", "/nothing"),
            web.ask("GET", "/page/node"),
        ]
        for each in answers:
            policy = each.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert each.headers["X-Frame-Options"] == "DENY"
            assert each.headers["X-Content-Type-Options"] == "nosniff"
            assert each.headers["Referrer-Policy"] == "no-referrer"
            assert each.headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert each.headers["Cache-Control"] == "no-store"
            assert not {name for name in each.headers if name.startswith("Access-Control-")}
            assert "Set-Cookie" not in each.headers

    def test_preflight(self, web: Web) -> None:
        """A preflight request from another site gets a refusal."""
        said = {"Origin": "http://evil.example", "Access-Control-Request-Method": "DELETE"}
        answer = web.send("OPTIONS", "/v1/leases/lease-1", headers=said)
        assert answer.status == 501
        assert not {name for name in answer.headers if name.startswith("Access-Control-")}


class TestRoutes:
    """The server passes on only the routes that the page needs."""

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", "/v1/status"),
            ("GET", "/v1/config"),
            ("GET", "/v1/openapi.json"),
            ("GET", "/v1/leases"),
            ("GET", "/v1/leases/lease-1"),
            ("GET", "/v1/leases/lease-1/cdi"),
            ("POST", "/v1/leases"),
            ("POST", "/v1/leases/lease-1/holders"),
            ("POST", "/v1/leases/lease-1/end"),
            ("POST", "/v1/reload"),
            ("DELETE", "/v1/quarantines/1000"),
            ("POST", "/v1/daemons/gpu0/canary"),
            ("GET", "/metrics"),
            ("DELETE", "/v1/leases/lease-1?untaken=true"),
            ("DELETE", "/v1/leases/.."),
            ("DELETE", "/v1/leases/../config"),
            ("DELETE", "/v1/leases/%2e%2e/config"),
            ("DELETE", "/v1/leases/lease-1%2fcdi"),
            ("POST", "/v1/daemons/gpu0/hold/../../../reload"),
            ("GET", "/v1/history?by=gpu"),
            ("GET", "/page/history"),
            ("GET", "/page/history?since=0&by=gpu"),
            ("GET", "/../server.py"),
            ("GET", "/..%2fserver.py"),
            ("GET", "/etc/passwd"),
            ("GET", "//etc/passwd"),
            ("GET", "/page/../page.js"),
            ("GET", "/page/story/../node"),
            ("GET", "/page/events?after=-1"),
            ("GET", "/page/events?after=1&follow=false"),
            ("GET", "http://127.0.0.1/page.js"),
        ],
    )
    def test_nothing_else(self, web: Web, method: str, path: str) -> None:
        """Other routes, other spellings and other files do not exist."""
        assert web.ask(method, path, body_of(method)).status in {404, 405}

    @pytest.mark.parametrize("by", ["gpu&user=0", "gpu%26user=0", "gpu%0d%0aX:y", "..%2fstatus", "", "%ff", "x" * 9000])
    def test_history(self, web: Web, by: str) -> None:
        """The whole query of the page's history is one key: it adds no parameter and no path to mpsd's request."""
        answer = web.ask("GET", f"/page/history?by={by}")
        assert answer.status in {400, 414, 422, 431}
        assert "history" not in answer.json

    def test_the_table_is_of_the_api(self, node: Node) -> None:
        """Each row is a route of mpsd, so a row cannot outlive its route."""
        document = node.get("/v1/openapi.json").json["paths"]
        there = {(method.upper(), path) for path, row in document.items() for method in row}
        known = {(method, re.sub(r"\{\w+\}", "{}", path)) for method, path in there}
        assert known.issuperset(guard.PASSED_ON)

    @pytest.mark.parametrize("method", ["PUT", "PATCH", "TRACE", "CONNECT", "OPTIONS", "get"])
    def test_methods(self, web: Web, method: str) -> None:
        """A method that the page does not use is refused."""
        assert web.ask(method, "/page/node").status == 501

    def test_wrong_method(self, web: Web) -> None:
        """A refused method gets the list of allowed methods."""
        answer = web.ask("DELETE", "/page/node")
        assert answer.status == 405
        assert answer.headers["Allow"] == "GET"
        assert web.ask("POST", "/", {}).status == 405

    def test_secrets_stay(self, web: Web, node: Node) -> None:
        """No answer contains the token in a lease's environment, which makes a process a member of the lease."""
        lease = node.request(
            "POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "ttl": 60, "pid": os.getpid()}
        ).json
        token = lease["env"][TOKEN]
        answers = [web.ask("GET", "/page/node"), web.ask("POST", f"/v1/leases/{lease['id']}/renew", {"ttl": 60})]
        answers.append(web.ask("GET", f"/page/story/{lease['id']}"))
        for each in answers:
            assert each.status == 200, each
            assert lease["id"].encode() in each.body
            assert token.encode() not in each.body


class TestHostileInput:
    """Input that is too large, too slow or no HTTP does not disturb other clients."""

    @pytest.mark.parametrize(
        "sent",
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500 + b"\n\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET  / HTTP/1.1\r\nHost\r\n\r\n",
            b"GET /" + b"x" * 40000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
            b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 40000 + b"\r\n\r\n",
            b"\r\n\r\n",
            b"\0" * 1000 + b"\r\n\r\n",
        ],
    )
    def test_no_http(self, web: Web, sent: bytes) -> None:
        """Input that is no HTTP is refused or disconnected, and the server continues to serve."""
        with connected(web) as connection:
            connection.sendall(sent)
            with contextlib.suppress(OSError):  # the server has already disconnected
                connection.shutdown(socket.SHUT_WR)
            answer = received(connection)
        assert answer == b"" or re.match(rb"HTTP/1\.[01] [45]\d\d |\{", answer), answer
        assert web.send("GET", "/").status == 200

    @pytest.mark.parametrize(
        ("body", "headers", "status"),
        [
            (b"{}", {"Content-Length": "99999999"}, 413),
            (b"{}", {"Content-Length": "-1"}, 400),
            (b"{}", {"Content-Length": "9" * 30}, 400),
            (b"{}", {"Content-Type": "text/plain"}, 400),
            (b"{}", {"Content-Type": "application/x-www-form-urlencoded"}, 400),
            (b"[]", {}, 400),
            (b"{", {}, 400),
            (b"\xff", {}, 400),
            (b"[" * 30000, {}, 400),
            (b"0\r\n\r\n", {"Transfer-Encoding": "chunked", "Content-Length": None}, 400),
        ],
    )
    def test_bodies(self, web: Web, body: bytes, headers: dict[str, str | None], status: int) -> None:
        """A body is a JSON object with a stated length, which no form of another site can be."""
        answer = web.ask("POST", "/v1/daemons/gpu0/resume", body, headers=headers)
        assert answer.status == status
        assert answer.headers["Connection"] == "close"

    def test_too_many(self, node: Node, make_web: Callable[..., Web]) -> None:
        """Excess connections are refused, and a place is free again once a connection closes."""
        web = make_web(node.socket)
        with contextlib.ExitStack() as stack:
            for _ in range(MOST):
                stack.enter_context(connected(web))
            wait_until(
                lambda: web.send("GET", "/").status == 503, what="a connection to be turned away", not_yet=(OSError,)
            )
        wait_until(lambda: web.send("GET", "/").status == 200, what="a place", not_yet=(OSError,))

    def test_slow_request(self, web: Web) -> None:
        """A request that is not complete by its deadline is disconnected, although bytes keep arriving."""
        with connected(web) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n")

            def drip() -> bool:
                try:
                    connection.send(b"x")
                except OSError:
                    return True
                return False

            wait_until(drip, what="the slow connection to be cut off", deadline=15)
        assert web.send("GET", "/").status == 200


class TestFlood:
    def test_behind_many(self, node: Node, make_web: Callable[..., Web]) -> None:
        """The kernel keeps hundreds of connections for a page that is busy, so that none has to be made again."""
        web = make_web(node.socket)
        web.process.send_signal(signal.SIGSTOP)
        with contextlib.ExitStack() as stack:
            crowd = [stack.enter_context(socket.socket()) for _ in range(500)]
            for each in crowd:
                each.setblocking(False)
                each.connect_ex((HOST, web.port))
            wait_until(
                lambda: len(select.select([], crowd, [], 0)[1]) == len(crowd), what="all to be connected", deadline=5
            )
            web.process.send_signal(signal.SIGCONT)
        assert web.send("GET", "/").status == 200


class TestStrangers:
    """Other users of the node get nothing from the port, even with the link."""

    @needs_root
    def test_another_user(self, node: Node, make_web: Callable[..., Web]) -> None:
        """The server closes a connection of another uid unread, after a short message and without the page."""
        web = make_web(node.socket)
        answer = as_nobody(web, f"GET / HTTP/1.1\r\nHost: {HOST}:{web.port}\r\n\r\n")
        assert answer.startswith("HTTP/1.1 403 ")
        assert "of another user" in answer
        assert web.ask("GET", "/page/node").status == 200

    @needs_root
    def test_another_user_with_a_session(self, node: Node, make_web: Callable[..., Web]) -> None:
        """Another user is refused even with a valid session."""
        web = make_web(node.socket)
        request = f"GET /page/node HTTP/1.1\r\nHost: {HOST}:{web.port}\r\nAuthorization: Bearer {web.session}\r\n\r\n"
        assert as_nobody(web, request).startswith("HTTP/1.1 403 ")

    @needs_root
    def test_a_user_that_is_named(self, node: Node, make_web: Callable[..., Web]) -> None:
        """`--for-user` admits a user whose ssh forwards the port; under sudo, the default is the calling user."""
        for arguments, more in ((("--for-user", f"{NOBODY}"), {}), ((), {"SUDO_UID": f"{NOBODY}"})):
            web = make_web(node.socket, *arguments, env={**os.environ, **more})
            answer = as_nobody(web, f"GET / HTTP/1.1\r\nHost: {HOST}:{web.port}\r\nConnection: close\r\n\r\n")
            assert answer.startswith("HTTP/1.1 200 ")

    def test_no_other_address(self, node: Node, make_web: Callable[..., Web]) -> None:
        """The server listens on 127.0.0.1 only."""
        web = make_web(node.socket)
        with open("/proc/net/tcp") as file:  # noqa: PTH123 - /proc is not for pathlib
            addresses = {
                fields[1]
                for fields in map(str.split, file)
                if fields[1].endswith(f":{web.port:04X}") and fields[3] == "0A"
            }
        assert addresses == {f"0100007F:{web.port:04X}"}


class TestLife:
    """`mpsctl web` ends with the process that started it, and notifies the pages."""

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_signals(self, node: Node, make_web: Callable[..., Web], number: signal.Signals) -> None:
        """A signal ends it with the usual exit status; the port is closed, and an open page is notified."""
        web = make_web(node.socket)
        request = f"GET /page/events HTTP/1.1\r\nHost: {HOST}:{web.port}\r\nAuthorization: Bearer {web.session}\r\n\r\n"
        with connected(web) as stream:
            stream.sendall(request.encode())
            assert b"200 OK" in stream.recv(100)
            assert web.end(number)[0] == -number
            assert received(stream).endswith(b'{"ended": true}\n')
        with pytest.raises(ConnectionRefusedError):
            connected(web).__enter__()

    def test_parent(self, node: Node) -> None:
        """It ends when its parent is gone, for any kind of parent."""
        program = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket), "web"]
        shell = 'trap "" HUP; "$@" </dev/null & read stop'
        with subprocess.Popen(
            ["sh", "-c", shell, "sh", *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as parent:
            assert parent.stdout is not None
            port = int(parent.stdout.readline().split(":")[2].partition("/")[0])
            parent.communicate(timeout=30)  # the parent ends with its input; mpsctl keeps the output open
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port))

    def test_reader_of_its_link(self, node: Node, make_web: Callable[..., Web]) -> None:
        """It ends when its output has no reader for another link."""
        web = make_web(node.socket)
        assert web.process.stdout is not None
        web.process.stdout.close()
        wait_until(lambda: web.process.poll() is not None, what="it to end")
        assert web.process.stderr is not None
        assert "is gone" in web.process.stderr.read()

    def test_terminal(self, node: Node, make_web: Callable[..., Web]) -> None:
        """On a terminal, Enter prints another link, which opens another session; the server ends with the terminal."""
        own, theirs = pty.openpty()
        web = make_web(node.socket, stdin=theirs)
        os.close(theirs)
        first = web.session
        os.write(own, b"\n")
        assert web.process.stdout is not None
        web.token = web.process.stdout.readline().strip().partition("#token=")[2]
        web.forget()
        assert web.session != first
        assert web.ask("GET", "/page/principal").status == 200
        os.close(own)
        assert web.process.wait(timeout=30) in {0, -signal.SIGHUP}

    def test_open(self, node: Node, make_web: Callable[..., Web], short_tmp: Path) -> None:
        """The browser's argument is a private file that leads to the link, since every user can read arguments."""
        browser = short_tmp / "browser"
        browser.write_text(
            f"#!/bin/sh\nfile=${{1#file://}}\nls -l $file >{short_tmp}/mode\ncat $file >{short_tmp}/page\n"
        )
        browser.write_text(browser.read_text() + f'echo "$@" >{short_tmp}/arguments\n')
        browser.chmod(0o700)
        environment = {**os.environ, "BROWSER": f"{browser} %s", "XDG_RUNTIME_DIR": str(short_tmp)}
        web = make_web(node.socket, "--open", env=environment)
        wait_until((short_tmp / "arguments").read_text, what="the browser to be called", not_yet=(FileNotFoundError,))
        page = (short_tmp / "page").read_text()
        (link,) = re.findall(r"http://[^\"]+", page)
        assert link.startswith(f"{web.origin}/#token=")
        assert "token" not in (short_tmp / "arguments").read_text()
        assert (short_tmp / "mode").read_text().startswith("-rw------- ")
        (directory,) = short_tmp.glob("mpsctl-*")
        assert directory.stat().st_mode & 0o777 == 0o700
        web.token = link.partition("#token=")[2]
        assert web.ask("GET", "/page/principal").status == 200
        web.end()
        assert not directory.exists()

    def test_mpsd_is_gone(self, make_node: Callable[..., Node], make_web: Callable[..., Web]) -> None:
        """While no mpsd answers, requests get the reason and the remedy; a new mpsd answers them again."""
        node = make_node()
        node.start()
        web = make_web(node.socket)
        assert web.ask("GET", "/page/node").status == 200
        node.end()
        gone = web.ask("GET", "/page/node")
        assert gone.status == 502
        assert gone.json["code"] == "unreachable"
        assert "systemctl start mpsd" in gone.json["hint"]
        assert web.ask("GET", "/page/events").status == 502
        node.start()
        assert web.ask("GET", "/page/node").status == 200

    def test_taken_port(self, web: Web, node: Node) -> None:
        """A port in use is an error of configuration."""
        done = node.mpsctl("web", "--port", f"{web.port}")
        assert done.returncode == 78
        assert f"cannot listen on {HOST}, port {web.port}: Address already in use" in done.stderr

    def test_no_mpsd(self, node: Node, short_tmp: Path) -> None:
        """Without an mpsd, it says so, and does not serve."""
        done = subprocess.run(
            [sys.executable, "-m", "mpsd.cli.main", "--socket", f"{short_tmp}/none", "web"],
            capture_output=True, text=True, check=False, timeout=30, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 69
        assert node.socket.exists()


@contextlib.contextmanager
def connected(web: Web) -> Iterator[socket.socket]:
    """Connect to the port for the time of the block."""
    with socket.create_connection((HOST, web.port), timeout=30) as connection:
        yield connection


def received(connection: socket.socket) -> bytes:
    """Return all bytes until the other side closes the connection."""
    pieces = []
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


_STRANGER: Final = """
import os, socket, sys
port, uid, request = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
with socket.socket() as connection:
    connection.settimeout(30)
    connection.connect(("127.0.0.1", port))
    connection.sendall(request.encode())
    try:
        while piece := connection.recv(65536):
            print(piece.decode(), end="", flush=True)
    except ConnectionError:
        pass
"""


def as_nobody(web: Web, request: str) -> str:
    """Return the answer to a user without rights."""
    return subprocess.run(
        [sys.executable, "-I", "-c", _STRANGER, str(web.port), str(NOBODY), request],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    ).stdout
