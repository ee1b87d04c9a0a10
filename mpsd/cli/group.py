"""The commands of `mpsctl`, each of which is imported when it is called."""

import importlib
from collections.abc import Iterable, Mapping
from typing import Final

import click

from mpsd import __version__
from mpsd.cli.groups import Commands, add_examples
from mpsd.cli.options import refuse_empty
from mpsd.client import Client
from mpsd.client.connection import SOCKET

SECTIONS: Final = {
    "See": {
        "status": "status",
        "gpus": "lists",
        "leases": "lists",
        "clients": "lists",
        "daemons": "lists",
        "top": "status",
        "web": "status",
        "events": "events",
        "explain": "events",
        "usage": "lists",
        "config": "lists",
        "doctor": "doctor",
        "help": "",
    },
    "Take": {
        "run": "admit",
        "job": "job",
        "shell": "admit",
        "admit": "admit",
        "show": "lists",
        "verify": "verify",
        "renew": "admit",
        "release": "admit",
        "attach": "admit",
        "claim": "admit",
        "hand-over": "admit",
    },
    "Operate": {
        "hold": "operate",
        "drain": "operate",
        "resume": "operate",
        "restart": "operate",
        "reset": "operate",
        "reload": "operate",
        "end": "operate",
        "pardon": "operate",
        "service": "service",
    },
    "Integrate": {
        "container": "container",
        "cdi": "container",
        "cluster": "cluster",
        "slurm": "slurm",
        "metrics": "metrics",
    },
}
"""The commands by what they are for, each with its module of mpsd.cli.commands, where its name has `_` for `-`."""

_MODULES: Final = {name: module for commands in SECTIONS.values() for name, module in commands.items()}

NAMES: Final = (*_MODULES,)
LOOKS: Final = frozenset((*SECTIONS["See"], "show", "verify", "metrics"))
"""The commands that change nothing."""

_HELP: Final = "help"


def _commands(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Offer the commands of mpsctl."""
    root = context.find_root()
    assert isinstance(root.command, click.Group)  # noqa: S101 - the root is always a group
    return [each for each in root.command.list_commands(root) if each.startswith(incomplete)]


@click.command(_HELP)
@click.argument("command", nargs=-1, shell_complete=_commands)
@click.pass_context
def help_(context: click.Context, command: tuple[str, ...]) -> None:
    """Show the help of mpsctl, or of COMMAND."""
    found = context.find_root()
    for name in command:
        group = found.command
        if not isinstance(group, click.Group):
            raise click.UsageError(f"{found.command_path} has no commands")
        _, child, _ = group.resolve_command(found, [name])
        assert child is not None  # noqa: S101 - resolve_command raises where there is none
        found = click.Context(child, found, name)
    click.echo(found.get_help())


class _Commands(Commands):
    """The commands, each imported when it is first used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        if cmd_name == _HELP:
            command: click.Command = help_
        else:
            module = importlib.import_module(f"mpsd.cli.commands.{_MODULES[cmd_name]}")
            command = getattr(module, cmd_name.replace("-", "_"))
            refuse_empty(command)
        add_examples(command, f"{ctx.command_path} {cmd_name}")
        return command

    def sections(self, ctx: click.Context) -> Mapping[str, Iterable[str]]:  # noqa: ARG002 - as above
        return SECTIONS


EXIT_STATUS: Final = {
    0: "Success; for status: the node is healthy; for doctor: no check failed",
    1: "Any other error",
    2: "Usage error",
    65: "The request can never fit on this node; retrying does not help",
    69: "mpsd is unreachable",
    75: "The request does not fit now",
    77: "Refused by policy or for lack of permission",
    78: "The configuration is invalid",
}
"""The exit statuses of mpsctl, for `mpsctl --help` and mpsctl(1)."""

_EPILOG: Final = "\n".join(
    (
        "\b",
        "Exit status:",
        *(f"    {status:<2}  {meaning}" for status, meaning in EXIT_STATUS.items()),
        "",
        "\b",
        "Shell completion for bash (also zsh_source and fish_source):",
        '    eval "$(_MPSCTL_COMPLETE=bash_source mpsctl)"',
        "",
    )
)


@click.group(cls=_Commands, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--socket",
    metavar="PATH",
    envvar="MPSD_SOCKET",
    default=SOCKET,
    show_envvar=True,
    show_default=True,
    help="The socket of mpsd.",
)
@click.option(
    "--trust-uid",
    "trusted",
    metavar="UID",
    type=click.IntRange(0, 2**32 - 2),
    multiple=True,
    envvar="MPSD_TRUST_UID",
    show_envvar=True,
    help="Trust an mpsd of this user too; may be repeated. An mpsd of root or of the caller is always trusted.",
)
@click.version_option(__version__, prog_name="mpsctl")
@click.pass_context
def mpsctl(context: click.Context, socket: str, trusted: tuple[int, ...]) -> None:
    """Inspect NVIDIA MPS on this node, and take out leases on its GPUs."""
    context.obj = context.with_resource(Client(socket, trusted=trusted))
