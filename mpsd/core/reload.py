"""Settings that change while mpsd runs: some apply at once, others wait for a restart.

`LiveSettings` is the one door to the settings in force. A part of mpsd that uses a setting reads `current` each time;
one that has to act on a change registers with `follow`. So a reload is handed on by nobody. The functions are pure.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from mpsd.core.settings import Settings, rows

RELOAD: Final = "mpsctl reload"
"""What to type to have mpsd read its configuration again; SIGHUP does the same."""


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """What a reload came to."""

    applied: tuple[str, ...]
    """The settings that changed, and hold from now on."""
    needs_restart: tuple[str, ...]
    """Those that changed, and will hold once mpsd is restarted."""
    unknown: str
    """Which names of users and groups are unknown; empty where none is."""


def changed(old: Settings, new: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the settings that differ: those that a reload applies, and those that need a restart of mpsd."""
    applied: list[str] = []
    waiting: list[str] = []
    for each in rows():
        section, name = each.key.split(".")
        if getattr(getattr(old, section), name) != getattr(getattr(new, section), name):
            (applied if each.reload else waiting).append(each.key)
    if old.quota != new.quota:
        applied.append("quota")
    return tuple(applied), tuple(waiting)


def reloaded(old: Settings, new: Settings) -> Settings:
    """Take from `new` what a reload may apply, and keep the rest of `old`."""
    applied, _ = changed(old, new)
    result = replace(old, names=new.names)
    for key in applied:
        if key == "quota":
            result = replace(result, quota=new.quota)
            continue
        section, name = key.split(".")
        part = replace(getattr(result, section), **{name: getattr(getattr(new, section), name)})
        result = replace(result, **{section: part})
    return result


class LiveSettings:
    """The settings in force, and who acts when a reload replaces them."""

    def __init__(self, settings: Settings) -> None:
        self.current = settings
        """The settings in force. Only `reload` replaces them."""
        self._followers: list[Callable[[Settings], None]] = []

    def follow(self, apply: Callable[[Settings], None]) -> None:
        """Have `apply` called with the settings now, and after each reload. Followers are called in this order."""
        self._followers.append(apply)
        apply(self.current)

    def reload(self, wanted: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Apply what a reload may apply; return the settings that were applied, and those that need a restart."""
        applied, waiting = changed(self.current, wanted)
        self.current = reloaded(self.current, wanted)
        for apply in self._followers:
            apply(self.current)
        return applied, waiting
