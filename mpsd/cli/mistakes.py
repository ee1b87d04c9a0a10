"""A usage error as one of mpsd's errors: what is wrong, and the command line that was meant, as it has to be typed."""

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise
from shlex import join, quote
from typing import Final

import click

from mpsd.cli import habits
from mpsd.cli.examples import EXAMPLES
from mpsd.cli.group import LOOKS, NAMES
from mpsd.cli.groups import UnknownCommandError
from mpsd.cli.users import name_of
from mpsd.core.errors import InvalidRequestError, MpsdError

_SURE: Final = 0.8
"""The likeness from which on a mistyped word is taken for a command that changes something, or for an option."""

_OF_MPSD: Final = ("check", "demo")
"""The commands of mpsd that mpsctl has not."""

_TOO_MANY: Final = r"got unexpected extra arguments? \((?P<more>.*)\)"
"""click's sentence about arguments that a command does not take; it has no class of its own."""


def refusal(error: click.UsageError, program: str = "mpsctl") -> MpsdError:
    """Return the error that says the same as one of click's, and what to type instead."""
    context = error.ctx or click.get_current_context(silent=True)
    path, said, meant = program if context is None else context.command_path, error.format_message(), None
    match error:
        case UnknownCommandError(words=words) if context is not None:
            meant = _command(context, words)
        case click.NoSuchOption(option_name=option) if context is not None:
            said, meant = f"{path} has no option {option}", _without(context, option)
        case click.MissingParameter(param=click.Parameter() as parameter) if context is not None:
            said, meant = f"{_name(parameter)} is missing", _completed(context, parameter)
        case click.BadParameter(param=parameter):
            name = str(error.param_hint or (parameter and _name(parameter)) or "")
            message = error.message.replace("is not a valid integer range", "is not a whole number")
            said, meant = f"{name}: {message}" if name else message, corrected(context, name)
        case click.BadOptionUsage(option_name=option):
            said, meant = f"{option} has no value", join([program, *sys.argv[1:], _valid(option, "")])
    said = said.removesuffix(".")
    said = said[0].lower() + said[1:] if said[1:2].islower() else said  # as other sentences of mpsctl begin
    if context is not None and (found := re.fullmatch(_TOO_MANY, said, re.DOTALL)):
        said, meant = f"{path} does not take {found['more']!r}", _with_fewer(context, found["more"].split())
    return InvalidRequestError(said, hint=meant or habits.HINTS.get(path) or EXAMPLES.get(path) or f"{path} --help")


def _name(parameter: click.Parameter) -> str:
    return parameter.opts[-1] if isinstance(parameter, click.Option) else parameter.human_readable_name.rstrip(".")


_OPTION: Final = {"active_thread_percentage": "--threads", "pinned_device_mem_limit": "--memory", "labels": "--label"}
"""The options of limits that have other names."""


def with_command(error: MpsdError) -> MpsdError:
    """Add the command line with a valid value to mpsd's refusal of an option's value, if its hint has none."""
    has_command = "mpsctl " in error.hint and error.limit != "gpu"
    if isinstance(error, InvalidRequestError) and error.is_answer and not has_command and error.limit is not None:
        words = words_of(None)
        fewer = _dropped(words, ("--threads", "--memory")) if error.limit == "fraction" else words
        option = _OPTION.get(error.limit, f"--{error.limit}")
        line = join(fewer) if fewer != words else corrected(None, option)
        error.hint += "" if line is None else f": {line}"
    return error


def words_of(context: click.Context | None) -> list[str]:
    """Return the command line as it was typed, but for the path of the program."""
    program = "mpsctl" if context is None else str(context.find_root().info_name)
    return [program, *sys.argv[1:]]


# -- commands ----------------------------------------------------------------------------------------------------------


def _command(context: click.Context, words: Sequence[str]) -> str:
    """Return the command that is meant by words of which the first is no command here."""
    word, rest, path = words[0].lower(), words[1:], context.command_path
    if path in {"mpsd", "mpsctl service"} and word in habits.OF_SYSTEMD and not rest:
        return f"systemctl {word} mpsd"
    if path == "mpsctl" and word in _OF_MPSD:
        return join(["mpsd", word, *rest])
    if path != "mpsctl" and word in NAMES:
        return join(["mpsctl", word, *rest])
    near = _near(context, word, rest)
    if context.parent is not None and near is not None:
        return near
    return (_habit(word, rest) if path in {"mpsctl", "mpsd"} else near) or near or f"{path} --help"


