"""The program `mpsctl`: its start and its end.

Imports are nearly the whole cost of a command, and those of click most of it. Each command therefore imports what it
needs when it is called.
"""

import io
import os
import signal
import sys
from typing import NoReturn

from mpsd import find_own_libraries_first


def main() -> NoReturn:
    """Run the program and exit at once: the interpreter's shutdown would take a tenth of `mpsctl status`.

    All output is written by then: `click.echo` flushes.
    """
    find_own_libraries_first(os.environ.get("PYTHONPATH", ""))
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
    import click

    from mpsd.cli.command import SignalledError, say
    from mpsd.cli.group import mpsctl
    from mpsd.core.errors import MpsdError

    try:
        status = mpsctl(prog_name="mpsctl", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except click.Abort:  # Ctrl-D at a question
        return 1
    except (click.UsageError, MpsdError) as error:
        from mpsd.cli import mistakes  # its imports take longer than those of most commands

        refusal = mistakes.with_command(error) if isinstance(error, MpsdError) else mistakes.refusal(error)
        say(refusal)
        return refusal.exit_code
    except SignalledError as signalled:
        signalled.end()
    except OSError as error:
        click.echo(f"mpsctl: cannot write the answer: {error.strerror}", err=True)
    return 1


if __name__ == "__main__":
    main()
