"""The handler of the event route: it streams stored events, and later ones."""

from collections.abc import AsyncIterator
from math import inf
from typing import Annotated, Final

from msgspec import Meta, Struct

from mpsd.core.errors import InvalidRequestError
from mpsd.core.quantities import Moment
from mpsd.daemon.api.decoding import parameter, text_parameter
from mpsd.daemon.api.request import Request, RequestQuery
from mpsd.daemon.api.schema import words
from mpsd.daemon.node.node import Node
from mpsd.daemon.record.encoding import to_json
from mpsd.daemon.record.events import Events
from mpsd.daemon.record.log import EventName
from mpsd.system import clock

_LATEST: Final = "latest"


class Event(Struct):
    """A decision of mpsd: a line of its log, with its number. Its further fields depend on the event.

    A line whose event is `heartbeat` is not an event: it has the number of the last one, and is sent only on request.
    """

    seq: int
    """Its number, one more than that of the previous event."""
    at: Moment
    """When it happened."""
    level: Annotated[str, Meta(extra_json_schema={"enum": ["info", "warning", "error"]})]
    event: Annotated[str, words(EventName, more=True)]
    """Its name."""
    because: str | None = None
    """Why it happened, in a sentence."""


class EventsQuery(RequestQuery, frozen=True):
    """The events that a caller requests."""

    after: Annotated[
        str,
        text_parameter(
            "The number of the last event that the caller has received: those behind it are sent. `0`: all that are"
            " kept; `latest`: none but those to come.",
            refusal="is not the number of an event",
            hint="pass the seq of the last event that you received, or latest for those to come",
            pattern=r"^([0-9]{1,18}|latest)\Z",
        ),
    ] = "0"
    follow: Annotated[
        bool,
        parameter(
            "Whether to keep sending new events until the caller disconnects.",
            refusal="is neither true nor false",
            hint="pass follow=true, or omit it",
        ),
    ] = False
    heartbeat: Annotated[
        int,
        parameter(
            "With `follow`: after so many seconds without a line, mpsd sends one that says `heartbeat`, with the number"
            " of the last event. `0`: never.",
            refusal="is not a number of seconds from 0 to 3600",
            hint="pass whole seconds, fewer than your client waits for a line, such as heartbeat=3",
            at_least=0,
            at_most=3600,
        ),
    ] = 0


class EventHandlers:
    """The handler of the events of one node."""

    def __init__(self, node: Node, events: Events) -> None:
        self._node = node
        self._events = events

    async def events(self, request: Request) -> AsyncIterator[bytes]:
        """Return the stored events after a number as lines, and with `follow` later ones too.

        A follower that is too slow is disconnected, and can continue with the last number that it has. Raises
        InvalidRequestError for a number that is no longer stored, instead of leaving a gap, and for a future one.
        """
        query, events = request.query, self._events
        assert isinstance(query, EventsQuery)  # noqa: S101 - the route table says so
        self._node.leases.publish()
        events.flush()  # numbering the pending events may delete the oldest stored ones
        return _lines(events, _position(events, query), query)


def _position(events: Events, query: EventsQuery) -> int:
    """Return the number after which a caller's events begin. Raises InvalidRequestError."""
    if query.after == _LATEST:
        return events.latest
    after = int(query.after)
    if after > events.latest:
        raise InvalidRequestError(
            f"event {after} does not exist yet; the latest is {events.latest}",
            hint="pass the seq of the last event that you received, or omit `after` to begin with the oldest",
        )
    if after + 1 < events.oldest and after > 0:
        raise InvalidRequestError(
            f"the events after {after} are no longer kept; the oldest is {events.oldest}",
            hint="start again from the oldest event, or keep more events: api.events",
            limit="api.events",
        )
    return after


async def _lines(events: Events, after: int, query: EventsQuery) -> AsyncIterator[bytes]:
    """Yield the lines of the events after a number, and heartbeats after long enough without one."""
    async for lines in events.read(after, follow=query.follow, patience=query.heartbeat or inf):
        yield lines or _heartbeat(events)


def _heartbeat(events: Events) -> bytes:
    """Return a heartbeat line: it has the number of the last event, and is not an event itself."""
    line = {"seq": events.latest, "at": clock.now(), "level": "info", "event": "heartbeat"}
    return to_json(line) + b"\n"
