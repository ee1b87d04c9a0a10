"""A route is a row of a table: every kind of answer and parameter is served and documented from the row alone.

The tables are made for the tests. The dispatcher and the connection are mpsd's own, over a real socket.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from tempfile import TemporaryFile
from typing import Annotated, Any, Final, TextIO

import pytest
from msgspec import Meta, Struct

from mpsd.core.errors import InvalidRequestError
from mpsd.core.reload import LiveSettings
from mpsd.core.roles import Role
from mpsd.core.settings import LogFormat, Roles, Settings
from mpsd.daemon.api import answers
from mpsd.daemon.api.decoding import parameter, query_decoder
from mpsd.daemon.api.dispatcher import Dispatcher
from mpsd.daemon.api.event_handlers import EventsQuery
from mpsd.daemon.api.openapi import document
from mpsd.daemon.api.request import Request, RequestBody, RequestQuery
from mpsd.daemon.api.routes import ROUTES
from mpsd.daemon.api.table import Route
from mpsd.daemon.http.connection import Connection
from mpsd.daemon.http.message import Answer as AnswerSent
from mpsd.daemon.http.peer import Peer
from mpsd.daemon.record.log import configure
from tests.daemon.caller import needs_root
from tests.node import Answer

FIGURES: Final = "text/plain; version=0.0.4; charset=utf-8"

STRANGER: Final = 2301


class Colour(Struct):
    """An answer whose field decides its status."""

    name: str
    known: bool


class Paint(RequestBody):
    """A body."""

    colour: str


class Which(RequestQuery, frozen=True):
    """Query parameters."""

    size: Annotated[int, parameter("How large.", refusal="is no size", hint="1 to 9", at_least=1, at_most=9)] = 3
    loud: Annotated[bool, parameter("Whether loud.", refusal="is neither", hint="true or false")] = False


class Words:
    """Handlers of every kind, which record their requests."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    async def figures(self, request: Request) -> AnswerSent:
        """Answer with text."""
        self.asked.append(request)
        return AnswerSent(200, '# HELP mpsd_up Whether it is.\nmpsd_up{name="ä"} 1\n'.encode(), FIGURES)

    async def picture(self, request: Request) -> bytes:
        """Answer with bytes."""
        self.asked.append(request)
        return b"\x89PNG\r\n"

    async def lines(self, request: Request) -> AsyncIterator[bytes]:
        """Answer line by line."""
        self.asked.append(request)
        assert isinstance(request.query, Which)
        return self._lines(request.query)

    async def _lines(self, which: Which) -> AsyncIterator[bytes]:
        for number in range(which.size):
            yield json.dumps({"seq": number, "loud": which.loud}).encode() + b"\n"

    async def paint(self, request: Request) -> Colour:
        """Answer with a struct that decides the status."""
        self.asked.append(request)
        assert isinstance(request.body, Paint)
        return Colour(request.body.colour, known=request.body.colour == "green")

    async def wash(self, request: Request) -> None:
        """Answer without a body."""
        self.asked.append(request)

    async def spill(self, request: Request) -> str:
        """Raise an unexpected error."""
        raise ZeroDivisionError(request.names["name"])


TABLE: Final[tuple[Route[Words, Any], ...]] = (
    Route("GET", "/figures", Role.OBSERVER, lambda h: h.figures, answers.negotiated(FIGURES, "The figures.")),
    Route(
        "GET",
        "/picture",
        Role.OBSERVER,
        lambda h: h.picture,
        answers.raw("image/png", {"type": "string"}, "A picture."),
    ),
    Route("GET", "/lines", Role.OBSERVER, lambda h: h.lines, answers.lines(Colour, "Lines."), query=Which),
    Route(
        "POST",
        "/paint",
        Role.USER,
        lambda h: h.paint,
        answers.json(Colour, answers.StatusBy("known", {True: 201, False: 202})),
        body=Paint,
        errors=(409,),
    ),
    Route("DELETE", "/paint/{name}", Role.ADMIN, lambda h: h.wash, answers.nothing(204)),
    Route("GET", "/spill/{name}", Role.OBSERVER, lambda h: h.spill, answers.negotiated("text/plain", "Nothing.")),
)

OPEN: Final = Settings(roles=Roles(users=("*",)))


