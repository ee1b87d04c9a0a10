"""The handlers of the events, past and future, and of the history of granted and held amounts."""

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Annotated, Final

from msgspec import Meta, Struct

from mpsd.client import answer_types
from mpsd.client.answer_types import about, words
from mpsd.core import gpu_names
from mpsd.core.accounting.accounts import SECOND
from mpsd.core.accounting.report import Amounts, By, Line, Report, step_of
from mpsd.core.errors import InvalidRequestError
from mpsd.core.events import EventName
from mpsd.core.quantities import Moment
from mpsd.daemon.accounting.accountant import Accountant
from mpsd.daemon.api import rendering
from mpsd.daemon.api.decoding import parameter
from mpsd.daemon.api.table import Request, RequestOf, RequestQuery, encoded, sees_others
from mpsd.daemon.node.node import Node
from mpsd.daemon.record.events import Events
from mpsd.system import clock
from mpsd.system.files.encoding import to_json

_LATEST: Final = "latest"

_MOST_SAMPLES: Final = 2000
"""Samples of one key that an answer has at most."""

_TIME: Final = r"([0-9]{1,10}|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{5,15}(Z|[+-][0-9]{2}:[0-9]{2}))"


class Event(Struct):
    __doc__ = (
        "A decision of mpsd: a line of its log, with its number. Its further fields depend on the event.\n\n"
        "A line whose event is `heartbeat` is not an event: it has the number of the last one, and is sent only on"
        " request."
    )

    seq: Annotated[int, about("The number of the event, one more than that of the previous event.")]
    at: Annotated[Moment, about("The time of the event.")]
    level: Annotated[str, Meta(extra_json_schema={"enum": ["info", "warning", "error"]})]
    event: Annotated[str, words(EventName, more=True), about("The name of the event.")]
    because: Annotated[str | None, about("The reason, in a sentence.")] = None


class EventsQuery(RequestQuery, frozen=True):
    """The events that a caller requests."""

    after: Annotated[
        str,
        parameter(
            "The number of the last event that the caller has received; mpsd sends the later ones. `0`: all stored"
            " events; `latest`: future events only.",
            refusal="is not the number of an event",
            hint="pass the seq of the last event that you received, or latest for those to come",
        ),
        Meta(pattern=r"^([0-9]{1,18}|latest)\Z"),
    ] = "0"
    follow: Annotated[
        bool,
        parameter(
            "Whether to keep sending new events until the caller disconnects.", hint="pass follow=true, or omit it"
        ),
    ] = False
    heartbeat: Annotated[
        int,
        parameter(
            "With `follow`: after this many seconds without a line, mpsd sends a `heartbeat` line with the number of"
            " the last event. `0`: never.",
            refusal="is not a number of seconds from 0 to 3600",
            hint="pass whole seconds, fewer than your client waits for a line, such as heartbeat=3",
        ),
        Meta(ge=0, le=3600),
    ] = 0


class EventHandlers:
    """The handler of the events of one node."""

    def __init__(self, events: Events) -> None:
        self._events = events

    async def events(self, request: RequestOf[EventsQuery]) -> AsyncIterator[bytes]:
        """Return the stored events after a number as lines, and with `follow` later ones too.

        mpsd disconnects a follower that is too slow; the follower can continue after the last number that it has.
        Raises InvalidRequestError for a number that is no longer stored, so that no gap arises, and for a future one.
        """
        query, events = request.content, self._events
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
        # A heartbeat has the number of the last event, and is not an event itself.
        heartbeat = {"seq": events.latest, "at": clock.now(), "level": "info", "event": "heartbeat"}
        yield lines or to_json(heartbeat) + b"\n"


# -- the history -------------------------------------------------------------------------------------------------------


class HistoryQuery(RequestQuery, frozen=True):
    """The part of the history that a caller requests."""

    by: Annotated[
        str,
        parameter(
            "The key of the series: `gpu`, `user`, `name`, `lease`, or `label:KEY` for the values of a label.",
            refusal="is not gpu, user, name, lease or label:KEY",
            hint="pass by=user, for example, or by=label:team",
        ),
        Meta(pattern=r"^(gpu|user|name|lease|label:[A-Za-z0-9][A-Za-z0-9._/-]{0,62})\Z"),
    ] = "gpu"
    since: Annotated[
        str,
        parameter(
            "The beginning: a time of RFC 3339, or whole seconds before now.",
            refusal="is not a time of RFC 3339, nor a number of seconds",
            hint="pass since=3600 for the last hour, or since=2026-11-23T00:00:00Z",
        ),
        Meta(pattern=rf"^{_TIME}\Z"),
    ] = "3600"
    until: Annotated[
        str,
        parameter(
            "The end, in the same form.",
            refusal="is not a time of RFC 3339, nor a number of seconds",
            hint="omit it for now, or pass until=2026-11-23T00:00:00Z",
        ),
        Meta(pattern=rf"^{_TIME}\Z"),
    ] = "0"
    step: Annotated[
        int,
        parameter(
            "Length of a sample in seconds, never less than that of the stored samples. `0`: mpsd chooses.",
            refusal="is not a number of seconds from 0 to 31536000",
            hint="pass whole seconds, such as step=60, or omit it",
        ),
        Meta(ge=0, le=31_536_000),
    ] = 0
    gpu: Annotated[
        str,
        parameter(
            "A GPU by its index, as `gpu0`, or by its UUID or a unique prefix of that, to count this GPU only.",
            refusal="is not the name of a GPU",
            hint="GET /v1/gpus has them",
        ),
        Meta(pattern=r"^([\x21-\x7e]{1,128})?\Z"),
    ] = ""
    user: Annotated[
        str,
        parameter(
            "The uid of a user, to count this user only.", refusal="is not a uid", hint="pass user=1000, for example"
        ),
        Meta(pattern=r"^([0-9]{1,10})?\Z"),
    ] = ""
    totals: Annotated[bool, parameter("Whether the answer has totals only, and no samples.")] = False


