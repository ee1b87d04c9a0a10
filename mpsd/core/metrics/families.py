"""The one table of metrics: name, kind, unit, meaning and labels of each family.

`/metrics`, docs/reference/metrics.md, the alert rules and the dashboard use the names of this table, and the tests
check that. Names follow Prometheus' guide: base units, `_total` for counters. No label has a value that a user chose: a
lease appears by its id, its user by the uid.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from msgspec import Struct


class Kind(StrEnum):
    """The types of metrics that mpsd uses, by their names in OpenMetrics."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    STATESET = "stateset"
    INFO = "info"


_UNITS: Final = ("seconds", "bytes", "ratio")

_OF_USERS: Final = frozenset({"class", "lease", "uid", "pid"})
"""The labels that name individual users, their leases or their clients."""


class Family(Struct, frozen=True):
    """A row of the table. The name omits the suffixes of its samples (`_total`, `_bucket`, `_info`)."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """The labels of each sample; a state set has one more, named after itself, and a histogram has `le`."""

    @property
    def unit(self) -> str:
        """The unit at the end of the name; empty for a plain number."""
        last = self.name.rpartition("_")[2]
        return last if last in _UNITS else ""

    @property
    def series(self) -> str:
        """The name of its samples in a query, for the kinds with a single name."""
        return self.name + {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(self.kind, "")

    @property
    def about_users(self) -> bool:
        """Whether its samples describe individual users, leases or clients; on TCP, they require `metrics.users`."""
        return not _OF_USERS.isdisjoint(self.labels)


SECTIONS: Final[dict[str, list[Family]]] = {}
"""Every family, by section of docs/reference/metrics.md."""


def _section(title: str) -> None:
    """Begin a section: the families that follow are in it."""
    SECTIONS[title] = []


def _family(kind: Kind, name: str, help_: str, *labels: str) -> Family:
    """Return a family of the present section."""
    family = Family(name, kind, help_, labels)
    [*SECTIONS.values()][-1].append(family)
    return family


_gauge: Final = partial(_family, Kind.GAUGE)
_counter: Final = partial(_family, Kind.COUNTER)
_histogram: Final = partial(_family, Kind.HISTOGRAM)

_section("The node")

BUILD: Final = _family(Kind.INFO, "mpsd_build", "The version of mpsd that runs.", "version")
START_TIME: Final = _gauge(
    "mpsd_start_time_seconds",
    "Time at which mpsd started, in seconds since 1970. Counters begin at 0 then, and count later events.",
)
HEALTHY: Final = _gauge("mpsd_node_healthy", "1 if the node is healthy, as GET /readyz says, otherwise 0.")
REASONS: Final = _gauge(
    "mpsd_node_reasons", "Reasons why the node is not healthy, and warnings, by kind as in GET /v1/status.", "kind"
)

_section("GPUs")

GPU: Final = _family(Kind.INFO, "mpsd_gpu", "The GPUs of the node, by UUID.", "gpu", "index", "name", "driver")
GPU_HEALTH: Final = _family(
    Kind.STATESET, "mpsd_gpu_health", "The health of a GPU by itself, without its control daemon.", "gpu"
)
GPU_MEMORY: Final = _gauge("mpsd_gpu_memory_bytes", "Memory of the GPU in total.", "gpu")
GPU_MEMORY_RESERVED: Final = _gauge(
    "mpsd_gpu_memory_reserved_bytes",
    "Memory that is never granted: admission.memory_reserve, and what the driver keeps for itself.",
    "gpu",
)
GPU_MEMORY_GRANTED: Final = _gauge("mpsd_gpu_memory_granted_bytes", "Memory that is granted to leases.", "gpu")
GPU_MEMORY_UNLEASED: Final = _gauge(
    "mpsd_gpu_memory_unleased_bytes", "Memory that counts as used by clients without a lease.", "gpu"
)
GPU_MEMORY_HELD: Final = _gauge(
    "mpsd_gpu_memory_held_bytes", "Memory in use on the GPU, by any process, as NVML reports it.", "gpu"
)
GPU_THREADS: Final = _gauge(
    "mpsd_gpu_threads_ratio",
    "Threads that can be granted: 1 is the whole GPU, times admission.threads_oversubscription.",
    "gpu",
)
GPU_THREADS_GRANTED: Final = _gauge(
    "mpsd_gpu_threads_granted_ratio", "Threads that are granted to leases; 1 is the whole GPU.", "gpu"
)
GPU_THREADS_UNLEASED: Final = _gauge(
    "mpsd_gpu_threads_unleased_ratio", "Threads that count as used by clients without a lease.", "gpu"
)
GPU_CLIENTS_MAX: Final = _gauge("mpsd_gpu_clients_max", "Client places of the GPU.", "gpu")
GPU_CLIENTS_GRANTED: Final = _gauge("mpsd_gpu_clients_granted", "Client places that are granted to leases.", "gpu")
GPU_XIDS: Final = _counter("mpsd_gpu_xids", "Critical errors that the GPU reported, by NVIDIA's number.", "gpu", "xid")

_section("Control daemons")

DAEMON: Final = _family(Kind.INFO, "mpsd_daemon", "The control daemons: one for each GPU.", "daemon", "gpu", "version")
DAEMON_STATE: Final = _family(
    Kind.STATESET, "mpsd_daemon_state", "The state of a control daemon. Only a ready one admits.", "daemon"
)
DAEMON_STATE_SINCE: Final = _gauge(
    "mpsd_daemon_state_since_timestamp_seconds",
    "Time at which the control daemon entered its state, in seconds since 1970.",
    "daemon",
)
DAEMON_SERVERS: Final = _gauge("mpsd_daemon_servers", "Servers of a control daemon.", "daemon")
DAEMON_CLIENTS: Final = _gauge("mpsd_daemon_clients", "Clients that the servers of a control daemon list.", "daemon")
DAEMON_DRIFT: Final = _gauge("mpsd_daemon_drift", "Limits that differ from the values that mpsd set.", "daemon")
UNKNOWN_LINES: Final = _counter(
    "mpsd_daemon_unknown_lines",
    "Lines in the logs of a control daemon and its servers that mpsd does not know.",
    "daemon",
)
DEATHS: Final = _counter(
    "mpsd_daemon_deaths",
    "Deaths of a control daemon that no operator wanted, by cause: the signal, `exit`, `quit` of others, or `start` if"
    " it could not be started.",
    "daemon",
    "cause",
)
HANGS: Final = _counter("mpsd_daemon_hangs", "Number of times that a control daemon stopped answering.", "daemon")
STARTS: Final = _counter(
    "mpsd_daemon_starts",
    "Starts of a control daemon by mpsd, by cause: `first`, `death`, `operator`, or `renewal` for its next user.",
    "daemon",
    "cause",
)
RECOVERY: Final = _histogram(
    "mpsd_daemon_recovery_duration_seconds",
    "Time from the death of a control daemon, or from its silence, until it was ready again.",
    "daemon",
)
CONVERSATION: Final = _histogram(
    "mpsd_control_conversation_duration_seconds",
    "Time that a conversation on the control pipe took, including the wait for other conversations.",
    "daemon",
)
CONVERSATION_FAILURES: Final = _counter(
    "mpsd_control_conversation_failures",
    "Conversations on the control pipe that failed, by the code of the error.",
    "daemon",
    "code",
)
DRIFT_FOUND: Final = _counter(
    "mpsd_limit_drift_found", "Limits that mpsd found changed by another program.", "daemon", "limit"
)
DRIFT_UNDONE: Final = _counter("mpsd_limit_drift_undone", "Changed limits that mpsd set back.", "daemon", "limit")
FOREIGN_COMMANDS: Final = _counter(
    "mpsd_foreign_commands", "Commands from programs other than mpsd that change a control daemon.", "daemon"
)

_section("Admission")

LEASES: Final = _gauge("mpsd_leases", "Leases by state; those that wait are requests in the queue.", "state")
ADMISSIONS: Final = _counter(
    "mpsd_admissions",
    "Decided requests for a lease, by outcome (`granted`, `refused`) and the code of the refusal.",
    "outcome",
    "code",
)
QUEUED: Final = _counter("mpsd_admissions_queued", "Requests for a lease that had to wait.")
ENDED: Final = _counter("mpsd_leases_ended", "Leases that ended, and requests that left the queue without one.")
WAITING: Final = _gauge("mpsd_waiting_requests", "Requests that wait for a lease.")
WAITING_OLDEST: Final = _gauge(
    "mpsd_waiting_oldest_seconds", "Time that the oldest request has waited; 0 if no request waits."
)
WAITING_BY_CLASS: Final = _gauge(
    "mpsd_waiting_class_requests",
    "Waiting requests by the class of their user: the name in [quota.NAME], or empty for a user without a quota.",
    "class",
)
WAIT: Final = _histogram(
    "mpsd_lease_wait_duration_seconds", "Time that granted requests waited; 0 for those that were granted at once."
)
GRANT: Final = _histogram(
    "mpsd_lease_grant_duration_seconds",
    "Time from a request to its answer, for requests granted at once: decided, stored, and open to its clients.",
)

_section("Violations")

VIOLATIONS: Final = _counter("mpsd_violations", "Violations found, by kind.", "kind")
OPEN_VIOLATIONS: Final = _gauge("mpsd_open_violations", "Current violations, by kind.", "kind")
CLIENTS_ENDED: Final = _counter("mpsd_clients_ended", "Clients that mpsd ended.")
QUARANTINED: Final = _gauge("mpsd_quarantined_uids", "Quarantined uids and control groups.")

_section("mpsd itself")

EVENTS: Final = _counter("mpsd_events", "Events, by name. Each event is a line of mpsd's log.", "event")
LOG_LINES: Final = _counter("mpsd_log_lines", "Lines of mpsd's log, by level.", "level")
LINES_LOST: Final = _counter("mpsd_log_lines_lost", "Lines of mpsd's log lost because its reader was too slow.")
LINES_LEFT_OUT: Final = _counter(
    "mpsd_log_lines_left_out",
    "Lines and events left out because their user had too many (api.lines_per_uid); the counters include them.",
)
CPU: Final = _counter("mpsd_process_cpu_seconds", "Processor time that mpsd itself has used.")
MEMORY: Final = _gauge("mpsd_process_resident_memory_bytes", "Memory that mpsd itself uses.")
OPEN_FDS: Final = _gauge("mpsd_process_open_fds", "File descriptors that mpsd itself has open.")
MAX_FDS: Final = _gauge("mpsd_process_max_fds", "File descriptors that mpsd itself may have open.")

_section("Leases and clients")

_OF_LEASE: Final = ("lease", "gpu", "uid")
_OF_CLIENT: Final = (*_OF_LEASE, "pid")

LEASE_THREADS: Final = _gauge(
    "mpsd_lease_threads_granted_ratio", "Threads granted to a lease; 1 is the whole GPU.", *_OF_LEASE
)
LEASE_MEMORY: Final = _gauge("mpsd_lease_memory_granted_bytes", "Memory granted to a lease.", *_OF_LEASE)
LEASE_MEMORY_HELD: Final = _gauge(
    "mpsd_lease_memory_held_bytes",
    "Memory that the clients of a lease hold, as NVML reports it; absent if NVML does not report it.",
    *_OF_LEASE,
)
LEASE_CLIENTS: Final = _gauge("mpsd_lease_clients", "Clients of a lease.", *_OF_LEASE)
CLIENT_MEMORY_HELD: Final = _gauge(
    "mpsd_client_memory_held_bytes",
    "Memory that a client of a lease holds, as NVML reports it; absent if NVML does not report it.",
    *_OF_CLIENT,
)

FAMILIES: Final = tuple(family for families in SECTIONS.values() for family in families)


# -- samples -----------------------------------------------------------------------------------------------------------

# The samples of metrics at one moment, by family and by the values of its labels.


Labels: TypeAlias = tuple[str, ...]
"""The values of a family's labels, in the order of their names; the last one of a state set is the state."""


class Buckets(NamedTuple):
    """A histogram at one moment."""

    counts: list[tuple[str, int]]
    """Each upper bound, up to `+Inf`, with the number of values that are at most the bound."""
    sum: float


class Samples(NamedTuple):
    """The samples of each family that has some or may have some; no family is in both."""

    numbers: dict[Family, Mapping[Labels, float]]
    histograms: dict[Family, Mapping[Labels, Buckets]]


class Histogram:
    """Counts the observed values in each range."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        """By bound, the number of values at most the bound and above the previous one; the last count is the rest."""
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> Buckets:
        """Return what was observed so far."""
        found: list[tuple[str, int]] = []
        below = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            below += count
            found.append((str(bound), below))
        return Buckets(found, self._sum)


def states(values: Mapping[Labels, str], every: Iterable[str]) -> dict[Labels, float]:
    """Return a state set: 1 for the state of each value, 0 for every other state."""
    known = tuple(every)
    return {(*labels, state): int(state == value) for labels, value in values.items() for state in known}
