"""The gauges of a node, from a snapshot of it: the content of GET /v1/status as samples, beside the counters. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Final, NamedTuple, TypeAlias

from mpsd.core import health
from mpsd.core.admission.admission import NOTHING, Amount
from mpsd.core.gpus import clients_max
from mpsd.core.health import NodeHealth
from mpsd.core.lifecycle import State
from mpsd.core.metrics import families
from mpsd.core.metrics.families import Family, Labels, Samples, states
from mpsd.core.metrics.tally import Tally
from mpsd.core.model import GpuView, Health, Known, Lease, LeaseState, ViolationKind


class OwnCost(NamedTuple):
    """The resources that mpsd itself uses."""

    cpu: float
    """Seconds of processor time since it started."""
    memory: int
    """Resident bytes."""
    descriptors: int
    most_descriptors: int


class NodeSnapshot(NamedTuple):
    """The state of a node at one time, as far as its metrics report it."""

    now: datetime
    version: str
    health: NodeHealth
    granted: Mapping[str, Amount]
    """By GPU, the amount granted to leases."""
    unleased: Mapping[str, Amount]
    """By GPU, the amount that counts as used by clients without a lease."""
    memory_reserve: int
    threads_oversubscription: float
    leases: Mapping[str, Lease]
    waiting: Mapping[str, Lease]
    classes: Iterable[str]
    """The class of the user of each request that waits."""
    quotas: Collection[str]
    """The classes in the configuration."""
    shown: Collection[Lease]
    """The leases that the reader may see individually."""
    violations: Iterable[ViolationKind]
    quarantined: int
    lost_lines: int
    cost: OwnCost


Numbers: TypeAlias = dict[Family, Mapping[Labels, float]]


def samples(node: NodeSnapshot, tally: Tally, *, about_users: bool) -> Samples:
    """Return the samples of every family; those about individual users only with `about_users`."""
    counted = tally.samples([each.name for each in node.health.daemons])
    numbers = {**counted.numbers, **_of_node(node), **_of_gpus(node), **_of_daemons(node), **_of_admission(node)}
    if about_users:
        numbers |= _of_users(node)
    return Samples(numbers, counted.histograms)


def _of_node(node: NodeSnapshot) -> Numbers:
    reasons = Counter(each.kind for each in (*node.health.reasons, *node.health.warnings))
    violations = Counter(node.violations)
    return {
        families.BUILD: {(node.version,): 1},
        families.HEALTHY: {(): int(node.health.healthy)},
        families.REASONS: {(kind,): reasons[kind] for kind in health.Kind},
        families.OPEN_VIOLATIONS: {(kind,): violations[kind] for kind in ViolationKind},
        families.QUARANTINED: {(): node.quarantined},
        families.LINES_LOST: {(): node.lost_lines},
        families.CPU: {(): round(node.cost.cpu, 6)},
        families.MEMORY: {(): node.cost.memory},
        families.OPEN_FDS: {(): node.cost.descriptors},
        families.MAX_FDS: {(): node.cost.most_descriptors},
    }


def _of_gpus(node: NodeSnapshot) -> Numbers:
    """Return the families of the GPUs. A GPU that cannot be read at all is among the node's reasons instead."""
    views = [view for view in node.health.gpus if view.gpu is not None]
    known = [view.gpu for view in views if view.gpu is not None]
    granted = {(gpu.uuid,): node.granted.get(gpu.uuid, NOTHING) for gpu in known}
    unleased = {(gpu.uuid,): node.unleased.get(gpu.uuid, NOTHING) for gpu in known}
    return {
        families.GPU: {(gpu.uuid, str(gpu.index), gpu.name, gpu.driver_version): 1 for gpu in known},
        families.GPU_HEALTH: states({(_uuid(view),): view.health for view in views}, Health),
        families.GPU_MEMORY: {(gpu.uuid,): gpu.memory_total for gpu in known},
        families.GPU_MEMORY_RESERVED: {(gpu.uuid,): node.memory_reserve + gpu.memory_reserved for gpu in known},
        families.GPU_MEMORY_GRANTED: {labels: amount.memory for labels, amount in granted.items()},
        families.GPU_MEMORY_UNLEASED: {labels: amount.memory for labels, amount in unleased.items()},
        families.GPU_MEMORY_HELD: {
            (_uuid(view),): used
            for view in views
            if isinstance(view.usage, Known) and (used := view.usage.value.memory_used) is not None
        },
        families.GPU_THREADS: {(gpu.uuid,): node.threads_oversubscription for gpu in known},
        families.GPU_THREADS_GRANTED: {labels: amount.threads / 1000 for labels, amount in granted.items()},
        families.GPU_THREADS_UNLEASED: {labels: amount.threads / 1000 for labels, amount in unleased.items()},
        families.GPU_CLIENTS_MAX: {(gpu.uuid,): clients_max(gpu) for gpu in known},
        families.GPU_CLIENTS_GRANTED: {labels: amount.places for labels, amount in granted.items()},
    }


