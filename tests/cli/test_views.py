"""Each answer is shown completely, with faults first, and unknown values as unknown."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from mpsd.cli import render, views
from mpsd.cli.render import for_you, when
from mpsd.cli.tables import PLAIN, Listed, Look, bar
from mpsd.core.events import EventName

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)
THEN = "2026-11-21T02:58:00Z"
GIB = 1024**3
NO_OTHERS: Any = {"leases": 0, "waiting": 0, "threads_granted": 0.0, "memory_granted": 0}


def clients(
    *listed: Any, leases: Sequence[Any] = (), commands: Mapping[int, str] | None = None, others: int = 0
) -> Listed:
    """Return the list of these clients, with so many of other users."""
    answer: Any = {"clients": [*listed], "others": {"clients": others, "memory_held": 3 * GIB}}
    return views.clients(answer, leases, commands or {})


def gpu(**other: Any) -> Any:
    """Return a healthy GPU in the API's form."""
    return {
        "uuid": "GPU-1",
        "index": 0,
        "name": "H100",
        "memory_total": 80 * GIB,
        "memory_reserved": GIB // 2,
        "threads_total": 100.0,
        "threads_granted": 25.0,
        "memory_granted": 8 * GIB,
        "memory_held": 3 * GIB,
        "clients": 1,
        "clients_max": 48,
        "threads_unleased": 0.0,
        "memory_unleased": 0,
        "clients_unleased": 0,
        "compute_mode": "default",
        "health": "ok",
        "because": "it answers",
        "hint": None,
        "refused": None,
        "refused_kind": None,
        "impaired": None,
        "obstacle": None,
        "hardware": None,
        "users": [0],
        **other,
    }


def daemon(**other: Any) -> Any:
    """Return a healthy control daemon in the API's form."""
    return {
        "name": "gpu0",
        "gpu": "GPU-1",
        "state": "ready",
        "because": "it answers",
        "hint": None,
        "pid": 4711,
        "start_time": THEN,
        "pipe_directory": "/run/mpsd/mps/gpu0",
        "since": THEN,
        "ready_since": THEN,
        "limits": {"active_thread_percentage": 100.0, "pinned_device_mem_limit": None},
        "limits_wanted": {"active_thread_percentage": 100.0, "pinned_device_mem_limit": None},
        "verified": True,
        "drift": [],
        "undone": [],
        "servers": [],
        "version": "535.261.03",
        "operation": None,
        "restart_for": [],
        "drained": False,
        **other,
    }


def drift(**other: Any) -> Any:
    return {
        "limit": "active_thread_percentage",
        "wanted": 100.0,
        "found": 10.0,
        "since": THEN,
        "command": "set_default_active_thread_percentage 10",
        "server": None,
        "undone": None,
        "because": "gpu0: active_thread_percentage is 10 % instead of 100 %",
        **other,
    }


def node(**other: Any) -> Any:
    """Return the status of a healthy node."""
    return {
        "healthy": True,
        "because": "every control daemon is ready",
        "headline": "healthy: every control daemon is ready",
        "version": "1.2.3",
        "simulated": False,
        "since": THEN,
        "reasons": [],
        "warnings": [],
        "violations": [],
        "gpus": [gpu()],
        "daemons": [daemon()],
        "leases": 1,
        "waiting": 3,
        "clients": 2,
        "notes": [],
        **other,
    }


def status(**other: Any) -> list[str]:
    """Return the lines of the status of a node that is healthy except for this."""
    return views.status(node(**other), NOW, PLAIN).splitlines()


def test_a_healthy_node() -> None:
    """The first line is the verdict; then come the GPUs, the control daemons, and the rest."""
    lines = status(notes=["the compute mode is left as it is"])
    assert lines == [
        "healthy: every control daemon is ready",
        "",
        "GPU  HEALTH  FOR YOU  THREADS      MEMORY                     HELD  PLACES   USERS  COMPUTE MODE  NAME",
        f"0    ok      yes      25% of 100%  8GiB of 80GiB  {bar(0.25)}  3GiB  1 of 48  root   default       H100",
        "",
        "DAEMON  STATE  SINCE  PID   THREADS  MEMORY    SERVERS",
        "gpu0    ready  2m     4711  100%     no limit  -",
        "",
        "1 lease, 3 waiting, 2 clients; mpsd 1.2.3, up 2m",
        "note: the compute mode is left as it is",
    ]


