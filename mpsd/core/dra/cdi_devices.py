"""The CDI devices of a prepared claim: one file with a device for each share, whose names outlive its leases. Pure.

kubelet asks for the names once, when it has the claim prepared, and hands them to the container runtime at each start
of a container. A lease that has ended is replaced under the same name.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from mpsd.core.containers import cdi

KIND: Final = "mpsd/share"

_PREFIX: Final = "mpsd-share_"
"""As the specification has it for devices that come and go: VENDOR-CLASS_NAME."""


def file_name(claim: str) -> str:
    """Return the name of a claim's file."""
    return f"{_PREFIX}{claim}.json"


def claim_of(name: str) -> str:
    """Return the claim that such a file is named after."""
    return name.removeprefix(_PREFIX).removesuffix(".json")


def device_id(claim: str, number: int) -> str:
    """Return what a container runtime names a share by."""
    return f"{KIND}={_name(claim, number)}"


def encoded(
    claim: str,
    environments: Sequence[Mapping[str, str]],
    *,
    shared_memory: Sequence[bool],
    more: Sequence[Mapping[str, str]],
    socket: str,
    hook: str,
) -> bytes:
    """Return the file of a claim, of which each share has its lease's environment, and `more` variables beside them.

    `hook` is mpsctl as the container runtime finds it on the node; empty: the lease is taken without one.
    """
    devices = dict[str, object]()
    for number, variables in enumerate(environments):
        lease = variables["MPSD_LEASE"]
        call = cdi.hook_of(cdi.Device(lease, socket), variables, [hook], "--pod") if hook else None
        found = cdi.edits({**variables, **more[number]}, hook=call, shared_memory=shared_memory[number])
        devices[_name(claim, number)] = found
    return cdi.encode(cdi.of_devices(KIND, devices))


def _name(claim: str, number: int) -> str:
    return f"{claim}-{number}"
