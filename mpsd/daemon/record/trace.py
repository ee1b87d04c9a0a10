"""The trace that a request is part of, by its header `traceparent`: it goes into the events that the request causes.

It holds for the task that answers the request, and for as long as it does. What is called back later, or runs in
another task, is not caused by the request alone, and has none of it.

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
    """What a request says of its trace, and the task that answers it."""

    facts: dict[str, object]
    task: "asyncio.Task[object] | None"


CURRENT: Final = ContextVar[Trace | None]("trace", default=None)
"""The trace of the request that is answered; `facts` reads it, unless it is None."""


def parse(header: bytes) -> dict[str, object] | None:
    """Return the facts of a trace: which one, and the caller's span in it; None for a header that is not valid."""
    found = _HEADER.fullmatch(header)
    if found is None or (found["version"] == _FIRST_VERSION and found["more"] is not None):
        return None
    return {"trace_id": found["trace"].decode(), "span_id": found["span"].decode()}


@contextmanager
def following(header: bytes) -> Iterator[None]:
    """Have the events of this task be of a request's trace meanwhile; a header that is not valid names none."""
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
    """Return what the events that are caused now say of a trace; call it only where CURRENT has one."""
    trace = CURRENT.get()
    return trace.facts if trace is not None and trace.task is asyncio.current_task() else {}