def reason(subject: str, **other: Any) -> Any:
    """Return a reason why a node is not healthy."""
    return {
        "kind": "daemon",
        "subject": subject,
        "because": f"{subject} is failed",
        "hint": f"reset {subject}",
        **other,
    }


def test_a_sick_node() -> None:
    """Each fault is a line with its remedy."""
    lines = status(
        healthy=False,
        headline="NOT HEALTHY: GPU 1 is unknown: it does not answer; gpu1 is failed: 5 deaths",
        reasons=[reason("GPU 1", hint="see what nvidia-smi says"), reason("gpu1", hint="mpsctl reset gpu1")],
        warnings=[reason("GPU 2", because="GPU 2 is unsupported: MIG mode is on", hint="turn MIG off")],
        simulated=True,
        daemons=[daemon(undone=[drift(undone=THEN, because="gpu0: it was 10 %; mpsd restored it at 02:57")])],
    )
    assert lines[:7] == [
        "NOT HEALTHY",
        "  GPU 1 is failed -> see what nvidia-smi says",
        "  gpu1 is failed -> mpsctl reset gpu1",
        "  GPU 2 is unsupported: MIG mode is on -> turn MIG off",
        "  gpu0: it was 10 %; mpsd restored it at 02:57 (2m ago)",
        "",
        "GPU  HEALTH  FOR YOU  THREADS      MEMORY                     HELD  PLACES   USERS  COMPUTE MODE  NAME",
    ]
    assert lines[-1].endswith("on simulated GPUs")


FAILED = reason(
    "gpu1",
    because="gpu1 is failed: 5 deaths within 60 s, the last one: pid 9 killed by SIGKILL; giving up",
    hint="read /var/log/mpsd/gpu1/control.log, fix the cause, then: mpsctl reset gpu1",
)


def test_a_sick_node_on_a_terminal() -> None:
    """No part of a reason or its remedy is cut off at the edge of the terminal."""
    found: Any = node(
        healthy=False,
        headline=f"NOT HEALTHY, 1 violation: {FAILED['because']}; process 7 is short",
        reasons=[FAILED],
        violations=[violation(because="process 7 is short", hint="start it again")],
    )
    assert views.status(found, NOW, Look(width=80)).splitlines()[:5] == [
        "NOT HEALTHY, 1 violation",
        "  gpu1 is failed: 5 deaths within 60 s, the last one: pid 9 killed by SIGKILL;",
        "    giving up -> read /var/log/mpsd/gpu1/control.log, fix the cause, then:",
        "    mpsctl reset gpu1",
        "  process 7 is short -> start it again",
    ]


def test_a_daemon_that_is_drained() -> None:
    """A completed drain is distinguished from a waiting one."""
    for drained, word in ((True, "drained"), (False, "draining")):
        text = views.daemons({"daemons": [daemon(state="draining", drained=drained)]}, NOW).text(PLAIN)
        assert text.splitlines()[1].split()[1] == word


def test_gpus_for_whom() -> None:
    """A GPU says whether it is for the caller, and below the table why not, in local time, and what helps."""
    obstacle: Any = {"code": "daemon_not_ready", "limit": "hold", "hint": "wait"}
    obstacle["because"] = "gpu0 is held: uid 0 holds it (a fan), at 2026-11-21T02:58:00+00:00"
    lines = views.gpus({"gpus": [gpu(obstacle=obstacle), gpu(index=1)]}).text(PLAIN).splitlines()
    assert [re.split(r"  +", line)[2] for line in lines[:3]] == ["FOR YOU", "no: held", "yes"]
    because = f"GPU 0 is not for you now: gpu0 is held: root holds it (a fan), at {when(THEN)}"
    assert lines[3:] == [because, "  hint: wait"]
    for limit, code, word in (
        ("user", "does_not_fit", "another user"),
        ("memory", "does_not_fit", "full"),
        ("quota.gpus", "quota", "quota"),
        (None, "quarantined", "quarantined"),
    ):
        assert for_you(gpu(obstacle={**obstacle, "limit": limit, "code": code})) == f"no: {word}"


def violation(**other: Any) -> Any:
    return {"kind": "short", "pid": 7, "lease": "lease-1", "daemon": "gpu0", "because": "b", "hint": "h", **other}


