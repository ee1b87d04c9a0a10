"""mpsd's own log: one line for each decision, to stderr, with the facts as keys. Configured once, at start."""

import logging
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TextIO

import structlog

from mpsd.core.settings import LogFormat

Logger = structlog.typing.FilteringBoundLogger


class Happened(StrEnum):
    """The catalogue of what mpsd logs; a log line's event is one of these and nothing else."""

    NODE_STARTED = "node_started"
    NODE_STOPPING = "node_stopping"
    API_LISTENING = "api_listening"
    API_DEFECT = "api_defect"
    GPU_FOUND = "gpu_found"
    GPU_HEALTH = "gpu_health"
    DAEMON_STATE = "daemon_state"
    DAEMON_DEATH = "daemon_death"
    DAEMON_FORCED = "daemon_forced"
    LIMITS_VERIFIED = "limits_verified"
    LIMITS_NOT_HELD = "limits_not_held"
    LIMIT_DRIFT = "limit_drift"
    LIMIT_DRIFT_OVER = "limit_drift_over"
    SERVER_ORPHANED = "server_orphaned"
    FOREIGN_COMMAND = "foreign_command"
    LOG_SHORTENED = "log_shortened"
    LOG_NOT_SHORTENED = "log_not_shortened"
    TALLY_NOT_KEPT = "tally_not_kept"
    LEASE_GRANTED = "lease_granted"
    LEASE_REFUSED = "lease_refused"
    LEASE_WAITS = "lease_waits"
    LEASE_RENEWED = "lease_renewed"
    LEASE_RESTORED = "lease_restored"
    CLIENT_ATTRIBUTED = "client_attributed"
    LEASE_ENDED = "lease_ended"
    DOOR_STUCK = "door_stuck"
    FOLLOWER_LEFT = "follower_left"
    STORE_FULL = "store_full"
    STORE_SET_ASIDE = "store_set_aside"
    SETTINGS_RELOADED = "settings_reloaded"
    SETTINGS_REFUSED = "settings_refused"


def _in_reading_order(_: object, __: str, facts: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Put first what a reader looks for first: when, how bad, and what."""
    first = {key: facts.pop(key) for key in ("at", "level", "event")}
    return {**first, **facts}


def configure(
    form: LogFormat, record: Callable[[Mapping[str, object]], None] | None = None, stream: TextIO = sys.stderr
) -> Logger:
    """Return the logger of this process: text on a terminal and JSON elsewhere, unless the form says which.

    `record` is given every line's facts too: what is logged and what is told as an event are one and the same.
    """

    def recorded(_: object, __: str, facts: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if record is not None and "exc_info" not in facts:
            record(dict(facts))
        return facts

    text = form is LogFormat.TEXT or (form is LogFormat.AUTO and stream.isatty())
    render: structlog.typing.Processor
    if text:
        render = structlog.dev.ConsoleRenderer(colors=stream.isatty())
    else:
        render = structlog.processors.JSONRenderer()
    logger: Logger = structlog.wrap_logger(
        structlog.PrintLogger(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            _in_reading_order,
            recorded,
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    return logger
