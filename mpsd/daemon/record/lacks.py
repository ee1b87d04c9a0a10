"""A lack of descriptors or memory ends no loop of mpsd: it is logged, and the loop does the rest at its next tick.

Each loop that reads facts of the machine takes its steps within `Lacks.outlived`. Any read of a step may fail, so it
reads all that it needs before it changes anything, or can be repeated. A supervisor has its own rule: a control daemon
that mpsd could not check is not healthy.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from mpsd.core.events import EventName
from mpsd.daemon.record.bounded import BoundedLog
from mpsd.daemon.record.log import Logger
from mpsd.system.processes import descriptors

_PAUSE: Final = 1.0
"""Seconds until a loop without a tick of its own tries again."""


class Lacks:
    """The lacks that one loop meets: each is logged, and ends nothing."""

    def __init__(self, log: Logger, checks: str) -> None:
        """Take the log; `checks` says what the loop checks, as the subject of a sentence."""
        self._log, self._checks = BoundedLog(log, most=1), checks

    @contextlib.contextmanager
    def outlived(self, again: Callable[[], None] | None = None) -> Iterator[None]:
        """Log a lack within this step, and leave the rest of the step out. Any other error is raised.

        A loop that only waits for events has `again` called after a moment.
        """
        self._log.settle()
        try:
            yield
        except OSError as error:
            if not descriptors.are_none_left(error):
                raise
            lacks = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
            because = f"{self._checks} cannot be checked now: {lacks}; mpsd tries again"
            self._log.error(EventName.RESOURCE_LACKING, because=because)
            if again is not None:
                asyncio.get_running_loop().call_later(_PAUSE, again)
