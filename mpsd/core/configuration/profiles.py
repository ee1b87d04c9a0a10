"""Configurations for three kinds of machine, sized for the GPUs and the driver that it has. Pure."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from mpsd.core import gpus
from mpsd.core.configuration.document import quoted, render
from mpsd.core.model import Gpu
from mpsd.core.quantities import ActiveThreadPercentage
from mpsd.core.sanitize import plain
from mpsd.core.settings import (
    OnExpiry,
    OnViolation,
    Quota,
    Settings,
    Unadmitted,
    Users,
    WantedComputeMode,
    quota_rows,
    rows,
)
from mpsd.core.units import GIB, MIB, format_size

_HOUR: Final = 3600.0
_WIDTH: Final = 118


class Profile(StrEnum):
    """The use of a machine, which decides its configuration."""

    SHARED_SERVER = "shared-server"
    """Users who trust each other share each GPU at the same time."""
    ONE_USER = "one-user"
    """A GPU belongs to one user at a time, so that no fault of another reaches it."""
    WORKSTATION = "workstation"
    """The desktop of one person, whose other programs use the GPU too."""
    SLURM = "slurm"
    """Slurm gives out the shares, and mpsd makes them limits."""


_PURPOSE: Final = {
    Profile.SHARED_SERVER: "users who trust each other share each GPU at the same time",
    Profile.ONE_USER: "each GPU serves one user at a time, whom no fault of another user's program reaches",
    Profile.WORKSTATION: "one person's machine, on which other programs use the GPU too",
    Profile.SLURM: "Slurm gives out the shares of each GPU, which mpsd makes limits",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What a configuration has to fit."""

    gpus: tuple[Gpu, ...] = ()
    """All GPUs that the driver lists; none where it does not answer."""
    many_users: bool | None = None
    """Whether the control program can serve several users at a time; None where none could be asked."""
    administrators: str = ""
    """The group whose members may become root, such as sudo or wheel; empty where there is none."""

    @property
    def shared(self) -> tuple[Gpu, ...]:
        """The GPUs that mpsd can share."""
        return tuple(each for each in self.gpus if gpus.unsupported(each) is None)

    @property
    def driver(self) -> str:
        """The version of the driver; empty where it is not known."""
        return self.gpus[0].driver_version if self.gpus else ""

    @property
    def serves_many(self) -> bool | None:
        """Whether several users can share a GPU at the same time; None where that is not known."""
        if self.many_users and not gpus.serve_many_users(self.gpus):
            return False
        return self.many_users


def remarks(profile: Profile, machine: Machine) -> tuple[str, ...]:
    """Return what keeps this machine from what the profile is for, as sentences."""
    found = []
    if profile in {Profile.SHARED_SERVER, Profile.SLURM} and machine.serves_many is False:
        because = "a GPU older than Volta" if machine.many_users else f"driver {machine.driver}".rstrip()
        count = len(machine.shared) or 1
        found.append(
            f"One user at a time: with {because}, MPS serves one user at a time on each GPU. While a user has a lease"
            " or a client on a GPU, all other users wait for it, however much of it is free:"
            f" {count} GPU{'s serve' if count > 1 else ' serves'} {count} user{'s' if count > 1 else ''} at the same"
            " time. Several share a GPU with driver 555 or newer, from Volta on; mpsd then serves them by itself, once"
            " its control daemons have restarted."
        )
    if profile is not Profile.ONE_USER and machine.many_users is None:
        found.append(
            "No control program of NVIDIA's was found, so that it is not known whether several users can share a GPU"
            " (driver 555 and newer). Write the profile again when the driver is installed."
        )
    if not machine.shared:
        which = "No GPU was found" if not machine.gpus else "No GPU of this machine can be shared"
        quotas = ": the quotas are those of one GPU, without memory" if settings_of(profile, machine).quota else ""
        found.append(f"{which}{quotas}.")
    return tuple(found)


