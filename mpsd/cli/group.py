"""The commands of `mpsctl`, each of which is imported when it is called."""

import importlib
from typing import Final

import click

from mpsd import __version__
from mpsd.cli.options import refuse_empty
from mpsd.client import Api
from mpsd.client.connection import SOCKET

_COMMANDS: Final = {
    "admit": ("admit", "attach", "claim", "hand-over", "release", "renew", "run", "shell"),
    "cluster": ("cluster",),
    "container": ("cdi", "container"),
    "doctor": ("doctor",),
    "events": ("events", "explain"),
    "lists": ("clients", "config", "daemons", "gpus", "leases", "show", "usage"),
    "metrics": ("metrics",),
    "operate": ("drain", "end", "hold", "pardon", "reload", "reset", "restart", "resume"),
    "service": ("service",),
    "status": ("status", "top", "web"),
    "verify": ("verify",),
}
"""The commands in each module of mpsd.cli.commands, under their own names (with `_` for `-`)."""

_MODULES: Final = {name: f"mpsd.cli.commands.{module}" for module, names in _COMMANDS.items() for name in names}

_HELP: Final = "help"
_NAMES: Final = sorted((*_MODULES, _HELP))


def _no_such_command(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, _NAMES, n=3)
    suggestion = f" Did you mean {' or '.join(near)}?" if near else " See: mpsctl --help"
    return f"No such command {name!r}.{suggestion}"


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
            raise click.UsageError(f"{found.command_path} has no commands.")
        _, child, _ = group.resolve_command(found, [name])
        assert child is not None  # noqa: S101 - resolve_command raises where there is none
        found = click.Context(child, found, name)
    click.echo(found.get_help())


class _Commands(click.Group):
    """The commands, each imported when it is first used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_NAMES)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown name, raise UsageError with similar names."""
        if args[0] not in _NAMES and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(_no_such_command(args[0]), ctx)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name == _HELP:
            return help_
        if cmd_name not in _MODULES:
            return None
        module = importlib.import_module(_MODULES[cmd_name])
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        refuse_empty(command)
        return command


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
    context.obj = context.with_resource(Api(socket, trusted=trusted))
