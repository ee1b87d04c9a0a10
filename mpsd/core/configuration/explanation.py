"""What a configuration means for users, in ten sentences. Pure."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from mpsd.core.settings import Attach, OnExpiry, OnViolation, Quota, Settings, Unadmitted, Users, WantedComputeMode
from mpsd.core.units import format_size


def explain(settings: Settings, *, serves_many: bool | None = None) -> dict[str, str]:
    """Return a sentence for each question of a user, by its topic.

    `serves_many` says whether this machine can serve several users on a GPU at a time; None where that is not known.
    """
    return {
        "connect": _connect(settings),
        "administer": _administer(settings),
        "users": _users(settings, serves_many=serves_many),
        "share": _share(settings),
        "quota": _quotas(settings),
        "time": _time(settings),
        "violations": _violations(settings),
        "no lease": _no_lease(settings),
        "outside MPS": _OUTSIDE[settings.daemon.compute_mode],
        "visible": _VISIBLE[settings.api.open],
    }


def _who(listed: Sequence[str]) -> str:
    return "every user" if "*" in listed else ", ".join(listed) or "no user"


def _connect(settings: Settings) -> str:
    roles = settings.roles
    said = f"{_who(roles.users)} may take out leases"
    if "*" not in roles.users:
        said += f", and {_who(roles.observers)} may only read"
    if not settings.api.mode & 0o002:
        said += f"; the socket has mode {settings.api.mode:04o} and group {settings.api.group or 'root'}"
    return said


def _administer(settings: Settings) -> str:
    roles = settings.roles
    said = f"{_who(('root', *roles.admins))} may end the leases of others and restart control daemons"
    return said + (f"; {_who(roles.operators)} may hold and drain them" if roles.operators else "")


_ALONE: Final = (
    "one at a time on each GPU: while a user has a lease or a client there, all others wait, however much of it is free"
)
_TOGETHER: Final = (
    "several at a time on each GPU; a fatal fault of one program ends the programs of all users on that GPU"
)


def _users(settings: Settings, *, serves_many: bool | None) -> str:
    match settings.daemon.users, serves_many:
        case (Users.ONE, _):
            return f'{_ALONE} (daemon.users = "one")'
        case (Users.AUTO, False):
            return f"{_ALONE}, because this machine can serve no more (driver 555 and Volta can)"
        case (Users.AUTO, None):
            return f"where the driver can (555 and newer), {_TOGETHER}; elsewhere one user at a time"
        case _:
            return _TOGETHER


def _share(settings: Settings) -> str:
    admission = settings.admission
    said = f"from {float(admission.smallest_share):g} % of a GPU to all that is free, by default for one process;"
    said += f" {format_size(admission.memory_reserve)} of each GPU's memory stay free"
    if admission.threads_oversubscription != 1:
        said += f", and threads are granted {admission.threads_oversubscription:g} times"
    if settings.enforcement.attach is Attach.STRICT:
        said += "; leases attach one after another, each under exactly its own limits"
    return said


def _quotas(settings: Settings) -> str:
    usual = settings.quota.get("*")
    said = f"each user has at most {_amount(usual)}" if usual is not None and _amount(usual) else "no limit for a user"
    others = [name for name in settings.quota if name != "*"]
    return said + (f"; {', '.join(others)} {'has' if len(others) == 1 else 'have'} other quotas" if others else "")


def _amount(quota: Quota) -> str:
    parts = {
        "% of threads": f"{quota.threads:g}" if quota.threads is not None else "",
        "of memory": format_size(quota.memory) if quota.memory is not None else "",
        f"GPU{'s' if quota.gpu_count != 1 else ''} at a time": f"{quota.gpu_count or ''}",
        "leases": f"{quota.leases or ''}",
        "client processes": f"{quota.clients or ''}",
        "GPUs that are named": f"{len(quota.gpus)}" if quota.gpus is not None else "",
    }
    return ", ".join(f"{value} {name}" for name, value in parts.items() if value)


def _time(settings: Settings) -> str:
    usual = settings.quota.get("*")
    if usual is None or usual.ttl is None:
        said = "a lease ends with its holder, by default at no other time"
    else:
        said = f"a lease ends with its holder, and after {_hours(usual.ttl)} unless it is renewed"
    then = "are ended" if settings.enforcement.on_expiry is OnExpiry.TERMINATE else "continue without a lease"
    return f"{said}; programs of an expired lease {then}"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:g} min"  # noqa: PLR2004 - an hour


def _violations(settings: Settings) -> str:
    usual = settings.enforcement.on_violation
    said = "programs that break their lease are " + (
        "ended, where the evidence is certain" if usual is OnViolation.TERMINATE else "reported, and continue"
    )
    others = {OnViolation.TERMINATE: "ended", OnViolation.REPORT: "only reported"}
    own = {each.name: getattr(settings.violations, each.name) for each in fields(settings.violations)}
    differ = [f"{name} ({others[action]})" for name, action in own.items() if action not in {None, usual}]
    return said + (f"; except {', '.join(differ)}" if differ else "")


def _no_lease(settings: Settings) -> str:
    match settings.unadmitted:
        case Unadmitted.DENY:
            return "a program that reaches MPS without a lease gets next to nothing"
        case Unadmitted.ALLOW:
            return "a program that reaches MPS without a lease gets the whole GPU"
    limits = settings.limits
    memory = limits.pinned_device_mem_limit
    return (
        f"a program that reaches MPS without a lease gets {float(limits.active_thread_percentage):g} % of the threads"
        f" and {'all' if memory is None else memory} memory"
    )


_OUTSIDE: Final = {
    WantedComputeMode.LEAVE: "a program that was started without a lease runs outside MPS, without limits",
    WantedComputeMode.EXCLUSIVE_PROCESS: (
        "a program that was started without a lease gets an error of CUDA (46), and not the whole GPU"
    ),
}

_VISIBLE: Final = {
    True: "users outside containers see owner, name, share and times of all leases, and no more of those of others",
    False: "users see the sums of the leases of others, and no more",
}
