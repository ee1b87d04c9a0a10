"""The event loop of mpsd, and the error for a machine on which none can be made."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from mpsd.core.errors import ConfigurationError

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, cancel the tasks that remain, and return its result.

    Raises ConfigurationError when no loop can be made.
    """
    with asyncio.Runner(loop_factory=partial(_make, main)) as runner:
        return runner.run(main)


def _make(main: Coroutine[Any, Any, T]) -> asyncio.AbstractEventLoop:
    try:
        return asyncio.new_event_loop()
    except OSError as error:
        main.close()  # the coroutine has not begun
        hint = "raise mpsd's limit of file descriptors (LimitNOFILE=, ulimit -n), or give the machine more memory"
        raise ConfigurationError(f"cannot create an event loop: {error.strerror or error}", hint=hint) from error
