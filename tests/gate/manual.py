"""The manual pages and the example of a configuration, generated from click's commands and the table of settings.

`python -m tests.gate.generate` writes them into docs/man and docs/mpsd.toml, and tests/gate/documents/test_manual.py
fails while they differ.
"""

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import click

from mpsd import __version__
from mpsd.__main__ import cli as mpsd
from mpsd.cli.group import EXIT_STATUS, mpsctl
from mpsd.core.configuration.document import render
from mpsd.core.enforcement.violations import VARIABLES
from mpsd.core.kubernetes import settings as kubernetes
from mpsd.core.settings import SettingRow, Settings, quota_rows, rows, rows_of

UNITS: Final = Path(__file__).resolve().parents[2] / "systemd"

DATE: Final = "2026-11-21"
"""The date at the foot of every page: a page must not change because it is generated on another day."""

_WIDTH: Final = 79

_MPSD_ENDS: Final = {
    0: "Success: mpsd was stopped, or, for check, the configuration is valid",
    1: "Any other error, such as another mpsd in the same runtime directory",
    2: "Usage error",
    75: "The machine lacks something that mpsd needs to start, such as disk space: start it again",
    78: "The configuration is invalid, or the machine has no NVIDIA driver",
}

_ENVIRONMENT: Final = {
    "MPSD_SOCKET": "The socket of mpsd, if --socket is not given.",
    "MPSD_TRUST_UID": "Uids whose mpsd is believed as root's is, separated by spaces, if --trust-uid is not given.",
    "MPSD_LEASE": (
        "The lease of the calling process. mpsctl run sets it for its COMMAND, and the commands about leases take it"
        " where none is named."
    ),
    "MPSD_LEASE_TOKEN": (
        "A secret of the lease, by which a process is known that has left the family of the lease's holder. It is worth"
        " something to processes of the lease's owner alone."
    ),
    ", ".join(VARIABLES): (
        "The environment of a lease. mpsctl run sets it for its COMMAND, and mpsctl admit -o env prints it. A process"
        " without it runs outside MPS, without limits."
    ),
    "_MPSCTL_COMPLETE": "Set by the shell's completion; mpsctl then prints only the possible completions.",
}

_PATHS: Final = Settings().paths

_FILES: Final = {
    "/etc/mpsd/mpsd.toml": "The configuration, see mpsd.toml(5). Without this file, every setting has its default.",
    f"{Settings().socket}": "The API: HTTP on a unix socket. /v1/openapi.json describes it.",
    f"{_PATHS.runtime_dir}/mps/gpuN": "The pipe directory of each control daemon.",
    f"{_PATHS.runtime_dir}/leases.db": "The leases of the current boot.",
    f"{_PATHS.state_dir}": "Data that survives a reboot: events, usage, and the desired state of each control daemon.",
    f"{_PATHS.log_dir}/gpuN": "NVIDIA's control.log and server.log of each control daemon.",
}


# -- roff --------------------------------------------------------------------------------------------------------------


def _escaped(text: str) -> str:
    """Return text escaped for roff: the beginning of a line is no request, and a hyphen can be copied from the page."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace('"', "\\(dq")
    return re.sub(r"^([.'])", r"\\&\1", escaped.replace("`", "\\(ga").replace("^", "\\(ha").replace("~", "\\(ti"))


def _filled(text: str) -> Iterator[str]:
    """Yield a paragraph as lines that the reader's terminal fills."""
    for line in textwrap.wrap(" ".join(text.split()), _WIDTH - 20, break_on_hyphens=False, break_long_words=False):
        yield _escaped(line)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield a help text of click's, in which a backspace begins a preformatted paragraph."""
    for number, paragraph in enumerate(inspect.cleandoc(text).split("\n\n")):
        if number:
            yield ".PP"
        if paragraph.startswith("\b\n"):
            said, shown = _parted(paragraph.removeprefix("\b\n").splitlines())
            yield from _filled(" ".join(said))
            yield from _shown(shown)
        else:
            yield from _filled(paragraph)


