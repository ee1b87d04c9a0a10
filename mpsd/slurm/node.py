"""A node of Slurm beside its mpsd: when Slurm gives it no more jobs, and what it is told of each job's leases. Pure."""

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from mpsd.core.health import Kind
from mpsd.core.sanitize import plain
from mpsd.core.slurm.job import JOB
from mpsd.core.units import MIB

if TYPE_CHECKING:
    from mpsd.client import answer_types

PREFIX: Final = "mpsd: "
"""The beginning of the reasons that are ours: a node with any other is none of our business."""

_LONGEST: Final = 200
"""Characters of a reason: `sinfo -R` has one line for it."""

_OVER: Final = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING", "PREEMPTED",
    "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "REVOKED", "SPECIAL_EXIT", "TIMEOUT",
})  # fmt: skip
"""The states of jobs that have no resources of a node, or none any more. Source: squeue(1). A state that is not known
here ends no lease."""


class NodeSeen(NamedTuple):
    """A node, as Slurm tells of it."""

    state: str
    """In Slurm's words, such as idle, mixed or drained, without its marks."""
    reason: str

    @property
    def is_drained(self) -> bool:
        return self.state.startswith("drain")

    @property
    def is_ours(self) -> bool:
        """Whether mpsd drained it."""
        return self.is_drained and self.reason.startswith(PREFIX)


class Reason(NamedTuple):
    """Why a node should get no more jobs."""

    text: str
    lasts: bool
    """Whether it is an operator's order, which needs no second look: others may pass within seconds."""


def reason(status: "answer_types.Status") -> Reason | None:
    """Return why jobs with shares could not run on this node; None where they can.

    Slurm drains nodes, and no single GPUs, and may give a job any GPU: one that admits nobody drains its node.
    """
    served = {each["gpu"] for each in status["daemons"]}
    found = [each for each in status["gpus"] if each["uuid"] in served and each["refused"] is not None]
    if not found:
        return None
    texts = dict.fromkeys(plain(each["refused"] or "") for each in found)
    return because("; ".join(texts), lasts=any(each["refused_kind"] == Kind.HOLD for each in found))


def because(text: str, *, lasts: bool = False) -> Reason:
    words = " ".join(text.split())
    return Reason(f"{PREFIX}{words}"[:_LONGEST], lasts)


def change(node: NodeSeen, wanted: Reason | None, said: str) -> Reason | bool | None:
    """Return the reason to drain a node with, None to resume it, or False to leave it.

    `said` is the reason that it was last drained with by us, empty where it was resumed: a node that somebody has
    resumed since stays as it is until there is another reason.
    """
    if wanted is None:
        return None if node.is_ours else False
    if node.is_drained:
        return wanted if node.is_ours and node.reason != wanted.text else False
    return wanted if wanted.text != said else False


# -- jobs --------------------------------------------------------------------------------------------------------------


class Account(NamedTuple):
    """What a job has by its leases on a node."""

    gpus: int
    threads: float
    """Percent of each GPU."""
    granted: int
    """Bytes, of all its GPUs."""
    held: int | None
    """Bytes that its clients hold now; None where that is unknown."""


def accounts(leases: Iterable["answer_types.Lease"], clients: Iterable["answer_types.Client"]) -> Mapping[str, Account]:
    """Return what each job of Slurm has on this node, by its id."""
    held: dict[str, int | None] = {}
    for client in clients:
        lease, before = client["lease"] or "", held.get(client["lease"] or "", 0)
        now = client["memory_held"]
        held[lease] = None if before is None or now is None else before + now
    found: dict[str, Account] = {}
    for each in leases:
        if JOB not in each["labels"] or each["active_thread_percentage"] is None:
            continue
        job, own = each["labels"][JOB], held.get(each["id"], 0)
        there = found.get(job, Account(0, 0.0, 0, 0))
        found[job] = Account(
            gpus=there.gpus + len(each["shares"]),
            threads=max(there.threads, each["active_thread_percentage"]),
            granted=there.granted + sum(share["pinned_device_mem_limit"] for share in each["shares"]),
            held=None if there.held is None or own is None else there.held + own,
        )
    return found


def text_of(account: Account, most: int | None) -> str:
    """Return an account as words; `most` are the most bytes that were held so far."""
    words = [f"gpus={account.gpus}", f"threads={account.threads:g}", f"memory={account.granted // MIB}M"]
    return " ".join([*words, "held=unknown" if most is None else f"held={most // MIB}M"])


def merged(present: str, node: str, text: str) -> str:
    """Return an AdminComment with this node's part in it, and the parts of other nodes and of others as they are."""
    own = f"mpsd({node}): {text}"
    parts = [each.strip() for each in present.split(";") if each.strip()]
    found = [own if each.startswith(f"mpsd({node}):") else each for each in parts]
    return "; ".join(found if own in found else [*found, own])


def is_over(state: str) -> bool:
    """Tell whether a job in this state, empty for one that Slurm does not know, has nothing of a node."""
    return not state or state.upper() in _OVER


def gone(leases: Iterable["answer_types.Lease"], states: Mapping[str, str]) -> Collection[str]:
    """Return the ids of the leases whose jobs have nothing of this node any more, by the states of its jobs."""
    return {each["id"] for each in leases if JOB in each["labels"] and is_over(states.get(each["labels"][JOB], ""))}
