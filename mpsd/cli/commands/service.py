"""The commands that make mpsd a service of the system where no package did: service install, uninstall and status.

They look at the machine itself, and do without mpsd.
"""

import contextlib
from collections.abc import Iterator

import click

from mpsd.core.errors import ConfigurationError
from mpsd.core.sanitize import plain

_DRY_RUN = click.option("--dry-run", "dry", is_flag=True, help="Show what would be done, without doing it.")


def _say(text: str) -> None:
    click.echo(plain(text))


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """Say which file could not be read or written."""
    try:
        yield
    except OSError as error:
        if error.filename is None:  # it is no file's, but the terminal's
            raise
        raise ConfigurationError(
            f"{error.filename}: {error.strerror}",
            hint="fix the cause, then run the command again: completed steps are not repeated",
        ) from error


@click.group()
def service() -> None:
    """Manage the system service of an mpsd that was installed with pip, pipx or uv.

    The Debian package does not need these commands.
    """


@service.command()
@_DRY_RUN
def install(*, dry: bool) -> None:
    """Install units, manual pages and completions into /usr/local, and a configuration if there is none.

    Run it again after an upgrade to update changed files, then: systemctl try-restart mpsd. Files that were changed by
    hand are kept. Nothing is started or stopped.
    """
    from mpsd.system.installation import Installation

    with _understood():
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

    with _understood():
        Installation(_say, dry).uninstall(purge=purge)
    if not dry:
        _say("control daemons and their clients keep running; mpsd adopts them when it is installed again")


@service.command()
def status() -> None:
    """Show which installed files differ from those of this version of mpsd.

    The exit status is 0 if none differs.
    """
    from mpsd.system.installation import Installation

    with _understood():
        differences = list(Installation(_say).differences())
    for each in differences:
        _say(each)
    if differences:
        click.get_current_context().exit(1)
    _say("the service is installed and matches this version of mpsd; for its state: systemctl status mpsd")
