"""The environment of a lease's processes: what they need of it, and what they must not inherit beside it."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from mpsd.client.client import Client
from mpsd.core.errors import DoesNotFitError, InternalError, InvalidRequestError, NotFoundError, NotPermittedError
from mpsd.core.mps_facts import MAX_CONNECTIONS, MOST_CONNECTIONS, UNASKED

if TYPE_CHECKING:
    from mpsd.client import answer_types

_VARIABLE: Final = r"(?!CUDA_INJECTION)(?:CUDA|NVIDIA|MPSD)_[A-Z0-9_]+"
"""The accepted names in a lease's environment. CUDA would load the library that CUDA_INJECTION64_PATH names."""


def environment(api: Client, lease: "answer_types.Lease", share: int | None = None) -> dict[str, str]:
    """Return the environment of a lease's processes, on its only GPU or on the GPU with the number `share`.

    It names the socket of this mpsd, where a program would not use it by default. Raises DoesNotFitError while the
    lease waits, NotFoundError when it has ended, NotPermittedError for that of another user, and InvalidRequestError
    when the number is missing or too high: without an environment of MPS, a process would run without limits. Raises
    InternalError for a variable that belongs to neither CUDA, NVIDIA nor mpsd: it could make a process run code that
    the lease names.
    """
    state, gpus = lease["state"], len(lease["gpus"])
    if state == "waiting":
        raise DoesNotFitError(
            f"{lease['id']} is still waiting, so it has no environment yet",
            hint=f"see what it waits for: mpsctl show {lease['id']}",
        )
    if state == "ended":
        raise NotFoundError(f"{lease['id']} has ended: {lease['because']}", hint="take out another lease: mpsctl admit")
    if share is None and gpus > 1:
        raise InvalidRequestError(
            f"{lease['id']} is on {gpus} GPUs, and a process can use only one of them",
            hint=f"choose a share: mpsctl show {lease['id']} -o env --share 0 (to {gpus - 1})",
        )
    if share is not None and share >= gpus:
        count = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        raise InvalidRequestError(
            f"{lease['id']} has no share {share}: it is on {count}", hint="shares are numbered from 0"
        )
    variables = lease["shares"][share]["env"] if share else lease["env"]
    if not variables and not lease["holders"]:
        raise NotPermittedError(
            f"{lease['id']} belongs to another user, so its environment is not shown",
            hint="take out a lease of your own: mpsctl admit",
        )
    if not variables:
        raise InternalError(
            f"mpsd gave {lease['id']} no environment, and without it no limits apply",
            hint="look at the lease: mpsctl show LEASE -o json",
        )
    if odd := [name for name in variables if not re.fullmatch(_VARIABLE, name)]:
        raise InternalError(
            f"the environment of {lease['id']} has {odd[0]!r}, a variable of neither CUDA, NVIDIA nor mpsd",
            hint="nothing was run or printed; find out what listens on the socket, and report this if it is mpsd",
        )
    return {**variables, **api.variables()}


def foreign(inherited: Mapping[str, str], variables: Mapping[str, str]) -> list[str]:
    """Return the inherited variables of another job that a process with a lease's variables must not have."""
    return [name for name in UNASKED if name in inherited and name not in variables]


def with_variables(inherited: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return an inherited environment with a lease's variables, and without those of another job."""
    dropped = foreign(inherited, variables)
    return {**{name: value for name, value in inherited.items() if name not in dropped}, **variables}


def own_connections(inherited: Mapping[str, str]) -> int | None:
    """Return the connections that the clients of a program with this environment ask for; None: they ask for none."""
    own = inherited.get(MAX_CONNECTIONS, "")
    return int(own) if own in map(str, range(1, MOST_CONNECTIONS + 1)) else None
