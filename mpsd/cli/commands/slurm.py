"""The commands about Slurm on this node: its configuration for shares of GPUs, and whether that makes them limits."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli.command import note, of_files, with_api, with_form
from mpsd.cli.groups import Commands
from mpsd.cli.render import as_here, as_json
from mpsd.client import Client
from mpsd.client.connection import SOCKET
from mpsd.core.errors import MpsdError
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from mpsd.core.slurm.check import Finding
    from mpsd.core.slurm.lines import Device

_HOOKS: Final = Path("/etc/mpsd/slurm")
_SETTINGS: Final = Path("/etc/mpsd/slurm.toml")
_FIRST_WITH_MANY: Final = 555
"""The first driver that serves several users at a time on one GPU."""

_CONFIG: Final = click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Path of slurm.conf, or of its directory.  [default: /etc/slurm, or what slurmd got from slurmctld]",
)


@click.group(cls=Commands)
def slurm() -> None:
    """Make Slurm's shares of GPUs limits that mpsd enforces.

    Users keep asking Slurm: sbatch --gres=mps:25. docs/slurm.md has the whole way.
    """


@slurm.command()
@_CONFIG
@with_form()
@with_api
def check(api: Client, form: str, config: Path | None) -> None:
    """Check Slurm on this node, and print a remedy for each problem.

    It reads slurm.conf, gres.conf and cgroup.conf, and the scripts that they name, so call it as root. The exit status
    is 0 if nothing fails.
    """
    from dataclasses import replace

    from mpsd.core.slurm import settings
    from mpsd.core.slurm.check import Seen, Verdict, findings
    from mpsd.system.host import slurm as files
    from mpsd.system.host.configuration import read_text

    ours, place = settings.parse(read_text(None, _SETTINGS) or ""), files.folder(config)
    found = files.read(place)
    seen = Seen(
        configuration=found,
        version=files.version(),
        scripts=files.scripts(found, place, _HOOKS),
        hooks=str(_HOOKS),
        missing=files.missing(_HOOKS),
        comment=ours.comment,
        is_scripted=files.is_scripted(place),
        is_current=files.is_current(place),
        grace=ours.grace,
        wait=ours.wait,
        node=ours.node or os.uname().nodename.partition(".")[0],
    )
    try:
        takers = api.config()["config"]["roles"]["users"]
        seen = replace(seen, gpus=_numbers(api), one_user=_serves_one_user(api), takes=bool(takers))
    except MpsdError as error:
        seen = replace(seen, unreachable=error.detail)
    results = findings(seen)
    click.echo(as_json(_as_json(results)) if form == "json" else _report(results))
    if any(each.verdict is Verdict.FAIL for each in results):
        click.get_current_context().exit(1)


def _as_json(results: "Sequence[Finding]") -> object:
    return {"findings": [each._asdict() for each in results]}


def _report(results: "Sequence[Finding]") -> str:
    lines = []
    for each in results:
        lines += [
            f"{each.verdict:<7}  {as_here(plain(each.because))}",
            f"         remedy: {as_here(plain(each.remedy))}",
        ]
    return "\n".join(lines or ["nothing is wrong: Slurm's shares are limits of mpsd's"])


def _numbers(api: Client) -> frozenset[int]:
    """Return the numbers of the device files of mpsd's GPUs."""
    from mpsd.core.slurm.gres import MINOR

    found = [MINOR.search(each.file) for each in _devices(api)]
    return frozenset(int(each[1]) for each in found if each is not None)


def _serves_one_user(api: Client) -> bool | None:
    """Tell whether a GPU of this node serves one user at a time; None where no control daemon tells its version."""
    users, daemons = api.config()["config"]["daemon"]["users"], api.daemons()["daemons"]
    if users != "auto":
        return users == "one"
    versions = [each["version"].partition(".")[0] for each in daemons if each["version"]]
    return any(int(each) < _FIRST_WITH_MANY for each in versions if each.isdecimal()) if versions else None


