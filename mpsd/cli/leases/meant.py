"""The command line that was meant where one names no share of a GPU, or a program that cannot be executed."""

import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from shlex import join, quote
from typing import Final

import click

from mpsd.cli.mistakes import words_of
from mpsd.cli.options import programs
from mpsd.core.errors import InvalidRequestError

_SHARE: Final = {"threads": ("--threads", "25"), "memory": ("--memory", "8GiB")}

_PART: Final = r"0?[.,][0-9]+|[0-9.]+%|1/[0-9]+"
"""A fraction without its option."""


def no_share(missing: Sequence[str]) -> InvalidRequestError:
    """Return the error of a request without a share of a GPU; `missing` are the parts of it, threads and memory."""
    context = click.get_current_context()
    command = [*(context.params.get("command") or context.params.get("arguments") or ())]
    words = words_of(context)[: -len(command) or None]
    options = words[:-1] if words[-1] == "--" else words
    if len(missing) == len(_SHARE) and (behind := _share_behind(command)):
        what, share = "the share of a GPU is missing: it stands behind COMMAND", behind
    elif len(missing) == len(_SHARE):
        is_first = len(command) > 1 and re.fullmatch(_PART, command[0])
        what, share = "the share of a GPU is missing", ["--fraction", command.pop(0) if is_first else "0.25"]
    else:
        what, share = f"{missing[0]} is missing", [*_SHARE[missing[0]]]
    place = options.index(str(context.info_name)) + 1
    line = [*options[:place], *share, *options[place:], *(["--", *command] if command else [])]
    return InvalidRequestError(what, hint=join(line), limit=missing[0])


def _share_behind(command: list[str]) -> list[str]:
    """Remove the options of a share from a command, and return them; none, if they are only a part of one."""
    found = [each for each in ("--fraction", "--threads", "--memory") if each in command[:-1]]
    if found not in (["--fraction"], ["--threads", "--memory"]):
        return []
    share = []
    for each in found:
        place = command.index(each)
        share += command[place : place + 2]
        del command[place : place + 2]
    return share if command else []


_INTERPRETERS: Final = {".py": "python", ".sh": "sh", ".pl": "perl", ".rb": "ruby", ".jl": "julia", ".R": "Rscript"}
_IN_A_SHELL: Final = frozenset({"cd", "source", ".", "export", "ulimit", "umask", "alias", "conda"})
"""What only a shell executes."""


def executable(command: Sequence[str]) -> str:
    """Return what to type instead of a command line whose program cannot be executed."""
    words = words_of(click.get_current_context())[: -len(command)]
    before = words if words[-1] == "--" else [*words, "--"]
    name, *rest = command
    is_file = Path(name).is_file()
    if is_file and (interpreter := _INTERPRETERS.get(Path(name).suffix)):
        return join([*before, interpreter, name, *rest])
    if is_file and "/" not in name and os.access(name, os.X_OK):
        return join([*before, f"./{name}", *rest])
    if is_file:
        return f"chmod +x {quote(name)}"
    if re.fullmatch(r"[A-Za-z_]\w*=.*", name, re.DOTALL):
        return join([*before, "env", *command])
    if name in _IN_A_SHELL or " " in name:
        return join([*before, "sh", "-c", name if " " in name else join(command), *(rest if " " in name else ())])
    near = get_close_matches(name, programs(), n=1)
    return join([*before, near[0], *rest]) if near and "/" not in name else f"command -v {quote(name)}"
