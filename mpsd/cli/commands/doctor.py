"""The command that looks for what is wrong with a node, whether mpsd runs or not: doctor."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli.api import Api
from mpsd.cli.command import with_api, with_form
from mpsd.cli.render import as_json, columns, plural
from mpsd.core.errors import InvalidRequestError
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from mpsd.core.doctor.finding import Check, Result

_TOLD: Final = ("fail", "warn", "unknown", "ok")
"""The verdicts, the worst first."""


@click.command()
@click.option("--fix", is_flag=True, help="Mend what no running client notices, and say what was done.")
@click.option("--only", metavar="ID", multiple=True, help="Only this check; may be given again. --list has their ids.")
@click.option("--list", "listed", is_flag=True, help="List the checks, and look at nothing.")
@click.option("--all", "everything", is_flag=True, help="Show the checks that are ok as well.")
@click.option("--config", metavar="FILE", help="The configuration of that mpsd, as for mpsd run.")
@click.option("--root", metavar="DIR", help="The directory of that mpsd, as for mpsd run; its socket is there, too.")
@with_form()
@with_api
def doctor(
    api: Api,
    form: str,
    only: Sequence[str],
    config: str | None,
    root: str | None,
    *,
    fix: bool,
    listed: bool,
    everything: bool,
) -> None:
    """Look for what is wrong with this node, and say what to do about each thing.

    It works without mpsd, and without root as far as that goes: what could not be looked at is unknown, and says why.
    Whatever --fix does is harmless to clients that run; it is written to doctor.log in mpsd's log directory.

    The exit status is 0 when no check fails.
    """
    checks = _chosen(only)
    if listed:
        click.echo(_list(form, checks))
        return
    from pathlib import Path

    from mpsd.cli import doctor_run

    context = click.get_current_context()
    if root is not None:
        api = context.with_resource(Api(f"{root}/run/mpsd.sock"))
    where = doctor_run.Where(
        Path(api.path), Path(config) if config else None, Path(root).absolute() if root is not None else None
    )
    results, done = doctor_run.run(api, where, checks, fix=fix)
    answer = doctor_run.as_json(results, done)
    click.echo(as_json(answer) if form == "json" else report(results, done, everything=everything))
    if not answer["ok"]:
        context.exit(1)


def _chosen(only: Sequence[str]) -> "list[Check]":
    """Return the checks of these ids, or all. Raises InvalidRequestError for an id that no check has."""
    from mpsd.core.doctor.table import CHECKS

    unknown = [each for each in only if each not in CHECKS]
    if unknown:
        raise InvalidRequestError(f"there is no check {unknown[0]!r}", hint="see them with: mpsctl doctor --list")
    return [check for check in CHECKS.values() if not only or check.id in only]


def _list(form: str, checks: "Sequence[Check]") -> str:
    if form == "json":
        return as_json([{"id": each.id, "right": each.right, "why": each.why, "fix": each.mends} for each in checks])
    return columns([(each.id, each.right + (f" (--fix {each.mends})" if each.mends else "")) for each in checks])


def report(results: "Sequence[Result]", done: Sequence[str], *, everything: bool) -> str:
    """Say what each check came to, the worst first, what to do about it, and how many came to what.

    Checks that are unknown for one reason stand on one line.
    """
    lines = [f"fixed    {plain(each)}" for each in done]
    for verdict in _TOLD:
        if verdict == "ok" and not everything:
            continue
        for (because, remedy), names in _grouped([each for each in results if each.finding.verdict == verdict]):
            lines.append(f"{verdict:<7}  {', '.join(names)}: {plain(because)}")
            if remedy and verdict != "ok":
                lines.append(f"         remedy: {plain(remedy)}")
    counts = {verdict: sum(each.finding.verdict == verdict for each in results) for verdict in _TOLD}
    told = (
        f"{counts['fail']} failed, {plural(counts['warn'], 'warning')}, {counts['unknown']} unknown, {counts['ok']} ok"
    )
    return "\n".join([*lines, *([""] if lines else []), f"{plural(len(results), 'finding')}: {told}"])


def _grouped(results: "Sequence[Result]") -> "list[tuple[tuple[str, str | None], list[str]]]":
    groups: dict[tuple[str, str | None], list[str]] = {}
    for each in results:
        finding = each.finding
        said = not finding.subject or finding.because.startswith(finding.subject)
        name = each.check.id if said else f"{each.check.id} ({plain(finding.subject)})"
        groups.setdefault((finding.because, finding.remedy), []).append(name)
    return list(groups.items())
