"""The variables of leases in the environment of this very process, and what was there before."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mpsd.client.environment import foreign


class _Put:
    """What one lease has put into os.environ: the values before of the variables that it replaced, None for none."""

    def __init__(self, owner: object, before: dict[str, str | None]) -> None:
        self.owner = owner
        self.before = before


_stack: Final[list[_Put]] = []
"""The last one is in force."""

_lock = threading.RLock()
"""A thread may take it again, such as a signal handler that ends a lease while another is ended."""


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def owners() -> list[object]:
    """Return those whose variables are here, the one in force first."""
    with _lock:
        return [each.owner for each in reversed(_stack)]


def inherited(name: str) -> str:
    """Return a variable with which this program was started, by the kernel's word; empty where it had none."""
    try:
        variables = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    beginning = f"{name}=".encode()
    return next((os.fsdecode(each.removeprefix(beginning)) for each in variables if each.startswith(beginning)), "")


def put(owner: object, variables: Mapping[str, str]) -> None:
    """Put a lease's variables into os.environ, and take away those of another job."""
    with _lock:
        changed: dict[str, str | None] = {**variables, **dict.fromkeys(foreign(os.environ, variables))}
        # First noted: `take_back` undoes what an exception such as KeyboardInterrupt leaves half done.
        _stack.append(_Put(owner, {name: os.environ.get(name) for name in changed}))
        _replace(changed)


def take_back(owner: object) -> None:
    """Set os.environ as it was before; beneath a later lease, that is done when that one is taken back.

    Nothing for an owner that has put nothing there.
    """
    with _lock:
        place = next((place for place, each in enumerate(_stack) if each.owner is owner), None)
        if place is None:
            return
        if place == len(_stack) - 1:
            _replace(_stack[place].before)
        else:
            _stack[place + 1].before |= _stack[place].before
        del _stack[place]


def _replace(variables: Mapping[str, str | None]) -> None:
    """Set variables, or remove those that are None."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
