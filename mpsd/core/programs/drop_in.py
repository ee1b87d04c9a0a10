"""The drop-in that gives a systemd unit its own lease. Pure.

Sources: systemd.unit(5) (names, specifiers), systemd.service(5) (quoting, the prefixes `+` and `-`, ExecStartPre= and
ExecStopPost=), systemd.exec(5) (EnvironmentFile= is read before each program is started).
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from math import inf
from pathlib import PurePosixPath
from typing import Final

from mpsd.core.errors import InvalidRequestError
from mpsd.core.mps_facts import CLIENT_PRIORITY, UNASKED

_LONGEST: Final = 255
"""Maximum characters of a unit's name. Source: systemd.unit(5)."""

_NAME: Final = re.compile(r"[A-Za-z0-9:_.\\@-]+")

_HEADER: Final = "# Written by `mpsctl service wrap`; `mpsctl service unwrap` removes it."


class OnRestart(StrEnum):
    """The effect of a restart of the unit on its lease."""

    KEEP = "keep"
    """The lease is held for the next start: at most for the unit's longest pause before a restart plus a minute."""
    RENEW = "renew"
    """The lease ends with the unit, and each start requests a new one."""


_MOST_SECONDS: Final = 1e6
"""The maximum seconds for which mpsd lets a claim wait (`RequestedClaim`)."""

BETWEEN: Final = 60.0
"""Seconds for which a stopped unit's lease is held for its next start, in addition to the unit's own pause."""


def seconds_held(pause: float, steps: int, longest: float) -> float:
    """Return for how long a stopped unit's lease is held: its longest pause before a restart plus a minute.

    The pause is RestartSec=; with RestartSteps= and RestartMaxDelaySec=, it grows up to the latter. Raises
    InvalidRequestError where that exceeds the maximum time of a claim. Source: systemd.service(5).
    """
    if steps and pause and longest != inf:
        pause = max(pause, longest)
    if pause + BETWEEN > _MOST_SECONDS:
        raise InvalidRequestError(
            f"the unit may pause for {pause:g} s before it is restarted, and a lease is held for"
            f" {_MOST_SECONDS - BETWEEN:g} s of that at most",
            hint="use --on-restart renew, or lower RestartSec= or RestartMaxDelaySec=",
            limit="on_restart",
        )
    return pause + BETWEEN


def service_name(name: str) -> str:
    """Return the full name of a service: `train` is `train.service`. Raises InvalidRequestError for any other unit."""
    full = name if name.endswith((".service", ".slice", ".scope", ".socket", ".timer")) else f"{name}.service"
    if not _NAME.fullmatch(full) or len(full) > _LONGEST or full.startswith("."):
        raise InvalidRequestError(f"{name!r} is not the name of a unit", hint="see systemctl list-units", limit="unit")
    if not full.endswith(".service"):
        raise InvalidRequestError(
            f"{full} is not a service, and only a service starts processes by itself",
            hint=f"for any other unit that has a control group: mpsctl admit --unit {full}",
            limit="unit",
        )
    return full


def is_written_here(text: str) -> bool:
    """Tell whether `render` made a drop-in."""
    return text.startswith(_HEADER)


def render(
    program: PurePosixPath, options: Sequence[str], on_restart: OnRestart, *, end_clients: bool, start_seconds: str
) -> str:
    """Return the drop-in for a service whose lease has `options`, those of `mpsctl admit`.

    `program` is mpsctl. `start_seconds` is the unit's start timeout, which must cover the time in the queue; empty:
    unchanged.
    """
    start = _command(program, "unit-start", "--on-restart", on_restart, "%n", *map(_literal, options))
    lines = [
        _HEADER,
        "[Unit]",
        "Wants=mpsd.socket",
        "After=mpsd.socket mpsd.service",
        "",
        "[Service]",
        f"ExecStartPre=+{start}",
        f"EnvironmentFile=-{environment_file('%n')}",
        f"ExecStopPost=-+{_command(program, 'unit-stop', '--on-restart', on_restart, '%n')}",
    ]
    # What the unit or its manager sets is unset last, also what EnvironmentFile= has: not what the lease is to have.
    asked = {CLIENT_PRIORITY} if "--client-priority" in options else ()
    unset = (name for name in UNASKED if name not in asked)
    lines.append(f"UnsetEnvironment={' '.join(unset)}")
    if end_clients:
        lines.append(f"ExecStop=-+{_command(program, 'unit-end-clients', '%n')}")
    if start_seconds:
        lines.append(f"TimeoutStartSec={start_seconds}")
    return "\n".join((*lines, ""))


def environment_file(unit: str) -> PurePosixPath:
    """Return the path of the environment of a unit's lease.

    The file has the lease's token, and only root can read it.
    """
    return PurePosixPath("/run/mpsd-units", f"{unit}.env")


def _command(program: PurePosixPath, *words: str) -> str:
    return " ".join((_literal(str(program)), "service", *words))


def _literal(word: str) -> str:
    """Quote a word so that systemd takes it literally. Raises InvalidRequestError."""
    if not word.isprintable():
        raise InvalidRequestError(f"{word!r} has a control character", hint="leave it out", limit="unit")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if re.search(r"[\s\"';\\]", word) or not word else escaped
