"""The gauges of a node, from a snapshot of it: the content of GET /v1/status as samples. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from mpsd.core import health, mps_facts
from mpsd.core.admission.admission import NOTHING, Amount
from mpsd.core.gpus import driver_branch
from mpsd.core.health import NodeHealth
from mpsd.core.lifecycle import State
from mpsd.core.metrics import families
from mpsd.core.metrics.exposition import Block, Samples, counters, gauges, infos, labels, states
from mpsd.core.metrics.families import Family
from mpsd.core.metrics.tally import Tally
from mpsd.core.model import Gpu, GpuView, Health, Known, Lease, LeaseState, ViolationKind


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


def blocks(node: NodeSnapshot, tally: Tally, *, about_users: bool) -> Iterator[Block]:
    """Yield every family in the order of the table; those about individual users only with `about_users`."""
    known = [view.gpu for view in node.health.gpus if view.gpu is not None]
    found = {
        **tally.blocks([each.name for each in node.health.daemons]),
        **{block.family: block for block in _all(node, known)},
        families.START_TIME: gauges(families.START_TIME, {(): tally.began.timestamp()}),
    }
    if about_users:
        found |= {block.family: block for block in (_classes(node), *_one_by_one(node))}
    for family in families.FAMILIES:
        if family in found:
            yield found[family]


def _all(node: NodeSnapshot, known: Sequence[Gpu]) -> Iterator[Block]:
    yield infos(families.BUILD, [(node.version,)])
    yield gauges(families.HEALTHY, {(): int(node.health.healthy)})
    reasons = Counter(each.kind for each in (*node.health.reasons, *node.health.warnings))
    yield gauges(families.REASONS, {(kind,): reasons[kind] for kind in health.Kind})
    yield from _gpus(node, known)
    yield from _daemons(node)
    yield from _admission(node)
    violations = Counter(node.violations)
    yield gauges(families.OPEN_VIOLATIONS, {(kind,): violations[kind] for kind in ViolationKind})
    yield gauges(families.QUARANTINED, {(): node.quarantined})
    yield counters(families.LINES_LOST, {(): node.lost_lines})
    yield counters(families.CPU, {(): round(node.cost.cpu, 6)})
    yield gauges(families.MEMORY, {(): node.cost.memory})
    yield gauges(families.OPEN_FDS, {(): node.cost.descriptors})
    yield gauges(families.MAX_FDS, {(): node.cost.most_descriptors})


def _gpus(node: NodeSnapshot, known: Sequence[Gpu]) -> Iterator[Block]:
    """Yield the families of the GPUs. A GPU that cannot be read at all is among the node's reasons instead."""
    yield infos(families.GPU, [(gpu.uuid, gpu.index, gpu.name, gpu.driver_version) for gpu in known])
    views = [view for view in node.health.gpus if view.gpu is not None]
    yield states(families.GPU_HEALTH, {(_uuid(view),): view.health for view in views}, Health)
    used = {_uuid(view): view.usage.value.memory_used for view in views if isinstance(view.usage, Known)}
    granted = {gpu.uuid: node.granted.get(gpu.uuid, NOTHING) for gpu in known}
    unleased = {gpu.uuid: node.unleased.get(gpu.uuid, NOTHING) for gpu in known}
    most = {gpu.uuid: mps_facts.clients_max(gpu.compute_capability, driver_branch(gpu.driver_version)) for gpu in known}

    def each(family: Family, values: Mapping[str, float]) -> Block:
        return gauges(family, {(uuid,): value for uuid, value in values.items()})

    yield each(families.GPU_MEMORY, {gpu.uuid: gpu.memory_total for gpu in known})
    yield each(families.GPU_MEMORY_RESERVED, {gpu.uuid: node.memory_reserve + gpu.memory_reserved for gpu in known})
    yield each(families.GPU_MEMORY_GRANTED, {uuid: amount.memory for uuid, amount in granted.items()})
    yield each(families.GPU_MEMORY_UNLEASED, {uuid: amount.memory for uuid, amount in unleased.items()})
    yield each(families.GPU_MEMORY_HELD, used)
    yield each(families.GPU_THREADS, {gpu.uuid: node.threads_oversubscription for gpu in known})
    yield each(families.GPU_THREADS_GRANTED, {uuid: amount.threads / 1000 for uuid, amount in granted.items()})
    yield each(families.GPU_THREADS_UNLEASED, {uuid: amount.threads / 1000 for uuid, amount in unleased.items()})
    yield each(families.GPU_CLIENTS_MAX, most)
    yield each(families.GPU_CLIENTS_GRANTED, {uuid: amount.clients for uuid, amount in granted.items()})


