"""What the driver says of a claim in the claim's own status: the lease of each share, or why it has none. Pure.

The object is for server-side apply, which merges the entries of this driver's devices among those of other drivers.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from mpsd.core.dra import allocation
from mpsd.core.dra.prepared import PreparedClaim
from mpsd.core.dra.slices import API_VERSION
from mpsd.core.errors import MpsdError

_GRANTED: Final = "LeaseGranted"

_LONGEST: Final = 1024
"""Maximum characters of a message, far below the 32,768 of Kubernetes."""


class Verdict(NamedTuple):
    """Whether the shares of a claim can be used, and since when that is so."""

    reason: str
    message: str
    since: datetime

    @property
    def is_ready(self) -> bool:
        """Whether they can."""
        return self.reason == _GRANTED


def verdict(error: MpsdError | None, message: str, now: datetime, before: Verdict | None) -> Verdict:
    """Return the verdict after an error, or after a success; it keeps its time where it only has other words."""
    reason = _GRANTED if error is None else "".join(map(str.capitalize, error.code.split("_")))
    found = Verdict(reason, message[:_LONGEST], now)
    is_same = before is not None and before.is_ready == found.is_ready
    return found._replace(since=before.since) if before is not None and is_same else found


def document(claim: PreparedClaim, driver: str, leases: Sequence[str], found: Verdict) -> Mapping[str, object]:
    """Return what is to be applied to the status of a claim; `leases` are their ids, by share."""
    devices = []
    for number, share in enumerate(claim.shares):
        lease = leases[number] if number < len(leases) else None
        memory = allocation.quantity_of(share.mebibytes)
        amount = f"{share.tenths / 10:g} % of the threads and {memory} of {share.gpu}"
        condition = {
            "type": "Ready",
            "status": "True" if found.is_ready else "False",
            "reason": found.reason,
            "message": found.message or f"{lease} has {amount}",
            "lastTransitionTime": found.since.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        devices.append(
            {
                "driver": driver,
                "pool": share.pool,
                "device": share.device,
                **({} if share.share_id is None else {"shareID": share.share_id}),
                "conditions": [condition],
                "data": {"lease": lease, "threads": share.tenths / 10, "memory": memory},
            }
        )
    return {
        "apiVersion": API_VERSION,
        "kind": "ResourceClaim",
        "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid},
        "status": {"devices": devices},
    }
