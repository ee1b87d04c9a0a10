"""What becomes of settings that changed while mpsd runs: some apply at once, others wait for a restart. Pure."""

from dataclasses import replace

from mpsd.core.settings import Settings, rows


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
    result = old
    for key in applied:
        if key == "quota":
            result = replace(result, quota=new.quota)
            continue
        section, name = key.split(".")
        part = replace(getattr(result, section), **{name: getattr(getattr(new, section), name)})
        result = replace(result, **{section: part})
    return result