def settings_of(profile: Profile, machine: Machine, group: str = "") -> Settings:
    """Return the settings of a profile; `group` is that of the users of the GPUs, empty for all users."""
    base = Settings()
    users = Users.ONE if profile is Profile.ONE_USER else Users.AUTO
    mode = WantedComputeMode.LEAVE if profile is Profile.WORKSTATION else WantedComputeMode.EXCLUSIVE_PROCESS
    expiry, quotas, smallest = OnExpiry.LEAVE, {}, base.admission.smallest_share
    if profile in {Profile.SHARED_SERVER, Profile.ONE_USER}:
        one_at_a_time = profile is Profile.ONE_USER or machine.serves_many is False
        expiry = OnExpiry.TERMINATE if one_at_a_time else OnExpiry.LEAVE
        quotas = {"*": _quota(machine.shared, one_at_a_time=one_at_a_time)}
        smallest = ActiveThreadPercentage.parse(10) if one_at_a_time else smallest
    everybody, nobody = (f"%{group}",) if group else ("*",), ()
    users_of = (nobody, everybody) if profile is Profile.SLURM else (everybody, nobody)
    violation = OnViolation.TERMINATE if profile is Profile.SLURM else OnViolation.REPORT
    reserve = GIB if profile is Profile.WORKSTATION else base.admission.memory_reserve
    return replace(
        base,
        daemon=replace(base.daemon, users=users, compute_mode=mode),
        api=replace(base.api, open=True),
        enforcement=replace(base.enforcement, unadmitted=Unadmitted.DENY, on_violation=violation, on_expiry=expiry),
        admission=replace(base.admission, memory_reserve=reserve, smallest_share=smallest),
        roles=replace(
            base.roles,
            users=users_of[0],
            observers=users_of[1],
            admins=(f"%{machine.administrators}",) if machine.administrators else (),
        ),
        quota=quotas,
    )