def ask(
    method: str,
    target: str,
    body: bytes = b"",
    *,
    table: Iterable[Route[Words, Any]] = TABLE,
    words: Words | None = None,
    settings: Settings = OPEN,
    uid: int | None = None,
    log: TextIO | None = None,
    times: int = 1,
) -> Answer:
    """Send a request to a dispatcher with this table, as this user or as mpsd's own, and return the last answer."""
    logger = configure(LogFormat.JSON, stream=log or sys.stderr)
    dispatcher = Dispatcher(table, words or Words(), LiveSettings(settings), logger)

    async def talk() -> bytes:
        os.seteuid(os.getuid() if uid is None else uid)  # the kernel records the uid that makes a socket
        try:
            ours, theirs = socket.socketpair()
        finally:
            os.seteuid(os.getuid())
        inside: set[Connection] = set()
        peer = Peer(theirs)
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Connection(peer, dispatcher.receive, inside, 60), theirs
        )
        reader, writer = await asyncio.open_connection(sock=ours)
        # HTTP/1.0, so that a stream comes without chunks and ends with the connection.
        writer.write(
            b"%b %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (method.encode(), target.encode(), len(body), body)
        )
        said = await reader.read()
        writer.close()
        await writer.wait_closed()
        return said

    for _ in range(times - 1):
        asyncio.run(talk())
    head, _, rest = asyncio.run(talk()).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return Answer(int(first.split()[1]), dict(line.split(": ", 1) for line in lines), rest)


def operation(method: str, path: str) -> Any:
    """Return the operation of a row in the document of the table."""
    return document(TABLE)["paths"][path][method]


class TestKinds:
    """Each kind of answer."""

    def test_text(self) -> None:
        """Text is sent as the handler made it, in the form that it chose."""
        answer = ask("GET", "/figures")
        assert (answer.status, answer.headers["Content-Type"]) == (200, FIGURES)
        assert answer.body.decode() == '# HELP mpsd_up Whether it is.\nmpsd_up{name="ä"} 1\n'
        assert answer.headers["Content-Length"] == str(len(answer.body))
        said = operation("get", "/figures")["responses"]
        assert said["200"] == {"description": "The figures.", "content": {FIGURES: {"schema": {"type": "string"}}}}
        assert said.keys() == {"200", "400", "403", "422", "429", "500"}

    def test_bytes(self) -> None:
        """Bytes are sent as they are."""
        answer = ask("GET", "/picture")
        assert (answer.status, answer.headers["Content-Type"], answer.body) == (200, "image/png", b"\x89PNG\r\n")
        assert list(operation("get", "/picture")["responses"]["200"]["content"]) == ["image/png"]

    def test_lines(self) -> None:
        """Lines are sent as they come, in the number that the typed query has."""
        answer = ask("GET", "/lines?size=2&loud=true")
        assert (answer.status, answer.headers["Content-Type"]) == (200, "application/x-ndjson")
        assert [json.loads(line) for line in answer.body.splitlines()] == [{"seq": n, "loud": True} for n in range(2)]
        assert "Content-Length" not in answer.headers

    @pytest.mark.parametrize(("colour", "status"), [("green", 201), ("mauve", 202)])
    def test_status_by_value(self, colour: str, status: int) -> None:
        """A field of the answer decides its status, and the document lists every possible status."""
        answer = ask("POST", "/paint", json.dumps({"colour": colour}).encode())
        assert (answer.status, answer.headers["Content-Type"]) == (status, "application/json")
        assert answer.json == {"name": colour, "known": colour == "green"}
        said = operation("post", "/paint")
        assert said["responses"].keys() == {"201", "202", "400", "403", "409", "413", "422", "429", "500"}
        schema = {"$ref": "#/components/schemas/Colour"}
        assert said["responses"][str(status)]["content"] == {"application/json": {"schema": schema}}
        assert said["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Paint"}

    def test_nothing(self) -> None:
        """An answer without a body has no media type and no length."""
        answer = ask("DELETE", "/paint/green")
        assert (answer.status, answer.body) == (204, b"")
        assert answer.headers.keys() == {"Date", "Connection"}
        assert "content" not in operation("delete", "/paint/{name}")["responses"]["204"]


