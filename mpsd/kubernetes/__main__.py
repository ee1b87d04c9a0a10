"""The program `mpsd-kubernetes`."""

import importlib
import os
import sys
from pathlib import Path
from typing import Final, NoReturn

import click

from mpsd import __version__, keep_rich_out
from mpsd.core.errors import ConfigurationError, MpsdError
from mpsd.core.kubernetes import settings
from mpsd.core.kubernetes import webhook as admission
from mpsd.core.kubernetes.settings import PREFIX, Offer, When
from mpsd.core.sanitize import plain
from mpsd.system.host.configuration import read_text
from mpsd.system.processes import capabilities

_CONFIG: Final = Path("/etc/mpsd/kubernetes.toml")

_LIBRARIES: Final = {"google", "grpc"}
"""The libraries of the extra `kubernetes`, by their import names."""


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
@click.option("--node", metavar="NAME", help="Name of the Node object of this node.")
@click.option(
    "--dra", is_flag=True, help="Run as the driver of Dynamic Resource Allocation instead of a device plugin."
)
@click.option("--webhook", is_flag=True, help="Run as the webhook that gives pods the shares that a variable names.")
@click.option(
    "--renew-certificate", metavar="NAME", help="Renew the certificate of the webhook NAME if it is due, and exit."
)
@click.option(
    "--check", is_flag=True, help="Validate the configuration, say what a node would offer, and exit with 0 or 78."
)
def cli(
    *,
    config: Path | None,
    socket: str | None,
    kubelet_dir: str | None,
    node: str | None,
    dra: bool,
    webhook: bool,
    renew_certificate: str | None,
    check: bool,
) -> None:
    """Offer this node's GPUs to Kubernetes as shares that mpsd holds: kubelet's device plugin, or its driver.

    Runs in the foreground beside mpsd, as root in the host's pid namespace, and logs to stderr. The
    environment variable MPSD_KUBERNETES_<SETTING> overrides a setting of the configuration file.
    """
    options = {"socket": socket, "kubelet_dir": kubelet_dir, "node": node, "resources": "dra" if dra else None}
    found = settings.parse(read_text(config, _CONFIG) or "", os.environ, options)
    if webhook:
        admission.check(found)
    if check:
        click.echo(settings.summary(found))
        return

    from mpsd.kubernetes import api_server  # noqa: PLC0415 - the help page does not need gRPC
    from mpsd.kubernetes.log import Log  # noqa: PLC0415
    from mpsd.kubernetes.parts import program  # noqa: PLC0415
    from mpsd.kubernetes.service import run_plugin  # noqa: PLC0415

    if webhook:
        importlib.import_module("mpsd.kubernetes.webhook.server").run(found, Log(found.log_format))
        return
    if renew_certificate is not None:
        certificate = importlib.import_module("mpsd.kubernetes.webhook.certificate")
        certificate.run(found, os.environ, renew_certificate, Log(found.log_format))
        return
    settings.check_capabilities(found, capabilities.effective())
    started = program(found, Log(found.log_format))
    if found.resources is Offer.DRA:
        place = api_server.place(found, os.environ)
        importlib.import_module("mpsd.kubernetes.dra.service").run_driver(started, place)
    else:
        is_known = bool(found.node) and api_server.is_known(found, os.environ)
        wanted = When.ALWAYS in {found.report, found.pod_events} or (
            is_known and {found.report, found.pod_events} != {When.NEVER}
        )
        run_plugin(started, api_server.place(found, os.environ) if wanted else None)


def main() -> None:
    """Run the program; an error of mpsd, or a missing library, ends it with a sentence."""
    keep_rich_out()
    try:
        cli(prog_name="mpsd-kubernetes")
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] not in _LIBRARIES:
            raise
        hint = "install mpsd with its extra, from its checkout: pip install '.[kubernetes]'"
        _end(ConfigurationError(f"the library {missing.name} is not installed", hint=hint))
    except MpsdError as error:
        _end(error)


def _end(error: MpsdError) -> NoReturn:
    click.echo(f"mpsd-kubernetes: {plain(error.detail)} [{error.code}]\n  hint: {plain(error.hint)}", err=True)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
