"""A route is a row of a table, found by its path: every kind of answer and parameter is served from the row alone.

The tables are made for the tests. The dispatcher and the connection are mpsd's own, over a real socket.
"""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from tempfile import TemporaryFile
from typing import Annotated, Any, Final, TextIO, TypeAlias, TypedDict

import pytest
from msgspec import Meta, Struct

from mpsd.core.errors import InvalidRequestError
from mpsd.core.reload import LiveSettings
from mpsd.core.roles import Role
from mpsd.core.settings import LogFormat, Settings
from mpsd.daemon.api import table
from mpsd.daemon.api.decoding import parameter, query_decoder
from mpsd.daemon.api.dispatcher import Dispatcher
from mpsd.daemon.api.event_handlers import EventsQuery
from mpsd.daemon.api.routes import ROUTES
from mpsd.daemon.api.table import Request, RequestBody, RequestOf, RequestQuery, Route, Table
from mpsd.daemon.http.connection import Connection
from mpsd.daemon.http.message import Answer as AnswerSent
from mpsd.daemon.http.peer import Peer
from mpsd.daemon.node.user_groups import UserGroups
from mpsd.daemon.record.log import configure
from mpsd.system.processes.foreign_reader import ForeignReader
from tests.daemon.leases.line import message
from tests.node import Answer

FIGURES: Final = "text/plain; version=0.0.4; charset=utf-8"


class Colour(TypedDict):
    """An answer whose field decides its status."""

    name: str
    ok: bool


class Line(Struct):
    """A line of a stream."""

    name: str


class Paint(RequestBody):
    """A body."""

    colour: str


class Which(RequestQuery, frozen=True):
    """Query parameters."""

    size: Annotated[int, parameter("How large.", refusal="is no size", hint="1 to 9"), Meta(ge=1, le=9)] = 3
    loud: Annotated[bool, parameter("Whether loud.", refusal="is neither", hint="true or false")] = False


