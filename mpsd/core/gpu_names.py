"""The names of a GPU, which are those of its control daemon too: `0`, `gpu0`, its UUID, or a unique beginning. Pure."""

import re
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from mpsd.core.errors import InvalidRequestError
from mpsd.core.units import briefly

Numbered: TypeAlias = tuple[int, str | None]
"""The index of a GPU, and its UUID, which is unknown of a GPU that cannot be read."""

_BY_INDEX: Final = re.compile(r"(?:gpu ?)?(0|[1-9]\d*)", re.ASCII)
_UUID: Final = re.compile(r"gpu-.+", re.ASCII)
"""The beginning of a UUID, of at least one digit, as in CUDA_VISIBLE_DEVICES. (That of a MIG device is `MIG-`.)"""


def find(meant: str, gpus: Iterable[Numbered]) -> int | None:
    """Return the index of the GPU that a text names, in any case of its letters; None where there is none.

    Raises InvalidRequestError where the beginning of a UUID names several.
    """
    text = meant.strip().lower()
    by_index = _BY_INDEX.fullmatch(text)
    is_uuid = _UUID.fullmatch(text) is not None
    found = [
        (index, uuid)
        for index, uuid in gpus
        if (by_index and by_index[1] == str(index)) or (is_uuid and uuid and uuid.lower().startswith(text))
    ]
    if len(found) > 1:
        uuids = ", ".join(f"{uuid} (GPU {index})" for index, uuid in found)
        detail = f"{briefly(meant)} is the beginning of several UUIDs"
        raise InvalidRequestError(detail, hint=f"choose {uuids}", limit="gpu")
    return found[0][0] if found else None


def is_uuid(meant: str) -> bool:
    """Tell whether a text has the form of a UUID, or of the beginning of one."""
    return _UUID.fullmatch(meant.strip().lower()) is not None


def is_name(meant: str) -> bool:
    """Tell whether a text has the form of such a name."""
    return is_uuid(meant) or _BY_INDEX.fullmatch(meant.strip().lower()) is not None


def unknown(meant: str, gpus: Sequence[Numbered]) -> tuple[str, str]:
    """Return the refusal of a text that names no GPU, and the names that there are."""
    if not gpus:
        return f"there is no GPU {briefly(meant)}", "no GPU of this node could be read; for the reason: mpsctl gpus"
    names = ", ".join(f"{index} (gpu{index})" for index, _ in gpus)
    return f"there is no GPU {briefly(meant)}", f"choose {names}, or a UUID: mpsctl gpus -o wide"
