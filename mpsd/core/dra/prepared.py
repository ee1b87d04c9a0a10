"""The driver's own record of the claims that it prepared, which kubelet expects it to have. Pure.

kubelet asks once to prepare a claim, and later, perhaps after hours, to end it. In between, kubelet, the driver and
mpsd may have been restarted. The record has the properties of each share, so that the driver can claim its lease again
if the lease ended before the claim: after a restart of the node, or when no container started in time.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from msgspec import Struct, structs

from mpsd.core.containers import cdi
from mpsd.core.containers.cdi import Program
from mpsd.core.kubernetes.claims import Held, Release, Renew
from mpsd.core.roles import RESERVED

VERSION: Final = 1
"""The version of the record's format."""


class PreparedShare(Struct, forbid_unknown_fields=True):
    """A share as the scheduler allocated it."""

    request: str
    pool: str
    device: str
    share_id: str | None
    gpu: str
    tenths: int
    """Threads, in tenths of a percent."""
    mebibytes: int
    client_priority: int | None = None
    processes: int | str | None = None
    stop: str | None = None
    connections: int | None = None
    visible: str | None = None
    user: int | None = None
    further: list[str | None] = []
    """The ids of further shares of the same device for the same request: they are one share here, with the sum."""


class PreparedPod(Struct, forbid_unknown_fields=True):
    """A pod that the claim was reserved for when it was prepared."""

    uid: str
    name: str


class Stage(StrEnum):
    """The progress of a claim."""

    BEGUN = "begun"
    """kubelet has requested the claim's preparation, and has no answer yet."""
    PREPARED = "prepared"
    OVER = "over"
    """kubelet has ended the claim: none of its leases is claimed again."""


class PreparedClaim(Struct, forbid_unknown_fields=True):
    """A claim that kubelet prepared or began to prepare."""

    uid: str
    namespace: str
    name: str
    pods: list[PreparedPod]
    shares: list[PreparedShare]
    stage: Stage = Stage.BEGUN
    is_shared: bool = False
    """Whether it was made for no single pod, so that further ones may use it; kubelet does not tell."""
    version: int = VERSION

    def at(self, stage: Stage) -> "PreparedClaim":
        """Return a copy at another stage."""
        return structs.replace(self, stage=stage)

    def of_pods(self, reserved: list[PreparedPod]) -> "PreparedClaim":
        """Return a copy with the pods that the claim is reserved for now."""
        return structs.replace(self, pods=reserved)


# -- its leases --------------------------------------------------------------------------------------------------------

_REQUEST: Final = re.compile(rf"{RESERVED}([0-9A-Za-z-]{{1,64}})/([0-9]{{1,3}})")


def request_id(claim: str, number: int) -> str:
    """Return the request_id for a share, with which mpsd repeats the same lease for as long as the lease lives."""
    return f"{RESERVED}{claim}/{number}"


class ShareLease(NamedTuple):
    held: Held
    claim: str
    number: int
    """The number of the share in its claim."""


def share_of(request: str | None) -> tuple[str, int] | None:
    """Return the claim and the number of the share that a request_id is for; None for any other."""
    match = _REQUEST.fullmatch(request or "")
    return None if match is None else (match[1], int(match[2]))


# -- what is next ------------------------------------------------------------------------------------------------------


class Take(NamedTuple):
    """Give a lease to a pod of its claim, once there is one, and to the user of the pod's program."""

    lease: ShareLease
    claim: PreparedClaim


class Join(NamedTuple):
    """Have all pods of a shared claim hold a lease that one of them has."""

    lease: ShareLease
    claim: PreparedClaim


class Replace(NamedTuple):
    """Claim the leases again that a prepared claim has lost, and write its CDI device again."""

    claim: PreparedClaim


class Finish(NamedTuple):
    """Release everything that is left of a claim that has ended."""

    claim: PreparedClaim


class Forget(NamedTuple):
    """Forget a claim that was never prepared and has no lease any more."""

    claim: PreparedClaim


Action: TypeAlias = Release | Renew | Take | Join | Replace | Finish | Forget


