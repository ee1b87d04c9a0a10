"""The command that prints the metrics, or writes them to a file for node_exporter's textfile collector."""

from pathlib import Path
from typing import Final

import click

from mpsd.cli.command import with_api
from mpsd.client import Client
from mpsd.core.errors import ConfigurationError

_MODE: Final = 0o644
"""node_exporter runs as a user of its own."""

_SUFFIX: Final = ".prom"


@click.command()
@click.option(
    "--textfile",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.prom",
    help="Write the metrics to this file, for node_exporter's textfile collector, instead of stdout.",
)
@click.option(
    "--users/--no-users",
    default=None,
    help="Whether to include metrics about individual users: their leases and clients, by uid."
    "  [default: users; no-users with --textfile]",
)
@with_api
def metrics(api: Client, textfile: Path | None, *, users: bool | None) -> None:
    """Show the node as metrics, in Prometheus' text format.

    Of individual users, a caller sees only its own leases; root sees all. A written file replaces the previous one
    atomically. If mpsd does not answer, the file does not change, and node_exporter reports its age
    (node_textfile_mtime_seconds).
    """
    if textfile is not None and textfile.suffix != _SUFFIX:
        raise click.BadParameter(
            f"node_exporter reads only files whose names end with {_SUFFIX}.", param_hint="--textfile"
        )
    text = api.metrics(users=textfile is None if users is None else users)
    if textfile is None:
        click.echo(text, nl=False)
        return
    from mpsd.system.files import atomic_file, path_safety

    try:
        # Others may own the directory, as node_exporter's user does on Debian.
        with path_safety.opened(textfile.parent) as directory:
            atomic_file.write(directory / textfile.name, text, mode=_MODE)
    except OSError as error:
        raise ConfigurationError(
            f"the metrics cannot be written to {textfile}: {error.strerror}",
            hint="name a file in the directory of --collector.textfile.directory, as a user who can write there",
        ) from None
