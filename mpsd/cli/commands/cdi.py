"""The commands about the CDI devices of leases: cdi write, cdi list and cdi remove."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from mpsd.cli.command import environment, note, of_files, print_answer, with_api, with_form
from mpsd.cli.completion import lease_names
from mpsd.cli.tables import PLAIN, Column, table
from mpsd.client import Api
from mpsd.core.containers import cdi as device_files
from mpsd.core.errors import InvalidRequestError, NotFoundError
from mpsd.system import cdi_directory

if TYPE_CHECKING:
    from mpsd.client import answer_types

_DIRECTORY: Final = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=cdi_directory.DEFAULT,
    show_default=True,
    metavar="DIR",
    help="Directory of CDI devices, in which no other user can write.",
)
_SHARED_MEMORY: Final = click.option(
    "--shm/--no-shm",
    "shared_memory",
    default=None,
    help="Give the container the machine's /dev/shm, or not."
    f"  [default: for drivers before {device_files.WITHOUT_SHARED_FILES}]",
)


def with_device(function: click.decorators.FC) -> click.decorators.FC:
    """Add the options for the place and the content of a device to a command."""
    return _DIRECTORY(_SHARED_MEMORY(function))


class _Written(NamedTuple):
    """A device of this mpsd in the directory; the lease is None where mpsd no longer has it."""

    path: Path
    device: device_files.Device
    lease: "answer_types.Lease | None"

    @property
    def state(self) -> str:
        return "ended" if self.lease is None else self.lease["state"]


@click.group()
def cdi() -> None:
    """Manage the CDI devices by which containers get leases: `--device mpsd/lease=ID`."""


@cdi.command()
@click.argument("lease", shell_complete=lease_names)
@with_device
@with_api
def write(api: Api, lease: str, directory: Path, *, shared_memory: bool | None) -> None:
    """Write the CDI device of a lease that is claimed and not taken yet, and print its name.

    \b
        mpsctl admit --fraction 0.25 --claim -o json
        mpsctl cdi write LEASE
        podman run --device mpsd/lease=LEASE IMAGE COMMAND

    The container gets the lease's environment and the pipe directory of its control daemon, and nothing else of mpsd's.
    Before its program starts, a hook takes the claim: the lease is held by the container's control group from then on.
    Where it cannot be taken, the container fails with the reason.

    The file has the lease's token. It is readable for the user who writes it, and for the uid that the claim is for.

    Devices of leases that have ended are removed.
    """  # noqa: D301 - click knows by that character what not to wrap
    device_files.file_name(lease)  # refuses an invalid id before anything else
    clean(api, directory)
    put(api, api.lease(lease), directory, shared_memory=shared_memory)
    click.echo(device_files.device_name(lease))


@cdi.command(name="list")
@_DIRECTORY
@with_form()
@with_api
def list_(api: Api, form: str, directory: Path) -> None:
    """List the CDI devices of this mpsd's leases, and remove those of leases that have ended."""
    clean(api, directory)
    devices = [
        {"device": device_files.device_name(each.device.lease), "state": each.state, "file": str(each.path)}
        for each in _written(api, directory)
    ]
    print_answer(
        form,
        {"devices": devices},
        lambda safe: table(
            (Column("DEVICE"), Column("STATE"), Column("FILE")),
            [(each["device"], each["state"], each["file"]) for each in safe["devices"]],
            PLAIN,
            none="no devices",
        ),
    )


@cdi.command()
@click.argument("lease", shell_complete=lease_names)
@_DIRECTORY
def remove(lease: str, directory: Path) -> None:
    """Remove the CDI device of a lease, if there is one. The lease stays."""
    wanted = directory / device_files.file_name(lease)
    for path, _ in cdi_directory.devices(directory):
        if path == wanted:
            path.unlink(missing_ok=True)


def put(api: Api, lease: "answer_types.Lease", directory: Path, *, shared_memory: bool | None) -> Path:
    """Write the device of a lease, and return its file. Raises InvalidRequestError where it cannot be claimed."""
    claim = next((each for each in lease["holders"] if each["kind"] == "claim"), None)
    if claim is None and lease["state"] != "ended":
        raise InvalidRequestError(
            f"{lease['id']} is held already, and a container can only take a claim",
            hint="claim one for the container: mpsctl admit --claim",
        )
    variables = {name: value for name, value in environment(api, lease).items() if name in lease["env"]}
    if device_files.TOKEN not in variables:
        raise InvalidRequestError(
            f"mpsd does not show the token of {lease['id']}, by which a container takes it",
            hint="write the device as root, or as the user who made the claim",
        )
    if shared_memory is None:
        shared_memory = _needs_shared_memory(api, lease)
    device = device_files.Device(lease["id"], os.path.abspath(api.path))  # noqa: PTH100 - unchanged, including links
    content = device_files.document(device, variables, program=_program(api), shared_memory=shared_memory)
    reader = None if claim is None else claim.get("uid")
    with of_files():
        return cdi_directory.write(directory, device, device_files.encode(content), reader=reader)


def clean(api: Api, directory: Path) -> None:
    """Remove the devices of this mpsd's leases that have ended, and report each."""
    with of_files():
        for each in list(_written(api, directory)):
            if each.state == "ended":
                each.path.unlink(missing_ok=True)
                note(f"removed {each.path}: {each.device.lease} has ended")


def _written(api: Api, directory: Path) -> Iterator[_Written]:
    for path, device in cdi_directory.devices(directory):
        if device.socket == os.path.abspath(api.path):  # noqa: PTH100 - as above
            try:
                yield _Written(path, device, api.lease(device.lease))
            except NotFoundError:
                yield _Written(path, device, None)


def _program(api: Api) -> list[str]:
    """Return the command with which a container runtime starts this mpsctl.

    It does not depend on the runtime's environment or directory.
    """
    trusted = [f"--trust-uid={uid}" for uid in sorted(api.trusted)]
    return [sys.executable, "-I", "-m", "mpsd.cli.main", *trusted]


def _needs_shared_memory(api: Api, lease: "answer_types.Lease") -> bool:
    """Tell whether clients and servers may share memory through files; True for an unknown driver."""
    from mpsd.core import gpus

    version = next((each["version"] for each in api.daemons()["daemons"] if each["name"] == lease["daemon"]), None)
    branch = gpus.driver_branch(version) if version is not None else None
    return branch is None or branch < device_files.WITHOUT_SHARED_FILES
