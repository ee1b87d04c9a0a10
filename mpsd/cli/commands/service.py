"""The commands about systemd services: mpsd's own, where no package installed it, and services with a lease.

`install`, `uninstall` and `status` inspect the machine itself, and work without mpsd.
"""

import click

from mpsd.cli.command import of_files
from mpsd.cli.commands import wrap
from mpsd.core.sanitize import plain

_DRY_RUN = click.option("--dry-run", "dry", is_flag=True, help="Show what would be done, without doing it.")


def _say(text: str) -> None:
    click.echo(plain(text))


@click.group()
def service() -> None:
    """Manage the system service of mpsd, and give services of systemd a lease of their own.

    `install`, `uninstall` and `status` are for an mpsd that was installed with pip, pipx or uv; the Debian package does
    not need them.
    """


for _command in (wrap.wrap, wrap.unwrap, wrap.unit_start, wrap.unit_stop, wrap.unit_end_clients):
    service.add_command(_command)


@service.command()
@_DRY_RUN
def install(*, dry: bool) -> None:
    """Install units, manual pages and completions into /usr/local, and a configuration if there is none.

    Run it again after an upgrade to update changed files, then: systemctl try-restart mpsd. Files that were changed by
    hand are kept. Nothing is started or stopped.
    """
    from mpsd.system.installation import Installation

    with of_files():
        Installation(_say, dry).install()
    if not dry:
        _say("to start mpsd now and at every boot: systemctl enable --now mpsd.socket mpsd.service")


@service.command()
@click.option("--purge", is_flag=True, help="Also remove the configuration, mpsd's state, and the logs.")
@_DRY_RUN
def uninstall(*, purge: bool, dry: bool) -> None:
    """Stop mpsd and remove the files that install wrote, except those that were changed since.

    Control daemons and their clients keep running. To stop each control daemon first, once it has no leases and no
    clients: systemctl start mpsd-stop-daemons.service.
    """
    from mpsd.system.installation import Installation

    with of_files():
        Installation(_say, dry).uninstall(purge=purge)
    if not dry:
        _say("control daemons and their clients keep running; mpsd adopts them when it is installed again")


@service.command()
def status() -> None:
    """Show which installed files differ from those of this version of mpsd.

    The exit status is 0 if none differs.
    """
    from mpsd.system.installation import Installation

    with of_files():
        differences = list(Installation(_say).differences())
    for each in differences:
        _say(each)
    if differences:
        click.get_current_context().exit(1)
    _say("the service is installed and matches this version of mpsd; for its state: systemctl status mpsd")
