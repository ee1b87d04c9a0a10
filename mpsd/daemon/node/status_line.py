"""The state of the node in one line, for `systemctl status`."""

from collections.abc import Sequence
from typing import Final

from mpsd.core.lifecycle import State
from mpsd.core.model import Daemon, Health
from mpsd.core.sanitize import plain
from mpsd.daemon.gpu.gpus import GpuView

_LONGEST: Final = 400
"""Characters of a status: `systemctl status` shows it in one line."""


def status_line(daemons: Sequence[Daemon], views: Sequence[GpuView], *, leases: int, waiting: int, reload: str) -> str:
    """Say in a line what an operator wants to know: what is ready, who is there, and what is wrong.

    `reload` is why the last one was refused.
    """
    ready = sum(each.state is State.READY for each in daemons)
    held = "1 lease" if leases == 1 else f"{leases} leases"
    parts = [f"{ready} of {len(daemons)} control daemons ready, {held}, {waiting} waiting"]
    parts += [f"GPU {view.index}: {view.health}, {view.because}" for view in views if view.health is not Health.OK]
    parts += [
        f"{each.name}: {each.state}, {each.operation or each.because}"
        for each in daemons
        if each.state not in {State.READY, State.STARTING}
    ]
    parts += [f"reload refused: {reload}"] if reload else []
    line = plain("; ".join(parts))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