class HistoryHandlers:
    """The handlers of the history of one node."""

    def __init__(self, node: Node, accountant: Accountant) -> None:
        self._node = node
        self._accountant = accountant

    async def history(self, request: RequestOf[HistoryQuery]) -> answer_types.History:
        """Return the history: by GPU for every caller, otherwise of the users whose leases the caller may see."""
        query = request.content
        now = clock.now()
        since, until = _moment(query.since, now), _moment(query.until, now)
        is_open, until = until >= now, min(until, now)
        if since >= until:
            raise InvalidRequestError(
                f"the history from {since:%FT%TZ} to {until:%FT%TZ} is empty", hint="pass a since before until"
            )
        begin, end = (round(each.timestamp() * SECOND) for each in (since, until))
        least = self._accountant.finest(begin)
        step = max(query.step, least) if query.step else step_of(begin, end, least)
        if (end - begin) / SECOND / step > _MOST_SAMPLES:
            raise InvalidRequestError(
                f"from {since:%FT%TZ} to {until:%FT%TZ} there are more than {_MOST_SAMPLES} samples of {step} s",
                hint="pass a longer step, or step=0",
                limit="step",
            )
        kind, _, label = query.by.partition(":")
        by = By(kind)
        is_seen = self._is_seen(request, by, int(query.user) if query.user else None)
        report = Report(
            by,
            label,
            begin,
            None if is_open else end,
            step,
            gpu=self._uuid(query.gpu),
            is_seen=is_seen,
            totals=query.totals,
        )
        end = await self._accountant.fill(report, request.pause)
        lines, left_out = report.lines()
        return answer_types.History(
            history=await encoded((_series(report, line) for line in lines), request.pause),
            by=query.by,
            since=rendering.time(since),
            until=_time(end),
            resolution=step,
            left_out=left_out,
            gaps=[
                answer_types.HistoryGap(since=_time(each.since), until=_time(each.until), because=each.because)
                for each in self._accountant.gaps(begin, end)
            ],
            because=self._accountant.trouble,
        )

    def _uuid(self, meant: str) -> str | None:
        """Return the UUID of the named GPU; None without a name. A GPU that is gone is named by its UUID.

        Raises InvalidRequestError.
        """
        there = self._node.gpus.by_index
        numbered = [(index, gpu.uuid) for index, gpu in there.items()]
        if (index := gpu_names.find(meant, numbered)) is not None:
            return there[index].uuid
        if meant and not meant.startswith("GPU-"):
            detail, hint = gpu_names.unknown(meant, numbered)
            raise InvalidRequestError(detail, hint=hint, limit="gpu")
        return meant or None

    def _is_seen(self, request: Request, by: By, user: int | None) -> Callable[[int | None], bool]:
        """Return the test whether a uid's leases are in the answer; uid None stands for memory outside of leases."""
        if by is By.GPU and user is None:
            return lambda _: True
        # Labels are their user's own business.
        sees = request.principal.admin or (by is not By.LABEL and sees_others(request, self._node.settings.current))
        own = None if sees else request.uid
        return lambda uid: uid is not None and own in {None, uid} and user in {None, uid}


def _moment(text: str, now: datetime) -> datetime:
    """Return the time that a parameter names. Raises InvalidRequestError."""
    try:
        return now - timedelta(seconds=int(text)) if text.isdecimal() else datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidRequestError(
            f"{text!r} is not a time", hint="pass one such as 2026-11-23T00:00:00Z, or seconds before now"
        ) from None


def _time(moment: int) -> str:
    return rendering.time(datetime.fromtimestamp(moment / SECOND, UTC))


def _series(report: Report, line: Line) -> answer_types.HistorySeries:
    samples = ((*report.bounds(number), amounts) for number, amounts in sorted(line.samples.items()))
    total = line.total
    return answer_types.HistorySeries(
        key=line.key,
        total=answer_types.HistoryTotal(
            seconds=report.seconds(line),
            leases=line.leases,
            threads_granted=total.threads,
            memory_granted=total.memory,
            memory_held=total.held if total.known else None,
            memory_held_most=line.held_most,
            clients=total.clients,
        ),
        samples=[_sample(_time(start), seconds, amounts) for start, seconds, amounts in samples],
    )


def _sample(start: str, seconds: float, amounts: Amounts) -> answer_types.HistorySample:
    seconds = max(seconds, 1e-6)
    return answer_types.HistorySample(
        time=start,
        seconds=seconds,
        threads_granted=amounts.threads / seconds,
        memory_granted=amounts.memory / seconds,
        memory_held=amounts.held / seconds if amounts.known else None,
        clients=amounts.clients / seconds,
    )
