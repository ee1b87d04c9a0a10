"""The trace of a request, from its `traceparent` header, is in the events that the request causes, and in no others."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryFile
from typing import Any, Final

import pytest

from mpsd.core.settings import LogFormat
from mpsd.daemon.record.log import EventName, configure
from mpsd.daemon.record.trace import following, parse
from tests.daemon.conftest import Start
from tests.daemon.helpers import event
from tests.daemon.leases.line import connect, message
from tests.node import Node

TRACE: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN: Final = "00f067aa0ba902b7"
HEADER: Final = f"00-{TRACE}-{SPAN}-01"
FACTS: Final = {"trace_id": TRACE, "span_id": SPAN}


@pytest.mark.parametrize(
    "header",
    [HEADER, f"00-{TRACE}-{SPAN}-00", f"01-{TRACE}-{SPAN}-01", f"fe-{TRACE}-{SPAN}-01-of-a-later-version"],
)
def test_valid(header: str) -> None:
    """A header of this version, or of a later version with the same prefix, names a trace and a span."""
    assert parse(header.encode()) == FACTS


@pytest.mark.parametrize(
    "header",
    [
        "",
        HEADER.upper(),
        HEADER[:-1],
        HEADER + "0",
        f"{HEADER}-more",
        f" {HEADER}",
        f"{HEADER}\n",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"00_{TRACE}_{SPAN}_01",
        HEADER * 2,
        f"fe-{TRACE}-{SPAN}-01more",
    ],
)
def test_not_valid(header: str) -> None:
    """Any other header names none, as the standard requires."""
    assert parse(header.encode()) is None


def test_what_is_called_back_later_is_of_no_trace() -> None:
    """Only the task that answers a request has its trace; later callbacks and other tasks that it started have none."""
    with TemporaryFile("w+", encoding="utf-8") as stream:
        log = configure(LogFormat.JSON, stream=stream)

        async def other() -> None:
            log.info(EventName.API_LISTENING, by="task")

        async def answer() -> None:
            async with asyncio.TaskGroup() as group:
                with following(HEADER.encode()):
                    log.info(EventName.API_LISTENING, by="request")
                    asyncio.get_running_loop().call_soon(partial(log.info, EventName.API_LISTENING, by="callback"))
                    await group.create_task(other())
                log.info(EventName.API_LISTENING, by="the next request")

        asyncio.run(answer())
        stream.seek(0)
        lines = [json.loads(line) for line in stream]
    assert {line["by"]: traced(line) for line in lines} == {
        "request": FACTS, "callback": {}, "task": {}, "the next request": {},
    }  # fmt: skip


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start a node."""
    return node_for_all(simulate=1, control=None, config='[quota."*"]\nleases = 99\n').start()


def ask(node: Node, method: str, path: str, body: object = None, header: str | None = HEADER) -> Any:
    """Send a request with a trace."""
    return node.request(method, path, body, headers={} if header is None else {"traceparent": header})


def traced(line: dict[str, Any]) -> dict[str, Any]:
    """Return the trace and the span in an event."""
    return {name: line[name] for name in ("trace_id", "span_id") if name in line}


def test_a_lease(node: Node) -> None:
    """The grant and the end of a lease have the traces of their requests, and without a header none."""
    lease = ask(node, "POST", "/v1/leases", {"threads": 1, "memory": "1MiB"}).json["id"]
    other = "1" * 32
    ask(node, "DELETE", f"/v1/leases/{lease}", header=f"00-{other}-{SPAN}-01")
    assert traced(event(node, "lease_granted", lease=lease)) == FACTS
    assert traced(event(node, "lease_ended", lease=lease)) == {**FACTS, "trace_id": other}
    for header in (None, "nonsense", HEADER.upper()):
        lease = ask(node, "POST", "/v1/leases", {"threads": 1, "memory": "1MiB"}, header).json["id"]
        ask(node, "DELETE", f"/v1/leases/{lease}", header=None)
        assert traced(event(node, "lease_granted", lease=lease)) == {}
        assert traced(event(node, "lease_ended", lease=lease)) == {}


def test_a_refusal_and_an_operation(node: Node) -> None:
    """A refusal, and the begin of an operation, have the traces of their requests."""
    assert ask(node, "POST", "/v1/leases", {"threads": 1, "memory": "900GiB"}).status == 422
    operation = ask(node, "POST", "/v1/daemons/gpu0/drain").json["id"]
    ask(node, "POST", "/v1/daemons/gpu0/resume", header=None)
    assert traced(event(node, "lease_refused", code="never_fits")) == FACTS
    assert traced(event(node, "operation_begun", operation=operation)) == FACTS
    node.wait_for_state("gpu0", "ready")


def test_who_waits(node: Node) -> None:
    """A waiting request keeps its trace for its grant, although the end of another lease causes the grant."""
    first = ask(node, "POST", "/v1/leases", {"threads": 100, "memory": "1MiB"}, header=None).json["id"]
    with connect(node.socket) as caller:
        body = {"threads": 100, "memory": "1MiB", "wait": 30}
        caller.sendall(message("POST", "/v1/leases", body, f"traceparent: {HEADER}"))
        waits = event(node, "lease_waits", trace_id=TRACE)
        other = "2" * 32
        ask(node, "DELETE", f"/v1/leases/{first}", header=f"00-{other}-{SPAN}-01")
        assert b"201" in caller.recv(16)
        granted = event(node, "lease_granted", lease=waits["lease"])
        assert traced(granted) == FACTS
        assert traced(event(node, "lease_ended", lease=first)) == {**FACTS, "trace_id": other}
        ask(node, "DELETE", f"/v1/leases/{waits['lease']}", header=None)
        assert traced(event(node, "lease_ended", lease=waits["lease"])) == {}


def test_one_connection(node: Node) -> None:
    """On one connection, each request has its own trace; a request with two headers has none."""
    before = len(node.events("lease_granted"))
    with connect(node.socket) as caller:
        for headers in ([f"traceparent: {HEADER}"], [], [f"traceparent: {HEADER}"] * 2):
            caller.sendall(message("POST", "/v1/leases", {"threads": 1, "memory": "1MiB"}, *headers))
            assert b"201" in caller.recv(65536)
    grants: Callable[[], list[dict[str, Any]]] = lambda: node.events("lease_granted")[before:]  # noqa: E731
    event(node, "lease_granted", lease=node.get("/v1/leases").json["leases"][-1]["id"])
    assert [traced(each) for each in grants()] == [FACTS, {}, {}]
    for each in grants():
        ask(node, "DELETE", f"/v1/leases/{each['lease']}", header=None)
