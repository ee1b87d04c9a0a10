"""The command that looks for what is wrong with a node, whether mpsd runs or not: doctor."""

from collections.abc import Iterator
from dataclasses import asdict

import click

from mpsd.cli.api import Api
from mpsd.cli.checks import Check, Verdict, of_node, report
from mpsd.cli.command import of_one_version, with_api, with_form
from mpsd.cli.render import as_json
from mpsd.core.errors import MpsdError, UnreachableError
from mpsd.core.harmless import plain


@click.command()
@click.option("--fix", is_flag=True, help="Give GPUs back their compute mode, as root, where no mpsd runs to do it.")
@click.option("--config", metavar="FILE", help="The configuration of that mpsd, as for mpsd run.")
@click.option("--root", metavar="DIR", help="The directory of that mpsd, as for mpsd run; its socket is there, too.")
@with_form()
@with_api
def doctor(api: Api, form: str, config: str | None, root: str | None, *, fix: bool) -> None:
    """Look for what is wrong with this node, and say what to do about each thing.

    It works without mpsd, too: then it looks, as root, for GPUs that were left in another compute mode than their own,
    and with --fix gives it back to them. A running mpsd mends what it can by itself.

    The exit status is 0 when no check fails.
    """
    context = click.get_current_context()
    if root is not None:
        api = context.with_resource(Api(f"{root}/run/mpsd.sock"))
    checks = [_harmless(each) for each in _checks(api, config, root, fix=fix)]
    ok = all(check.verdict is not Verdict.FAIL for check in checks)
    click.echo(as_json({"ok": ok, "checks": [asdict(check) for check in checks]}) if form == "json" else report(checks))
    if not ok:
        context.exit(1)


def _harmless(check: Check) -> Check:
    """Return a check with the foreign text in it made harmless."""
    return Check(plain(check.name), check.verdict, plain(check.because), plain(check.remedy))


def _checks(api: Api, config: str | None, root: str | None, *, fix: bool) -> Iterator[Check]:
    try:
        status = api.status()
        answers = status, api.gpus(), api.daemons(), api.config()
    except UnreachableError as error:
        from mpsd.cli import left_behind

        yield Check("mpsd", Verdict.FAIL, error.detail, error.hint)
        yield from left_behind.checks(config, root, fix=fix)
    except MpsdError as error:
        yield Check("mpsd", Verdict.FAIL, f"it turned this caller away: {error.detail}", error.hint)
    else:
        with of_one_version():
            yield Check("mpsd", Verdict.OK, f"version {status['version']} answers")
            yield from of_node(*answers)
