"""The program `mpsctl`: its start and its end.

The start is nearly its whole cost, so it imports click, json, socket and os, and nothing heavier. `mpsctl status`
without options does not even import click, which takes longer than all the rest; tests/cli checks that.
"""

import gc
import io
import os
import signal
import sys
from typing import Final, NoReturn

from mpsd import find_own_libraries_first

_READ_BY_CLICK: Final = frozenset({"MPSD_TRUST_UID", "_MPSCTL_COMPLETE"})
"""Environment variables that change the meaning of a command without options."""


def main() -> NoReturn:
    """Run the program and exit at once: the interpreter's shutdown would cost more than the answer.

    All output is written by then: `click.echo` flushes.
    """
    find_own_libraries_first(os.environ.get("PYTHONPATH", ""))
    gc.disable()  # a short program makes no garbage, and collections would delay its imports
    _end_by_signals()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that this terminal cannot show is not an error
    os._exit(_outcome())


def _end_by_signals() -> None:
    """Let signals end it silently and at once, as they end other programs, instead of Python's handling.

    That applies to Ctrl-C (130 in a shell), and to a closed reader (`mpsctl leases | head -1`). The program that
    `mpsctl run` executes gets its signals unchanged.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _outcome() -> int:
    """Run the command, and return its exit status; an error of mpsd is printed as a sentence, its code, and a hint."""
    from mpsd.core.errors import MpsdError

    try:
        if sys.argv[1:] == ["status"] and _READ_BY_CLICK.isdisjoint(os.environ):
            status = _status()
            if status is not None:
                return status

        from mpsd.cli.group import mpsctl

        mpsctl(prog_name="mpsctl")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except MpsdError as error:
        from mpsd.cli.command import say

        say(error)
        return error.exit_code
    except OSError as error:
        import click

        click.echo(f"mpsctl: cannot write the answer: {error.strerror}", err=True)
    return 1


def _status() -> int | None:
    """Run `mpsctl status` without options; None for an answer that only the full command can explain."""
    from datetime import UTC, datetime

    from mpsd.cli import tables, views
    from mpsd.cli.api import SOCKET, Api
    from mpsd.core.sanitize import plain

    with Api(os.environ.get("MPSD_SOCKET") or SOCKET) as api:
        node = plain(api.status())
    try:
        text, healthy = views.status(node, datetime.now(UTC), tables.look_of()), node["healthy"]
    except KeyError:
        return None
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    return 0 if healthy else 1


if __name__ == "__main__":
    main()