def test_open_violations() -> None:
    """The first line has the violations, and the remedy for each is below; its other facts are not repeated."""
    lines = status(
        headline="healthy, not closed, 1 violation: a program that misses MPS gets all of GPU 0; process 7 is short",
        warnings=[reason("node", because="a program that misses MPS gets all of GPU 0", hint="close it")],
        violations=[violation(because="process 7 is short", hint="start it again")],
    )
    assert lines[1:4] == ["  short, process 7: start it again", "  node: close it", ""]


def test_judged_clients_and_leases() -> None:
    """A fault of a client, or an unknown, is in the table, and below it in a sentence."""
    client: Any = {"pid": 9, "name": "x", "uid": 0, "daemon": "gpu0", "gpu": "GPU-1", "server": 8, "lease": "lease-1"}
    client["memory_held"] = None
    well: Any = {"verdict": "ok", "because": "", "hint": ""}
    doubt: Any = {"verdict": "unknown", "because": "process 9 may", "hint": ""}
    wrong: Any = {"verdict": "violation", "because": "process 9 has", "hint": "end it"}
    lines = clients(client | well, client | doubt, client | wrong).text(PLAIN).splitlines()
    assert [line.split()[7] for line in lines[:4]] == ["VERDICT", "ok", "unknown", "violation"]
    assert lines[4:] == ["unknown: process 9 may", "violation: process 9 has", "  hint: end it"]
    judged = lease(violations=[violation(because="process 7 has less")], unknown=["process 9 may"])
    assert views.leases({"leases": [judged], "others": NO_OTHERS}, NOW).text(PLAIN).splitlines()[2:] == [
        f"{judged['id']}: violation: process 7 has less",
        "  hint: h",
        f"{judged['id']}: unknown: process 9 may",
    ]
    shown = views.lease(judged, NOW)
    assert "process 7 has less; h" in shown
    assert "process 9 may" in shown


def limits(threads: float, memory: int) -> Any:
    """Return limits in the API's form."""
    return {"active_thread_percentage": threads, "pinned_device_mem_limit": memory}


def verified(granted: Any, most: Any, least: Any) -> list[str]:
    """Return the lines of a verification of one process, whose limits are known to be between two values."""
    judged: Any = {"verdict": "unknown", "because": ""}
    process = {"pid": 9, "daemon": "gpu0", "server": 8, "mps": True, "memory_held": None, "ok": True, **judged}
    process |= {"limits_granted": granted, "limits_in_force": most, "limits_at_least": least}
    answer: Any = {**judged, "violations": [], "unknown": [], "processes": [process], "hint": "do"}
    return views.verified(answer).splitlines()


@pytest.mark.parametrize(
    ("least", "most", "shown"),
    [
        (25.0, 25.0, " 25% of 25%"),
        (0.1, 25.0, "0.1% to 25% of 25%"),
        (None, 25.0, "? to 25% of 25%"),
        (None, None, "unknown of 25%"),
        (60.0, 60.0, "up to 60% of 25%"),
    ],
)
def test_bounds(least: float | None, most: float | None, shown: str) -> None:
    """A limit known to be between two values is shown with both; a process may have lowered its own."""
    said = verified(limits(25.0, GIB), *(None if each is None else limits(each, GIB) for each in (most, least)))
    assert shown in said[-1]
    assert said[1] == "  hint: do"


@pytest.mark.parametrize(
    ("granted", "in_force", "shown"),
    [
        (20347 << 20, 19 * GIB, "19.87GiB of 19.87GiB"),
        (20347 << 20, 18 * GIB, "18GiB of 19.87GiB"),
        (20347 << 20, 20347 << 20, "19.87GiB of 19.87GiB"),
        (512 << 20, 512 << 20, "512MiB of 512MiB"),
        (512 << 20, 0, "0B of 512MiB"),
    ],
)
def test_memory_as_it_is_reported(granted: int, in_force: int, shown: str) -> None:
    """A control daemon reports whole GiB: a value that agrees with the grant is shown as the grant."""
    found = limits(25.0, in_force)
    assert f" {shown} " in verified(limits(25.0, granted), found, found)[-1]


