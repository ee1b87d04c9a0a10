"""The command that diagnoses a node, with or without a running mpsd: doctor."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli.command import with_api, with_form
from mpsd.cli.render import as_here, as_json, columns, plural
from mpsd.client import Client
from mpsd.core.errors import InvalidRequestError
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from mpsd.core.doctor.finding import Check, Result

_SHOWN: Final = ("fail", "warn", "unknown", "note", "ok")
"""The verdicts, the worst first."""


def _checks(_: click.Context, __: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Offer the ids of the checks."""
    from click.shell_completion import CompletionItem

    from mpsd.core.doctor.table import CHECKS

    return [CompletionItem(each.id, help=each.right) for each in CHECKS.values() if each.id.startswith(incomplete)]


@click.command()
@click.option(
    "--fix", is_flag=True, help="Fix what can be fixed without affecting running clients, and report each fix."
)
@click.option(
    "--only",
    metavar="ID",
    multiple=True,
    shell_complete=_checks,
    help="Run only this check; may be repeated. --list shows the ids.",
)
@click.option("--list", "listed", is_flag=True, help="List the checks without running them.")
@click.option("--all", "everything", is_flag=True, help="Show the checks that are ok as well.")
@click.option("--config", metavar="FILE", help="Configuration file of the mpsd to check, as for mpsd run.")
@click.option(
    "--root", metavar="DIR", help="Root directory of the mpsd to check, as for mpsd run; also selects its socket."
)
@with_form()
@with_api
def doctor(
    api: Client,
    form: str,
    only: Sequence[str],
    config: str | None,
    root: str | None,
    *,
    fix: bool,
    listed: bool,
    everything: bool,
) -> None:
    """Diagnose this node, and print a remedy for each problem.

    The checks work without mpsd, and as far as possible without root: a check that cannot run is reported as unknown,
    with the reason. The fixes of --fix do not affect running clients; each is recorded in doctor.log in mpsd's log
    directory.

    The exit status is 0 if no check fails.
    """
    checks = _chosen(only)
    if listed:
        click.echo(_list(form, checks))
        return
    import asyncio

    from mpsd.cli import doctor_run

    context = click.get_current_context()
    if root is not None:
        api = context.with_resource(api.at(f"{root}/run/mpsd.sock"))
    file, directory = Path(config) if config is not None else None, Path(root).absolute() if root is not None else None
    results, done = asyncio.run(doctor_run.run(api, file, directory, checks, fix=fix))
    answer = doctor_run.as_json(results, done)
    click.echo(as_json(answer) if form == "json" else report(results, done, everything=everything))
    if not answer["ok"]:
        context.exit(1)


def _chosen(only: Sequence[str]) -> "list[Check]":
    """Return the checks with these ids, or all. Raises InvalidRequestError for an unknown id."""
    from mpsd.core.doctor.table import CHECKS

    unknown = [each for each in only if each not in CHECKS]
    if unknown:
        raise InvalidRequestError(f"there is no check {unknown[0]!r}", hint="list the checks: mpsctl doctor --list")
    return [check for check in CHECKS.values() if not only or check.id in only]


def _list(form: str, checks: "Sequence[Check]") -> str:
    if form == "json":
        return as_json([{"id": each.id, "right": each.right, "why": each.why, "fix": each.mends} for each in checks])
    lines = [
        line
        for each in checks
        for line in (
            (each.id, each.right + (f" (--fix {each.mends})" if each.mends else "")),
            ("", f"otherwise: {each.why}"),
        )
    ]
    return columns(lines)


def report(results: "Sequence[Result]", done: Sequence[str], *, everything: bool) -> str:
    """Describe the results, the worst first, with their remedies, and count them.

    Checks that are unknown for the same reason share one line.
    """
    lines = [f"fixed    {plain(each)}" for each in done]
    for verdict in _SHOWN:
        if verdict == "ok" and not everything:
            continue
        for (because, remedy), names in _grouped([each for each in results if each.finding.verdict == verdict]):
            lines.append(f"{verdict:<7}  {', '.join(names)}: {as_here(plain(because))}")
            if remedy and verdict != "ok":
                lines.append(f"         remedy: {as_here(plain(remedy))}")
    counts = {verdict: sum(each.finding.verdict == verdict for each in results) for verdict in _SHOWN}
    shown = f"{counts['fail']} failed, {plural(counts['warn'], 'warning')}, {counts['unknown']} unknown"
    shown += f", {plural(counts['note'], 'note')}, {counts['ok']} ok" if counts["note"] else f", {counts['ok']} ok"
    return "\n".join([*lines, *([""] if lines else []), f"{plural(len(results), 'finding')}: {shown}"])


def _grouped(results: "Sequence[Result]") -> "list[tuple[tuple[str, str | None], list[str]]]":
    groups: dict[tuple[str, str | None], list[str]] = {}
    for each in results:
        finding = each.finding
        said = not finding.subject or finding.because.startswith(finding.subject)
        name = each.check.id if said else f"{each.check.id} ({plain(finding.subject)})"
        groups.setdefault((finding.because, finding.remedy), []).append(name)
    return list(groups.items())
