"""Settings that change while mpsd runs: some apply at once, others wait for a restart.

`LiveSettings` is the only access to the settings in force. A part of mpsd that uses a setting reads `current` each
time; a part that must act on a change registers with `follow`. No part passes a reload on to another. The functions are
pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mpsd.core.settings import Settings, rows
from mpsd.core.signal import Signal

RELOAD: Final = "mpsctl reload"
"""The command that makes mpsd read its configuration again; SIGHUP does the same."""


@dataclass(frozen=True, slots=True)
class ReloadResult:
    applied: tuple[str, ...]
    """The settings that changed, and are in force now, except where `daemons` has them."""
    needs_restart: tuple[str, ...]
    """The settings that changed, and take effect when mpsd is restarted."""
    daemons: Mapping[str, Sequence[str]]
    """The settings that a control daemon, by its name, gets when it next starts."""
    unknown: str
    """A sentence about unknown names of users and groups; empty where there is none."""


def changed(old: Settings, new: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the settings that differ: those that a reload applies, and those that need a restart of mpsd."""
    applied: list[str] = []
    waiting: list[str] = []
    for each in rows():
        section, name = each.key.split(".")
        if getattr(getattr(old, section), name) != getattr(getattr(new, section), name):
            (waiting if each.restart else applied).append(each.key)
    if old.quota != new.quota:
        applied.append("quota")
    return tuple(applied), tuple(waiting)


def reloaded(old: Settings, new: Settings) -> Settings:
    """Return `old` with the settings of `new` that a reload may apply."""
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
    """The settings in force, and the parts that act when a reload replaces them."""

    def __init__(self, settings: Settings) -> None:
        self.current = settings
        """The settings in force. Only `reload` replaces them."""
        self._replaced = Signal[Settings]()

    def follow(self, apply: Callable[[Settings], None]) -> None:
        """Call `apply` with the settings now, and after each reload. Followers are called in order of registration."""
        self._replaced.connect(apply)
        apply(self.current)

    def reload(self, wanted: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Apply the settings that a reload may apply; return these, and those that need a restart."""
        applied, waiting = changed(self.current, wanted)
        self.current = reloaded(self.current, wanted)
        self._replaced.send(self.current)
        return applied, waiting
