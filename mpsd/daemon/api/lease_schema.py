"""What goes over the API's wire about leases: the requests that are taken, and the answers that are given.

These types are the API's document too, as those of `schema` are.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated

from msgspec import Meta, Struct, field

from mpsd.core.admission.ledger import QueuePlace
from mpsd.core.enforcement.verification import VerifiedProcess
from mpsd.core.model import Lease, Owner, Share
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.daemon.api.request import RequestBody
from mpsd.daemon.api.schema import LimitsOut

Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}\Z")]
Text = Annotated[str, Meta(max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
Labels = Annotated[dict[Label, Text], Meta(max_length=32)]

# What the document says of these, and the units' own parsers check, whose errors name the limit and say what to write.
Percent = Annotated[float, Meta(extra_json_schema={"minimum": 0.1, "maximum": 100})]
Fraction = Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})]
SizeText = Annotated[str, Meta(extra_json_schema={"pattern": r"^[0-9]+(\.[0-9]+)? ?(B|KiB|MiB|GiB|KB|MB|GB)?$"})]
SizeBytes = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": 2**50 - 2**20})]


class LeaseRequest(RequestBody, kw_only=True):
    """What a caller asks for: threads and memory, or a fraction of one GPU."""

    threads: Percent | None = None
    """Percent of the GPU's threads, (0, 100], in steps of 0.1."""
    memory: SizeText | SizeBytes | None = None
    """Device memory, as `8GiB` or in bytes; granted in whole MiB."""
    fraction: Fraction | None = None
    """That part of one GPU's threads and memory, from 0.001 to 1."""
    gpu: Text = "any"
    """`any`, an index, a UUID, or a unique prefix of one."""
    gpus: Annotated[int, Meta(ge=1, le=64)] = 1
    """On how many GPUs, all or nothing; the lease has as much on each."""
    processes: Annotated[int, Meta(ge=1, le=1000)] = 1
    """How many client processes it may have; threads and memory are the sum over them."""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Higher goes first; above 0 only with a quota that allows it."""
    wait: Annotated[float, Meta(ge=0, le=1e9)] | None = 0.0
    """Seconds to wait for what is not free now; null: for ever."""
    ttl: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Seconds after which the lease ends unless it is renewed; null: no such time."""
    name: Text = ""
    labels: Labels = field(default_factory=dict)
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """The process that the lease is tied to; the caller's own by default."""
    request_id: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+\Z")] | None = None
    """Makes a retry return the same lease."""


class RenewRequest(RequestBody):
    """How long a lease is to live from now on."""

    ttl: Annotated[float, Meta(gt=0, le=1e9)]
    """Seconds."""


class OwnerOut(Struct):
    """Who holds a lease, as the kernel said."""

    uid: int
    gid: int
    pid: int
    start_time: datetime | None

    @classmethod
    def of(cls, owner: Owner) -> "OwnerOut":
        """Make it from the value."""
        return cls(owner.uid, owner.gid, owner.pid, owner.started)


class ShareOut(Struct):
    """What a lease has on one GPU, and what each of its client processes there must have in its environment."""

    gpu: str
    daemon: str
    active_thread_percentage: float
    pinned_device_mem_limit: int
    env: Mapping[str, str]

    @classmethod
    def of(cls, share: Share) -> "ShareOut":
        """Make it from the value."""
        return cls(share.gpu, share.daemon, float(share.threads), share.memory.bytes, share.env)


class WaitOut(Struct):
    """Where a waiting lease stands: its position from 1, and the limit that it waits for."""

    position: int
    waits_for: str
    because: str


class LeaseOut(Struct):
    """A lease: a promise of this much of a GPU, until it ends; or a place in the queue for one.

    Percentage, memory and environment are those on the first of its GPUs; `shares` has each. Null or empty: not yet.
    """

    id: str
    state: str
    because: str
    gpus: list[str]
    daemon: str | None
    owner: OwnerOut
    active_thread_percentage: float | None
    pinned_device_mem_limit: int | None
    env: Mapping[str, str]
    shares: list[ShareOut]
    clients: list[int]
    processes: int
    priority: int
    name: str
    labels: Mapping[str, str]
    created: datetime
    granted: datetime | None
    ended: datetime | None
    expires: datetime | None
    request_id: str | None
    wait: WaitOut | None

    @classmethod
    def of(cls, lease: Lease, *, expires: datetime | None, place: QueuePlace | None) -> "LeaseOut":
        """Make it from the value."""
        request, shares = lease.request, [ShareOut.of(share) for share in lease.shares]
        first = shares[0] if shares else None
        return cls(
            id=lease.id,
            state=lease.state,
            because=lease.because,
            gpus=[share.gpu for share in shares],
            daemon=first.daemon if first else None,
            owner=OwnerOut.of(lease.owner),
            active_thread_percentage=first.active_thread_percentage if first else _percent(request.threads),
            pinned_device_mem_limit=first.pinned_device_mem_limit if first else _bytes(request.memory),
            env=first.env if first else {},
            shares=shares,
            clients=[client.pid for client in lease.clients],
            processes=request.processes,
            priority=request.priority,
            name=request.name,
            labels=request.labels,
            created=lease.created,
            granted=lease.granted,
            ended=lease.ended,
            expires=expires,
            request_id=request.request_id,
            wait=WaitOut(place.position, place.waits_for.limit, place.waits_for.because) if place else None,
        )


def _percent(threads: ActiveThreadPercentage | None) -> float | None:
    return None if threads is None else float(threads)


def _bytes(memory: PinnedDeviceMemLimit | None) -> int | None:
    return None if memory is None else memory.bytes


class OthersOut(Struct):
    """What all others have together, for a caller who may see no more of them."""

    leases: int
    waiting: int
    threads_granted: float
    memory_granted: int


class LeasesOut(Struct):
    """The leases that have not ended: the caller's own, or everybody's where the caller may see them."""

    leases: list[LeaseOut]
    others: OthersOut


class ProcessOut(Struct):
    """A process of a lease on one GPU: whether it is under MPS, what it was granted, and what it can really use.

    `mps` is null for the holder of a lease that was not seen on the GPU. `limits_in_force` is the most that it can use,
    by what was open when it connected and by the environment it was started with; nulls where that is not known.
    """

    pid: int
    name: str
    daemon: str
    gpu: str
    server: int | None
    mps: bool | None
    limits_granted: LimitsOut
    limits_in_force: LimitsOut | None
    memory_held: int | None
    ok: bool
    because: str

    @classmethod
    def of(cls, each: VerifiedProcess, name: str) -> "ProcessOut":
        """Make it from the value."""
        return cls(
            pid=each.pid,
            name=name,
            daemon=each.daemon,
            gpu=each.gpu,
            server=each.server,
            mps=each.mps,
            limits_granted=LimitsOut.of(each.granted),
            limits_in_force=LimitsOut.of(each.in_force) if each.in_force is not None else None,
            memory_held=each.held,
            ok=each.ok,
            because=each.because,
        )


class VerifyOut(Struct):
    """Whether every process of a lease is under MPS and within its limits, by what was read just now."""

    lease: str
    ok: bool
    because: str
    memory_granted: int
    memory_held: int
    """Bytes, summed over its processes and GPUs, as far as they are known."""
    processes: list[ProcessOut]
    violations: list[str]