def _parted(lines: list[str]) -> tuple[list[str], list[str]]:
    """Split the introduction of an example from the example, which is indented."""
    said = [line for line in lines if not line.startswith(" ")]
    return said, textwrap.dedent("\n".join(line for line in lines if line.startswith(" "))).splitlines()


def _shown(lines: Iterable[str]) -> Iterator[str]:
    yield from (".RS 4", ".nf", *map(_escaped, lines), ".fi", ".RE")


def _term(term: str, *meaning: str) -> Iterator[str]:
    yield ".TP"
    yield f".B {_escaped(term)}"
    for number, paragraph in enumerate(meaning):
        if number:
            yield ".IP"
        yield from _filled(paragraph)


def _page(title: str, section: int, purpose: str, *parts: Iterable[str]) -> str:
    lines = [
        '.\\" Made by python -m tests.gate.generate: change what it is made from, and not this.',
        f'.TH {title.upper()} {section} "{DATE}" "mpsd {__version__}" "NVIDIA MPS"',
        ".SH NAME",
        f"{_escaped(title)} \\- {_escaped(purpose)}",
    ]
    return "\n".join([*lines, *(line for part in parts for line in part), ""])


def _section(title: str, *parts: Iterable[str]) -> Iterator[str]:
    yield f".SH {title}"
    for part in parts:
        yield from part


def _terms(table: dict[str, str]) -> Iterator[str]:
    for term, meaning in table.items():
        yield from _term(term, meaning)


def _exit_status(table: dict[int, str]) -> Iterator[str]:
    return _section("EXIT STATUS", _terms({f"{status}": f"{meaning}." for status, meaning in table.items()}))


def _see_also(*pages: str) -> Iterator[str]:
    yield ".SH SEE ALSO"
    for number, page in enumerate(pages, start=1):
        name, section = page.rstrip(")").split("(")
        yield f".BR {_escaped(name)} ({section}){',' if number < len(pages) else ''}"


# -- commands ----------------------------------------------------------------------------------------------------------


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record is not None and "--help" not in parameter.opts:
            yield from _term(record[0], record[1])


def _commands(group: click.Group, above: click.Context) -> Iterator[str]:
    for name in sorted(group.list_commands(above)):
        command = group.get_command(above, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=above)
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield from _command(command, context)
        if isinstance(command, click.Group):
            yield from _commands(command, context)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    words = context.command_path.split()[1:]
    pieces = command.collect_usage_pieces(context)
    yield f".SS {_escaped(' '.join([*words, *pieces]))}"
    yield from _paragraphs(command.help or "")
    yield from _options(command, context)
    if command.epilog:
        yield ".PP"
        yield from _paragraphs(command.epilog)


def _description(group: click.Group, *more: str) -> Iterator[str]:
    return _section("DESCRIPTION", _paragraphs("\n\n".join([inspect.cleandoc(group.help or ""), *more])))


EXAMPLES: Final = {
    "Run a program on a quarter of a GPU, and wait for room:": (
        "mpsctl run --fraction 0.25 --wait 10m -- python train.py"
    ),
    "Give each of two client processes half of a lease:": (
        "mpsctl run --threads 40 --memory 8GiB --processes 2 -- python train.py"
    ),
    "Take out a lease for everything that a shell starts afterwards:": 'eval "$(mpsctl admit --fraction 0.25 -o env)"',
    "Renew the lease of the calling program:": (
        "mpsctl run --fraction 0.25 --ttl 1h -- sh -c 'mpsctl renew \"$MPSD_LEASE\" --ttl 2h'"
    ),
    "Show which GPUs have room, and who holds what:": "mpsctl gpus; mpsctl leases",
    "Free one GPU for maintenance, and end what is left after an hour:": "mpsctl drain gpu1 --timeout 1h",
    "Admit clients there again:": "mpsctl resume gpu1",
}
"""The commands of the section EXAMPLES, by their purpose; tests/guides runs each."""


