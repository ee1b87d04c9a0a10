"""The history of one lease, control daemon or GPU, in order: the events that belong to it, and the end of its log."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from mpsd.cli.history.selection import GpuNames, Selection, Selector, leases_of
from mpsd.core.sanitize import plain, text

if TYPE_CHECKING:
    from mpsd.client import answer_types

_OF_THE_NODE: Final = frozenset(
    {
        "node_started",
        "node_stopping",
        "node_stopped",
        "settings_reloaded",
        "store_full",
        "store_writable",
        "events_lost",
    }
)
"""Events of the whole node that belong to each story."""

_REPEATED: Final = frozenset({"limits_verified", "api_listening", "log_shortened"})
"""Events that repeat facts of other events in a story."""

_SETTLED: Final = frozenset({"limit_drift_ended", "server_recovered", "server_serves", "log_resumed"})
_OPERATED: Final = frozenset({"operation_begun", "operation_resumed", "operation_ended"})
_PASSING: Final = frozenset({"cooling", "down"})
"""States of a control daemon between its death, which has its own event, and its start."""

_MARK: Final = re.compile(rb"mpsd-[0-9a-f]{16,}-\d")
"""The mark in each of mpsd's own conversations with a control daemon."""

_BEGINS: Final = b"NEW UI"
_ENDS: Final = b"UI closed"
_STARTS: Final = b"Starting control daemon using socket"
_WAITS: Final = b"Accepting connection..."


def _is_new(event: "answer_types.Event") -> bool:
    """Tell whether an event adds a fact to those before it."""
    is_passing = event["event"] == "daemon_state" and event.get("state") in _PASSING
    return not is_passing and event["event"] not in _REPEATED


def of_lease(
    events: Sequence["answer_types.Event"], lease: str, daemons: Mapping[str, str]
) -> list["answer_types.Event"]:
    """Return the story of a lease: its own events, and those of its control daemons and of mpsd meanwhile.

    `daemons` has the control daemon of each GPU, by the GPU's UUID.
    """
    own = [number for number, event in enumerate(events) if lease in leases_of(event)]
    if not own:
        return []
    ended = events[own[-1]]["event"] in {"lease_ended", "lease_refused"}
    during = events[own[0] : own[-1] + 1] if ended else events[own[0] :]
    names = {daemons.get(gpu) for number in own for gpu in _gpus(events[number])}
    return [event for event in during if _is_new(event) and (lease in leases_of(event) or _befell(event, names))]


def _gpus(event: "answer_types.Event") -> list[str]:
    gpus = event.get("gpus")
    return [str(each) for each in gpus] if isinstance(gpus, list) else []


def _befell(event: "answer_types.Event", daemons: Collection[object]) -> bool:
    """Tell whether an event may have affected the leases on these control daemons."""
    if event["event"] in _OF_THE_NODE:
        return True
    if event.get("daemon") not in daemons or leases_of(event):
        return False
    return event.get("level") != "info" or event["event"] in {"daemon_state", *_SETTLED, *_OPERATED}


def of_gpu(
    events: Iterable["answer_types.Event"], gpu: GpuNames, sees: Callable[["answer_types.Event"], bool]
) -> tuple[list["answer_types.Event"], int]:
    """Return the story of a GPU and its control daemon, and how many of its events this reader may not see."""
    selector = Selector(Selection(gpu=gpu))
    found = [each for each in events if selector.takes(each) or each["event"] in _OF_THE_NODE]
    chosen = [each for each in found if _is_new(each)]
    seen = [each for each in chosen if sees(each)]
    return seen, len(chosen) - len(seen)


def said_by_others(raw: bytes, most: int) -> list[str]:
    """Return the last lines of a control daemon's log that are not from mpsd's own conversations with it."""
    lines = [plain(text(each)) for each in _others(raw.split(b"\n")) if each.strip()]
    return lines[-most:]


def _others(lines: Iterable[bytes]) -> Iterator[bytes]:
    conversation: list[bytes] = []
    for line in lines:
        if _BEGINS in line or _STARTS in line:  # the daemon may have died in the conversation before
            yield from _unless_own(conversation)
            conversation = []
        is_part = _BEGINS in line or bool(conversation)
        if is_part:
            conversation.append(line)
        elif not line.endswith(_WAITS):
            yield line
        if is_part and _ENDS in line:
            yield from _unless_own(conversation)
            conversation = []
    yield from _unless_own(conversation)


def _unless_own(conversation: Sequence[bytes]) -> Sequence[bytes]:
    return () if any(map(_MARK.search, conversation)) else conversation