def next_actions(
    claims: Iterable[PreparedClaim],
    leases: Iterable[ShareLease],
    *,
    unreadable: Collection[str],
    is_populated: Callable[[str], bool],
    has_device: Callable[[str], bool],
    deadline: float,
) -> list[tuple[str, Action]]:
    """Return the next actions for each claim, by its uid, and for each lease that belongs to no claim.

    `unreadable` are the claims of which no more is known: kubelet alone ends them.
    `deadline` is the lifetime of a claim of mpsd's without renewal. kubelet must repeat or end a claim at stage BEGUN;
    until then its leases are not renewed, so that nothing remains where kubelet has forgotten the claim.
    """
    known = {each.uid: each for each in claims}
    had: dict[str, dict[int, ShareLease]] = {uid: {} for uid in known}
    actions: list[tuple[str, Action]] = []
    for each in leases:
        owner = known.get(each.claim)
        if owner is not None and each.number < len(owner.shares):
            had[each.claim][each.number] = each
        elif each.claim in unreadable:
            actions += [(each.claim, renew) for renew in _renewals([each], deadline)]
        elif each.held.pod is None or not any(map(is_populated, [each.held.group, *each.held.others])):
            actions.append((each.claim, Release(each.held, "no claim is prepared that has it")))
    for uid, claim in known.items():
        actions += [(uid, each) for each in _next_of(claim, had[uid].values(), has_device, deadline)]
    return actions


def _next_of(
    claim: PreparedClaim, leases: Collection[ShareLease], has_device: Callable[[str], bool], deadline: float
) -> list[Action]:
    # 1. OVER: kubelet has ended the claim, and nothing else is done for it.
    # 2. BEGUN: kubelet repeats or ends the claim. Its leases run out by themselves, and then it is forgotten.
    # 3. PREPARED: lost leases are claimed again, and a CDI device that a restart of the machine has removed is written
    #    again, before the other leases are renewed or taken.
    match claim.stage:
        case Stage.OVER:
            return [Finish(claim)]
        case Stage.BEGUN:
            return [] if leases else [Forget(claim)]
        case Stage.PREPARED:
            replace = [Replace(claim)] if len(leases) < len(claim.shares) or not has_device(claim.uid) else []
            return [
                *replace,
                *_renewals(leases, deadline),
                *(Join(each, claim) for each in leases if claim.is_shared and each.held.pod is not None),
                *(Take(each, claim) for each in leases if not each.held.has_clients),
            ]


def _renewals(leases: Iterable[ShareLease], deadline: float) -> list[Renew]:
    return [Renew(each.held) for each in leases if each.held.pod is None and each.held.left < deadline / 2]


# -- its CDI devices ---------------------------------------------------------------------------------------------------
#
# One file for each claim, with a device for each share. kubelet requests the names of the devices once, when it
# prepares the claim, and passes them to the container runtime at each start of a container. A lease that has ended is
# replaced under the same name. The driver's name is the vendor's, so that no driver touches the files of another.


def device_file(driver: str, claim: str) -> str:
    """Return the name of a claim's file, in the specification's form for devices that come and go."""
    return f"{driver}-share_{claim}.json"


def claim_of_file(driver: str, name: str) -> str:
    """Return the claim that such a file is named after."""
    return name.removeprefix(f"{driver}-share_").removesuffix(".json")


def device_id(driver: str, claim: str, number: int) -> str:
    """Return the name of a share for a container runtime."""
    return f"{driver}/share={_device_name(claim, number)}"


def device_document(
    driver: str,
    claim: str,
    environments: Sequence[Mapping[str, str]],
    *,
    shared_memory: Sequence[bool],
    more: Sequence[Mapping[str, str]],
    socket: str,
    hook: Program | None,
    root: Path,
) -> bytes:
    """Return the file of a claim, whose shares have their lease's environment and the variables of `more`.

    `hook` is mpsctl for the container runtime on the node; without it, the lease is taken without a hook.
    `root` is kubelet's cgroupRoot.
    """
    devices = dict[str, object]()
    for number, variables in enumerate(environments):
        lease = variables["MPSD_LEASE"]
        call = cdi.hook_of(cdi.Device(lease, socket), variables, hook, "--pod", str(root)) if hook else None
        found = cdi.edits({**variables, **more[number]}, hook=call, shared_memory=shared_memory[number])
        devices[_device_name(claim, number)] = found
    return cdi.encode(cdi.of_devices(f"{driver}/share", devices))


def has_hook(raw: bytes, program: Program | None) -> bool:
    """Tell whether this program is the hook of a device file, or, where there is none, whether it has no hook."""
    try:
        hooks = [hook for each in json.loads(raw)["devices"] for hook in each["containerEdits"].get("hooks", ())]
        commands = [hook["args"][: hook["args"].index("--socket")] for hook in hooks]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return commands == [] if program is None else {*map(tuple, commands)} == {(*program.command,)}


def _device_name(claim: str, number: int) -> str:
    return f"{claim}-{number}"
