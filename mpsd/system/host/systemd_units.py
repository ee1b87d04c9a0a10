"""Properties of systemd units, and the drop-in that gives a unit a lease."""

import asyncio
import contextlib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Final

from mpsd.core.errors import ConfigurationError, NotFoundError, NotPermittedError
from mpsd.system.files import atomic_file, path_safety
from mpsd.system.processes import process

_UNITS: Final = Path("/etc/systemd/system")
_DROP_IN: Final = "50-mpsd.conf"
_SECONDS: Final = 60.0
"""Timeout in seconds for systemctl and similar programs."""

_SPANS: Final = {"": 0.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
"""Seconds of each unit of time in systemctl's output; it prints 0 without one. Source: systemd.time(7)."""


def properties(unit: str, *names: str) -> Mapping[str, str]:
    """Return properties of a unit from `systemctl show`; those that the unit does not have are empty.

    Raises NotFoundError for an absent unit, and ConfigurationError where systemd does not answer.
    """
    wanted = ("LoadState", *names)
    said = finished("systemctl", "show", f"--property={','.join(wanted)}", "--", unit)
    found = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    if found.get("LoadState") != "loaded":
        raise NotFoundError(
            f"systemd has no usable unit {unit}: it is {found.get('LoadState', 'unknown')}",
            hint=f"see systemctl status {unit}",
        )
    return {name: found.get(name, "") for name in names}


def control_group(unit: str) -> str:
    """Return the control group of a unit.

    Raises the errors of `properties`, and NotFoundError where the unit has no control group now.
    """
    found = properties(unit, "ControlGroup", "ActiveState")
    if not found["ControlGroup"]:
        raise NotFoundError(
            f"{unit} has no control group: it is {found['ActiveState']}", hint=f"start it first: systemctl start {unit}"
        )
    return found["ControlGroup"]


def seconds(span: str) -> float:
    """Convert a time span as systemctl prints it, such as `1min 30s` or `infinity`, to seconds.

    Source: systemd.time(7). Raises ConfigurationError for a span of another form.
    """
    if span == "infinity":
        return inf
    found = 0.0
    for word in span.split():
        parts = re.fullmatch(r"([0-9.]+)([a-z]*)", word)
        if parts is None or parts[2] not in _SPANS:
            raise ConfigurationError(
                f"systemd names a time span {span!r}", hint="report this, with systemctl --version"
            )
        found += float(parts[1]) * _SPANS[parts[2]]
    return found


def drop_in(unit: str) -> Path:
    return _UNITS / f"{unit}.d" / _DROP_IN


def read(path: Path) -> str | None:
    """Return the text of a drop-in; None where there is none. Raises OSError."""
    raw = atomic_file.read(path)
    return None if raw is None else raw.decode(errors="replace")


def write(path: Path, text: str) -> None:
    """Write a drop-in, and make systemd read it. Raises OSError, and ConfigurationError where systemd does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_file.write(path, text.encode(), lasting=True)
    path.chmod(0o644)
    finished("systemctl", "daemon-reload")


def remove(path: Path) -> None:
    """Remove a drop-in, and make systemd forget it. Raises OSError, and ConfigurationError where systemd does not."""
    path.unlink()
    with contextlib.suppress(OSError):  # the directory has other drop-ins, and stays
        path.parent.rmdir()
    finished("systemctl", "daemon-reload")


def write_secret(path: Path, text: str) -> None:
    """Write a file that only root can read, in a directory of root's. Raises OSError, and NotPermittedError."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path_safety.is_own(path.parent):
        raise NotPermittedError(f"{path.parent} can be written to by others", hint=f"remove {path.parent}")
    atomic_file.write(path, text.encode())


def own_program() -> Path:
    """Return the path of this program, for a unit of root's to start.

    Raises ConfigurationError where it has no path, or where other users could replace it.
    """
    found = shutil.which(sys.argv[0])
    if found is None:
        raise ConfigurationError(f"{sys.argv[0]} is not a program", hint="call mpsctl by its path")
    path = Path(os.path.abspath(found))  # noqa: PTH100 - a symbolic link stays one, so that an upgrade can move it
    for each in (path, path.resolve()):
        path_safety.check_path(each)
    return path


def refuse_without_root() -> None:
    if os.geteuid() != 0:
        raise NotPermittedError("only root can change the system's services", hint="use sudo")


def refuse_without_systemd(hint: str = "start the program with: mpsctl run -- COMMAND") -> None:
    """Raise NotPermittedError unless root calls, and ConfigurationError where systemd did not boot the system."""
    refuse_without_root()
    if not Path("/run/systemd/system").is_dir():  # sd_booted(3)
        raise ConfigurationError("this system was not booted with systemd", hint=hint)


def finished(*command: str) -> str:
    """Run a program to its end, and return its output. Raises ConfigurationError where it fails."""
    try:
        done = asyncio.run(process.run(command, env=process.environment({}), stdin=b"", seconds=_SECONDS))
    except FileNotFoundError:
        raise ConfigurationError(f"{command[0]} is not there", hint="this needs a system with systemd") from None
    if done.returncode != 0:
        raise ConfigurationError(
            f"{done.command} failed: {done.output.strip() or f'status {done.returncode}'}",
            hint="fix the cause, then run the command again: completed steps are not repeated",
        )
    return done.output
