"""The commands about systemd services: mpsd's own, where no package installed it, and services with a lease.

`install`, `configure`, `uninstall` and `status` inspect the machine itself, and work without mpsd. `wrap` gives a unit
a lease, by a drop-in that calls the hidden commands at the unit's start and stop.
"""

import contextlib
from collections.abc import Mapping
from math import inf
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli.command import note, of_files, with_api
from mpsd.cli.commands.admit import with_request
from mpsd.cli.groups import Commands
from mpsd.cli.leases import find, start
from mpsd.cli.leases.take import check_share, take
from mpsd.cli.options import given
from mpsd.cli.render import as_env_file
from mpsd.cli.users import user
from mpsd.client import Client
from mpsd.client.environment import environment
from mpsd.core.configuration.profiles import Profile
from mpsd.core.errors import ConfigurationError, InvalidRequestError, MpsdError, NotFoundError
from mpsd.core.programs.drop_in import OnRestart, environment_file, is_written_here, render, seconds_held, service_name
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from mpsd.client import answer_types

_DRY_RUN = click.option("--dry-run", "dry", is_flag=True, help="Show what would be done, without doing it.")


def _say(text: str) -> None:
    click.echo(plain(text))


@click.group(cls=Commands)
def service() -> None:
    """Manage mpsd's service, and give services of systemd a lease.

    `install`, `uninstall` and `status` are for an mpsd that was installed with pip, pipx or uv; the Debian package does
    not need them. `configure` is for any.
    """


_PROFILE: Final = click.Choice([each.value for each in Profile])
_GROUP: Final = click.option("--group", metavar="GROUP", help="Group of those who use the GPUs.  [default: all users]")


def _configuration(profile: str, group: str | None) -> str:
    """Return a profile for this machine, after saying what keeps the machine from it."""
    from mpsd.core.configuration.profiles import remarks, text_of
    from mpsd.system.doctor import profiles
    from mpsd.system.host import event_loop
    from mpsd.system.host.configuration import read_configuration

    machine = event_loop.run(profiles.look(read_configuration(None), group))
    for each in remarks(Profile(profile), machine):
        note(each)
    return text_of(Profile(profile), machine, group or "")


@service.command()
@click.option("--profile", type=_PROFILE, help="Write a configuration for this machine too, as `configure` does.")
@_GROUP
@_DRY_RUN
def install(*, profile: str | None, group: str | None, dry: bool) -> None:
    """Install mpsd's units, manual pages and completions.

    They go into /usr/local; a configuration is written if there is none. Run it again after an upgrade to update
    changed files, then: systemctl try-restart mpsd. Files that were changed by hand are kept. Nothing is started or
    stopped.
    """
    from mpsd.system.host.installation import Installation

    if group is not None and profile is None:
        raise click.UsageError("--group is for a configuration: name its --profile.")
    with of_files():
        Installation(_say, dry).install(None if profile is None else _configuration(profile, group))
    if not dry:
        _say("to start mpsd now and at every boot: systemctl enable --now mpsd.socket mpsd.service")


@service.command()
@click.argument("profile", type=_PROFILE)
@_GROUP
@click.option("--dry-run", "dry", is_flag=True, help="Print the configuration, without writing it.")
def configure(*, profile: str, group: str | None, dry: bool) -> None:
    """Write a configuration for this machine, from a profile.

    \b
        mpsctl service configure shared-server

    \b
    PROFILE is one of:
        shared-server  users share each GPU, at the same time from driver 555 on
        one-user       each GPU serves one user at a time, with any driver
        workstation    one person's machine; other programs use the GPU too
        slurm          Slurm gives out the shares of each GPU

    It fits the driver, the GPUs and the group of administrators as they are. The file is /etc/mpsd/mpsd.toml, with the
    reason for each setting. Beside one that is there it is mpsd.toml.new, and the output has the command that puts it
    in force. `mpsd check --explain` says what it means for users.
    """  # noqa: D301 - click knows by that character what not to wrap
    from mpsd.system.host.installation import Installation

    text = _configuration(profile, group)
    if dry:
        click.echo(text, nl=False)
        return
    with of_files():
        Installation(_say).configure(text)


@service.command()
@click.option("--purge", is_flag=True, help="Also remove the configuration, and mpsd's files of state and logs.")
@_DRY_RUN
def uninstall(*, purge: bool, dry: bool) -> None:
    """Stop mpsd, and remove the files that install wrote.

    Those that were changed since are kept. Control daemons and their clients keep running. To stop each control daemon
    first, once it has no leases and no clients: systemctl start mpsd-stop-daemons.service.
    """
    from mpsd.system.host.installation import Installation

    with of_files():
        Installation(_say, dry).uninstall(purge=purge)
    if not dry:
        _say("control daemons and their clients keep running; mpsd adopts them when it is installed again")


