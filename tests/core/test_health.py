"""The reasons why a node, a GPU or a control daemon is not healthy: each reason, their order, and their effects."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from msgspec import structs

from mpsd.core import health
from mpsd.core.compute_mode import ComputeMode
from mpsd.core.health import WELL, Kind, Reason
from mpsd.core.lifecycle import State
from mpsd.core.model import (
    Daemon,
    Drift,
    Gpu,
    GpuProcess,
    GpuUsage,
    GpuView,
    Health,
    Known,
    Limits,
    Outsider,
    Quarantined,
    Server,
    StoppedServer,
    Suspect,
    UnforeseenAnswer,
    Unknown,
)
from mpsd.core.quantities import ActiveThreadPercentage
from mpsd.core.units import GIB
from tests.core.enforcement.test_violations import HOLDER, lease

NOW: Final = datetime(2026, 11, 22, 3, 0, 0, 500_000, tzinfo=UTC)

GPU: Final = GpuView(0, None, Unknown("not needed here"), Health.OK, "it answers", None)

DAEMON: Final = Daemon(
    name="gpu0",
    gpu="GPU-0",
    state=State.READY,
    because="it answers",
    since=NOW,
    process=None,
    ready_since=NOW,
    pipe_directory="/run/mpsd/mps/gpu0",
    wanted=Limits(ActiveThreadPercentage(600), None),
    limits=None,
    verified=True,
)

COMMAND: Final = "set_default_active_thread_percentage 10"
DRIFT: Final = Drift("active_thread_percentage", 60.0, 10.0, NOW, COMMAND)
MEMORY: Final = Drift("pinned_device_mem_limit", 8 * GIB, None, NOW, None)
FAULTED: Final = Server(42, faulted=NOW)
REPORTED: Final = Server(42, fault_reported=NOW)
STOPPED: Final = StoppedServer(42, 1001, NOW, 0.0, "its clients are 7")
NO_ROOM: Final = "the store cannot be written: disk full"


def daemon(**otherwise: Any) -> Daemon:
    """Return a control daemon that is healthy except for this."""
    return replace(DAEMON, **otherwise)


def gpu(state: Health, because: str = "why", hint: str | None = "what to do") -> GpuView:
    return replace(GPU, health=state, because=because, hint=hint)


# -- each reason -------------------------------------------------------------------------------------------------------

OF_GPUS: Final = [
    (gpu(Health.UNKNOWN), Kind.GPU_UNKNOWN, "GPU 0 is unknown: why"),
    (gpu(Health.FAULTY), Kind.GPU, "GPU 0 is faulty: why"),
    (gpu(Health.MISCONFIGURED), Kind.GPU, "GPU 0 is misconfigured: why"),
    (gpu(Health.UNSUPPORTED), Kind.GPU_UNSUPPORTED, "GPU 0 is unsupported: why"),
    (gpu(Health.OK, "its mode is not restored"), Kind.GPU_NOT_RESTORED, "GPU 0 needs attention: its mode is not"),
]

OF_DAEMONS: Final = [
    *(
        (daemon(state=state), Kind.DAEMON, f"gpu0 is {state}: it answers")
        for state in State
        if state not in {State.READY, State.HELD, State.DRAINING}
    ),
    (daemon(state=State.HELD, because="uid 0 holds it"), Kind.HOLD, "gpu0 is held: uid 0 holds it"),
    (daemon(state=State.DRAINING, operation="it waits for pid 7"), Kind.HOLD, "it answers; it waits for pid 7"),
    (
        daemon(state=State.DRAINING, drained=True, because="no leases and no clients were left"),
        Kind.HOLD,
        "gpu0 is drained: no leases and no clients were left",
    ),
    (daemon(incomplete="why"), Kind.LEASES_INCOMPLETE, "gpu0 is held because its leases may be incomplete: why"),
    (
        daemon(state=State.STOPPING, because="a restart", operation="a restart"),
        Kind.OPERATION,
        "is stopping: a restart",
    ),
    (
        daemon(state=State.UNRESPONSIVE, because="no answer in 5 s", operation="uid 0 drains it"),
        Kind.OPERATION,
        "gpu0 is unresponsive: no answer in 5 s; uid 0 drains it",
    ),
    (
        daemon(servers=(FAULTED,)),
        Kind.SERVER_FAULT,
        "server 42 has been handling a fatal GPU fault since 2026-11-22T03:00:00Z; it accepts no client until it has",
    ),
    (
        daemon(stopped=(STOPPED,)),
        Kind.SERVER_STOPPED,
        "gpu0: server 42 (uid 1001) was found stopped (SIGSTOP) at 2026-11-22T03:00:00Z, and no client of gpu0 is",
    ),
    (daemon(servers=(replace(FAULTED, clients=(7,)),)), Kind.SERVER_FAULT, "until its last client exits"),
    (daemon(servers=(replace(FAULTED, clients=(7, 8)),)), Kind.SERVER_FAULT, "until its 2 clients exit"),
    (daemon(cannot_start="6 servers did not start"), Kind.SERVERS_CANNOT_START, "gpu0: 6 servers did not start"),
    (daemon(unserved="pid 7 hangs"), Kind.WEDGED, "gpu0 is wedged: its server serves no client"),
    (daemon(drift=(DRIFT,)), Kind.DRIFT, "gpu0: active_thread_percentage is 10 % instead of 60 %"),
    (
        daemon(log_silent_since=datetime(2026, 11, 22, 3, tzinfo=UTC)),
        Kind.LOG_SILENT,
        "gpu0: its log has shown nothing since 2026-11-22T03:00:00Z",
    ),
    (daemon(unrestored=("lease x could not be restored",)), Kind.UNRESTORED, "gpu0: lease x could not be restored"),
    (
        daemon(servers=(Server(42, unforeseen=UnforeseenAnswer("get_device_pinned_mem_limit 42 0", "'1 GB'")),)),
        Kind.ANSWER_UNFORESEEN,
        "gpu0: server 42 answers 'get_device_pinned_mem_limit 42 0' with '1 GB', a form that this mpsd does not know",
    ),
    (daemon(servers=(Server(42, orphan=True),)), Kind.ORPHAN, "gpu0: server 42 is an orphan"),
    (
        daemon(client_end_late="server 42 did not end the contexts of client 7 in time"),
        Kind.CLIENT_END_LATE,
        "gpu0: server 42 did not end",
    ),
    (
        daemon(servers=(REPORTED,)),
        Kind.FAULT_REPORTED,
        "gpu0: the log of server 42 has reported a fatal GPU fault since 2026-11-22T03:00:00Z",
    ),
    (daemon(client_end="server 42 is ending the contexts of client 7"), Kind.CLIENT_END, "gpu0: server 42 is ending"),
]


@pytest.mark.parametrize(("view", "kind", "because"), OF_GPUS, ids=lambda each: getattr(each, "health", None))
def test_reasons_of_a_gpu(view: GpuView, kind: Kind, because: str) -> None:
    """Each health other than ok is one reason, which names the GPU and has the GPU's own hint."""
    (reason,) = health.of_gpu(view)
    assert (reason.kind, reason.subject, reason.hint) == (kind, "GPU 0", "what to do")
    assert reason.because.startswith(because)


