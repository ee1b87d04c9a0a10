"""The demonstration of `mpsd demo`: a simulated node, a shell in which mpsctl finds it, and five steps to try."""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from mpsd.cli.terminal import interactive_shell
from mpsd.core.errors import ConfigurationError, InternalError
from mpsd.core.settings import Settings
from mpsd.simulator import launch
from mpsd.system.processes import foreground

LOG: Final = "mpsd.log"
"""The file of the log in the node's directory, so that the demonstration is quiet."""

STEPS: Final = {
    "mpsctl status": "shows the node: its faults, and the command for each",
    "mpsctl run --fraction 0.25 -- gpu-client": "runs a client of MPS on a quarter of a GPU; `help` and `exit` work",
    "mpsctl run --fraction 0.5 --name job -- sleep 600 &": "runs a job under a lease on half of a GPU",
    "mpsctl leases": "shows who has which share of which GPU",
    "mpsctl release job": "ends the lease of the job",
}
"""The commands to try, and what each does: README.md has the same."""

_TRY: Final = "".join(f" {number}. {each}\n      {does}\n" for number, (each, does) in enumerate(STEPS.items(), 1))

_IN_A_SHELL: Final = f"""\
A simulated node with two GPUs runs until you leave this shell. Try:

{_TRY}
`mpsctl help` lists all commands. `exit` ends the node and removes its files.
"""

_ELSEWHERE: Final = f"""\
A simulated node with two GPUs is running. In a second terminal:

    export MPSD_SOCKET={{socket}} PATH={{programs}}:$PATH

{_TRY}
Ctrl-C ends the node and removes its files."""

_GOODBYE: Final = """\
The simulated node has ended, and its files are removed. On a node with a GPU:
  sudo mpsd check    shows the settings, and where the driver was found
  sudo mpsd run      supervises MPS there; as a service: docs/install.md
"""


_PROGRAMS: Final = "bin"
"""The directory of the programs that the steps name, in the node's directory."""


def write_programs(root: Path) -> None:
    """Write the programs that the steps name, as wrappers that work wherever mpsd is installed."""
    (root / _PROGRAMS).mkdir()
    for name, command in {
        "mpsd": (sys.executable, "-P", "-m", "mpsd"),
        "mpsctl": (sys.executable, "-P", "-m", "mpsd.cli.main"),
        "gpu-client": launch.program("client"),
    }.items():
        path = root / _PROGRAMS / name
        path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        path.chmod(0o755)


def what_to_try(root: Path) -> str:
    """Return the steps for another terminal."""
    socket = Settings().under(root).socket
    return _ELSEWHERE.format(socket=shlex.quote(f"{socket}"), programs=shlex.quote(f"{root / _PROGRAMS}"))


def in_a_shell(root: Path, environment: Mapping[str, str]) -> int:
    """Run the node beside a shell, print the steps, and return the shell's exit status."""
    write_programs(root)
    variables = {
        "MPSD_SOCKET": f"{Settings().under(root).socket}",
        "PATH": f"{root / _PROGRAMS}:{environment.get('PATH', os.defpath)}",
    }
    node = (sys.executable, "-P", "-m", "mpsd", "demo", "--until-eof", f"{root}")
    with foreground.beside(node, environment) as printed:
        if not printed.read(1):
            raise InternalError("the simulated node did not start", hint=f"its log:\n{_log(root)}")
        click.echo(_IN_A_SHELL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        command, more = interactive_shell("mpsd demo", variables, environment, root)
        try:
            status = foreground.run(command, {**environment, **variables, **more})
        except OSError as error:
            raise ConfigurationError(
                f"the shell {command[0]} cannot be started: {error.strerror}",
                hint="set SHELL to another, or use mpsd demo --no-shell",
            ) from None
    with contextlib.suppress(OSError):  # the terminal is gone, which ended the shell
        click.echo(f"\n{_GOODBYE}", nl=False)
    return status


def _log(root: Path) -> str:
    try:
        return (root / LOG).read_text(errors="replace")
    except FileNotFoundError:
        return "there is none"
