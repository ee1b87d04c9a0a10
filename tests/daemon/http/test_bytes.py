"""Any bytes may arrive over the socket: mpsd keeps running, does not grow, and logs only its decisions.

MPSD_API_EXAMPLES makes more of them than a usual run does.
"""

import json
import os
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.daemon.caller import needs_root
from tests.daemon.conftest import Start
from tests.daemon.http.test_load import MIB, memory
from tests.daemon.leases.line import Talk, message
from tests.node import Node

pytestmark = [pytest.mark.real_daemon(535), pytest.mark.thorough]

STRANGER, USER, ROOT = 2700, 2701, None

EXAMPLES: Final = int(os.environ.get("MPSD_API_EXAMPLES", "25")) * 10

ANSWERS: Final = {200, 201, 202, 204, 400, 403, 404, 405, 409, 413, 422, 429, 505}
"""The statuses that mpsd may answer with; 100 may come before."""

LEASE: Final = {"threads": 1, "memory": "1GiB"}

SOUND: Final = [
    message("GET", "/v1/status"),
    message("GET", "/v1/leases"),
    message("GET", "/v1/events?after=0"),
    message("POST", "/v1/leases", LEASE),
    message("POST", "/v1/leases", {**LEASE, "wait": None, "gpus": 2, "labels": {"a": "b"}, "request_id": "x"}),
    message("POST", "/v1/leases/lease-0/renew", {"ttl": 1}),
    message("DELETE", "/v1/leases/lease-0"),
    message("POST", "/v1/daemons/gpu7/reset"),
    b"POST /v1/leases HTTP/1.1\r\nHost: mpsd\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
]

PIECES: Final = [
    b"\r\n", b"\r\n\r\n", b"\n", b" ", b"\x00", b"\xff", b"\xed\xa0\x80", b"%ff", b"%00", b"%2e%2e/", b"//", b"?", b"#",
    b":", b"HTTP/1.0", b"HTTP/2.0", b"http://mpsd", b"CONNECT ", b"OPTIONS * ", b"HEAD ", b"Content-Length: 1\r\n",
    b"Content-Length: 99999999999\r\n", b"Transfer-Encoding: chunked\r\n", b"ffffffffffffffff\r\n",
    b"Expect: 100-continue\r\n", b"Expect: x\r\n", b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
    b"Connection: close\r\n", b"Connection: keep-alive\r\n", b"Content-Encoding: gzip\r\n", b"Host: \r\n",
    b"Cookie: a=b; c\r\n", b"Range: bytes=0-\r\n", b"If-None-Match: *\r\n", b"\xf0\x9f\x92\xa9", b"{", b"[[[[",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"0\r\nX: y\r\n\r\n",
    b'"\\ud800"', b"1e999", b"-" * 20, b"9" * 5000, b"A" * 9000, b"X: " + b"y" * 9000 + b"\r\n",
]  # fmt: skip
"""Pieces that are difficult for a parser."""


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Return some valid requests in which pieces were replaced, removed, inserted or doubled."""
    raw = b"".join(draw(st.lists(st.sampled_from(SOUND), min_size=1, max_size=4)))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(raw)))
        end = min(start + draw(st.sampled_from([0, 0, 1, 2, 10])), len(raw))
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=4) | st.just(raw[start:end] * 2))
        raw = raw[:start] + piece + raw[end:]
    return raw


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start the node that the tests of this module share."""
    config = f'[api]\nevents = 100\nheader_deadline = 2.0\n[roles]\nusers = ["{USER}"]\n'
    return node_for_all(config=config).start()


DECISIONS: Final = {"lease_granted", "lease_waits", "lease_refused", "lease_ended", "limits_verified", "peer_refused"}


def decided(event: dict[str, Any]) -> bool:
    """Return whether this event states the decision on a request.

    This process holds the leases of USER, and is root again once it has connected. On a slow machine mpsd may check the
    holders in time to report that as a violation, which then ends with the lease.
    """
    is_violation = event["event"] in {"violation", "violation_ended"}
    other_user = is_violation and (event["kind"], event["pid"]) == ("user", os.getpid())
    return event["event"] in DECISIONS or other_user


