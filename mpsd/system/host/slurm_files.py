"""Slurm's configuration files, with those that they include. A hook reads them at each job, so this imports little."""

import os
from collections.abc import Iterator
from typing import Final

from mpsd.core.errors import ConfigurationError
from mpsd.core.slurm import configuration

_DEPTH: Final = 8
"""How many files may include one another."""


def text(path: str) -> str:
    """Return the text of a file, with the files that it includes in their places; empty where there is none.

    An included relative path is one beside this file. Raises ConfigurationError for a file that cannot be read.
    """
    folder, name = os.path.split(path)
    return "\n".join(_lines(folder, name, 0))


def _lines(folder: str, name: str, depth: int) -> Iterator[str]:
    path = os.path.join(folder, name)  # noqa: PTH118 - pathlib would take longer than all else
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - likewise
            found = file.read()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}", hint="call this as root") from None
    for line in configuration.logical_lines(found):
        further = configuration.included(line)
        if further is None:
            yield line
        elif depth < _DEPTH:
            yield from _lines(folder, further, depth + 1)
