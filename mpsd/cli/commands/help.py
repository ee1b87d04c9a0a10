"""The command that explains the others."""

import click


def _names(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Offer the commands of mpsctl."""
    root = context.find_root()
    assert isinstance(root.command, click.Group)  # noqa: S101 - so it is
    return [each for each in root.command.list_commands(root) if each.startswith(incomplete)]


@click.command()
@click.argument("command", nargs=-1, shell_complete=_names)
@click.pass_context
def help(context: click.Context, command: tuple[str, ...]) -> None:  # noqa: A001 - the command's name
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
