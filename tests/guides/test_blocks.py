"""Every command of the documents, and of the manual pages' examples, works on a simulated node as described."""

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click
import pytest

from mpsd.__main__ import cli as mpsd
from mpsd.cli.group import mpsctl
from mpsd.cli.render import as_here
from mpsd.core.configuration.document import parse
from mpsd.core.doctor.table import FAMILIES
from mpsd.core.errors import catalogue
from mpsd.core.events import EventName
from mpsd.kubernetes.__main__ import cli as mpsd_kubernetes
from mpsd.simulator.devices import VARIABLE
from tests.gate import manual
from tests.guides.blocks import DOCUMENTS, PAGES, ROOT, Block, blocks, calls, commands, every, spans
from tests.guides.conftest import Workplace
from tests.tools import needed

pytestmark = pytest.mark.thorough

_READ: Final = {"mermaid", "text", "yaml"}
"""Languages of blocks for reading, without commands."""

_RUN: Final = [block for block in every("sh") if block.needs is None and block.file is None]
_EXCUSED: Final = [block for page in PAGES for block in blocks(page) if block.needs is not None]


def _name(block: Block) -> str:
    return block.name


def _with_files(workplace: Workplace, block: Block) -> None:
    """Write the files that the page shows before this block."""
    for each in blocks(block.page):
        if each.file is not None and each.line < block.line:
            path = workplace.directory / each.file
            path.write_text(each.text)
            path.chmod(0o755)


def _filled_in(text: str, lease: Callable[[], str]) -> str:
    """Replace the words in capitals, like a reader."""
    if re.search(r"\bLEASE\b", text):
        text = re.sub(r"\bLEASE\b", lease(), text)
    text = text.replace("$PID", "PID")
    for word, value in {"PID": f"{os.getpid()}", "UID": "65533", "NAME": "nobody"}.items():
        text = re.sub(rf"\b{word}\b", value, text)
    return text


def _check(done: "subprocess.CompletedProcess[str]", status: frozenset[int] = frozenset({0})) -> None:
    assert done.returncode in status, f"{done.returncode}: {done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", _RUN, ids=_name)
def test_block_runs(block: Block, workplace: Workplace, lease: Callable[[], str]) -> None:
    """A block of commands ends with the status in its marker, or 0 without one."""
    _with_files(workplace, block)
    wanted = "|".join(map(str, sorted(block.status)))
    # Each command of a block with several valid statuses has one of these; any other block ends at its first failure.
    varies = f"set +e; trap 'status=$?; case $status in {wanted}) ;; *) exit $status; esac' ERR\n"
    _check(workplace.run((varies if len(block.status) > 1 else "") + _filled_in(block.text, lease)), block.status)


@pytest.mark.parametrize("block", every("console"), ids=_name)
def test_session_is_as_shown(block: Block, workplace: Workplace) -> None:
    """The commands of a session print what the page shows, for another user and lease."""
    for gpu in ("0", "1") if block.granted else ():
        workplace.node.lease(threads=None, memory=None, fraction=block.granted, gpu=gpu)
    commands = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    shown = [f"status=$?; echo {shlex.quote(f'$ {each}')}; (exit $status); {each}" for each in commands]
    done = workplace.run("\n".join(["exec 2>&1; set +e", *shown]))
    assert _anyone(done.stdout) == _anyone(block.text)


def _anyone(text: str) -> str:
    """Return a session's output without the parts that vary: ids of leases and users."""
    text = re.sub(r"lease-[0-9a-f]{10}", "LEASE", text)
    return text.replace(f"({as_here(f'uid {os.geteuid()}')}) has", "(ann) has")


@pytest.mark.parametrize("block", [block for block in every("sh") if block.file is not None], ids=_name)
def test_script_is_sound(block: Block) -> None:
    """Shellcheck reports nothing about a script that a reader copies."""
    command = [needed("shellcheck", "shellcheck"), "-"]
    _check(subprocess.run(command, input=block.text, capture_output=True, text=True, check=False))


@pytest.mark.parametrize("block", _EXCUSED, ids=_name)
def test_excused_block_needs_what_it_names(block: Block) -> None:
    """A block that no test runs calls what its marker names, is valid shell, and calls mpsctl correctly."""
    assert block.is_excused, f"{block.name} calls nothing that needs {block.needs}"
    if block.language == "sh":
        _check(subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False))


_TYPED: Final = [
    block for page in DOCUMENTS for block in blocks(page) if block.language in {"sh", "console"} and block.file is None
]
"""The blocks of all documents with commands for a reader."""


@pytest.mark.parametrize("block", _TYPED, ids=_name)
def test_calls_are_as_the_programs_take_them(block: Block) -> None:
    """Each call of mpsctl, mpsd and mpsd-kubernetes has a valid command, and valid options and arguments.

    The commands around them are valid shell.
    """
    text = _filled_in(commands(block), lambda: "lease-0000000000")
    _check(subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False))
    for name, program in PROGRAMS.items():
        for arguments in calls(text, name):
            _parse(arguments, program)


PROGRAMS: Final = {"mpsctl": mpsctl, "mpsd": mpsd, "mpsd-kubernetes": mpsd_kubernetes}


def _parse(arguments: list[str], program: click.Command = mpsctl) -> None:
    """Fail if a program would refuse these arguments before any action."""
    command, rest = _found(arguments, program)
    command.make_context(command.name, rest, parent=click.Context(program, info_name=program.name))