def test_clients_without_a_lease() -> None:
    """A client without a lease takes a place as well."""
    (row, line) = views.gpus({"gpus": [gpu(clients_unleased=2)]}).text(PLAIN).splitlines()[1:]
    assert " 3 of 48 " in row
    assert "2 clients without a lease" in line


def test_drift() -> None:
    """A drifted limit is reported in mpsd's own sentence, with its age, and is marked where limits are listed."""
    memory = drift(limit="pinned_device_mem_limit", because="gpu0: the sentence")
    restored = drift(undone="2026-11-21T02:59:00Z", because="gpu0: the other sentence")
    text = views.daemons({"daemons": [daemon(drift=[memory], undone=[restored])]}, NOW).text(PLAIN)
    assert "no limit (drift)" in text
    assert text.splitlines()[-2:] == ["gpu0: the sentence (found 2m ago)", "gpu0: the other sentence (1m ago)"]


def test_what_is_unknown() -> None:
    """A value that could not be read is unknown, not zero, and not absent."""
    silent = daemon(pid=None, version=None, limits={"active_thread_percentage": None, "pinned_device_mem_limit": None})
    lost = gpu(uuid=None, name=None, memory_total=None, memory_held=None, clients_max=None, health="unknown")
    (row,) = views.daemons({"daemons": [silent]}, NOW).text(PLAIN).splitlines()[1:]
    assert row.split() == ["gpu0", "ready", "2m", "-", "unknown", "unknown", "-", "unknown", "/run/mpsd/mps/gpu0"]
    (row,) = views.gpus({"gpus": [lost]}).text(PLAIN).splitlines()[1:]
    assert row.count("unknown") == 5
    client: Any = {"pid": 9, "name": "", "uid": None, "daemon": "gpu0", "gpu": "GPU-1", "server": 8, "lease": None}
    client |= {"verdict": "ok", "because": "", "hint": "", "memory_held": None}
    (row,) = clients(client).text(PLAIN).splitlines()[1:]
    assert row.split() == ["9", "unknown", "0", "unknown", "-", "none", "-", "ok", "-"]


def test_who_uses_what() -> None:
    """A client is shown with what it holds of its lease's share of that GPU, and with its command line."""
    client: Any = {"pid": 9, "name": "python3", "uid": 0, "daemon": "gpu1", "gpu": "GPU-1", "server": 8}
    client |= {"verdict": "ok", "because": "", "hint": "", "memory_held": GIB, "lease": "lease-1"}
    of_lease = lease(share(0), share(1, active_thread_percentage=20.0), name="train")
    found = clients(client, client | {"pid": 10}, leases=[of_lease], commands={9: "python3 train.py"})
    (_, row, other) = found.text(PLAIN).splitlines()
    assert row.split() == [
        "9",
        "root",
        "1",
        "1GiB",
        "of",
        "1.5GiB",
        "20%",
        "lease-1",
        "train",
        "ok",
        "python3",
        "train.py",
    ]
    assert other.split()[-1] == "python3"
    assert found.csv(headings=False).splitlines()[0] == (
        "9,root,1,1073741824,1610612736,20,lease-1,train,ok,gpu1,8,0,GPU-1,python3 train.py"
    )


def test_a_ceiling_as_it_was_set() -> None:
    """A control daemon reports whole GiB: a report that agrees with the ceiling is shown as the ceiling."""
    wanted = {"active_thread_percentage": 100.0, "pinned_device_mem_limit": 8130 << 20}
    for reported, shown in ((7 * GIB, "7.93GiB"), (6 * GIB, "6GiB"), (None, "no limit")):
        limits = {**wanted, "pinned_device_mem_limit": reported}
        row = views.daemons({"daemons": [daemon(limits=limits, limits_wanted=wanted)]}, NOW).text(PLAIN).splitlines()[1]
        assert f"  {shown}  " in row


def test_servers() -> None:
    """Servers are listed by pid, and an orphan, or one that is ending, is marked as such."""
    servers = [
        {"pid": 11, "status": "ACTIVE", "clients": [], "orphan": False},
        {"pid": 12, "status": None, "clients": [], "orphan": True},
        {"pid": 13, "status": None, "clients": [], "orphan": False, "dying": True},
    ]
    assert "11, 12 (orphan), 13 (ending)" in views.daemons({"daemons": [daemon(servers=servers)]}, NOW).text(PLAIN)


