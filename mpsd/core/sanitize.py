"""What makes foreign text harmless on a terminal.

Names of leases and of processes, and commands in a control daemon's log, are chosen by others. On a terminal, a control
character in one of them could hide a line, or forge one. So each answer passes `plain` on its way to a table and
`harmless_json` on its way out as JSON, and each line of mpsd's log passes one of them on its way to wherever that goes.
"""

import json
from typing import TypeVar, cast

T = TypeVar("T")


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
