"""The trace of a request, from its header `traceparent`. The events that the request causes carry it.

The trace applies to the task that answers the request, until the answer. Later callbacks and other tasks have no trace,
since the request is not their only cause.

Source: W3C, "Trace Context", Level 1, section 3.2.
"""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple

_HEADER: Final = re.compile(
    rb"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})(?P<span>[0-9a-f]{16})-[0-9a-f]{2}(?P<more>-.*)?"
)

_FIRST_VERSION: Final = b"00"


class Trace(NamedTuple):
    """The trace of a request, and the task that answers the request."""

    facts: dict[str, object]
    task: "asyncio.Task[object] | None"


CURRENT: Final = ContextVar[Trace | None]("trace", default=None)
"""The trace of the current request, or None; `facts` reads it."""


def parse(header: bytes) -> dict[str, object] | None:
    """Return the facts of a trace, its id and the caller's span; None for a header that is not valid."""
    found = _HEADER.fullmatch(header)
    if found is None or (found["version"] == _FIRST_VERSION and found["more"] is not None):
        return None
    return {"trace_id": found["trace"].decode(), "span_id": found["span"].decode()}


@contextmanager
def following(header: bytes) -> Iterator[None]:
    """Add a request's trace to the events of this task within the context; an invalid header adds none."""
    facts = parse(header)
    if facts is None:
        yield
        return
    token = CURRENT.set(Trace(facts, asyncio.current_task()))
    try:
        yield
    finally:
        CURRENT.reset(token)


def facts() -> dict[str, object]:
    """Return the facts of the trace for the events that this task causes; call it only if CURRENT is not None."""
    trace = CURRENT.get()
    return trace.facts if trace is not None and trace.task is asyncio.current_task() else {}