@slurm.command()
@_CONFIG
@click.option(
    "--share",
    type=click.Choice(["mps", "shard"]),
    default="mps",
    show_default=True,
    help="What users ask for: percent of a GPU's threads, or one of four parts of a GPU.",
)
@click.option("--apply", "applies", is_flag=True, help="Write the files, which are mpsd's alone, and the hooks.")
@with_api
def install(api: Client, config: Path | None, share: str, *, applies: bool) -> None:
    """Show the lines for Slurm's configuration on this node.

    With --apply it writes them beside slurm.conf, as mpsd-slurm.conf and mpsd-gres.conf, for slurm.conf and gres.conf
    to include; mpsd.lua, and a job_submit.lua unless there is one; the hooks, in /etc/mpsd/slurm; and
    /etc/mpsd/slurm.toml unless there is one. slurm.conf itself stays as it is. Nothing is started or stopped.
    """
    from mpsd.core.slurm import lines
    from mpsd.core.slurm.configuration import Configuration
    from mpsd.system.host import slurm as files

    place, present = files.PLACES[0], Configuration()
    if config is not None:
        place = (config.parent if config.name == "slurm.conf" else config).absolute()
    try:
        place = files.folder(config).absolute()
        present = files.read(place)
        if place == files.PLACES[-1]:  # a copy of slurmctld's, which slurmd replaces
            place = files.PLACES[0]
    except MpsdError:
        if config is not None:
            raise
        note("there is no Slurm here yet: these are the lines for its files in /etc/slurm")
    node, devices = os.uname().nodename.partition(".")[0], _devices(api)
    wanted = {
        place / "mpsd-slurm.conf": [*lines.of_slurm(node, devices, share, str(_HOOKS), present)],
        place / "mpsd-gres.conf": [*lines.of_gres(node, devices, share)],
    }
    texts = {path: "\n".join([*each, ""]) for path, each in wanted.items()}
    texts[place / "mpsd.lua"] = files.script()
    own = "comment = true\n"
    if api.path != SOCKET:
        own += f"socket = {json.dumps(str(Path(api.path).absolute()))}\n"
    kept = {place / "job_submit.lua": lines.of_script(str(place), devices), _SETTINGS: own}
    if not applies:
        click.echo("\n".join(_shown(texts, kept)))
        return
    with of_files():
        for program in files.HOOK_PROGRAMS:
            files.check_open(program)
        for each in files.put(texts, kept, hooks=_HOOKS):
            click.echo(as_here(plain(each)))
    click.echo("\n".join(_further(place, kept)))


def _devices(api: Client) -> "list[Device]":
    """Return the GPUs that mpsd shares, by the numbers of their device files, each with what mpsd can grant of it."""
    from mpsd.core.slurm.lines import Device
    from mpsd.system.host import slurm as files

    minors = files.minors()
    found = [
        (minors.get(each["uuid"] or "", each["index"]), (each["memory_total"] or 0) - each["memory_reserved"])
        for each in api.gpus()["gpus"]
        if each["health"] != "unsupported"
    ]
    return [Device(f"/dev/nvidia{minor}", memory) for minor, memory in sorted(found)]


def _shown(texts: dict[Path, str], kept: dict[Path, str]) -> Iterator[str]:
    """Yield the files as they would be written; of a long one only its name."""
    for path, text in {**texts, **kept}.items():
        there = f" (kept: {path} is there)" if path in kept and path.exists() else ""
        yield f"# {path}{there}"
        if path.suffix != ".lua" or path in kept:
            yield text.rstrip()
        yield ""
    yield f"# hooks: {_HOOKS}/prolog, epilog, task-prolog and health"
    yield "# to write all this: mpsctl slurm install --apply"


def _further(place: Path, kept: dict[Path, str]) -> Iterator[str]:
    """Yield what is left to a person."""
    yield ""
    yield "what is left to do:"
    yield "  slurm.conf, at its end:  Include mpsd-slurm.conf"
    yield "  gres.conf, at its end:   Include mpsd-gres.conf"
    yield f"  what the comments in {place}/mpsd-slurm.conf say"
    yield f"  where slurmctld runs on another machine: copy what is new in {place} to it"
    script = place / "job_submit.lua"
    if script.exists() and "mpsd.submit" not in script.read_text(errors="replace"):
        yield f"  {script} is yours; what calls mpsd.lua:"
        yield from (f"    {each}" for each in kept[script].splitlines())
    yield "  then restart slurmctld and slurmd, and:"
    yield "    systemctl enable --now mpsd-slurm.service"
    yield "    mpsctl slurm check"