class Words:
    """Handlers of every kind, which record their requests."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def figures(self, request: Request) -> AnswerSent:
        """Answer with text."""
        self.asked.append(request)
        return AnswerSent(200, '# HELP mpsd_up Whether it is.\nmpsd_up{name="ä"} 1\n'.encode(), FIGURES)

    async def lines(self, request: RequestOf[Which]) -> AsyncIterator[bytes]:
        """Answer line by line."""
        self.asked.append(request)
        return self._lines(request.content)

    async def _lines(self, which: Which) -> AsyncIterator[bytes]:
        for number in range(which.size):
            yield json.dumps({"seq": number, "loud": which.loud}).encode() + b"\n"

    async def paint(self, request: RequestOf[Paint]) -> Colour:
        """Answer with a struct that decides the status."""
        self.asked.append(request)
        return Colour(name=request.content.colour, ok=request.content.colour == "green")

    async def wash(self, request: Request) -> None:
        """Answer without a body."""
        self.asked.append(request)

    async def spill(self, request: Request) -> str:
        """Raise an unexpected error."""
        raise ZeroDivisionError(request.names["name"])


Row: TypeAlias = Route[Words, Any]


def row(method: str, path: str, role: Role, handler: Any, answer: table.AnswerKind[Any], **columns: Any) -> Row:
    """Return a row whose name and summary do not matter."""
    return Route(method, path, role, handler, answer, "name", "summary", **columns)


TABLE: Final[tuple[Row, ...]] = (
    row("GET", "/figures", Role.OBSERVER, lambda h: h.figures, table.negotiated(FIGURES, "The figures.")),
    row("GET", "/lines", Role.OBSERVER, lambda h: h.lines, table.lines(Line, "Lines."), query=Which),
    row("POST", "/paint", Role.USER, lambda h: h.paint, table.json(Colour, 201, not_ok=202), body=Paint, errors=(409,)),
    row("DELETE", "/paint/{name}", Role.ADMIN, lambda h: h.wash, table.nothing(204)),
    row("GET", "/spill/{name}", Role.OBSERVER, lambda h: h.spill, table.negotiated("text/plain", "Nothing.")),
)


def ask(
    method: str,
    target: str,
    body: bytes = b"",
    *,
    words: Words | None = None,
    log: TextIO | None = None,
    times: int = 1,
) -> Answer:
    """Send a request to a dispatcher with the table, so many times, and return the last answer."""
    logger = configure(LogFormat.JSON, stream=log or sys.stderr)
    dispatcher = Dispatcher(
        TABLE,
        words or Words(),
        user_groups=UserGroups(ForeignReader()),
        settings=LiveSettings(Settings()),
        log=logger,
    )

    async def talk() -> bytes:
        ours, theirs = socket.socketpair()
        inside: set[Connection] = set()
        peer = Peer(theirs)
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Connection(peer, dispatcher.receive, inside, 60), theirs
        )
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(message(method, target, body, "Connection: close"))
        said = await reader.read()
        writer.close()
        await writer.wait_closed()
        return said

    for _ in range(times - 1):
        asyncio.run(talk())
    head, _, rest = asyncio.run(talk()).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return Answer(int(first.split()[1]), dict(line.split(": ", 1) for line in lines), rest)


class TestKinds:
    """Each kind of answer."""

    def test_text(self) -> None:
        """Text is sent as the handler made it, in the form that it chose."""
        answer = ask("GET", "/figures")
        assert (answer.status, answer.headers["Content-Type"]) == (200, FIGURES)
        assert answer.body.decode() == '# HELP mpsd_up Whether it is.\nmpsd_up{name="ä"} 1\n'
        assert answer.headers["Content-Length"] == str(len(answer.body))

    def test_lines(self) -> None:
        """Lines are sent as they come, in the number that the typed query has."""
        answer = ask("GET", "/lines?size=2&loud=true")
        assert (answer.status, answer.headers["Content-Type"]) == (200, "application/x-ndjson")
        lines = [json.loads(line) for line in answer.body.splitlines() if line.startswith(b"{")]
        assert lines == [{"seq": number, "loud": True} for number in range(2)]
        assert "Content-Length" not in answer.headers

    @pytest.mark.parametrize(("colour", "status"), [("green", 201), ("mauve", 202)])
    def test_status_by_value(self, colour: str, status: int) -> None:
        """A field of the answer decides its status."""
        answer = ask("POST", "/paint", json.dumps({"colour": colour}).encode())
        assert (answer.status, answer.headers["Content-Type"]) == (status, "application/json")
        assert answer.json == {"name": colour, "ok": colour == "green"}

    def test_nothing(self) -> None:
        """An answer without a body has no media type and no length."""
        answer = ask("DELETE", "/paint/green")
        assert (answer.status, answer.body) == (204, b"")
        assert answer.headers.keys() == {"Date", "Connection"}


class TestRequests:
    """The values that a handler gets, and the requests that do not reach it."""

    def test_typed_values(self) -> None:
        """A handler gets the names, and the body or query with the row's type, or None where it has neither."""
        words = Words()
        ask("DELETE", "/paint/sea%20green", words=words)
        ask("POST", "/paint", b'{"colour": "red"}', words=words)
        ask("GET", "/lines?loud=true", words=words)
        washed, painted, listed = words.asked
        assert (washed.names, washed.content) == ({"name": "sea green"}, None)
        assert (painted.names, painted.content) == ({}, Paint("red"))
        assert (listed.names, listed.content) == ({}, Which(size=3, loud=True))

    @pytest.mark.parametrize(
        ("target", "hint"),
        [
            *((f"/lines?size={text}", "1 to 9") for text in ("0", "10", "-1", "1.0", "")),
            *((f"/lines?loud={text}", "true or false") for text in ("yes", "True")),
            ("/lines?other=1", "this route takes size, loud"),
            ("/lines?laud", "loud may have been meant; this route takes size, loud"),
            ("/figures?size=1", "this route takes none"),
            ("/lines?size=1&size=2", "pass size once"),
        ],
    )
    def test_wrong_parameters(self, target: str, hint: str) -> None:
        """A parameter that is invalid, repeated or unknown is refused in the words of its row, before the handler."""
        words = Words()
        answer = ask("GET", target, words=words)
        assert (answer.status, answer.json["code"], answer.json["hint"]) == (422, "invalid_request", hint)
        assert not words.asked

    @pytest.mark.parametrize(
        "body", [b"", b"{}", b"null", b"nul", b"[]", b"\xff", b'{"colour": 1}', b'{"colour": "red", "size": 1}']
    )
    def test_wrong_bodies(self, body: bytes) -> None:
        """A body that does not match the row is refused before the handler runs."""
        words = Words()
        answer = ask("POST", "/paint", body, words=words)
        assert answer.status == 422
        assert answer.json["hint"].endswith("the fields are described in /v1/openapi.json, schema Paint")
        assert ("send a JSON object" in answer.json["hint"]) == (body in {b"nul", b"\xff"})
        assert not words.asked

    def test_defects(self) -> None:
        """A defect answers its request with 500, which reveals nothing; 16 are logged in a minute."""
        with TemporaryFile("w+", encoding="utf-8") as log:
            answer = ask("GET", f"/spill/milk{'k' * 1000}", log=log, times=20)
            log.seek(0)
            lines = log.read().splitlines()
        assert (answer.status, answer.json["code"]) == (500, "internal")
        assert b"milk" not in answer.body
        assert len(lines) == 16
        assert all("ZeroDivisionError" in each and len(json.loads(each)["path"]) <= 200 for each in lines)


