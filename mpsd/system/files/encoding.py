"""How values become JSON, and are read back: the log, answers, stores and mpsd's small files.

Python's surrogates stand for bytes that are not UTF-8, for example in a path or a name, and JSON cannot represent them.
An encoder that met one would fail.

A small file is read by `read` or `load`, and replaced by `store`. Its owner decides what a damaged one stands for: no
record of this boot (`Record`); `hold`, which it may have said (an operator's command); no quarantine, or no saved
compute mode, and it is set aside; an end that begins anew; a claim that kubelet ends.
"""

from pathlib import Path
from typing import Final, TypeVar

import msgspec

from mpsd.core.model import Known, Reading, Unknown
from mpsd.core.sanitize import text
from mpsd.system.files import atomic_file

T = TypeVar("T")

NOT_UNDERSTOOD: Final = (ValueError, OverflowError, RecursionError)
"""The errors of decoding invalid data; msgspec raises ValueError, and so does text that is not UTF-8."""


def _as_text(value: object) -> str:
    return text(str(value))


_encode: Final = msgspec.json.Encoder(enc_hook=_as_text).encode


def to_json(value: object) -> bytes:
    """Return a value as JSON, with every text in it made valid by `text`; values without a JSON form become text."""
    try:
        return _encode(value)
    except UnicodeEncodeError:  # rare, so that other values cost nothing more
        return _encode(_encodable(msgspec.to_builtins(value, enc_hook=_as_text)))


def _encodable(value: object) -> object:
    match value:
        case str():
            return text(value)
        case dict():
            return {_encodable(key): _encodable(each) for key, each in value.items()}
        case list() | tuple():
            return [_encodable(each) for each in value]
        case _:
            return value


class DamagedError(ValueError):
    """A file has not the content that mpsd gives it."""


def read(path: Path, kind: type[T]) -> T | None:
    """Return the content of a JSON file; None where there is none. Raises OSError, and DamagedError."""
    raw = atomic_file.read(path)
    try:
        return None if raw is None else msgspec.json.decode(raw, type=kind)
    except NOT_UNDERSTOOD as error:
        raise DamagedError(text(str(error))) from None


def load(path: Path, kind: type[T]) -> Reading[T] | None:
    """Return the content of a JSON file; None where there is none, and Unknown where it cannot be read or parsed.

    No file keeps mpsd from working: the caller decides what a damaged one stands for, and logs it.
    """
    try:
        found = read(path, kind)
    except OSError as error:
        return Unknown(f"{text(str(path))} cannot be read: {error.strerror}")
    except DamagedError as error:
        return Unknown(f"{text(str(path))} cannot be parsed: {error}")
    return None if found is None else Known(found)


def store(path: Path, value: object, *, lasting: bool = False) -> None:
    """Replace a JSON file in one step. Raises OSError and then changes nothing.

    With `lasting`, the file is on the disk when this returns and survives a loss of power.
    """
    atomic_file.write(path, to_json(value), lasting=lasting)