def test_troubles() -> None:
    """Below the tables is the reason why a GPU or a control daemon is not well, and the remedy."""
    text = views.gpus({"gpus": [gpu(health="unsupported", because="MIG is enabled", hint="disable it")]}).text(PLAIN)
    assert text.endswith("\nGPU 0: MIG is enabled\n  hint: disable it")
    text = views.daemons({"daemons": [daemon(state="failed", because="5 deaths", hint="mpsctl reset gpu0")]}, NOW).text(
        PLAIN
    )
    assert text.endswith("\ngpu0: 5 deaths\n  hint: mpsctl reset gpu0")


def test_nothing_there() -> None:
    """An empty list is a sentence, not a line of headings."""
    assert views.gpus({"gpus": []}).text(PLAIN) == "no GPUs"
    assert views.daemons({"daemons": []}, NOW).text(PLAIN) == "no control daemons"
    assert views.leases({"leases": [], "others": NO_OTHERS}, NOW).text(PLAIN) == "no leases"
    assert clients().text(PLAIN) == "no clients"
    assert clients(others=2).text(PLAIN) == "no clients\nand 2 clients of other users, with 3GiB"
    assert "no control daemons" in status(gpus=[], daemons=[])


def share(index: int, **other: Any) -> Any:
    """Return a lease's share on one GPU."""
    return {
        "gpu": f"GPU-{index}",
        "daemon": f"gpu{index}",
        "active_thread_percentage": 33.3,
        "pinned_device_mem_limit": 3 * GIB // 2,
        "env": {"CUDA_VISIBLE_DEVICES": f"GPU-{index}"},
        **other,
    }


def lease(*shares: Any, **other: Any) -> Any:
    """Return a lease with these shares, in the API's form."""
    first = shares[0] if shares else dict.fromkeys(("daemon", "active_thread_percentage", "pinned_device_mem_limit"))
    return {
        "id": "lease-1",
        "state": "granted",
        "because": "it was free",
        "gpus": [each["gpu"] for each in shares],
        **{name: first[name] for name in ("daemon", "active_thread_percentage", "pinned_device_mem_limit")},
        "owner": {"uid": 70001, "gid": 7, "pid": 99, "start_time": THEN},
        "holders": [{"kind": "process", "pid": 99, "start_time": THEN}],
        "env": first.get("env", {}),
        "shares": list(shares),
        "clients": [],
        "bearers": [],
        "processes": 1,
        "priority": 0,
        "name": "",
        "labels": {},
        "violations": [],
        "unknown": [],
        "created": THEN,
        "granted": THEN,
        "ended": None,
        "expires": None,
        "wait": None,
        **other,
    }


def rows(*found: Any, others: Any = NO_OTHERS) -> list[list[str]]:
    """Return the lines below the headings of the list of leases, as words."""
    return [
        line.split()
        for line in views.leases({"leases": list(found), "others": others}, NOW).text(PLAIN).splitlines()[1:]
    ]


def test_a_lease() -> None:
    """A lease is shown with everything, including its environment; an ended one has its end."""
    ended = lease(
        share(1),
        state="ended",
        because="uid 0 released it",
        clients=[100, 101],
        processes=4,
        priority=-5,
        labels={"team": "a", "run": "7"},
        ended=THEN,
    )
    assert views.lease(ended, NOW).splitlines() == [
        "lease     lease-1",
        "state     ended: root released it",
        "name      -",
        "labels    team=a run=7",
        "priority  -5",
        "daemon    gpu1",
        "GPU       GPU-1",
        "threads   33.3%",
        "memory    1.5GiB (1610612736 bytes)",
        "holder    pid 99, uid 70001",
        "clients   100 101 (of 4 at most)",
        f"created   {when(THEN)} (2m ago)",
        f"ended     {when(THEN)} (2m ago)",
        "env       CUDA_VISIBLE_DEVICES=GPU-1",
    ]
    assert "ended " not in views.lease(lease(share(1)), NOW)
    assert rows(ended) == [["lease-1", "ended", "1", "33.3%", "1.5GiB", "70001", "99", "2", "of", "4", "2m", "-", "-"]]


