"""How a process is ended: step by step, each with its time, and never the last step first."""

import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias

from mpsd.core.errors import ControlError
from mpsd.core.mps import commands
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system.control_pipe import ControlPipe
from mpsd.system.process import Process

Terminate: TypeAlias = Callable[[], Awaitable[None]]
"""Has a server end the contexts of a client, and returns when it says that this is done. Raises ControlError."""

_STEP: Final = 5
"""Seconds for each step of ending a control daemon."""


def terminate_contexts_of(pipe: ControlPipe, server: int, client: int) -> Terminate:
    """Return what has a server end the contexts of a client."""
    return partial(pipe.ask, commands.terminate_client(server, client))


async def end_daemon(daemon: Process, pipe: ControlPipe, log: Logger) -> None:
    """End a control daemon by `quit`, SIGTERM and SIGKILL; its pidfd says when it is gone."""
    try:
        await pipe.quit(_STEP)
        if await daemon.gone_within(_STEP):
            return
    except ControlError as error:
        log.warning(EventName.DAEMON_FORCED, step="quit", because=error.detail)
    for number in (signal.SIGTERM, signal.SIGKILL):
        log.warning(EventName.DAEMON_FORCED, step=number.name, pid=daemon.pid)
        daemon.signal(number)
        if await daemon.gone_within(_STEP):
            return


async def end_client(client: Process, terminate: Terminate | None, grace: float, log: Logger, because: str) -> None:
    """End a client by SIGTERM, `terminate_client` and SIGKILL, with `grace` seconds after each of the first two.

    The client is taken over. A client that is killed while its server works for it takes the server's other clients
    with it; one whose contexts the server has ended does not (mps-facts B4.3). So SIGKILL comes after the server's
    `0`, and not at all where that does not come. A process that is no client of a server has no such step.
    """

    def forced(step: str, **facts: object) -> None:
        log.warning(EventName.CLIENT_FORCED, step=step, pid=client.pid, because=because, **facts)

    try:
        forced(signal.SIGTERM.name)
        client.signal(signal.SIGTERM)
        if await client.gone_within(grace):
            return
        if terminate is not None:
            try:
                await terminate()
            except ControlError as error:
                # Its server may have no such command, or be busy with it for ever.
                forced("terminate_client", failed=error.detail)
                return
            forced("terminate_client")
            if await client.gone_within(grace):
                return
        forced(signal.SIGKILL.name)
        client.signal(signal.SIGKILL)
        await client.gone_within(grace)
    except PermissionError as error:
        forced("none", failed=f"mpsd has no permission to signal it: {error.strerror} (CAP_KILL)")
    finally:
        client.close()