def _examples() -> Iterator[str]:
    yield ".SH EXAMPLES"
    for number, (title, script) in enumerate(EXAMPLES.items()):
        if number:
            yield ".PP"
        yield from _filled(title)
        yield from _shown([script])


def mpsd_page() -> str:
    synopsis = (".B mpsd", ".I COMMAND", ".RI [ OPTIONS ]")
    signals = {
        "SIGTERM": "Stop mpsd. The control daemons and their clients keep running, and the next mpsd adopts them.",
        "SIGHUP": "Reload the configuration. Settings that need a restart keep their values and are logged.",
    }
    return _page(
        "mpsd", 8, "supervise NVIDIA MPS on a GPU node",
        _section("SYNOPSIS", synopsis),
        _description(mpsd, _WHAT_IT_IS),
        _section("COMMANDS", _commands(mpsd, click.Context(mpsd, info_name="mpsd"))),
        _section("SIGNALS", _terms(signals)),
        _section("UNITS", _paragraphs(_SERVICE), _terms(_units())),
        _exit_status(_MPSD_ENDS),
        _section("FILES", _terms(_FILES)),
        _see_also("mpsctl(1)", "mpsd.toml(5)"),
    )  # fmt: skip


_SERVICE: Final = (
    "As a service, mpsd is started by systemd. Stopping, restarting, upgrading or killing it does not stop the control"
    " daemons; only mpsd-stop-daemons.service does."
)


def _units() -> dict[str, str]:
    """Return the units of systemd/, each with its own description."""
    units = [path for path in sorted(UNITS.iterdir()) if path.suffix in {".service", ".socket"}]
    described = {path.name: re.search(r"^Description=(.+)$", path.read_text(), re.MULTILINE) for path in units}
    return {name: f"{found[1]}." for name, found in described.items() if found is not None}


_WHAT_IT_IS: Final = (
    "For each GPU, mpsd starts or adopts one nvidia-cuda-mps-control, checks that it answers, sets its limits, reads"
    " them back, watches them, and restarts it when it dies. mpsd admits clients: each gets a lease on a share of a"
    " GPU, tied to the life of a process. GPU processes are not affected when mpsd is restarted, upgraded or killed."
)


def mpsctl_page() -> str:
    synopsis = (".B mpsctl", ".RB [ \\-\\-socket", ".IR PATH ]", ".I COMMAND", ".RI [ OPTIONS ]")
    context = click.Context(mpsctl, info_name="mpsctl")
    files = {path: meaning for path, meaning in _FILES.items() if path == f"{Settings().socket}"}
    return _page(
        "mpsctl", 1, "inspect NVIDIA MPS on a GPU node, and take out leases on GPUs",
        _section("SYNOPSIS", synopsis),
        _description(mpsctl),
        _section("OPTIONS", _options(mpsctl, context)),
        _section("COMMANDS", _commands(mpsctl, context)),
        _examples(),
        _exit_status(EXIT_STATUS),
        _section("ENVIRONMENT", _terms(_ENVIRONMENT)),
        _section("FILES", _terms(files)),
        _see_also("mpsd(8)", "mpsd.toml(5)"),
    )  # fmt: skip


# -- the configuration -------------------------------------------------------------------------------------------------


def _value(row: SettingRow) -> str:
    """Return a setting's default in the file's notation, or its meaning when it is absent."""
    shown = Settings().socket if row.key == "api.socket" else row.default
    return "" if shown is None else render(row, shown)


def _setting(row: SettingRow) -> Iterator[str]:
    default = _value(row)
    facts = [f"Default: {default}." if default else "Absent by default."]
    if isinstance(row.default, StrEnum):
        facts.append(f"One of {', '.join(type(row.default))}.")
    if row.unit:
        facts.append(f"Unit: {row.unit}.")
    if row.restart:
        facts.append("A change needs a restart of mpsd.")
    yield from _term(row.key.rpartition(".")[2], row.help, " ".join(facts))