def _uuid(view: GpuView) -> str:
    return view.gpu.uuid if view.gpu is not None else ""


def _of_daemons(node: NodeSnapshot) -> Numbers:
    daemons = node.health.daemons
    return {
        families.DAEMON: {(each.name, each.gpu, each.version or ""): 1 for each in daemons},
        families.DAEMON_STATE: states({(each.name,): each.state for each in daemons}, State),
        families.DAEMON_STATE_SINCE: {(each.name,): each.since.timestamp() for each in daemons},
        families.DAEMON_SERVERS: {(each.name,): len(each.servers) for each in daemons},
        families.DAEMON_CLIENTS: {
            (each.name,): sum(len(server.clients) for server in each.servers) for each in daemons
        },
        families.DAEMON_DRIFT: {(each.name,): len(each.drift) for each in daemons},
        families.UNKNOWN_LINES: {(each.name,): each.unknown_lines.count for each in daemons},
    }


def _of_admission(node: NodeSnapshot) -> Numbers:
    counted = Counter(lease.state for lease in node.leases.values())
    counted[LeaseState.WAITING] = len(node.waiting)
    oldest = min((lease.created for lease in node.waiting.values()), default=node.now)
    return {
        families.LEASES: {(state,): counted[state] for state in LeaseState if state is not LeaseState.ENDED},
        families.WAITING: {(): len(node.waiting)},
        families.WAITING_OLDEST: {(): max((node.now - oldest).total_seconds(), 0.0)},
    }


_OF_LEASES: Final = families.SECTIONS["Leases and clients"]


def _of_users(node: NodeSnapshot) -> Numbers:
    """Return the families of the users' classes, and those of each lease and its clients."""
    usages = {_uuid(view): view.usage.value for view in node.health.gpus if isinstance(view.usage, Known)}
    classes = Counter(node.classes)
    found: dict[Family, dict[Labels, float]] = {family: {} for family in _OF_LEASES}
    for lease in node.shown:
        for share in lease.shares:
            labels = (lease.id, share.gpu, str(lease.owner.uid))
            on_it = lease.clients_on(share.gpu)
            found[families.LEASE_THREADS][labels] = share.threads.tenths / 1000
            found[families.LEASE_MEMORY][labels] = share.memory.bytes
            found[families.LEASE_CLIENTS][labels] = len(on_it)
            usage = usages.get(share.gpu)
            if usage is None or usage.memory_used is None:
                continue
            held = found[families.LEASE_MEMORY_HELD]
            held[labels] = 0
            for client in on_it:
                process, pid = usage.processes.get(client.pid), str(client.pid)
                if process is not None and isinstance(process.memory, Known):
                    found[families.CLIENT_MEMORY_HELD][*labels, pid] = process.memory.value
                    held[labels] += process.memory.value
    return {
        families.WAITING_BY_CLASS: {(name,): classes[name] for name in sorted({"", *node.quotas, *classes})},
        **found,
    }
