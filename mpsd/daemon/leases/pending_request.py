"""A request whose outcome no caller has got yet."""

import asyncio
from collections.abc import Iterable
from typing import Self

from msgspec import Struct

from mpsd.core.errors import DoesNotFitError, MpsdError, StoppingError
from mpsd.core.model import Lease


class PendingRequest(Struct):
    """The callers that wait for the outcome of a request, and that outcome."""

    uid: int
    until: float
    """The time until which its callers wait for it, on the monotonic clock."""
    decided: "asyncio.Future[None] | None" = None
    """For a request that waits in the queue: done when it is granted, or has ended without a grant."""
    refusal: MpsdError | None = None
    """The reason why it has ended, if it has."""
    listeners: int = 0
    """The number of connections that wait for the answer: a request may be repeated by its request_id."""
    held_until: float | None = None
    """The time until which the request is kept while no caller waits, in seconds of the monotonic clock: a caller may
    return."""

    @classmethod
    def waiting(cls, uid: int, until: float, held_until: float | None = None) -> Self:
        """Return one that waits in the queue."""
        return cls(uid, until, asyncio.get_running_loop().create_future(), held_until=held_until)

    def decide(self, refusal: MpsdError | None) -> None:
        """Wake the callers that wait for the outcome: a grant, or a refusal."""
        self.refusal = refusal
        if self.decided is not None and not self.decided.done():
            self.decided.set_result(None)


def is_full(pending: Iterable[PendingRequest], uid: int, most: int) -> bool:
    """Tell whether the maximum of a uid's requests is kept for callers that disconnected."""
    return sum(each.uid == uid and each.held_until is not None for each in pending) >= most


def no_room(lease: Lease) -> DoesNotFitError:
    """Return the error that a lease has its present maximum of client processes."""
    if lease.request.processes is None:
        return DoesNotFitError(
            f"lease {lease.id} already has {len(lease.clients)} processes, and the GPU has no place for another client",
            hint="end one of them, or try again when another lease on the GPU has ended: mpsctl leases",
            limit="clients",
        )
    each = " on each of its GPUs" if len(lease.shares) > 1 else ""
    return DoesNotFitError(
        f"lease {lease.id} already has its {lease.request.processes} processes{each}",
        hint="end one of them, or take out a lease for more processes",
        limit="processes",
    )


def stopping() -> StoppingError:
    """Return the error that mpsd is stopping."""
    hint = "try again in a moment: the next mpsd takes over, unless this one stops the control daemons (mpsctl status)"
    return StoppingError("mpsd is stopping", hint=hint)


def code_of(refusal: MpsdError | None) -> dict[str, object]:
    """Return the code of a refusal as a fact of the event about a lease's end; no fact without a refusal."""
    return {} if refusal is None else {"code": refusal.code}