@pytest.mark.parametrize(("found", "kind", "because"), OF_DAEMONS)
def test_reasons_of_a_control_daemon(found: Daemon, kind: Kind, because: str) -> None:
    """Each fault of a control daemon is one reason, which names the daemon and the remedy."""
    (reason,) = health.of_daemon(found)
    assert (reason.kind, reason.subject) == (kind, "gpu0")
    assert because in reason.because
    assert reason.because.startswith("gpu0")
    assert reason.hint


def test_the_hint_of_the_control_daemon_comes_first() -> None:
    """The control daemon's own hint about its state takes precedence."""
    (reason,) = health.of_daemon(daemon(state=State.HELD, hint="mpsctl resume gpu0"))
    assert reason.hint == "mpsctl resume gpu0"


def test_uids() -> None:
    """A uid that crashed control daemons, or may have, is named with the remedy; the node stays healthy for others."""
    shut_out = Quarantined(1001, datetime(2026, 11, 22, 3, tzinfo=UTC), "it did")
    node = health.of_node([GPU], [DAEMON], quarantined=[shut_out], suspects=[Suspect(1002, 2, 1)])
    assert node.healthy
    assert [(each.kind, each.subject, each.because) for each in node.warnings] == [
        (Kind.QUARANTINE, "uid 1001", "uid 1001 has been quarantined since 2026-11-22T03:00:00Z: it did"),
        (
            Kind.SUSPECT,
            "uid 1002",
            "uid 1002 had pipe access when a control daemon crashed, or got a `quit`: 2 times lately, 1 of them alone",
        ),
    ]
    assert node.warnings[0].hint == "lift the quarantine: mpsctl pardon 1001"
    assert health.refusal(GPU, DAEMON) is None