class TestRequests:
    """The values that a handler gets, and the requests that do not reach it."""

    def test_typed_values(self) -> None:
        """A handler gets names, body and query with the row's types, and None for parts that the row does not have."""
        words = Words()
        ask("DELETE", "/paint/sea%20green", words=words)
        ask("POST", "/paint", b'{"colour": "red"}', words=words)
        ask("GET", "/lines?loud=true", words=words)
        washed, painted, listed = words.asked
        assert (washed.names, washed.query, washed.body) == ({"name": "sea green"}, None, None)
        assert (painted.names, painted.query, painted.body) == ({}, None, Paint("red"))
        assert (listed.names, listed.query, listed.body) == ({}, Which(size=3, loud=True), None)

    @pytest.mark.parametrize("query", ["size=0", "size=10", "size=-1", "size=1.0", "size=", "loud=yes", "loud=True"])
    def test_wrong_parameters(self, query: str) -> None:
        """An invalid parameter is refused in the words of its row, before the handler runs."""
        words, (name, _, text) = Words(), query.partition("=")
        answer = ask("GET", f"/lines?{query}", words=words)
        assert (answer.status, answer.json["code"]) == (422, "invalid_request")
        said, hint = {"size": ("is no size", "1 to 9"), "loud": ("is neither", "true or false")}[name]
        assert (answer.json["detail"], answer.json["hint"]) == (f"{name}={text!r} {said}", hint)
        assert not words.asked

    @pytest.mark.parametrize(
        ("method", "target", "detail", "hint"),
        [
            ("GET", "/lines?other=1", "there is no query parameter 'other'", "this route takes size, loud"),
            ("GET", "/lines?laud", "there is no query parameter 'laud'", "loud may have been meant; this route takes"),
            ("GET", "/figures?size=1", "there is no query parameter 'size'", "this route takes none"),
            ("DELETE", "/paint/x?force=true", "there is no query parameter 'force'", "this route takes none"),
            ("GET", "/lines?size=1&size=2", "size is there 2 times", "pass size once"),
        ],
    )
    def test_parameters_that_are_not_taken(self, method: str, target: str, detail: str, hint: str) -> None:
        """A parameter that the row does not have is refused with the nearest known one.

        A repeated parameter is refused too.
        """
        words = Words()
        answer = ask(method, target, words=words)
        assert (answer.status, answer.json["code"], answer.json["detail"]) == (422, "invalid_request", detail)
        assert answer.json["hint"].startswith(hint)
        assert not words.asked

    def test_documented_parameters(self) -> None:
        """The document has each parameter with its sentence, its bounds and its default."""
        size = {"type": "integer", "format": "int64", "minimum": 1, "maximum": 9, "default": 3}
        loud = {"type": "boolean", "default": False}
        assert operation("get", "/lines")["parameters"] == [
            {"name": "size", "in": "query", "required": False, "description": "How large.", "schema": size},
            {"name": "loud", "in": "query", "required": False, "description": "Whether loud.", "schema": loud},
        ]
        assert "422" in operation("get", "/lines")["responses"]

    @pytest.mark.parametrize(
        "body", [b"", b"{}", b"null", b"nul", b"[]", b"\xff", b'{"colour": 1}', b'{"colour": "red", "size": 1}']
    )
    def test_wrong_bodies(self, body: bytes) -> None:
        """A body that does not match the row is refused before the handler runs."""
        words = Words()
        answer = ask("POST", "/paint", body, words=words)
        assert answer.status == 422
        assert answer.json["hint"].endswith("the fields are described in /v1/openapi.json, schema Paint")
        assert not words.asked

    def test_defects(self) -> None:
        """A defect in a handler answers one request with 500, which reveals nothing, and is logged."""
        with TemporaryFile("w+", encoding="utf-8") as log:
            answer = ask("GET", "/spill/milk", log=log)
            log.seek(0)
            said = log.read()
        assert (answer.status, answer.json["code"]) == (500, "internal")
        assert b"milk" not in answer.body
        assert "ZeroDivisionError" in said

    def test_defects_are_no_flood(self) -> None:
        """However often a defect occurs, 16 are logged in a minute, and each request is answered."""
        with TemporaryFile("w+", encoding="utf-8") as log:
            answer = ask("GET", f"/spill/milk{'k' * 1000}", log=log, times=20)
            log.seek(0)
            lines = log.read().splitlines()
        assert answer.status == 500
        assert len(lines) == 16
        assert max(len(json.loads(each)["path"]) for each in lines) <= 200