def _found(words: list[str], program: click.Command = mpsctl) -> tuple[click.Command, list[str]]:
    """Return the command that these words call, and the words after its name."""
    command = program
    context = click.Context(program, info_name=program.name)
    for at, word in enumerate(words):
        if not isinstance(command, click.Group) or (command.invoke_without_command and word.startswith("-")):
            return command, words[at:]
        found = command.get_command(context, word)
        assert found is not None, f"{program.name} has no command {word}"
        command = found
    return command, []


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_name_what_is_there(page: Path) -> None:
    """Every mpsctl command in a sentence exists, with its options, checks of doctor, and kinds of events."""
    for span in spans(page):
        words = span.split()[1:]
        if not words[0].isupper():
            command, rest = _found(words)
            options = {each for parameter in command.params for each in parameter.opts} | {"--help"}
            assert [word for word in rest if word.startswith("--") and word != "--" and word not in options] == []
        checks = [words[at + 1] for at, word in enumerate(words) if word == "--only"]
        assert set(checks) <= {check.id for family in FAMILIES.values() for check in family}
        assert {words[at + 1] for at, word in enumerate(words) if word == "--kind"} <= set(EventName)


def test_refusals_have_the_status_that_they_name() -> None:
    """The table of refusals in the user's guide has the exit status of each error."""
    page = next(page for page in PAGES if page.name == "user.md")
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    named = {code: int(status) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert len(named) > 8
    assert named == {error.code: error.exit_code for error in catalogue() if error.code in named}


def test_no_block_escapes() -> None:
    """Each block is in a language that a test of this file knows, and each fence belongs to a block."""
    known = _READ | {"sh", "console", "toml", "ini", "crontab", "python"}
    found = [block for page in PAGES for block in blocks(page)]
    assert len(found) > 30
    assert [block.name for block in found if block.language not in known] == []
    assert [block.name for block in found if block.language == "python" and block.file is None] == []  # commands run it
    assert sum(page.read_text(encoding="utf-8").count("```") for page in PAGES) == 2 * len(found)


@pytest.mark.parametrize("block", every("toml"), ids=_name)
def test_configuration_is_valid(block: Block) -> None:
    """mpsd accepts each part of mpsd.toml."""
    parse(block.text)


@pytest.mark.parametrize("block", [each for each in every("ini") if "[Service]" in each.text], ids=_name)
def test_unit_starts_its_program(block: Block, workplace: Workplace) -> None:
    """The program of a systemd unit runs under MPS, without any variable of a user's shell."""
    _with_files(workplace, block)
    unit = dict(re.findall(r"^(\w+)=(.+)$", block.text, re.MULTILINE))
    assert unit["User"] != "root"
    _check(workplace.run(_bare(_here(unit["ExecStart"], workplace), workplace)))


@pytest.mark.parametrize("block", every("crontab"), ids=_name)
def test_crontab_runs(block: Block, workplace: Workplace) -> None:
    """A line of a crontab runs by sh, with the variables above it, and without those of a user's shell."""
    lines = [line for line in block.text.splitlines() if line and not line.startswith("#")]
    variables = [line for line in lines if re.match(r"[A-Z]+=", line)]
    for line in lines:
        if line not in variables:
            assert "%" not in line, "cron makes a new line of it"
            command = _here(line.split(maxsplit=5)[5], workplace)
            _check(workplace.run(_bare(f"{' '.join(variables)} {command}", workplace)))


def _bare(command: str, workplace: Workplace) -> str:
    """Return a command whose environment only leads to the simulated node and its programs."""
    names = ("HOME", "PATH", "PYTHONPATH", "MPSD_SOCKET", VARIABLE)
    variables = " ".join(shlex.quote(f"{name}={workplace.environment[name]}") for name in names)
    return f"env -i {variables} sh -c {shlex.quote(command)}"


def _here(command: str, workplace: Workplace) -> str:
    """Replace installed programs by those of the workplace, and the example's directory by the workplace's."""
    command = re.sub(r"/usr/bin/(mpsctl|python3)\b", lambda found: found[1].rstrip("3"), command)
    return command.replace("/srv/trainer/", f"{shlex.quote(str(workplace.directory))}/")


@pytest.mark.root("become another user")
def test_entrypoint_changes_its_user(workplace: Workplace) -> None:
    """The entrypoint of the recipe requests the lease as the user that the program runs as."""
    page = next(page for page in PAGES if page.name == "recipes.md")
    entrypoint = next(block for block in blocks(page) if block.file == "entrypoint.sh")
    path = workplace.directory / "entrypoint.sh"
    path.write_text(entrypoint.text)
    path.chmod(0o755)
    needed("setpriv", "util-linux")
    done = workplace.run("./entrypoint.sh sh -c 'id -u; echo $MPSD_LEASE'", APP_UID="65533", APP_GID="65533")
    _check(done)
    uid, lease = done.stdout.split()
    assert uid == "65533"
    assert workplace.node.get(f"/v1/leases/{lease}").json["owner"]["uid"] == 65533


@pytest.mark.root("become another user")
@pytest.mark.parametrize(
    "block", [each for each in _EXCUSED if each.needs == "another user" and "mpsctl run" in each.text], ids=_name
)
def test_program_of_another_user(block: Block, workplace: Workplace) -> None:
    """Root's call for another user runs a program as that user; the page's own program is not reachable here."""
    script, program = _filled_in(block.text, lambda: ""), "python train.py"
    assert program in script
    done = workplace.run(script.replace(program, "id -un"))
    _check(done)
    assert done.stdout == "nobody\n"


@pytest.mark.parametrize("script", manual.EXAMPLES.values())
def test_example_of_a_manual_page(script: str, workplace: Workplace, lease: Callable[[], str]) -> None:
    """A command of a manual page's examples succeeds."""
    _check(workplace.run(_filled_in(script, lease)))