@service.command()
def status() -> None:
    """Show which installed files differ from this version.

    The exit status is 0 if none differs.
    """
    from mpsd.system.host.installation import Installation

    with of_files():
        differences = list(Installation(_say).differences())
    for each in differences:
        _say(each)
    if differences:
        click.get_current_context().exit(1)
    _say("the service is installed and matches this version of mpsd; for its state: systemctl status mpsd")


# -- services with a lease ---------------------------------------------------------------------------------------------

_LEASE: Final = "MPSD_LEASE="

_ON_RESTART: Final = click.option(
    "--on-restart",
    type=click.Choice([each.value for each in OnRestart]),
    default=OnRestart.RENEW.value,
    show_default=True,
    help="What a restart does to the lease: `renew` ends it with the unit, and asks for another; `keep` holds it for"
    " the next start, for the unit's longest pause before a restart and a minute.",
)


_UNIT: Final = click.argument("unit")


@service.command()
@_UNIT
@with_request
@_ON_RESTART
@click.option(
    "--end-clients",
    is_flag=True,
    help="At a stop, end the unit's clients by terminate_client before systemd sends SIGTERM. Programs that save their"
    " work on SIGTERM lose what is on the GPU.",
)
@click.option("--dry-run", "dry", is_flag=True, help="Show the drop-in, without writing it.")
def wrap(
    unit: str,
    *,
    on_restart: str,
    end_clients: bool,
    dry: bool,
    wait: float,
    owner: object,
    ttl: object,
    **request: object,
) -> None:
    """Give a service of systemd a lease.

    Each start of UNIT takes out a lease, and its processes get the environment; the first one that does is
    `systemctl restart UNIT`.

    The lease is held by the unit's control group and ends with the unit. It belongs to the unit's User=: that
    user's processes are its clients. A start without room fails, or waits with --wait; the unit's journal says why.

    The command writes a drop-in, /etc/systemd/system/UNIT.d/50-mpsd.conf, and starts and stops nothing. Running it
    again replaces the drop-in, and `mpsctl service unwrap UNIT` removes it.
    """
    from mpsd.system.host import systemd_units

    full = service_name(unit)
    if owner is not None or ttl is not None:
        wrong = "--user" if owner is not None else "--ttl"
        raise InvalidRequestError(
            f"{wrong} makes no sense for a unit: its lease is of its User=, and lives as long as it does",
            hint=f"omit {wrong}",
            limit=wrong.removeprefix("--"),
        )
    if end_clients and on_restart == OnRestart.KEEP:
        raise InvalidRequestError(
            "--end-clients ends the lease, so that it cannot be kept over a restart",
            hint="use --on-restart renew",
            limit="on_restart",
        )
    systemd_units.refuse_without_systemd()
    found = systemd_units.properties(full, "DynamicUser", "TimeoutStartUSec")
    if found["DynamicUser"] == "yes":
        raise ConfigurationError(
            f"{full} has DynamicUser=, so that its user is not known before it starts",
            hint="give it a User= of its own (systemctl edit)",
        )
    if on_restart == OnRestart.KEEP:
        _seconds_held(full)
    check_share(request)
    text = render(
        PurePosixPath(systemd_units.own_program()),
        _as_options(request, wait),
        OnRestart(on_restart),
        end_clients=end_clients,
        start_seconds=_start_seconds(wait, found["TimeoutStartUSec"]),
    )
    path = systemd_units.drop_in(full)
    if dry:
        click.echo(text, nl=False)
        return
    with of_files():
        there = systemd_units.read(path)
        if there is not None and not is_written_here(there):
            raise ConfigurationError(f"{path} was not written by mpsctl", hint="move it away, then run this again")
        systemd_units.write(path, text)
    click.echo(f"{path} is written, and takes effect at the unit's next start: systemctl restart {full}")


@service.command()
@_UNIT
def unwrap(unit: str) -> None:
    """Remove the drop-in of `wrap`. A unit that runs keeps its lease until it stops."""
    from mpsd.system.host import systemd_units

    full = service_name(unit)
    systemd_units.refuse_without_systemd()
    path = systemd_units.drop_in(full)
    with of_files():
        there = systemd_units.read(path)
        if there is None:
            raise NotFoundError(f"{full} is not wrapped: there is no {path}", hint="mpsctl service wrap writes it")
        if not is_written_here(there):
            raise ConfigurationError(f"{path} was not written by mpsctl", hint=f"remove it by hand: rm {path}")
        systemd_units.remove(path)
    click.echo(f"{path} is removed")


