"""Functions that make foreign text harmless, on a terminal and for outputs that accept only UTF-8.

Other users choose the names of leases and processes, and the commands in a control daemon's log. On a terminal, a
control character in such a text could hide a line, or forge one. Each answer therefore passes `plain` on its way to a
table and `harmless_json` on its way out as JSON, and each line of mpsd's log passes one of them on its way to any
output.

Paths, names, arguments and environments are bytes, and can be any bytes. Python represents bytes that are not UTF-8 as
surrogates, which JSON and SQLite refuse. `text` therefore converts everything that comes from the kernel or from a
directory, and mpsd writes JSON only through `mpsd/system/files/encoding.py`, which accepts nothing else.
"""

import json
from typing import Final, TypeVar, cast

T = TypeVar("T")

SECRETS: Final = frozenset({"MPSD_LEASE_TOKEN"})
"""The variables of a lease's environment that only its processes may see, and that no output shows."""


def text(raw: bytes | str) -> str:
    r"""Return foreign text as text that can be encoded: bytes that are not UTF-8 become `\xff` and the like.

    A text may have been decoded with surrogates, as Python decodes paths and arguments.
    """
    if isinstance(raw, bytes):
        return raw.decode("utf-8", "backslashreplace")
    if raw.isascii():
        return raw
    return raw.encode("utf-8", "surrogateescape" if _is_escaped(raw) else "backslashreplace").decode(
        "utf-8", "backslashreplace"
    )


def _is_escaped(value: str) -> bool:
    """Tell whether each surrogate in a text stands for a byte, as `os.fsdecode` leaves them."""
    return all(not "\ud800" <= each <= "\udfff" or "\udc80" <= each <= "\udcff" for each in value)


def plain(value: T) -> T:
    """Return a text, or a decoded answer, with every character escaped that does not print as itself."""
    match value:
        case str():
            safe = value if value.isprintable() else "".join(map(_escaped, value))
            return cast("T", safe)
        case list():
            return cast("T", [plain(each) for each in value])
        case dict():
            return cast("T", {plain(key): plain(each) for key, each in value.items()})
        case _:
            return value


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def harmless_json(text: str) -> str:
    """Return a JSON document with unprintable characters escaped; line ends between its parts may stay."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)