def test_not_closed() -> None:
    """The first line warns of a node where a program that misses MPS gets a whole GPU, while clients are limited."""
    others = [
        replace(gpu(Health.UNSUPPORTED), usage=Known(GpuUsage(0))),
        replace(GPU, index=1, usage=Known(GpuUsage(0))),
    ]
    closed = replace(GPU, index=2, usage=Known(GpuUsage(0, compute_mode=ComputeMode.EXCLUSIVE_PROCESS)))
    node = health.of_node([*others, closed], [DAEMON], limited=True)
    assert (node.healthy, node.because) == (True, WELL)
    assert node.headline == "healthy, not closed: a program that misses MPS gets all of GPU 1"
    assert 'while the GPUs are idle, set daemon.compute_mode = "exclusive-process"' in node.warnings[-1].hint
    assert health.of_node([closed], [DAEMON], limited=True).headline == f"healthy: {WELL}"
    assert health.of_node(others, [DAEMON]).headline == f"healthy: {WELL}"


def test_is_closed() -> None:
    """A node is closed where each GPU is, also one that mpsd does not share; one that cannot be read is unknown."""
    closed, prohibited = (
        replace(GPU, usage=Known(GpuUsage(0, compute_mode=mode)))
        for mode in (ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED)
    )
    open_to_all = replace(gpu(Health.UNSUPPORTED), usage=Known(GpuUsage(0)))
    of_no_mode = replace(GPU, usage=Known(GpuUsage(0, compute_mode=None)))
    unread = replace(GPU, usage=Unknown("NVML did not answer"))
    assert health.is_closed([closed, prohibited]) is True
    assert health.is_closed([closed, open_to_all]) is health.is_closed([of_no_mode, closed]) is False
    assert health.is_closed([closed, unread]) is None
    assert health.is_closed([unread, open_to_all]) is False


def test_open_violations() -> None:
    """Open violations are in the first line, the first few in a sentence; the node stays healthy."""
    found = [f"process {pid} is short" for pid in range(1, 6)]
    node = health.of_node([GPU], [DAEMON], violations=found[:1])
    assert (node.healthy, node.because) == (True, WELL)
    assert node.headline == "healthy, 1 violation: process 1 is short"
    node = health.of_node([GPU], [daemon(state=State.HELD, because="uid 0 holds it")], violations=found)
    assert node.headline == (
        "NOT HEALTHY, 5 violations: gpu0 is held: uid 0 holds it; process 1 is short; process 2 is short;"
        " process 3 is short; and 2 more"
    )


def test_every_kind_has_a_case() -> None:
    """The tables above, and the two tests of a whole node, cover every kind."""
    assert {kind for _, kind, _ in (*OF_GPUS, *OF_DAEMONS)} == set(Kind) - {
        Kind.STORE,
        Kind.NO_GPU,
        Kind.QUARANTINE,
        Kind.NOT_CLOSED,
        Kind.SUSPECT,
        Kind.CLIENTS_LOST,
        Kind.OUTSIDE,
    }


# -- the node ----------------------------------------------------------------------------------------------------------