@pytest.fixture(autouse=True)
def unharmed(node: Node) -> Iterator[None]:
    """Check that mpsd is the same, and that neither its memory nor its log has grown from the input."""
    daemons, size, before = node.unharmed(), memory(node), len(node.stderr.read_bytes())
    yield
    assert node.exited() is None
    assert node.unharmed() == daemons
    assert memory(node) - size < 10 * MIB
    said = [json.loads(each) for each in node.stderr.read_bytes()[before:].splitlines()]
    assert [each for each in said if not decided(each)] == []
    for lease in node.get("/v1/leases").json["leases"]:
        node.request("DELETE", f"/v1/leases/{lease['id']}")


def answers(node: Node, raw: bytes, uid: int | None) -> bytes:
    """Send these bytes, give mpsd the time to process them, end the request, and return everything that came back."""
    with Talk(node.socket, uid=uid) as talk, Talk(node.socket) as other:
        try:
            talk.send(raw)
            for _ in range(3):
                # mpsd is one loop: by now it has read the earlier bytes, and has begun to answer them.
                assert other.ask("GET", "/healthz").status == 200
            talk.connection.shutdown(1)
            return talk.rest()
        except (BrokenPipeError, ConnectionResetError):
            return b""


def statuses(said: bytes) -> list[int]:
    """Check that all answers are HTTP, and all errors problem documents; return their statuses."""
    found: list[int] = []
    while said:
        head, _, rest = said.partition(b"\r\n\r\n")
        assert re.fullmatch(rb"HTTP/1\.1 \d{3} [^\r\n]*(\r\n[\w-]+: [^\r\n]*)*", head), said
        status = int(head.split()[1])
        headers = dict(each.lower().split(b": ", 1) for each in head.split(b"\r\n")[1:])
        if status >= 400:
            assert headers[b"content-type"] == b"application/problem+json", said
        if headers.get(b"transfer-encoding") == b"chunked":
            rest = rest.partition(b"0\r\n\r\n")[2]
        else:
            size = int(headers.get(b"content-length", b"0"))
            # The answer to HEAD states the length of the body that it leaves out.
            rest = rest if rest.startswith(b"HTTP/") else rest[size:]
        said = rest
        found.append(status)
    return found


MANY: Final = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
"""The number of examples, over a node that is started once."""


@pytest.mark.parametrize(
    "uid",
    [ROOT, pytest.param(USER, marks=needs_root), pytest.param(STRANGER, marks=needs_root)],
    ids=["root", "user", "stranger"],
)
def test_almost_requests(node: Node, uid: int | None) -> None:
    """Slightly wrong requests get answers that a client can read, or none, and never a 500."""

    @MANY
    @given(raw=mutated())
    def check(raw: bytes) -> None:
        found = set(statuses(answers(node, raw, uid)))
        assert found <= (ANSWERS if uid != STRANGER else {403}) | {100}, found

    check()


@needs_root
def test_any_bytes(node: Node) -> None:
    """Bytes that are no request are answered by 400 or 505, or not at all."""

    @MANY
    @given(raw=st.binary(min_size=1, max_size=200))
    def check(raw: bytes) -> None:
        assert set(statuses(answers(node, raw + b"\r\n\r\n", USER))) <= {400, 505}

    check()


@pytest.mark.parametrize(
    "path",
    [b"/v1/leases/\xff", b"/v1/leases/%ff", b"/v1/leases/%ed%a0%80", b"/\xed\xa0\x80", b"/v1/leases/%00", b"/%c0%ae"],
)
def test_paths_that_are_no_text(node: Node, path: bytes) -> None:
    """A path that is not UTF-8 is not found, or no request; its problem document can be read."""
    for method in (b"GET", b"DELETE", b"PUT"):
        with Talk(node.socket) as talk:
            talk.send(b"%b %b HTTP/1.1\r\nHost: mpsd\r\n\r\n" % (method, path))
            answer = talk.answer()
            assert answer.status in {400, 404, 405}
            assert answer.json["hint"]
