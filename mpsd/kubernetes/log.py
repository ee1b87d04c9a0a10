"""The log of `mpsd-kubernetes`: one line for each decision, to stderr, rendered as those of mpsd's own log.

mpsd's own logger needs an event loop, which this program does not have; structlog's loggers work with threads.
"""

import sys
from enum import StrEnum
from typing import TextIO

import structlog
from structlog.processors import add_log_level
from structlog.typing import EventDict, WrappedLogger

from mpsd.core.errors import MpsdError
from mpsd.core.sanitize import SECRETS, plain
from mpsd.core.settings import LogFormat
from mpsd.system import clock
from mpsd.system.host import log_output


class EventName(StrEnum):
    PLUGIN_STARTED = "plugin_started"
    PLUGIN_STAYS = "plugin_stays"
    PLUGIN_ENDED = "plugin_ended"
    RESOURCE_REGISTERED = "resource_registered"
    RESOURCE_NOT_REGISTERED = "resource_not_registered"
    OTHER_PLUGIN = "other_plugin"
    READINESS_NOT_SHOWN = "readiness_not_shown"
    DEVICES_CHANGED = "devices_changed"
    NODE_NOT_OFFERED = "node_not_offered"
    HOOK_INSTALLED = "hook_installed"
    HOOK_NOT_CALLED = "hook_not_called"
    HOOK_NOT_INSTALLED = "hook_not_installed"
    MPSD_UNREACHABLE = "mpsd_unreachable"
    MPSD_ANSWERS = "mpsd_answers"
    CHECKPOINT_UNREADABLE = "checkpoint_unreadable"
    CONTAINER_NOT_CLAIMED = "container_not_claimed"
    CONTAINER_CLAIMED = "container_claimed"
    CONTAINER_REFUSED = "container_refused"
    CONTAINER_STARTS = "container_starts"
    CONTAINER_HOLDS = "container_holds"
    CONTAINER_NOT_HELD = "container_not_held"
    CLAIM_RENEWED = "claim_renewed"
    LEASE_RELEASED = "lease_released"
    LEASE_NOT_CHANGED = "lease_not_changed"
    DRIVER_REGISTERED = "driver_registered"
    DRIVER_NOT_REGISTERED = "driver_not_registered"
    CLAIM_PREPARED = "claim_prepared"
    CLAIM_REFUSED = "claim_refused"
    CLAIM_REPLACED = "claim_replaced"
    CLAIM_UNPREPARED = "claim_unprepared"
    CLAIM_UNREADABLE = "claim_unreadable"
    CLAIM_STATUS_NOT_WRITTEN = "claim_status_not_written"
    SLICE_PUBLISHED = "slice_published"
    SLICE_NOT_PUBLISHED = "slice_not_published"
    NODE_REPORTED = "node_reported"
    NODE_NOT_REPORTED = "node_not_reported"
    POD_EVENT_LOST = "pod_event_lost"
    WEBHOOK_STARTED = "webhook_started"
    WEBHOOK_ENDED = "webhook_ended"
    SHARE_GIVEN = "share_given"
    SHARE_NOT_GIVEN = "share_not_given"
    REVIEW_FAILED = "review_failed"
    CERTIFICATE_LOADED = "certificate_loaded"
    CERTIFICATE_NOT_LOADED = "certificate_not_loaded"
    CERTIFICATE_RENEWED = "certificate_renewed"
    CERTIFICATE_TRUSTED = "certificate_trusted"


class Log:
    """Logs events with their facts; any thread may call."""

    def __init__(self, form: LogFormat, stream: TextIO = sys.stderr) -> None:
        processors = (_stamped, add_log_level, _harmless, *log_output.rendering(form, stream))
        self._log = structlog.wrap_logger(structlog.PrintLogger(stream), processors).bind()
        self._problems: dict[str, str] = {}
        """The last logged problem of each subject."""

    def info(self, event: EventName, **facts: object) -> None:
        self._log.info(event.value, **facts)

    def warning(self, event: EventName, error: MpsdError | None = None, **facts: object) -> None:
        """Log a problem that this program handles itself."""
        self._log.warning(event.value, **facts, **_said_by(error))

    def error(self, event: EventName, error: MpsdError | None = None, **facts: object) -> None:
        """Log a problem that an operator must look into."""
        self._log.error(event.value, **facts, **_said_by(error))

    def is_new(self, subject: str, because: str) -> bool:
        """Tell whether a problem of a subject is another one than its last, which is logged only once."""
        before, self._problems[subject] = self._problems.get(subject), because
        return because != before

    def solved(self, *subjects: str) -> None:
        """Forget the last problems of subjects."""
        for each in subjects:
            self._problems.pop(each, None)


def _said_by(error: MpsdError | None) -> dict[str, object]:
    return {} if error is None else {"code": error.code, "because": error.detail, "hint": error.hint}


def _stamped(_: WrappedLogger, __: str, line: EventDict) -> EventDict:
    return {"at": clock.now().isoformat(), **line}


def _harmless(_: WrappedLogger, __: str, line: EventDict) -> EventDict:
    """Escape text of other users, and omit secrets that belong to a container alone."""
    return {name: plain(value) for name, value in line.items() if name not in SECRETS}
