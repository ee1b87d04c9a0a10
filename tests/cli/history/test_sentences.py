"""Every event is a sentence in local time, folded at the terminal's edge, without bytes that act on it."""

import re
import time
from collections.abc import Iterator
from string import Formatter
from typing import Any

import pytest

from mpsd.cli.history.sentences import line, sentence
from mpsd.cli.render import when
from mpsd.cli.tables import PLAIN, Look
from mpsd.core.events import EventName, facts_of

THEN = "2026-11-21T02:57:00.5Z"
UUID = "GPU-00000000-0000-4000-8000-000000000000"


@pytest.fixture(autouse=True)
def _zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the machine's clock two hours ahead of UTC."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "UTC-2")
        time.tzset()
        yield
    time.tzset()


def event(kind: str, level: str = "info", /, **facts: object) -> Any:
    """Return an event in mpsd's form."""
    return {"seq": 7, "at": THEN, "level": level, "event": kind, **facts}


DEATH = event(
    "daemon_death", "warning", daemon="gpu0", how="pid 9 killed by SIGKILL", verdict="later", delay=0.5, suspects=[]
)

MADE = {"user", "daemons", "limits", "drift", "changes", "requests"}
"""Facts that sentences make of others."""

STORY = {
    "a grant": (
        event("lease_granted", lease="lease-1", uid=0, pid=9, gpus=[UUID], because="25 % were free on gpu0"),
        "lease-1: granted to root, pid 9: 25 % were free on gpu0",
    ),
    "a refusal": (
        event("lease_refused", uid=0, pid=9, code="daemon_not_ready", limit="hold", because="gpu1 is held"),
        "root, pid 9, was refused a lease: gpu1 is held [daemon_not_ready]",
    ),
    "a refusal of one that waited": (
        event("lease_refused", lease="lease-1", uid=0, pid=9, code="does_not_fit", because="its time is over"),
        "lease-1: refused: its time is over [does_not_fit]",
    ),
    "a death": (DEATH, "gpu0 died: pid 9 killed by SIGKILL; mpsd starts it again in 0.5 s"),
    "a hold, with its time": (
        event("daemon_state", daemon="gpu1", state="held", because="uid 0 holds it, at 2026-11-21T02:57:00+00:00"),
        "gpu1 is held: root holds it, at 2026-11-21 04:57:00",
    ),
    "a canary": (
        event("canary_ended", daemon="gpu1", proof="context", cause="operator", because="the canary has a context"),
        "gpu1: a canary ended (context): the canary has a context",
    ),
    "a stranger's command": (
        event("foreign_command", "warning", daemon="gpu1", command="set_default_active_thread_percentage 10"),
        "gpu1: a foreign front-end sent the command 'set_default_active_thread_percentage 10'",
    ),
    "what that did": (
        event(
            "limit_drift",
            "warning",
            daemon="gpu1",
            limit="pinned_device_mem_limit",
            wanted=8 << 30,
            found=None,
            command="quit",
        ),
        "gpu1: pinned_device_mem_limit is no limit instead of 8GiB; the foreign command 'quit' changed it",
    ),
    "limits": (
        event("limits_verified", daemon="gpu0", active_thread_percentage=25.0, pinned_device_mem_limit=1 << 30),
        "gpu0: its limits are 25% of the threads and 1GiB, read back",
    ),
    "a violation, with its remedy": (
        event(
            "violation", "warning", kind="memory", daemon="gpu0", because="it holds 2GiB of 1GiB", hint="ask for more"
        ),
        "gpu0: violation (memory): it holds 2GiB of 1GiB (ask for more)",
    ),
    "a full disk": (event("store_full", "error", because="no space left"), "nothing can be stored: no space left"),
    "a list": (
        event("leases_faulted", "error", daemon="gpu0", leases=["lease-1", "lease-2"], because="a fault"),
        "gpu0: the fault affected lease-1, lease-2: a fault",
    ),
    "a kind of a newer mpsd": (event("disk_melted", disk="sda", left=[1]), "disk melted: disk=sda left=1"),
    "a fact of a newer mpsd": (event("lease_ended", lease="lease-1"), "lease-1: ended"),
    "a fact that is missing": (
        event("server_failed", daemon="gpu0", server=9),
        "gpu0: server 9 failed: (no words)",
    ),
}


@pytest.mark.parametrize(("told", "says"), STORY.values(), ids=STORY)
def test_sentences(told: Any, says: str) -> None:
    """A sentence names its subject, in units and names that its reader knows."""
    assert sentence(told) == says


@pytest.mark.parametrize("name", EventName)
def test_placeholders(name: EventName) -> None:
    """Each event of a kind has all that its sentence says, except a reason at its end, which may be left out."""
    facts, template = facts_of(name), name.sentence
    if "because" in facts:
        template = template.removesuffix(": {because}")
    said = {each for _, each, _, _ in Formatter().parse(template) if each}
    assert said <= {fact for fact, always in facts.items() if always} | MADE


def test_times() -> None:
    """A time is that of the local clock, with which its reader compares it."""
    assert when(THEN) == "2026-11-21 04:57:00"
    assert line(event("node_started"), PLAIN) == "2026-11-21 04:57:00    mpsd started"


def test_width() -> None:
    """Nothing of a sentence is cut off at the terminal's edge: it continues below its first word."""
    told = {**DEATH, "how": "pid 9 killed by SIGKILL; uid 1001 had pipe access"}
    assert line(told, Look(width=80)).splitlines() == [
        "2026-11-21 04:57:00 !  gpu0 died: pid 9 killed by SIGKILL; uid 1001 had pipe",
        "                       access; mpsd starts it again in 0.5 s",
    ]
    assert len(line(told, Look(width=120)).splitlines()) == 1


@pytest.mark.parametrize(("level", "mark"), [("info", "  "), ("warning", "! "), ("error", "!!")])
def test_marks(level: str, mark: str) -> None:
    """The level is visible without colour; on a terminal there is colour in addition."""
    told = event("node_started", level)
    assert line(told, PLAIN)[20:22] == mark
    coloured = line(told, Look(colour=True))
    assert ("\x1b[" in coloured) is (level != "info")
    assert re.sub(r"\x1b\[\d*m", "", coloured) == line(told, PLAIN)