def test_a_healthy_node() -> None:
    """A healthy node has no reasons, and says that it is healthy."""
    node = health.of_node([GPU], [DAEMON])
    assert (node.healthy, node.because, node.reasons, node.warnings) == (True, WELL, (), ())
    assert (node.gpus, node.daemons) == ((GPU,), (DAEMON,))
    assert health.refusal(GPU, DAEMON) is None


def test_a_store_that_is_full() -> None:
    """When no lease can be stored, the node is not healthy, but its GPUs are."""
    node = health.of_node([GPU], [DAEMON], store=NO_ROOM)
    assert not node.healthy
    assert [(each.kind, each.subject) for each in node.reasons] == [(Kind.STORE, "leases")]
    assert node.because == f"no lease can be granted: {NO_ROOM}"
    assert "paths.runtime_dir" in node.reasons[0].hint


@pytest.mark.parametrize("gpus", [[], [gpu(Health.UNSUPPORTED)]])
def test_no_gpu_that_can_run_mps(gpus: list[GpuView]) -> None:
    """A node without control daemons is not healthy, even if no GPU is broken."""
    node = health.of_node(gpus, [])
    assert [(each.kind, each.subject, each.hint) for each in node.reasons] == [
        (Kind.NO_GPU, "node", "see why: mpsctl gpus")
    ]
    assert len(node.warnings) == len(gpus)


def test_no_gpu_is_no_second_reason() -> None:
    """A GPU that cannot be read is itself the reason for the missing control daemon."""
    node = health.of_node([gpu(Health.UNKNOWN)], [])
    assert [each.kind for each in node.reasons] == [Kind.GPU_UNKNOWN]


def test_one_reason_for_a_stopped_server() -> None:
    """That its control daemon does not answer is no second reason, unless an operator's command waits for it."""
    found = daemon(state=State.UNRESPONSIVE, stopped=(STOPPED,))
    assert [each.kind for each in health.of_daemon(found)] == [Kind.SERVER_STOPPED]
    found = replace(found, operation="uid 0 drains it")
    assert {each.kind for each in health.of_daemon(found)} == {Kind.SERVER_STOPPED, Kind.OPERATION}


def test_outsiders() -> None:
    """Processes without a lease outside MPS are named by GPU, those with most memory first, where they are limited."""
    device = Gpu(0, "GPU-0", "A", GIB, (9, 0), mig=False, driver_version="555.58")
    processes = {7: GpuProcess(Known(GIB)), 8: GpuProcess(Known(4 * GIB)), 9: GpuProcess(Unknown("hidden"))}
    usage = GpuUsage(0, processes=processes, compute_mode=ComputeMode.EXCLUSIVE_PROCESS)
    view = replace(GPU, gpu=device, usage=Known(usage))
    outsiders = [Outsider(device.uuid, pid, uid) for pid, uid in ((7, 1001), (8, 1002), (9, None), (10, 1001))]
    node = health.of_node([view], [DAEMON], limited=True, outsiders=[*outsiders, Outsider("another", 11, 1)])
    ((kind, subject, because, hint),) = ((each.kind, each.subject, each.because, each.hint) for each in node.warnings)
    assert (node.healthy, kind, subject) == (True, Kind.OUTSIDE, "GPU 0")
    assert ": processes 8 (uid 1002, 4GiB), 7 (uid 1001, 1GiB), " in because
    assert hint.endswith("kill 8 7 9 10")
    assert not health.of_node([view], [DAEMON], outsiders=outsiders).warnings


def test_clients_that_are_lost() -> None:
    """The leases whose clients ended with a control daemon are named by GPU, at most three, and the node is healthy."""
    leases = [
        structs.replace(lease(number), shares=(structs.replace(lease().shares[0], daemon=name),), lost=(HOLDER,))
        for number, name in ((1, "gpu0"), (2, "gpu1"), (3, "gpu0"), (4, "gpu0"), (5, "gpu0"))
    ]
    node = health.of_node([GPU], [DAEMON], lost=leases)
    assert node.healthy
    assert [(each.kind, each.subject) for each in node.warnings] == [
        (Kind.CLIENTS_LOST, "gpu0"),
        (Kind.CLIENTS_LOST, "gpu1"),
    ]
    assert [each.id in node.warnings[0].because for each in leases] == [True, False, True, True, False]
    assert f"lease-1 (pid {HOLDER.pid})" in node.warnings[0].because
    assert ", 1 more" in node.warnings[0].because