EVENTS: Final = query_decoder(EventsQuery)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", EventsQuery("0", follow=False, heartbeat=0)),
        ("after=7", EventsQuery("7")),
        ("after=007&follow=true", EventsQuery("007", follow=True)),
        ("heartbeat=0", EventsQuery()),
        ("after=latest&heartbeat=3600", EventsQuery("latest", heartbeat=3600)),
        ("after=999999999999999999", EventsQuery("9" * 18)),
        ("follow=false", EventsQuery()),
    ],
)
def test_query_of_events(query: str, found: EventsQuery) -> None:
    """The valid queries of `/v1/events`, and their meaning."""
    assert EVENTS(query) == found


@pytest.mark.parametrize(
    "query",
    [
        *("after=", "after=-1", "after=%31e3", "after=1000000000000000000", "after=last", "after=latest%0a"),
        *("after=%d9%a1", "after=1&after=2", "heartbeat=0.5", "heartbeat=3601", "heartbeat=\u0661", "folow=true"),
        *(f"heartbeat={'9' * 5000}", "heartbeat=", "heartbeat=-1", "heartbeat=true"),
        *("follow=1", "follow", "follow=TRUE&after=x"),
    ],
)
def test_wrong_query_of_events(query: str) -> None:
    """An invalid query of `/v1/events` is refused."""
    with pytest.raises(InvalidRequestError):
        EVENTS(query)


def test_a_long_query() -> None:
    """A refusal repeats the beginning of a long text."""
    with pytest.raises(InvalidRequestError) as refused:
        EVENTS(f"after={'x' * 50}")
    assert refused.value.detail.startswith(f"after='{'x' * 40}' ")


PATHS: Final = ("/leases", "/leases/{id}", "/leases/{id}/renew", "/leases/all", "/openapi.json")


def paths_table(*paths: str) -> Table[str]:
    """Return a table with a row for each path, which has that path as its value."""
    made = Table[str]()
    for path in paths:
        made.add("GET", path, path)
    return made


@pytest.mark.parametrize(
    ("path", "row", "names"),
    [
        ("/leases", "/leases", {}),
        ("/leases/lease-1", "/leases/{id}", {"id": "lease-1"}),
        ("/leases/leases", "/leases/{id}", {"id": "leases"}),
        ("/leases/ü\n%2F", "/leases/{id}", {"id": "ü\n%2F"}),
        ("/leases/lease-1/renew", "/leases/{id}/renew", {"id": "lease-1"}),
        ("/leases/all", "/leases/all", {}),
        ("/leases/{id}", "/leases/{id}", {"id": "{id}"}),
        ("/openapi.json", "/openapi.json", {}),
    ],
)
def test_found(path: str, row: str, names: dict[str, str]) -> None:
    """A path leads to its row, for GET and for HEAD, with the names in it."""
    assert paths_table(*PATHS).find(path) == ({"GET": row, "HEAD": row}, names)


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "leases", "//leases", "/leases/", "/leases//renew", "/leases/lease-1/", "/leases/lease-1/renew/now"),
        *("/openapi-json", "/Leases", "/leases /", "/leases/{id}/renew/"),
    ],
)
def test_not_found(path: str) -> None:
    """No other path leads anywhere."""
    rows, names = paths_table(*PATHS).find(path)
    assert not rows
    assert not names


def test_routes() -> None:
    """Each route of mpsd is found, alone for its method, also where a name in its path has the text of another path."""
    made = Table[str]()
    for route in ROUTES:
        made.add(route.method, route.path, route.path)
    for route in ROUTES:
        for text in ("some", *{part for other in ROUTES for part in other.path.split("/") if part}):
            path = "/".join(text if part.startswith("{") else part for part in route.path.split("/"))
            rows, _ = made.find(path)
            assert rows[route.method] == route.path, path