def _settings() -> Iterator[str]:
    section = ""
    for row in rows():
        if row.key.split(".")[0] != section:
            section = row.key.split(".")[0]
            yield f".SS [{section}]"
        yield from _setting(row)
    yield ".SS [quota.NAME]"
    yield from _filled("Limits for one user. NAME is a user, a %group, or * for every user without its own quota.")
    for row in quota_rows():
        yield from _setting(row)


_FORM: Final = """\
The file is TOML. Every setting has a default, and an unknown setting is an error. Sizes are strings such as "8GiB", or
a number of bytes; times are seconds; file modes are octal strings such as "0660".

`mpsd check` validates the file and prints the effective settings. SIGHUP and `systemctl reload mpsd` make mpsd read the
file again; if the file is invalid, the settings stay as they are, and the log says why.
"""

_EXAMPLE: Final = """\
[daemon]
compute_mode = "exclusive-process"

[limits]
active_thread_percentage = 50
pinned_device_mem_limit = "20GiB"

[roles]
users = ["%research"]
admins = ["%gpu-operators"]

[quota."%research"]
threads = 100
memory = "40GiB"
"""


def settings_page() -> str:
    return _page(
        "mpsd.toml", 5, "configuration of mpsd",
        _section("SYNOPSIS", (".I /etc/mpsd/mpsd.toml",)),
        _section("DESCRIPTION", _paragraphs(_FORM)),
        _section("SETTINGS", _settings()),
        _section("EXAMPLE", _shown(_EXAMPLE.splitlines())),
        _see_also("mpsd(8)", "mpsctl(1)"),
    )  # fmt: skip


_SET: Final = {
    "daemon.compute_mode": (
        '"exclusive-process"',
        ('A new installation is closed: with "leave", the default, a program that misses MPS gets a whole GPU.',),
    )
}
"""The settings of a new installation that differ from the defaults, and why. An upgrade leaves the file unchanged."""


def example() -> str:
    """Return the configuration of a new installation: every setting as a comment, except for those that it sets."""
    lines = [
        "# The configuration of mpsd: every setting, with its default. Uncomment what you want to change, then:",
        "#     mpsd check && systemctl reload mpsd",
        "# See mpsd.toml(5).",
    ]
    section = ""
    for row in rows():
        name = row.key.split(".")[1]
        if row.key.split(".")[0] != section:
            section = row.key.split(".")[0]
            lines += ["", f"[{section}]"]
        lines += _comment(row)
        lines += [f"# {line}" for line in _SET[row.key][1]] if row.key in _SET else []
        lines.append(f"{name} = {_SET[row.key][0]}" if row.key in _SET else f"#{name} = {_value(row)}".rstrip())
    lines += ["", "# Limits for one user: a user, a %group, or * for every user without its own quota.", '#[quota."*"]']
    for row in quota_rows():
        unit = f" Unit: {row.unit}." if row.unit else ""
        lines += [f"# {row.help}{unit}", f"#{row.key.rpartition('.')[2]} ="]
    return "\n".join([*lines, ""])


def kubernetes_example() -> str:
    """Return a configuration of mpsd-kubernetes: every setting as a comment."""
    lines = [
        "# The configuration of mpsd-kubernetes: every setting, with its default. Uncomment what you change, then:",
        "#     mpsd-kubernetes --check",
    ]
    for row in rows_of("", kubernetes.Settings):
        value = "" if row.default is None else f" {render(row, row.default)}"
        lines += ["", *_comment(replace(row, restart=False)), f"#{row.key} ={value}"]
    return "\n".join([*lines, ""])


def _comment(row: SettingRow) -> list[str]:
    unit = f" Unit: {row.unit}." if row.unit else ""
    restart = " A change needs a restart." if row.restart else ""
    return [f"# {line}" for line in textwrap.wrap(f"{row.help}{unit}{restart}", 118)]