def test_a_server_that_is_about_to_end() -> None:
    """A server whose control daemon died just now is no orphan yet, and no reason proposes to kill it."""
    assert [*health.of_daemon(daemon(servers=(Server(42, orphan=True, dying=True),)))] == []


def test_the_gravest_reason_comes_first() -> None:
    """Reasons are in the order of their kinds, and those of a kind in the order of the GPUs."""
    all_at_once = daemon(
        name="gpu1",
        state=State.HELD,
        servers=(Server(9, orphan=True), FAULTED),
        cannot_start="no server starts",
        drift=(MEMORY,),
    )
    last = daemon(name="gpu2", state=State.FAILED, drift=(DRIFT,))
    gpus = [gpu(Health.FAULTY), replace(gpu(Health.UNKNOWN), index=1)]
    node = health.of_node(gpus, [all_at_once, last], store=NO_ROOM)
    assert [(each.kind, each.subject) for each in node.reasons] == [
        (Kind.GPU_UNKNOWN, "GPU 1"),
        (Kind.GPU, "GPU 0"),
        (Kind.DAEMON, "gpu2"),
        (Kind.HOLD, "gpu1"),
        (Kind.SERVER_FAULT, "gpu1"),
        (Kind.SERVERS_CANNOT_START, "gpu1"),
        (Kind.DRIFT, "gpu1"),
        (Kind.DRIFT, "gpu2"),
        (Kind.STORE, "leases"),
        (Kind.ORPHAN, "gpu1"),
    ]
    assert node.because == "; ".join(each.because for each in node.reasons)


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED: Final = [
    *((view, DAEMON, "health", kind) for view, kind, _ in OF_GPUS if kind is not Kind.GPU_NOT_RESTORED),
    *(
        (GPU, found, "hold" if kind in {Kind.HOLD, Kind.OPERATION, Kind.LEASES_INCOMPLETE} else "health", kind)
        for found, kind, _ in OF_DAEMONS
        if kind not in {Kind.ORPHAN, Kind.LOG_SILENT, Kind.FAULT_REPORTED, Kind.CLIENT_END}
    ),
    (GPU, daemon(state=State.HELD, servers=(FAULTED,), drift=(DRIFT,)), "hold", Kind.HOLD),
    (gpu(Health.FAULTY), daemon(state=State.HELD), "health", Kind.GPU),
    (GPU, daemon(state=State.UNRESPONSIVE, stopped=(STOPPED,)), "health", Kind.SERVER_STOPPED),
    (GPU, daemon(drift=(DRIFT,), cannot_start="no server starts"), "health", Kind.SERVERS_CANNOT_START),
]


@pytest.mark.parametrize(("view", "found", "limit", "kind"), REFUSED)
def test_refusals(view: GpuView, found: Daemon, limit: str, kind: Kind) -> None:
    """An unhealthy GPU or control daemon refuses every request, with the gravest reason."""
    reason = health.refusal(view, found)
    assert reason is not None
    assert (reason.kind.limit, reason.kind) == (limit, kind)
    assert reason.because
    assert reason.hint


@pytest.mark.parametrize(
    ("view", "found"),
    [
        (gpu(Health.OK), DAEMON),
        (GPU, daemon(servers=(Server(42, orphan=True), Server(43)))),
        (GPU, daemon(servers=(Server(42, orphan=True, dying=True),))),
        (GPU, daemon(state=State.STOPPING, replacing=True)),
        (GPU, daemon(log_silent_since=datetime(2026, 11, 22, tzinfo=UTC))),
    ],
)
def test_what_refuses_nobody(view: GpuView, found: Daemon) -> None:
    """A minor fault refuses no request, and nor does the replacement of a control daemon for its next user."""
    assert health.refusal(view, found) is None


