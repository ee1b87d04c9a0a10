"""The differences between driver branches, beside the commands that they know (`since` in mpsd/core/mps).

Measured.
"""

from dataclasses import dataclass
from typing import Final

from mpsd.core.mps.commands import TABLE, echo_of

UID: Final = "<uid>"
"""Placeholder in the sentences below for the uid of the caller."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The behaviour of one driver branch where branches differ."""

    files: frozenset[str]
    """The files in the pipe directory of a running daemon beside the four files of every branch."""
    defaults_refused: str | None
    """The answer to a stranger that changes a default; None where any user may."""
    start_refused: str
    """The answer to a stranger that starts a server for another uid."""
    shutdown_refused: str
    """The answer to a stranger that shuts down another uid's server."""
    quit_announced: bool
    """Whether the log says how long a `quit -t` waits."""
    force_announced: bool
    """Whether the log says that a server is forced to shut down."""
    start_logged_by_server: bool
    """Whether `Starting new server` is logged under the pid of the server, not of the daemon."""


_BEFORE_550: Final = f"Insufficient privileges for UID {UID}"
_DEFAULTS: Final = "Control deamon settings can only be modified by the user started it or by the root user."
_START: Final = "Only the root user may start server for another user."
_SHUTDOWN: Final = "Only the root user may shutdown another user's server."

_SINCE_550: Final = Difference(
    files=frozenset({"nvidia-cuda-mps-control.pid"}),
    defaults_refused=f"{_BEFORE_550}. {_DEFAULTS}",
    start_refused=f"{_BEFORE_550}. {_START}",
    shutdown_refused=f"{_BEFORE_550}. {_SHUTDOWN}",
    quit_announced=True,
    force_announced=True,
    start_logged_by_server=True,
)

DIFFERENCES: Final = {
    470: Difference(
        files=frozenset(),
        defaults_refused=None,
        start_refused=_BEFORE_550,
        shutdown_refused=_BEFORE_550,
        quit_announced=False,
        force_announced=False,
        start_logged_by_server=False,
    ),
    535: Difference(
        files=frozenset(),
        defaults_refused=None,
        start_refused=_BEFORE_550,
        shutdown_refused=_BEFORE_550,
        quit_announced=True,
        force_announced=False,
        start_logged_by_server=False,
    ),
    550: _SINCE_550,
    555: _SINCE_550,
}


def known(command: str, branch: int) -> bool:
    row = TABLE.get(command.split(maxsplit=1)[0])
    return row is not None and row.since <= branch


def answered(command: str, lines: list[str], branch: int) -> list[str]:
    return lines if known(command, branch) else [echo_of(command.split(maxsplit=1)[0])]