def test_a_lease_on_several_gpus() -> None:
    """Each share is shown under its number with its own limits and environment, and the list shows what differs."""
    several = lease(share(0), share(3, pinned_device_mem_limit=GIB))
    lines = views.lease(several, NOW).splitlines()
    assert lines[-4:] == [
        "share 0   gpu0, GPU-0: 33.3% and 1.5GiB",
        "  env     CUDA_VISIBLE_DEVICES=GPU-0",
        "share 1   gpu3, GPU-3: 33.3% and 1GiB",
        "  env     CUDA_VISIBLE_DEVICES=GPU-3",
    ]
    assert not [line for line in lines if line.startswith(("daemon", "GPU", "env"))]
    (row,) = rows(several)
    assert row[:5] == ["lease-1", "granted", "0,3", "33.3%", "1.5GiB,1GiB"]


def test_a_lease_that_waits() -> None:
    """Values that a waiting lease does not have yet are dashes.

    Its position and the limit that it waits for are shown.
    """
    wait = {"position": 2, "waits_for": "memory", "because": "8GiB are left"}
    waiting = lease(state="waiting", wait=wait)
    assert "waits     at position 2 for memory: 8GiB are left" in views.lease(waiting, NOW).splitlines()
    row, line = rows(waiting)
    assert row == ["lease-1", "waiting,", "place", "2", "-", "-", "-", "70001", "99", "0", "of", "1", "2m", "-", "-"]
    assert " ".join(line) == "lease-1: has waited 2m for memory: 8GiB are left"


def test_the_order_of_leases() -> None:
    """Leases that hold something come first, in the order of their grants.

    Waiting ones follow in the order of the queue.
    """
    wait = {"waits_for": "memory", "because": "8GiB are left"}
    last, first = (lease(id=f"place-{place}", state="waiting", wait={"position": place, **wait}) for place in (10, 9))
    found = rows(last, lease(share(0), id="older"), first, lease(share(0), id="newer"))
    assert [row[0] for row in found[:4]] == ["older", "newer", "place-9", "place-10"]


def test_a_time_to_live() -> None:
    """A lease with a time to live shows when it ends, and how long that is from now."""
    lines = views.lease(lease(share(0), expires="2026-11-21T03:01:30.5Z"), NOW).splitlines()
    assert f"expires   {when('2026-11-21T03:01:30.5Z')} (in 1m 30s, unless renewed)" in lines


def test_leases_of_others() -> None:
    """A user that may not see all leases gets the sums of the others in one line."""
    others: Any = {"leases": 3, "waiting": 1, "threads_granted": 150.0, "memory_granted": 24 * GIB}
    text = views.leases({"leases": [], "others": others}, NOW).text(PLAIN)
    assert text == "no leases\nand 3 leases of other users, of 150% and 24GiB in all, 1 of them waiting"
    others |= {"leases": 1, "waiting": 0}
    text = views.leases({"leases": [], "others": others}, NOW).text(PLAIN)
    assert text == "no leases\nand 1 lease of other users, of 150% and 24GiB in all"


def test_an_event() -> None:
    """An event is one line: time, sentence, number, and facts; an unusual level is shown."""
    facts = {"lease": "lease-1", "gpus": ["GPU-1", "GPU-2"], "clients": [], "pid": 9, "left": 0.5, "limit": None}
    event = {"seq": 7, "at": THEN, "level": "info", "event": "lease_ended", **facts, "because": "uid 0 released it"}
    assert render.event(event) == (
        f"{THEN}  lease_ended               seq=7 lease=lease-1 gpus=GPU-1,GPU-2 clients=[] pid=9 left=0.5 limit=null"
        ' because="uid 0 released it"'
    )
    assert " level=error " in render.event({**event, "level": "error"})
    assert len({render.event({**event, "event": each.value}).index(" seq=7") for each in EventName}) == 1


def test_settings() -> None:
    """Each setting is a line with its full name; an absent or empty one is a dash."""
    settings: Any = {
        "limit": None,
        "group": "",
        "mode": "0666",
        "open": True,
        "factor": 1.5,
        "uids": ["1", "2"],
        "none": [],
    }
    lines = [line.split() for line in views.config({"config": {"api": settings}}).splitlines()]
    assert lines == [
        ["api.limit", "-"],
        ["api.group", "-"],
        ["api.mode", "0666"],
        ["api.open", "true"],
        ["api.factor", "1.5"],
        ["api.uids", "1", "2"],
        ["api.none", "-"],
    ]
