"""What the route of the events does: it streams those that are kept, and those to come."""

from collections.abc import AsyncIterator

from mpsd.core.errors import InvalidRequestError
from mpsd.daemon.api import schema
from mpsd.daemon.api.request import Request
from mpsd.daemon.node.node import Node
from mpsd.daemon.record.events import Events


class EventHandlers:
    """The handlers of the events of one node."""

    def __init__(self, node: Node, events: Events) -> None:
        self._node = node
        self._events = events

    async def events(self, request: Request) -> AsyncIterator[bytes]:
        """Return the kept events after a number, and with `follow` those that come, as lines.

        A follower that cannot keep up is dropped, and comes back with the last number that it has. Raises
        InvalidRequestError for a number that is not kept any more, instead of a gap, and for one that is yet to come.
        """
        query, events = request.query, self._events
        assert isinstance(query, schema.EventsQuery)  # noqa: S101 - the route table says so
        self._node.leases.publish()
        events.flush()  # what has no number yet may take the place of what is asked for
        if query.after > events.latest:
            raise InvalidRequestError(
                f"event {query.after} does not exist yet; the latest is {events.latest}",
                hint="pass the seq of the last event that you received, or omit `after` to begin with the oldest",
            )
        if query.after + 1 < events.oldest and query.after > 0:
            raise InvalidRequestError(
                f"the events after {query.after} are no longer kept; the oldest is {events.oldest}",
                hint="start again from the oldest event, or keep more events: api.events",
                limit="api.events",
            )
        return events.read(query.after, follow=query.follow)