def _habit(word: str, rest: Sequence[str]) -> str | None:
    """Return the command that a word of another tool means, with the words that follow."""
    if word in habits.OF_DAEMON and rest and re.fullmatch(r"gpu[0-9]+", rest[0]):
        return join(["mpsctl", habits.OF_DAEMON[word], *rest])
    habit = next((each for each in (*habits.LOOKS, *habits.CHANGES) if word in each.words.split()), None)
    if habit is None:
        return None
    named = [each for each in rest if not each.startswith("-")]
    if not named or not habit.of:
        return habit.alone
    look = next((each for each in (named[0].lower(), f"{named[0].lower()}s") if each in LOOKS), None)
    if look is not None and habit in habits.LOOKS:  # `get leases`, `list gpu`
        return join(["mpsctl", look, *named[1:]])
    if habit is habits.ENDS and named[0].isdecimal():
        return f"mpsctl end {named[0]}"
    return habit.of.format(join(rest if habit.of.endswith("-- {}") else named))


def _near(context: click.Context, word: str, rest: Iterable[str]) -> str | None:
    """Return the command line with the command that is nearest to a mistyped word.

    A command that changes something has to be much like the word, and no other may be nearer.
    """
    group = context.command
    names = group.list_commands(context) if isinstance(group, click.Group) else []
    near = get_close_matches(word, names, n=1)
    is_look = near and near[0] in LOOKS
    chosen = near if is_look else get_close_matches(word, names, n=1, cutoff=_SURE)
    return join([*context.command_path.split(), chosen[0], *rest]) if chosen else None


# -- arguments ---------------------------------------------------------------------------------------------------------


def _with_fewer(context: click.Context, more: Sequence[str]) -> str | None:
    """Return what is meant by arguments that a command does not take."""
    path = context.command_path
    if path in {"mpsctl admit", "mpsctl shell", "mpsd run"} and more[0][0].isdigit():
        return EXAMPLES[path]
    if path in habits.TOO_MANY:
        return habits.TOO_MANY[path].format(join(more))
    if any(isinstance(each, click.Argument) for each in context.command.params):
        first = [each for each in context.params.values() if isinstance(each, str)][:1]
        return " && ".join(f"{path} {quote(each)}" for each in [*first, *more])
    return None


def _completed(context: click.Context, parameter: click.Parameter) -> str | None:
    """Return the command line with the parameter that is missing."""
    words = words_of(context)
    if isinstance(parameter, click.Option):
        option, value = parameter.opts[-1], _valid(parameter.opts[-1], words[-1])
        return join([*(words[:-1] if words[-1] == value else words), option, value])  # `renew train 2h`
    if parameter.name == "command":
        return f"{join(words[:-1] if words[-1] == '--' else words)} -- python train.py"
    return None


# -- options -----------------------------------------------------------------------------------------------------------


def _without(context: click.Context, option: str) -> str | None:
    """Return the command line without an option that does not exist, or with the one that is meant."""
    path, words, command = context.command_path, words_of(context), context.command
    if path == "mpsd run" and option in habits.VALUES:
        return join(["mpsctl", *words[1:]])
    if (path, option) in habits.ELSEWHERE:
        return habits.ELSEWHERE[path, option]
    if path == "mpsctl" and (name := next((each for each in words[1:] if each in NAMES), None)):
        return join(["mpsctl", *sorted(words[1:], key=name.__ne__)])  # `-o json leases`
    there = [each for parameter in command.get_params(context) for each in parameter.opts]
    meanings = [each for each, words in habits.OPTIONS.items() if option in words.split()]
    if not meanings and option not in habits.ABSENT:
        meanings = get_close_matches(option, [each for each in there if each.startswith("--")], n=1, cutoff=_SURE)
    meant = next((each for each in meanings if each.split()[0] in there), None)
    if meant is None and option in habits.NAMES and any(isinstance(each, click.Argument) for each in command.params):
        meant = ""  # `drain --gpu gpu0`
    if meant is None:
        return None
    if meant == "--version":
        return f"{words[0]} --version"
    line = " ".join(filter(None, (_other(each, option, meant) for each in words)))
    return f"this ends all clients at once: {line}" if meant == "--timeout 0" else line