def _uuid(view: GpuView) -> str:
    return view.gpu.uuid if view.gpu is not None else ""


def _daemons(node: NodeSnapshot) -> Iterator[Block]:
    daemons = node.health.daemons
    yield infos(families.DAEMON, [(each.name, each.gpu, each.version or "") for each in daemons])
    yield states(families.DAEMON_STATE, {(each.name,): each.state for each in daemons}, State)
    yield gauges(families.DAEMON_STATE_SINCE, {(each.name,): each.since.timestamp() for each in daemons})
    yield gauges(families.DAEMON_SERVERS, {(each.name,): len(each.servers) for each in daemons})
    clients = {(each.name,): sum(len(server.clients) for server in each.servers) for each in daemons}
    yield gauges(families.DAEMON_CLIENTS, clients)
    yield gauges(families.DAEMON_DRIFT, {(each.name,): len(each.drift) for each in daemons})
    yield counters(families.UNKNOWN_LINES, {(each.name,): each.unknown_lines.count for each in daemons})


def _admission(node: NodeSnapshot) -> Iterator[Block]:
    counted = Counter(lease.state for lease in node.leases.values())
    counted[LeaseState.WAITING] = len(node.waiting)
    living = [state for state in LeaseState if state is not LeaseState.ENDED]
    yield gauges(families.LEASES, {(state,): counted[state] for state in living})
    yield gauges(families.WAITING, {(): len(node.waiting)})
    oldest = min((lease.created for lease in node.waiting.values()), default=node.now)
    yield gauges(families.WAITING_OLDEST, {(): max((node.now - oldest).total_seconds(), 0.0)})


def _classes(node: NodeSnapshot) -> Block:
    counted = Counter(node.classes)
    return gauges(families.WAITING_BY_CLASS, {(name,): counted[name] for name in sorted({"", *node.quotas, *counted})})


def _one_by_one(node: NodeSnapshot) -> Iterator[Block]:
    """Yield the families of each lease and its clients. They have most of the samples, so labels are made once."""
    usages = {_uuid(view): view.usage.value for view in node.health.gpus if isinstance(view.usage, Known)}
    threads: Samples = []
    granted: Samples = []
    held: Samples = []
    clients: Samples = []
    client_held: Samples = []
    activity: Samples = []
    client_activity: Samples = []
    for lease in node.shown:
        for share in lease.shares:
            mine = labels(families.LEASE_MEMORY.labels, (lease.id, share.gpu, lease.owner.uid))
            threads.append((mine, share.threads.tenths / 1000))
            granted.append((mine, share.memory.bytes))
            usage = usages.get(share.gpu)
            on_it = lease.clients_on(share.gpu)
            clients.append((mine, len(on_it)))
            if usage is None:
                continue
            here, worked = 0, None
            for client in on_it:
                process = usage.processes.get(client.pid)
                if process is not None and process.sm_activity is not None:
                    worked = (worked or 0.0) + process.sm_activity / 100
                    client_activity.append((f'{mine[:-1]},pid="{client.pid}"}}', process.sm_activity / 100))
                if process is not None and isinstance(process.memory, Known):
                    here += process.memory.value
                    client_held.append((f'{mine[:-1]},pid="{client.pid}"}}', process.memory.value))
            held.append((mine, here))
            if worked is not None:
                activity.append((mine, worked))
    yield Block(families.LEASE_THREADS, threads)
    yield Block(families.LEASE_MEMORY, granted)
    yield Block(families.LEASE_MEMORY_HELD, held)
    yield Block(families.LEASE_CLIENTS, clients)
    yield Block(families.CLIENT_MEMORY_HELD, client_held)
    yield Block(families.LEASE_ACTIVITY, activity)
    yield Block(families.CLIENT_ACTIVITY, client_activity)