@needs_root
class TestAuthorisation:
    """The dispatcher checks the role before it looks at the rest of a request."""

    @pytest.mark.parametrize("route", TABLE, ids=lambda route: route.path)
    def test_stranger(self, route: Route[Words, Any]) -> None:
        """A caller without a role gets 403 from every row, and no handler runs."""
        words = Words()
        answer = ask(route.method, route.path, b"nonsense", words=words, settings=Settings(roles=Roles(users=())),
                     uid=STRANGER)  # fmt: skip
        assert (answer.status, answer.json["code"]) == (403, "not_permitted")
        assert not words.asked

    def test_role(self) -> None:
        """A row is closed to every role below its own."""
        for roles, allowed in (
            (Roles(users=(), observers=("*",)), {"/figures"}),
            (Roles(users=("*",)), {"/figures", "/paint"}),
            (Roles(admins=("*",)), {"/figures", "/paint", "/paint/{name}"}),
        ):
            settings = Settings(roles=roles)
            rows = [route for route in TABLE if route.path in {"/figures", "/paint", "/paint/{name}"}]
            statuses = {row.path: ask(row.method, row.path, settings=settings, uid=STRANGER).status for row in rows}
            assert {path for path, status in statuses.items() if status != 403} == allowed


class TestNothingElse:
    """The dispatcher serves its table only."""

    @pytest.mark.parametrize("path", sorted({route.path for route in ROUTES}))
    def test_no_path_is_added_by_hand(self, path: str) -> None:
        """No path exists without a row."""
        assert ask("GET", path).status == 404

    def test_no_method_is_added_by_hand(self) -> None:
        """A path accepts the methods of its rows, and lists them."""
        for method in ("OPTIONS", "PUT"):
            answer = ask(method, "/figures")
            assert (answer.status, answer.headers["Allow"]) == (405, "GET,HEAD")


EVENTS: Final = query_decoder(EventsQuery)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", EventsQuery("0", follow=False, heartbeat=0)),
        ("after=7", EventsQuery("7")),
        ("after=007&follow=true", EventsQuery("007", follow=True)),
        ("after=latest&heartbeat=3600", EventsQuery("latest", heartbeat=3600)),
        ("after=999999999999999999", EventsQuery("9" * 18)),
        ("follow=false", EventsQuery()),
    ],
)
def test_query_of_events(query: str, found: EventsQuery) -> None:
    """The valid queries of `/v1/events`, and their meaning."""
    assert EVENTS(query) == found


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("after=", "after='' is not the number of an event"),
        ("after=-1", "after='-1' is not the number of an event"),
        ("after=%31e3", "after='1e3' is not the number of an event"),
        ("after=1000000000000000000", "after='1000000000000000000' is not the number of an event"),
        (f"after={'x' * 50}", f"after='{'x' * 40}' is not the number of an event"),
        ("after=last", "after='last' is not the number of an event"),
        ("after=latest%0a", "after='latest\\n' is not the number of an event"),
        ("after=%d9%a1", "after='\u0661' is not the number of an event"),
        ("heartbeat=0.5", "heartbeat='0.5' is not a number of seconds from 0 to 3600"),
        ("heartbeat=3601", "heartbeat='3601' is not a number of seconds from 0 to 3600"),
        ("after=1&after=2", "after is there 2 times"),
        ("folow=true", "there is no query parameter 'folow'"),
        ("follow=1", "follow='1' is neither true nor false"),
        ("follow", "follow='' is neither true nor false"),
        ("follow=TRUE&after=x", "follow='TRUE' is neither true nor false"),
    ],
)
def test_wrong_query_of_events(query: str, detail: str) -> None:
    """An invalid query of `/v1/events` is refused in these words."""
    with pytest.raises(InvalidRequestError) as refused:
        EVENTS(query)
    assert refused.value.detail == detail


class Fractional(RequestQuery, frozen=True):
    """A parameter of a type that no query can have."""

    size: Annotated[float, parameter("A size.", refusal="is no size", hint="name one")] = 0


class Boundless(RequestQuery, frozen=True):
    """A text without restrictions."""

    name: Annotated[str, parameter("A name.", refusal="is no name", hint="name one")] = ""


class Required(RequestQuery, frozen=True):
    """A parameter without a default."""

    loud: Annotated[bool, parameter("Whether loud.", refusal="is neither", hint="true or false")]


class Unbounded(RequestQuery, frozen=True):
    """A number without bounds."""

    size: Annotated[int, parameter("How large.", refusal="is no size", hint="say a number", at_least=0)] = 0


class Undocumented(RequestQuery, frozen=True):
    """A parameter without a description."""

    size: Annotated[int, Meta(ge=0, le=9)] = 0


@pytest.mark.parametrize("kind", [Fractional, Boundless, Required, Unbounded, Undocumented])
def test_unusable_parameters(kind: Callable[..., RequestQuery]) -> None:
    """A row whose parameters cannot be decoded, or have no description, is found when mpsd starts."""
    assert isinstance(kind, type)
    with pytest.raises(TypeError, match="parameter"):
        query_decoder(kind)
