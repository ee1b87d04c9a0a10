"""The program `mpsd-kubernetes`."""

import os
import sys
from pathlib import Path
from typing import Final

import click

from mpsd import __version__
from mpsd.core.errors import ConfigurationError, MpsdError
from mpsd.core.kubernetes import settings
from mpsd.core.kubernetes.settings import PREFIX, Settings
from mpsd.core.sanitize import plain

_CONFIG: Final = Path("/etc/mpsd/kubernetes.toml")


def _settings(config: Path | None, options: dict[str, str | None]) -> Settings:
    """Return the settings of the file, the environment and the command line. Raises ConfigurationError."""
    path = config or _CONFIG
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if config is not None:
            raise ConfigurationError(f"there is no configuration file {path}", hint="check --config") from None
        text = ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}", hint="check its permissions") from None
    return settings.parse(text, os.environ, options)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mpsd-kubernetes")
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar=f"{PREFIX}CONFIG",
    help=f"Configuration file.  [default: {_CONFIG}, if it exists]",
)
@click.option("--socket", metavar="PATH", help="mpsd's socket.  [default: /run/mpsd/mpsd.sock]")
@click.option("--kubelet-dir", metavar="DIR", help="kubelet's root directory.  [default: /var/lib/kubelet]")
@click.option("--node", metavar="NAME", help="The node's name, for the log.")
def cli(config: Path | None, socket: str | None, kubelet_dir: str | None, node: str | None) -> None:
    """Offer this node's GPUs to Kubernetes as shares that mpsd holds: kubelet's device plugin.

    Runs in the foreground beside mpsd, as root in the host's pid namespace, and logs to stderr. Each setting of the
    configuration file is taken from MPSD_KUBERNETES_<SETTING> too.
    """
    from mpsd.kubernetes.log import Log  # noqa: PLC0415 - the help page does not wait for gRPC
    from mpsd.kubernetes.service import Service  # noqa: PLC0415

    found = _settings(config, {"socket": socket, "kubelet_dir": kubelet_dir, "node": node})
    Service(found, Log(found.log_format)).run()


def main() -> None:
    """Run the program; an error of ours is said, and not raised."""
    try:
        cli(prog_name="mpsd-kubernetes")
    except MpsdError as error:
        click.echo(f"mpsd-kubernetes: {plain(error.detail)} [{error.code}]\n  hint: {plain(error.hint)}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
