"""The commands by which root starts a program as another user, which then has no part in root's lease."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_ALWAYS: Final[tuple[str, ...]] = ()
_CHANGERS: Final[Mapping[str, tuple[str, ...]]] = {
    "su": _ALWAYS,
    "runuser": _ALWAYS,
    "sudo": _ALWAYS,
    "doas": _ALWAYS,
    "run0": _ALWAYS,
    "pkexec": _ALWAYS,
    "gosu": _ALWAYS,
    "su-exec": _ALWAYS,
    "setuidgid": _ALWAYS,
    "s6-setuidgid": _ALWAYS,
    "setpriv": ("--reuid", "--ruid", "--euid"),
    "chroot": ("--userspec",),
    "chpst": ("-u", "-U"),
}
"""By command, the options that make it change the user, if it does not always do so."""


def warning(command: Sequence[str]) -> str:
    """Warn about a command of root that starts a program as another user; empty for any other command."""
    name = Path(command[0]).name
    options = _CHANGERS.get(name)
    if options is None or (options and not any(each.startswith(options) for each in command[1:])):
        return ""
    return (
        f"a program that {name} starts as another user has no part in this lease: it gets error 46, or the whole GPU"
        " without limits; start it by mpsctl run --user NAME -- PROGRAM"
    )
