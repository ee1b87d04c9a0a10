"""What makes foreign text harmless: on a terminal, and for whatever takes nothing but UTF-8.

Names of leases and of processes, and commands in a control daemon's log, are chosen by others. On a terminal, a control
character in one of them could hide a line, or forge one. So each answer passes `plain` on its way to a table and
`harmless_json` on its way out as JSON, and each line of mpsd's log passes one of them on its way to wherever that goes.

Paths, names, arguments and environments are bytes, and any bytes. Python's own word for those that are not UTF-8, a
surrogate, is one that JSON and SQLite refuse. So whatever comes from the kernel or from a directory is made text by
`text`, and whatever becomes JSON in mpsd does so by `mpsd/daemon/record/encoding.py`, which lets no other pass.
"""

import json
from typing import Final, TypeVar, cast

T = TypeVar("T")

SECRETS: Final = frozenset({"MPSD_LEASE_TOKEN"})
"""What of a lease's environment is for its processes alone, and never for a screen."""


def text(raw: bytes | str) -> str:
    r"""Return what others wrote as text that can be encoded: what is not UTF-8 in it stands there as `\xff`.

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
    """Return a text, or a decoded answer, with every character escaped that prints as anything but itself."""
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
    """Return a document in JSON as it is, with what does not print escaped; line ends between its parts may stay."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)