@service.command(hidden=True)
@_UNIT
@with_request
@_ON_RESTART
@with_api
def unit_start(api: Client, unit: str, *, on_restart: str, wait: float, **request: object) -> None:
    """Take out the lease of a unit that starts, and write its environment; called by the drop-in of `wrap`."""
    from mpsd.system.host import systemd_units

    group = systemd_units.control_group(unit)
    path, wanted = Path(environment_file(unit)), f"# {' '.join(_as_options(request, wait))}"
    lease = _left_lease(api, path, group, wanted if on_restart == OnRestart.KEEP else None)
    if lease is None:
        for each in api.leases()["leases"]:  # a lease of a start that was killed before it recorded the lease
            if each["name"] == unit and any(holder.get("cgroup") == group for holder in each["holders"]):
                api.release(each["id"])
        found = systemd_units.properties(unit, "User", "Group")
        request["owner"] = _owner(found["User"] or "root", found["Group"])
        request["holder"] = {"cgroup": group, "while": "exists"}
        lease = take(api, {"name": unit, **given(**request)}, wait=wait)
    with start.released_on_failure(api, lease):
        systemd_units.write_secret(path, f"{wanted}\n{as_env_file(environment(api, lease, share=0))}\n")


@service.command(hidden=True)
@_UNIT
@_ON_RESTART
@with_api
def unit_stop(api: Client, unit: str, *, on_restart: str) -> None:
    """Release or keep the lease of a unit that has stopped; called by the drop-in of `wrap`."""
    path = Path(environment_file(unit))
    lease = _noted(path)
    if lease is None:
        return
    if on_restart == OnRestart.KEEP:
        deadline = _seconds_held(unit)
        with contextlib.suppress(NotFoundError):  # the lease has ended: the next start requests another
            api.hold(lease, {"claim": {"deadline": deadline}, "replace": True})
            return
    else:
        api.release(lease)
    path.unlink(missing_ok=True)


@service.command(hidden=True)
@_UNIT
@with_api
def unit_end_clients(api: Client, unit: str) -> None:
    """End the clients of a unit before it stops; called by the drop-in of `wrap --end-clients`."""
    if lease := _noted(Path(environment_file(unit))):
        find.end_with_clients(api, lease)


def _left_lease(api: Client, path: Path, group: str, wanted: str | None) -> "answer_types.Lease | None":
    """Return the lease of the unit's last run, after handing it to this run's control group; None without one.

    A lease with other options is released, as is any lease where `wanted` is None: the drop-in was changed since.
    """
    lease = _noted(path)
    if lease is None:
        return None
    if path.read_text().partition("\n")[0] == wanted:
        try:
            return api.hold(lease, {"cgroup": group, "while": "exists", "replace": True})
        except MpsdError as error:  # the lease has ended, or is ending
            note(f"{lease} could not be kept: {error.detail}")
    with contextlib.suppress(NotFoundError):
        api.release(lease)
    return None


def _noted(path: Path) -> str | None:
    """Return the lease whose environment the unit got last."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return None
    return next((each.removeprefix(_LEASE) for each in lines if each.startswith(_LEASE)), None)


def _owner(name: str, group: str) -> Mapping[str, object]:
    """Return the user of a unit, with the unit's own group. Raises ConfigurationError where either does not exist."""
    import grp

    found = user(name)
    if found is not None and group:
        with contextlib.suppress(KeyError):
            return {**found, "gid": int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid}
    elif found is not None:
        return found
    raise ConfigurationError(f"there is no user {name}, or no group {group}", hint="correct User= or Group=")


def _as_options(request: Mapping[str, object], wait: float) -> list[str]:
    """Return a request as command-line options."""
    options = []
    for name, value in sorted(given(**request).items()):
        if name == "labels":
            assert isinstance(value, dict)  # noqa: S101 - its option makes it
            options += [word for key in sorted(value) for word in ("--label", f"{key}={value[key]}")]
        else:
            options += [f"--{name.replace('_', '-')}", str(value)]
    if wait:
        options += ["--wait", "forever" if wait == inf else f"{wait:g}"]
    return options


def _seconds_held(unit: str) -> float:
    """Return for how long a stopped unit's lease is held; growing pauses need systemd 254 or later.

    Raises InvalidRequestError where that is too long.
    """
    from mpsd.system.host import systemd_units

    found = systemd_units.properties(unit, "RestartUSec", "RestartSteps", "RestartMaxDelayUSec")
    longest = systemd_units.seconds(found["RestartMaxDelayUSec"] or "infinity")
    return seconds_held(systemd_units.seconds(found["RestartUSec"]), int(found["RestartSteps"] or 0), longest)


def _start_seconds(wait: float, before: str) -> str:
    """Return the start timeout of a unit that waits first; empty where it does not wait."""
    from mpsd.system.host import systemd_units

    if not wait:
        return ""
    usual = systemd_units.seconds(before)
    return "infinity" if inf in {wait, usual} else f"{wait + usual:g}"
