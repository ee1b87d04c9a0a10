"""The help of each command has an example that its command takes, and the hints name commands that exist."""

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Final

import click
import pytest

from mpsd.__main__ import cli as mpsd
from mpsd.cli import habits
from mpsd.cli.examples import EXAMPLES
from mpsd.cli.group import LOOKS, NAMES, SECTIONS, mpsctl
from mpsd.cli.groups import UnknownCommandError
from mpsd.cli.mistakes import refusal

PROGRAMS: Final = {"mpsctl": mpsctl, "mpsd": mpsd}

_WIDTH: Final = 80


def root(program: str) -> click.Context:
    """Return the context of a program; click keeps the help option of a command as the first context has it."""
    return click.Context(PROGRAMS[program], info_name=program, **PROGRAMS[program].context_settings)


def commands(group: click.Group, above: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """Yield the commands that a user sees below a group."""
    for name in group.list_commands(above):
        command = group.get_command(above, name)
        assert command is not None
        if not command.hidden:
            context = click.Context(command, above, name)
            yield command, context
            if isinstance(command, click.Group):
                yield from commands(command, context)


ALL: Final = {
    context.command_path: (command, context)
    for name, program in PROGRAMS.items()
    for command, context in commands(program, root(name))
}


def parse(line: str) -> list[str]:
    """Parse a command line, and return the path of its command. Raises click.UsageError."""
    inner = re.search(r"\$\((.*)\)", line)
    words = shlex.split(line if inner is None else inner[1])
    program, *rest = words
    command: click.Command = PROGRAMS[program]
    path, above = [program], None
    while True:
        above = context = command.make_context(path[-1], [*rest], above)
        if not isinstance(command, click.Group) or (command.invoke_without_command and not context._protected_args):
            return path
        rest = [*context._protected_args, *context.args]
        name, found, rest = command.resolve_command(context, rest)
        assert name is not None
        assert found is not None
        command = found
        path.append(name)


@pytest.mark.parametrize("path", ALL)
def test_examples(path: str) -> None:
    """Each command has an example, which its help shows, and which it takes."""
    command, context = ALL[path]
    if isinstance(command, click.Group) and not command.invoke_without_command:
        return
    example = EXAMPLES[path]
    assert example in command.get_help(context)
    assert " ".join(parse(example)) == path


def test_nothing_else_is_an_example() -> None:
    """The table names commands that exist."""
    assert set(EXAMPLES) <= set(ALL)


GROUPS: Final = ["mpsctl", "mpsd", *(path for path, (command, _) in ALL.items() if isinstance(command, click.Group))]


@pytest.mark.parametrize("path", GROUPS)
def test_no_summary_is_cut(path: str) -> None:
    """The help of a group shows each command on one line of 80 columns, with a whole sentence."""
    group, context = ALL.get(path) or (PROGRAMS[path], root(path))
    assert isinstance(group, click.Group)
    context.terminal_width = _WIDTH - 2
    shown = group.get_help(context).splitlines()
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if not command.hidden:
            (line,) = [each for each in shown if re.match(rf"  {name} +\S", each)]
            summary = line.split(maxsplit=1)[1]
            assert summary == command.get_short_help_str(1000)
            assert summary.endswith(".")
            assert len(line) <= _WIDTH


def words() -> list[str]:
    return [word for habit in (*habits.LOOKS, *habits.CHANGES) for word in habit.words.split()]


def test_habits_are_words_of_others() -> None:
    """No word of a habit is a command, and each is there once."""
    assert len(set(words())) == len(words())
    assert set(words()).isdisjoint(NAMES)


LINES: Final = [
    *(habit.alone for habit in (*habits.LOOKS, *habits.CHANGES)),
    *(habit.of.format("0") for habit in (*habits.LOOKS, *habits.CHANGES) if habit.of),
    *(meant.format("root") for meant in (*habits.TOO_MANY.values(), *habits.ELSEWHERE.values())),
    *(meant.partition(";")[0] for meant in habits.HINTS.values()),
]


@pytest.mark.parametrize("line", [each for each in LINES if not each.startswith("systemctl ")])
def test_meant_commands(line: str) -> None:
    """What is meant by a word of another tool is a command line that is taken."""
    shown = re.sub(r"\bPID\b", "1", line.partition(" | ")[0])
    if shown != "mpsctl --version":
        parse(shown)


def hint(*typed: str, program: str = "mpsctl") -> str:
    """Return the hint for words that are no command."""
    context = root(program)
    return refusal(UnknownCommandError(typed, context)).hint


def mistyped(word: str) -> Iterator[str]:
    """Yield a word with each slip of a finger: a letter too few, one twice, two in the wrong order."""
    for place in range(len(word)):
        yield word[:place] + word[place + 1 :]
        yield word[:place] + word[place] + word[place:]
        yield word[:place] + word[place + 1 : place + 2] + word[place : place + 1] + word[place + 2 :]


def test_a_look_changes_nothing() -> None:
    """A word of people who want to see something, mistyped or not, leads to no command that changes something."""
    assert {"mpsctl"} == {habit.alone.split()[0] for habit in habits.LOOKS}
    harmless = {*LOOKS, "--version", "--help"}
    assert {habit.alone.split()[1] for habit in habits.LOOKS} <= harmless
    for look in (*LOOKS, "get", "list", "info", "set", "ps"):
        wrong = {each for each in mistyped(look) if each and each not in NAMES and each not in words()}
        assert {each: said for each in wrong if (said := hint(each)).split()[1] not in harmless} == {}


@pytest.mark.parametrize("name", sorted({*NAMES} - {"run"}))
def test_commands_of_the_other_program(name: str) -> None:
    """Each command of mpsctl that is typed as one of mpsd is the one that is meant."""
    systemd = {"restart": "systemctl restart mpsd"}
    assert hint(name, program="mpsd") == systemd.get(name, f"mpsctl {name}")


def test_sections() -> None:
    """Each command stands in one section, and those that only look are known."""
    listed: Sequence[str] = [name for names in SECTIONS.values() for name in names]
    assert len(listed) == len(set(listed))
    changes = {*SECTIONS["Operate"], "run", "shell", "admit", "renew", "release", "claim", "hand-over"}
    assert changes.isdisjoint(LOOKS)
