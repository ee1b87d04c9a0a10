"""Groups of commands: their help, which ends with an example, and the error of a word that is none of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import click

from mpsd.cli.examples import EXAMPLES

_UNCUT: Final = 1000
"""More characters than any first sentence has."""


class UnknownCommandError(click.UsageError):
    """The first word is no command of this group."""

    def __init__(self, words: Sequence[str], context: click.Context) -> None:
        super().__init__(f"there is no command {words[0]!r}", context)
        self.context = context
        self.words = words


class Commands(click.Group):
    """A group whose errors say which command is meant, and whose help cuts no summary."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; without any, show the help, with the status of a usage error."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(click.UsageError.exit_code)
        return super().parse_args(ctx, args)

    def sections(self, ctx: click.Context) -> Mapping[str, Iterable[str]]:
        """Return the names of the commands, by the headings of the help."""
        return {"Commands": self.list_commands(ctx)}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands and the first sentences of their help."""
        sections = {title: [*self._shown(ctx, names)] for title, names in self.sections(ctx).items()}
        widest = max(len(name) for rows in sections.values() for name, _ in rows)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), text) for name, text in rows])

    def _shown(self, ctx: click.Context, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        for name in names:
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                yield name, command.get_short_help_str(_UNCUT)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. Raises UnknownCommandError."""
        if not ctx.resilient_parsing and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UnknownCommandError(args, ctx)
        return super().resolve_command(ctx, args)


def add_examples(command: click.Command, path: str) -> None:
    """End the help of a command, and of those below it, with its example."""
    if path in EXAMPLES and EXAMPLES[path] not in (command.help or ""):
        command.epilog = f"\b\nExample:\n    {EXAMPLES[path]}"
    for name, below in command.commands.items() if isinstance(command, click.Group) else ():
        add_examples(below, f"{path} {name}")
