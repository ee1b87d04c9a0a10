"""The ending of a control daemon, step by step with a time for each; force comes last."""

import signal
from typing import Final

from mpsd.core.errors import ControlError
from mpsd.core.events import EventName
from mpsd.daemon.record.log import Logger
from mpsd.system.control_pipe import ControlPipe
from mpsd.system.process import Process

_STEP: Final = 5
"""Seconds for each step of the ending of a control daemon."""

_UNUSED: Final = 1
"""Seconds for the servers of a control daemon that has no client, before they are forced."""


async def end_daemon(daemon: Process, pipe: ControlPipe, log: Logger, *, is_deserted: bool) -> None:
    """End a control daemon by `quit`, SIGTERM and SIGKILL; its pidfd reports when it is gone."""
    try:
        await pipe.give_up()
        await pipe.quit(_UNUSED if is_deserted else _STEP)
        if await daemon.gone_within(_STEP):
            return
    except ControlError as error:
        log.warning(EventName.DAEMON_FORCED, step="quit", because=error.detail)
    for number in (signal.SIGTERM, signal.SIGKILL):
        log.warning(EventName.DAEMON_FORCED, step=number.name, pid=daemon.pid)
        daemon.signal(number)
        if await daemon.gone_within(_STEP):
            return