def _other(word: str, option: str, meant: str) -> str:
    """Return a quoted word of a command line, with another option in the place of this one."""
    name, equals, value = word.partition("=")
    if name != option:
        return quote(word)
    return f"{meant}{equals}{quote(value)}" if equals and meant else meant or quote(value) if equals else meant


def corrected(context: click.Context | None, option: str) -> str | None:
    """Return the command line with a valid value of an option; None where it does not have that option."""
    words = words_of(context)
    parameters = [] if context is None else context.command.params
    parameter = next((each for each in parameters if option in each.opts), None)
    names = [option] if parameter is None else parameter.opts
    given = [right for left, right in pairwise(words) if left in names]
    given += [value for name, _, value in (each.partition("=") for each in words) if name in names]
    if not given:
        return None
    several = {*",".join(given).split(",")} - {""} if option == "--gpu" else ()
    if len(several) > 1 and (context is None or any("--gpus" in each.opts for each in parameters)):
        place = next(place for place, each in enumerate(words) if each.partition("=")[0] == "--gpu")
        fewer = _dropped(words, ("--gpu",))
        return join([*fewer[:place], "--gpus", f"{len(several)}", *fewer[place:]])
    if parameter is not None and isinstance(parameter.type, click.Choice):
        choices = [*parameter.type.choices]
        value = next(iter(get_close_matches(given[0], choices, n=1)), "json" if "json" in choices else choices[0])
    else:
        value = _valid(option, given[0])
        value = habits.VALUES.get(option, "") if value == given[0] else value
    if value in {"", given[0]}:
        return None
    return join(_replaced(words, names, value)).replace(quote(_OWN_PID), _OWN_PID)


def _replaced(words: Sequence[str], options: Sequence[str], value: str) -> Iterator[str]:
    """Yield a command line with another value of an option, the first time that it is given."""
    done = False
    for before, word in pairwise(["", *words]):
        name, equals, _ = word.partition("=")
        if not done and before in options:
            yield value
            if word == "--":  # it was taken for the value
                yield word
        elif not done and equals and name in options:
            yield f"{name}={value}"
        else:
            yield word
            continue
        done = True


def _dropped(words: Sequence[str], options: Collection[str]) -> list[str]:
    """Return a command line without some options and their values, except behind `--`."""
    end = words.index("--") if "--" in words else len(words)
    kept = [
        word
        for before, word in pairwise(["", *words[:end]])
        if before not in options and word.partition("=")[0] not in options
    ]
    return [*kept, *words[end:]]


_OWN_PID: Final = "$$"
"""What a shell replaces by its pid."""

_LONGEST_NAME: Final = 128

_NUMBER: Final = re.compile(r"([0-9]+(?:[.,][0-9]+)?) ?([A-Za-z%]*)")
_DURATIONS: Final = frozenset({"--ttl", "--wait", "--timeout", "--every", "--watch", "--since", "--until"})


def _valid(option: str, given: str) -> str:
    """Return a valid value of an option, as near as possible to the given one; empty where none is known."""
    if option in _DURATIONS and (clock := re.fullmatch(r"(?:([0-9]+)-)?([0-9]+):([0-9]{2}):[0-9]{2}", given)):
        days, hours, minutes = (int(each or 0) for each in clock.groups())  # as Slurm has it
        return f"{(days * 24 + hours) * 60 + minutes}m"
    found = _NUMBER.fullmatch(given)
    number, unit = found.groups() if found is not None else ("", "")
    count = float(number.replace(",", ".") or 0)
    value = habits.VALUES.get(option, "")
    if option == "--user":
        import pwd

        near = get_close_matches(given, [each.pw_name for each in pwd.getpwall()], n=1)
        value = near[0] if near else name_of(os.getuid())
    elif option in {"--name", "--label"} and not given.isprintable():
        value = "".join(each if each.isprintable() else " " for each in given)[:_LONGEST_NAME]
    elif option == "--fraction" and 1 < count <= 100:  # noqa: PLR2004 - percent
        value = f"{number}%"
    elif option == "--memory" and count and unit.lower() in {"", "g", "m", "k", "t"}:
        value = f"{number}{unit.upper() or 'G'}iB"
    elif option in _DURATIONS and count and unit[:1].lower() in {*"smhdw"}:
        value = f"{count * 7:g}d" if unit[0] in "wW" else f"{number}{unit[0].lower()}"
    return value
