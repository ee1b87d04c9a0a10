"""A node of Slurm beside its mpsd: when Slurm gives it no more jobs, and what it is told of each job's leases. Pure."""

import re
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
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


_OURS: Final = re.compile(r"mpsd\([^()]*\):", re.IGNORECASE)

_KEEPS_LETTERS: Final = [23, 2]


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
    """The most bytes that it held on each of them, summed; None where that is unknown."""

    def __str__(self) -> str:
        words = [f"gpus={self.gpus}", f"threads={self.threads:g}", f"memory={self.granted // MIB}M"]
        return " ".join([*words, "held=unknown" if self.held is None else f"held={self.held // MIB}M"])


def account(leases: Iterable["answer_types.Lease"], most: Mapping[str, int | None]) -> Account:
    """Return what a job has, or had, by its leases on this node; `most` has the most bytes of each lease, by its id."""
    found = Account(0, 0.0, 0, 0)
    for each in leases:
        held = most.get(each["id"])
        found = Account(
            gpus=found.gpus + len(each["shares"]),
            threads=max(found.threads, each["active_thread_percentage"] or 0.0),
            granted=found.granted + sum(share["pinned_device_mem_limit"] for share in each["shares"]),
            held=None if found.held is None or held is None else found.held + held,
        )
    return found


def last_run(leases: Collection["answer_types.Lease"]) -> list["answer_types.Lease"]:
    """Return the leases of a job's last run: those of an earlier one ended before its others were granted."""
    latest = max(_time(each["granted"]) for each in leases if each["granted"] is not None)
    return [each for each in leases if each["ended"] is None or _time(each["ended"]) > latest]


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def merged(present: str, node: str, text: str) -> str:
    """Return an AdminComment with this node's part in it, and the parts of other nodes and of others as they are."""
    own, begin = _part(node, text), f"mpsd({node}):".lower()
    found = [own if each.lower().startswith(begin) else each for each in _parts(present)]
    return "; ".join(found if own in found else [*found, own])


def has_part(present: str, node: str, text: str) -> bool:
    """Tell whether an AdminComment has this node's part, whatever became of its capital letters."""
    return _part(node, text).lower() in _parts(present.lower())


def is_kept(comment: str, version: str) -> bool:
    """Tell whether sacctmgr of this version writes the parts of others as they are.

    It writes ` for quotes, and before 23.02 small letters for capital ones. Source: Slurm's notes on 23.02.
    """
    others = "".join(each for each in _parts(comment) if not _OURS.match(each))
    is_old = [int(each) for each in re.findall(r"\d+", version)[:2]] < _KEEPS_LETTERS
    return not {*others}.intersection("'\"") and not (is_old and others != others.lower())


def _part(node: str, text: str) -> str:
    return f"mpsd({node}): {text}"


def _parts(comment: str) -> list[str]:
    return [each.strip() for each in comment.split(";") if each.strip()]


def is_over(state: str) -> bool:
    """Tell whether a job in this state, empty for one that Slurm does not know, has nothing of a node."""
    return not state or state.upper() in _OVER


def gone(leases: Iterable["answer_types.Lease"], states: Mapping[str, str]) -> Collection[str]:
    """Return the ids of the leases whose jobs have nothing of this node any more, by the states of its jobs."""
    return {each["id"] for each in leases if JOB in each["labels"] and is_over(states.get(each["labels"][JOB], ""))}