# -- the sentence for drift --------------------------------------------------------------------------------------------

UNDONE: Final = NOW + timedelta(seconds=1)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            DRIFT,
            f"gpu0: active_thread_percentage is 10 % instead of 60 %; the foreign command '{COMMAND}' changed it",
        ),
        (
            replace(DRIFT, found=33.3, server=42, command=None),
            "gpu0: active_thread_percentage of server 42 is 33.3 % instead of 60 %",
        ),
        (
            replace(DRIFT, undone=UNDONE),
            (
                f"gpu0: active_thread_percentage was 10 % instead of 60 %; the foreign command '{COMMAND}' changed it;"
                " mpsd restored it at 2026-11-22T03:00:01Z"
            ),
        ),
        (MEMORY, "gpu0: pinned_device_mem_limit is unlimited instead of 8GiB"),
        (
            replace(MEMORY, wanted=None, found=3 * GIB // 2, undone=UNDONE),
            "gpu0: pinned_device_mem_limit was 1.5GiB instead of unlimited; mpsd restored it at 2026-11-22T03:00:01Z",
        ),
        (
            replace(MEMORY, found=0, command="set\x1b[2J 'x'"),
            "gpu0: pinned_device_mem_limit is 0B instead of 8GiB; the foreign command \"set\\x1b[2J 'x'\" changed it",
        ),
    ],
)
def test_drift(found: Drift, sentence: str) -> None:
    """The sentence names the limit, its daemon or server, both values with units, the command, and the undo."""
    assert health.drifted("gpu0", found) == sentence


@pytest.mark.parametrize("kind", Kind)
def test_hints_for_users(kind: Kind) -> None:
    """An operator reads a command, another user what it can do itself, unless the hint is to wait or to read."""
    reason = Reason(kind, "gpu0", "gpu0 is not well", "mpsctl restart gpu0")
    assert reason.hint_for(operator=True) == reason.hint
    is_for_all = kind in {Kind.FAULT_REPORTED, Kind.CLIENT_END, Kind.CLIENTS_LOST, Kind.SUSPECT, Kind.NO_GPU}
    assert (reason.hint_for(operator=False) == reason.hint) is is_for_all
    assert ("(--wait)" in reason.hint_for(operator=False)) is bool(reason.kind.limit)


@pytest.mark.parametrize(
    ("otherwise", "refused", "impaired"),
    [
        ({}, None, None),
        ({"state": State.HELD}, Kind.HOLD, None),
        ({"state": State.DRAINING}, Kind.HOLD, None),
        ({"state": State.STARTING, "operation": "a restart"}, Kind.OPERATION, None),
        ({"drift": (DRIFT,)}, Kind.DRIFT, None),
        ({"incomplete": "its store was damaged"}, Kind.LEASES_INCOMPLETE, None),
        ({"state": State.COOLING}, Kind.DAEMON, Kind.DAEMON),
        ({"state": State.DOWN}, Kind.DAEMON, None),
        ({"state": State.STARTING}, Kind.DAEMON, None),
        ({"state": State.HELD, "servers": (FAULTED,)}, Kind.HOLD, Kind.SERVER_FAULT),
        ({"unserved": "no answer"}, Kind.WEDGED, Kind.WEDGED),
        ({"stopped": (STOPPED,)}, Kind.SERVER_STOPPED, Kind.SERVER_STOPPED),
    ],
    ids=str,
)
def test_who_is_served(otherwise: dict[str, Any], refused: Kind | None, impaired: Kind | None) -> None:
    """What refuses new work need not concern what runs; what impairs that also refuses new work."""
    view = replace(GPU, gpu=Gpu(0, "GPU-0", "A", GIB, (9, 0), mig=False, driver_version="555.58"))
    found = health.verdict(view, [daemon(**otherwise)])
    assert [each and each.kind for each in found] == [refused, impaired]
    assert health.verdict(view, [daemon(**otherwise)], NO_ROOM).impaired == found.impaired
