"""Parsers for the values of settings: a TOML value in, a typed value out.

Each raises ValueError, or an InvalidRequestError, with words that complete a sentence about the value.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Final, TypeVar

from msgspec import Struct

from mpsd.core.capabilities import parse as parse_capabilities
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.units import parse_duration, parse_size

E = TypeVar("E", bound=StrEnum)

_HIGHEST_PORT: Final = 65535

_MOST: Final = 2**31 - 1
"""The largest number that any setting can sensibly have."""


class UserNames(Struct, frozen=True):
    """The numbers of the users and groups in the configuration, as the user database had them when it was read.

    `unknown` has the names that it did not have.
    """

    uids: Mapping[str, int] = {}
    gids: Mapping[str, int] = {}
    unknown: tuple[str, ...] = ()


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("it is not text")
    if "\0" in value:
        raise ValueError("it contains a NUL character, which paths and names cannot contain")
    return value


def path(value: object) -> Path:
    """Accept an absolute path."""
    found = Path(text(value))
    if not found.is_absolute():
        raise ValueError("it is not an absolute path")
    return found


def flag(value: object) -> bool:
    """Accept true or false."""
    if not isinstance(value, bool):
        raise ValueError("it is not true or false")
    return value


def optional_path(value: object) -> Path | None:
    """Accept an absolute path, or an empty text for none."""
    return None if value == "" else path(value)


def optional_address(value: object) -> str:
    """Take a numeric address with a port, such as 127.0.0.1:9410 or [::1]:9410, or an empty text for none."""
    found = text(value)
    if found:
        address_of(found)
    return found


def address_of(written: str) -> tuple[str, int]:
    """Return the host and the port of an address. Raises ValueError."""
    host, colon, port = written.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ip_address(host[1:-1] if is_bracketed else host)
    except ValueError:
        address = None
    if not colon or address is None or (address.version == 6) != is_bracketed:  # noqa: PLR2004 - IPv6
        raise ValueError("it is not a numeric address with a port, such as 127.0.0.1:9410 or [::1]:9410")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= _HIGHEST_PORT):
        raise ValueError(f"its port is not a number from 1 to {_HIGHEST_PORT}")
    return str(address), int(port)


def octal_mode(value: object) -> int:
    """Accept the permissions of a file, in octal."""
    digits = text(value)
    try:
        mode = int(digits, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:  # noqa: PLR2004 - the nine permission bits
        raise ValueError('it is not an octal mode such as "0660"')
    return mode


def seconds(value: object) -> float:
    """Accept a number of seconds above zero."""
    if not isinstance(value, (int, float)):
        raise ValueError("it is not a number of seconds")
    return parse_duration(value)


def whole(least: int, most: int) -> Callable[[object], int]:
    """Return a parser that accepts a whole number of this range."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"it is not a whole number from {least} to {most}")
        return value

    return parse


count: Final = whole(1, _MOST)
priority: Final = whole(-100, 100)


def size(value: object) -> int:
    """Accept a size, or 0."""
    if not isinstance(value, (str, int)):
        raise ValueError("it is not a size")
    return 0 if value in {0, "0"} and not isinstance(value, bool) else parse_size(value)


def percentage(value: object) -> ActiveThreadPercentage:
    """Accept a percentage in (0, 100]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("it is not a number")
    return ActiveThreadPercentage.parse(value)


def mem_limit(value: object) -> PinnedDeviceMemLimit | None:
    if not isinstance(value, (str, int)):
        raise ValueError("it is not a size")
    return PinnedDeviceMemLimit.parse(value)


def names(value: object) -> tuple[str, ...]:
    """Accept a list of names."""
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ValueError('it is not a list of names such as ["alice", "%staff"]')
    return tuple(value)


def capabilities(value: object) -> tuple[str, ...]:
    found = names(value)
    parse_capabilities(found)
    return found


def positive(value: object) -> float:
    """Accept a number above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MOST:
        raise ValueError(f"it is not a number above 0 and up to {_MOST}")
    return float(value)


def factor(value: object) -> float:
    """Accept a factor of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= 1000:  # noqa: PLR2004
        raise ValueError("it is not a factor from 1.0 to 1000")
    return float(value)


def choice(choices: type[E]) -> Callable[[object], E]:
    """Return a parser that accepts one of these words."""

    def parse(value: object) -> E:
        try:
            return choices(text(value))
        except ValueError:
            raise ValueError("it is not one of " + ", ".join(f'"{choice}"' for choice in choices)) from None

    return parse