def _quota(shared: tuple[Gpu, ...], *, one_at_a_time: bool) -> Quota:
    """Return the quota of each user: half of the GPUs, or a quarter where a lease keeps all others from its GPU.

    Of one GPU that users share, it is half of the GPU.
    """
    count = max(len(shared) // (4 if one_at_a_time else 2), 1)
    part = 1.0 if one_at_a_time or len(shared) > 1 else 0.5
    memory = int(count * part * max((each.memory_total for each in shared), default=0))
    unit = GIB if memory >= 4 * GIB else MIB
    return Quota(
        leases=64,
        threads=100.0 * count * part,
        memory=memory // unit * unit or None,
        ttl=12 * _HOUR if one_at_a_time else 72 * _HOUR,
        gpu_count=count,
    )


def text_of(profile: Profile, machine: Machine, group: str = "") -> str:
    """Return a profile as a configuration file, with the reason for each setting."""
    settings = settings_of(profile, machine, group)
    found = ", ".join(f"{plain(each.name)} with {format_size(each.memory_total // MIB * MIB)}" for each in machine.gpus)
    driver = f"driver {plain(machine.driver)}" if machine.driver else "no driver that answers"
    lines = [
        *_comment(f'The configuration of mpsd, by the profile "{profile}": {_PURPOSE[profile]}.'),
        *_comment(f"It was made for {driver}, and {found or 'no GPU'}."),
        "# In plain words, for users: mpsd check --explain",
        "# After a change:            mpsd check && systemctl reload mpsd",
        "# Every other setting has its default, see mpsd.toml(5).",
    ]
    for remark in remarks(profile, machine):
        lines += ["#", *_comment(remark)]
    why, section = _reasons(profile, settings), ""
    for row in rows():
        if row.key in why:
            of, name = row.key.split(".")
            if of != section:
                section = of
                lines += ["", f"[{section}]"]
            lines += [*_comment(why[row.key]), f"{name} = {render(row, getattr(getattr(settings, of), name))}"]
    for name, quota in settings.quota.items():
        lines += ["", *_comment(_OF_QUOTAS), f"[quota.{quoted(name)}]"]
        for row in quota_rows():
            value = getattr(quota, row.name)
            if value is not None:
                lines += [*_comment(_OF_QUOTA[row.name]), f"{row.name} = {render(row, value)}"]
    return "\n".join([*lines, ""])


_OF_QUOTAS: Final = (
    "What each user may have at a time. A user or a %group gets more, or less, by a quota of its own, such as"
    " [quota.alice] or [quota.'%students'], which replaces this one as a whole."
)

_OF_QUOTA: Final = {
    "leases": "Leases, with requests that wait.",
    "threads": "The threads of all leases together; 100 is a whole GPU.",
    "memory": "The memory of all leases together.",
    "ttl": (
        "Seconds until a lease ends, unless it is renewed before (mpsctl renew), so that forgotten ones give their"
        " share back. It is the longest time that can be requested, and that of a request which names none."
    ),
    "gpu_count": "GPUs at a time.",
}


def _comment(text: str) -> Iterator[str]:
    return (f"# {each}" for each in textwrap.wrap(text, _WIDTH, break_on_hyphens=False, break_long_words=False))


def _reasons(profile: Profile, settings: Settings) -> Mapping[str, str]:
    """Return the settings that the file of a profile states, each with its reason."""
    is_closed = settings.daemon.compute_mode is WantedComputeMode.EXCLUSIVE_PROCESS
    reasons = {
        "api.open": (
            "Users see who has which share of which GPU, and until when: owner, name, share and times of each lease."
            " With false, they see only the sums. (Who may connect: [roles] below. The kernel tells mpsd which user"
            " calls, so the socket itself can stay open to all; to close it, set `mode` and `group`, and the same in"
            " mpsd.socket.)"
        ),
        "daemon.users": (
            "One user at a time on each GPU: the next one waits for the last lease and client of the other."
            if settings.daemon.users is Users.ONE
            else "Several users at a time on each GPU, where the driver can (555 and newer), and otherwise one."
            " A fatal fault of one program then ends the programs of all users on that GPU."
        ),
        "daemon.compute_mode": (
            "A program that is started without a lease gets an error, and not the whole GPU."
            if is_closed
            else "Programs that are started without mpsctl use the GPU as before, without limits."
        ),
        "enforcement.unadmitted": "A program that reaches MPS without a lease gets next to nothing.",
        "enforcement.on_violation": (
            "A program that breaks its lease is reported (mpsctl status, mpsctl events), and an administrator decides."
            ' With "terminate", mpsd ends it where the evidence is certain.'
        ),
        "enforcement.on_expiry": (
            "The programs of a lease that expires continue without one, and keep their limits."
            ' With "terminate", mpsd ends them: where leases are forgotten.'
            if settings.enforcement.on_expiry is OnExpiry.LEAVE
            else "The programs of a lease that expires are ended, because they would keep all other users from the GPU."
        ),
        "roles.users": "Who may take out leases: users, %groups, or * for all.",
        "roles.admins": "Who may end the leases of others, beside root.",
    }
    if profile is Profile.WORKSTATION:
        reasons["admission.memory_reserve"] = "Left to the desktop on each GPU."
    if settings.admission.smallest_share != Settings().admission.smallest_share:
        reasons["admission.smallest_share"] = "A lease keeps all other users from its GPU, so none is next to nothing."
    if profile is Profile.SLURM:
        reasons["enforcement.on_violation"] = (
            "A program that takes more than Slurm gave its job is ended, where the evidence is certain."
        )
        reasons["daemon.compute_mode"] = (
            "A program that misses MPS gets an error, and not the whole GPU. A job with whole GPUs (gpu:1) then has one"
            ' process on each; for more of them: mpsctl job, or "leave".'
        )
        reasons["api.open"] = "Users see owner, name, share and times of each lease; with false, only the sums."
        reasons["roles.users"] = (
            "Root alone takes out leases, for jobs, in Slurm's Prolog: Slurm would not count those of users, and jobs"
            " would fail for lack of room."
        )
        reasons["roles.observers"] = "The users of jobs, whose tasks take the leases of their jobs, and read."
    if not settings.quota:  # without quotas, no lease expires
        del reasons["enforcement.on_expiry"]
    return reasons
