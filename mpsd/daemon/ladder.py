"""How what runs is ended: rung by rung, each with its time, and never the last one first."""

import signal
from typing import Final

from mpsd.core.errors import ControlError
from mpsd.daemon.log import Happened, Logger
from mpsd.system.control import ControlPipe
from mpsd.system.process import Process

_RUNG: Final = 5
"""Seconds for each rung."""


async def end_daemon(daemon: Process, pipe: ControlPipe, log: Logger) -> None:
    """End a control daemon by `quit`, SIGTERM and SIGKILL; its pidfd says when it is gone."""
    try:
        await pipe.quit(_RUNG)
    except ControlError as error:
        log.warning(Happened.DAEMON_FORCED, rung="quit", because=error.detail)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if await daemon.gone_within(_RUNG):
            return
        log.warning(Happened.DAEMON_FORCED, rung=number.name, pid=daemon.pid)
        daemon.signal(number)
    await daemon.gone_within(_RUNG)
