"""A configuration as a TOML document, and as the API shows it: by the rows of the table in `core/settings.py`. Pure."""

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias, TypeVar

from mpsd.core.errors import ConfigurationError, MpsdError
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.settings import SECTIONS, Quota, SettingRow, Settings, key_of, quota_rows, rows, rows_of
from mpsd.core.units import KIB, format_size

T = TypeVar("T")

Plain: TypeAlias = str | int | float | list[str] | None
"""The types of a setting's value in TOML or JSON."""


def parse(text: str) -> Settings:
    """Return the settings of a TOML document. Raises ConfigurationError instead of guessing."""
    return from_mapping(decode(text))


def decode(text: str) -> dict[str, object]:
    """Return the values of a TOML document. Raises ConfigurationError."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also raised for numbers and brackets by the thousand
        raise ConfigurationError(
            f"the configuration is not TOML: {error}", hint='fix that line; text is in quotes, as in users = "one"'
        ) from error


def from_mapping(document: Mapping[str, object]) -> Settings:
    """Return the settings of a parsed document. Raises ConfigurationError as `parse` does."""
    settings = Settings()
    for section, values in document.items():
        if section == "quota":
            quotas = _names_and_values(section, values).items()
            settings = replace(
                settings, quota={name: section_of(f"quota.{name}", Quota, each) for name, each in quotas}
            )
        elif section in SECTIONS:
            settings = replace(settings, **{section: section_of(section, SECTIONS[section], values)})
        else:
            raise _unknown("section", section, [*SECTIONS, "quota"])
    return settings


def section_of(section: str, kind: type[T], values: object, page: str = "mpsd.toml(5)") -> T:
    """Return the frozen section with these values, which a page describes. Raises ConfigurationError.

    A table without sections is one whose name is empty.
    """
    known = {row.name: row for row in rows_of(section, kind)}
    parsed: dict[str, object] = {}
    for name, value in _names_and_values(section, values).items():
        if name not in known:
            raise _unknown("setting", key_of(section, name), [row.key for row in known.values()])
        row = known[name]
        try:
            parsed[name] = row.parse(value)
        except (ValueError, MpsdError) as error:
            advice = f"{error.hint}. " if isinstance(error, MpsdError) else ""
            raise ConfigurationError(
                f"{row.key} = {value!r}: {error}",
                hint=f"{advice}The default is {render(row, row.default)}; {page} describes it.",
                limit=row.key,
            ) from error
    return kind(**parsed)


def _names_and_values(section: str, values: object) -> dict[str, object]:
    if not isinstance(values, dict):
        raise ConfigurationError(f"{section!r} is not a section", hint=f"write [{section}] on a line of its own")
    return values


def _unknown(kind: str, name: str, known: list[str]) -> ConfigurationError:
    keys = {each.rpartition(".")[2]: each for each in known}
    near = difflib.get_close_matches(name.rpartition(".")[2], keys, n=1)
    hint = f"did you mean {keys[near[0]]!r}?" if near else f"known {kind}s: " + ", ".join(known)
    return ConfigurationError(f"unknown {kind} {name!r}", hint=hint)


def plain(each: SettingRow, value: object) -> Plain:
    """Return a setting's value in a type of TOML and JSON, in the usual notation."""
    if each.unit == "octal":
        return f"{value:04o}"
    if each.unit == "bytes" and isinstance(value, int):
        return format_size(value) if value and value % KIB == 0 else value  # never rounded: it must parse back
    match value:
        case ActiveThreadPercentage():
            return float(value)
        case PinnedDeviceMemLimit() | Path() | StrEnum():
            return str(value)
        case tuple():
            found = [str(item) for item in value]
            return value[0] if len(value) == 1 and isinstance(value[0], int) else found
        case str() | int() | float() | None:
            return value
        case _:
            raise TypeError(f"{each.key} holds {value!r}, which no configuration file can")


def render(each: SettingRow, value: object) -> str:
    """Print a setting's value as in the configuration file; `absent` for None."""
    shown = plain(each, value)
    if isinstance(shown, bool):
        return str(shown).lower()
    if isinstance(shown, list):
        return "[" + ", ".join(map(quoted, shown)) + "]"
    if isinstance(shown, str):
        return quoted(shown)
    return "absent" if shown is None else str(shown)


def quoted(text: str) -> str:
    """Return text in TOML's notation, which is that of JSON except for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def document(settings: Settings) -> str:
    """Return a TOML document with exactly these settings, each with its help."""
    lines: list[str] = []
    for each in rows():
        section, name = each.key.split(".")
        if f"[{section}]" not in lines:
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        value = settings.socket if each.key == "api.socket" else getattr(getattr(settings, section), name)
        unit = f" Unit: {each.unit}." if each.unit else ""
        setting = f"# {name} =" if value is None else f"{name} = {render(each, value)}"
        lines.append(f"{setting}  # {each.help}{unit}")
    for name, quota in settings.quota.items():
        lines += ["", f"[quota.{quoted(name)}]"]
        for each in quota_rows():
            value = getattr(quota, each.name)
            if value is not None:
                lines.append(f"{each.name} = {render(each, value)}  # {each.help}")
    return "\n".join(lines) + "\n"


def effective(settings: Settings) -> dict[str, dict[str, Plain]]:
    """Return every setting with its value in force, in types of JSON."""
    tree: dict[str, dict[str, Plain]] = {}
    for each in rows():
        section, name = each.key.split(".")
        tree.setdefault(section, {})[name] = plain(each, getattr(getattr(settings, section), name))
    tree["api"]["socket"] = str(settings.socket)
    for name, quota in settings.quota.items():
        tree[f"quota.{name}"] = {each.name: plain(each, getattr(quota, each.name)) for each in quota_rows()}
    return tree
