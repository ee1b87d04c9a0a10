"""The commands that make mpsd a service of the system where no package did: service install, uninstall and status.

They look at the machine itself, and do without mpsd.
"""

import contextlib
from collections.abc import Iterator

import click

from mpsd.core.errors import ConfigurationError
from mpsd.core.sanitize import plain

_DRY_RUN = click.option("--dry-run", "dry", is_flag=True, help="Say what would be done, and do nothing.")


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
            f"{error.filename}: {error.strerror}", hint="mend that, and do it again: what is done is not done twice"
        ) from error


@click.group()
def service() -> None:
    """Make mpsd a service of the system, where it was installed by pip, pipx or uv.

    A Debian package needs none of this.
    """


@service.command()
@_DRY_RUN
def install(*, dry: bool) -> None:
    """Write units, manual pages and completions into /usr/local, and a configuration unless there is one.

    After an upgrade it is done again, and changes what has changed; then: systemctl try-restart mpsd. What somebody
    else changed stays as it is. Nothing is started, and nothing that runs is stopped.
    """
    from mpsd.system.installation import Installation

    with _understood():
        Installation(_say, dry).install()
    if not dry:
        _say("to start it, now and at every boot: systemctl enable --now mpsd.socket mpsd.service")


@service.command()
@click.option("--purge", is_flag=True, help="Remove the configuration, what mpsd kept, and the logs as well.")
@_DRY_RUN
def uninstall(*, purge: bool, dry: bool) -> None:
    """Stop mpsd, and remove what install wrote, unless it was changed since.

    Control daemons go on, with the clients that they have: nobody who computes is stopped. To have them end first, each
    when nobody is left on it: systemctl start mpsd-stop-daemons.service.
    """
    from mpsd.system.installation import Installation

    with _understood():
        Installation(_say, dry).uninstall(purge=purge)
    if not dry:
        _say("control daemons go on, with the clients that they have; installed again, mpsd adopts them")


@service.command()
def status() -> None:
    """Tell what is installed, and what of it is not as this version of mpsd would have it.

    The exit status is 0 when all of it is.
    """
    from mpsd.system.installation import Installation

    with _understood():
        differences = list(Installation(_say).differences())
    for each in differences:
        _say(each)
    if differences:
        click.get_current_context().exit(1)
    _say("the service is installed, as this version of mpsd has it; how it is: systemctl status mpsd")
