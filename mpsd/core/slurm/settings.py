"""The settings of `mpsd-slurm`: one table, read from a flat TOML file.

A hook reads them at each task, so this module imports little.
"""

import json
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from mpsd.core.errors import ConfigurationError

FILE: Final = "/etc/mpsd/slurm.toml"


class Settings(NamedTuple):
    socket: str = "/run/mpsd/mpsd.sock"
    """mpsd's socket."""
    state_dir: str = "/run/mpsd-slurm"
    """Directory in which Prolog leaves the leases of jobs."""
    comment: bool = False
    """Whether the request of a job is read from its comment: mpsd.lua must then write it, since users write comments
    too."""
    without_mpsd: str = "fail"
    """What becomes of a job while mpsd does not answer: `fail`, or `run` without a lease."""
    several_users: str = "wait"
    """What becomes of a job whose GPU serves another user: it waits for `wait` seconds, or it may `fail` at once."""
    wait: float = 15.0
    """Seconds for which Prolog waits for room, and for an mpsd that restarts. Slurm counts them against
    PrologEpilogTimeout and BatchStartTimeout."""
    grace: float = 15.0
    """Seconds for which Epilog waits until the lease of a job has ended."""
    gres_conf: str = ""
    """Slurm's gres.conf; empty: beside slurm.conf."""
    node: str = ""
    """The name of this node in Slurm, for the service; empty: the host's, without its domain."""
    look: float = 60.0
    """Seconds between two looks of the service at Slurm."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("it is not text")
    return value


def _path(value: object) -> str:
    if not _text(value).startswith("/"):
        raise ValueError("it is not an absolute path")
    return _text(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("it is not true or false")
    return value


_LONGEST: Final = 600.0


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LONGEST:
        raise ValueError(f"it is not a number of seconds up to {_LONGEST:g}")
    return float(value)


def _one_of(*words: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in words:
            raise ValueError(f"it is not {' or '.join(words)}")
        return str(value)

    return parse


PARSERS: Final[Mapping[str, Callable[[object], object]]] = {
    "socket": _path,
    "state_dir": _path,
    "comment": _flag,
    "without_mpsd": _one_of("fail", "run"),
    "several_users": _one_of("wait", "fail"),
    "wait": _seconds,
    "grace": _seconds,
    "gres_conf": _path,
    "node": _text,
    "look": _seconds,
}


def parse(document: str) -> Settings:
    """Return the settings of a TOML document. Raises ConfigurationError."""
    values = _plain(document)
    if values is None:
        import tomllib  # noqa: PLC0415 - it takes a quarter of a hook's time

        try:
            values = tomllib.loads(document)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"slurm.toml is not TOML: {error}", hint="fix that line; text is in quotes"
            ) from error
    parsed: dict[str, object] = {}
    for name, value in values.items():
        if name not in PARSERS:
            raise ConfigurationError(f"slurm.toml: unknown setting {name!r}", hint=f"known: {', '.join(PARSERS)}")
        try:
            parsed[name] = PARSERS[name](value)
        except ValueError as error:
            raise ConfigurationError(
                f"slurm.toml: {name} = {value!r}: {error}", hint=f"the default is {getattr(Settings(), name)!r}"
            ) from error
    return Settings()._replace(**parsed)  # type: ignore[arg-type]  # each parser returns its setting's type


def _plain(document: str) -> dict[str, object] | None:
    """Return the values of a document whose values are all like those of JSON; None for any other one."""
    found: dict[str, object] = {}
    for line in document.splitlines():
        name, _, value = line.partition("=")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if name.strip() in found:
            return None
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            return None
    return found
