"""`mpsctl explain` finds its subject, informs only users with permission, and fits the terminal."""

import json
import re
from collections.abc import Callable
from typing import Any

from mpsd.cli.history.story import Story, lines_of
from mpsd.cli.render import when
from mpsd.cli.tables import Look
from tests.cli.conftest import end, mpsctl_as_nobody, start_mpsctl
from tests.daemon.caller import NOBODY, calling, needs_root
from tests.harness import wait_until
from tests.node import Node

THEN = "2026-11-21T02:57:00.5Z"
DEATH: Any = {
    "seq": 7,
    "at": THEN,
    "level": "warning",
    "event": "daemon_death",
    "daemon": "gpu0",
    "how": "pid 9 killed by SIGKILL; uid 1001 had pipe access",
    "verdict": "later",
    "delay": 0.5,
}
STORY: Any = {
    "about": "gpu0, the control daemon of GPU 0, a H100",
    "events": [DEATH],
    "hidden": 2,
    "log": ["the end of /var/log/mpsd/gpu0/control.log:", "  killed"],
    "now": [
        "gpu0 is failed for 3m: 5 deaths within 60 s, the last one: pid 9 killed by SIGKILL; giving up",
        "GPU 0 is ok",
    ],
    "next": ["gpu0 is failed -> read /var/log/mpsd/gpu0/control.log, fix the cause, then: mpsctl reset gpu0"],
}  # fmt: skip


def test_a_story() -> None:
    """A story has what was left out, the events, the log, the present, and what to do, folded at the edge."""
    text = "\n".join(lines_of(Story(**STORY), 3, Look(width=80)))
    assert text.splitlines() == [
        "gpu0, the control daemon of GPU 0, a H100",
        "",
        "(3 earlier events: --last 4)",
        f"{when(THEN)} !  gpu0 died: pid 9 killed by SIGKILL; uid 1001 had pipe",
        "                       access; mpsd starts it again in 0.5 s",
        "(2 events of leases of other users)",
        "",
        "the end of /var/log/mpsd/gpu0/control.log:",
        "  killed",
        "",
        "now   gpu0 is failed for 3m: 5 deaths within 60 s, the last one: pid 9 killed by",
        "        SIGKILL; giving up",
        "      GPU 0 is ok",
        "",
        "next  gpu0 is failed -> read /var/log/mpsd/gpu0/control.log, fix the cause,",
        "        then: mpsctl reset gpu0",
    ]


def test_what_is_meant(node: Node) -> None:
    """A lease is found by its id, its prefix and its name; a GPU by its index, UUID, or control daemon."""
    leases = [
        node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "name": name}).json["id"]
        for name in ("first", "second")
    ]
    for subject in (leases[0], leases[0][:-1], "first"):
        done = node.mpsctl("explain", subject)
        assert done.stdout.startswith(f"{leases[0]} (first), a lease of ")
        shown = f'eval "$(mpsctl show {leases[0]} -o env)"'
        assert f"next  no process uses it yet; for this shell and what it starts: {shown}" in done.stdout
    for subject in ("gpu1", "1", "GPU 1", "gpu 1", node.get("/v1/gpus").json["gpus"][1]["uuid"]):
        text = node.mpsctl("explain", subject).stdout
        assert text.startswith("gpu1, the control daemon of GPU 1, a ")
        assert re.search(r"^ +gpu1 has been ready for \d+s: ", text, re.MULTILINE)
    several = node.mpsctl("explain", "lease-")
    assert (several.returncode, "'lease-' is ambiguous: lease-" in several.stderr) == (2, True)
    nothing = node.mpsctl("explain", "lease-nobody-has")
    assert (nothing.returncode, "there is no lease 'lease-nobody-has'" in nothing.stderr) == (1, True)


def test_json(node: Node) -> None:
    """JSON has the events in mpsd's form, and the same sentences about the present."""
    lease = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"}).json["id"]
    told = json.loads(node.mpsctl("explain", lease, "-o", "json").stdout)
    assert [each["event"] for each in told["events"]] == ["lease_granted"]
    assert told["now"][0].startswith("it was granted ")
    assert json.loads(node.mpsctl("explain", lease, "--since", "now", "-o", "json").stdout)["events"] == []
    assert len(json.loads(node.mpsctl("explain", "gpu0", "-n", "2", "-o", "json").stdout)["events"]) == 2


def test_a_lease_that_waits(make_node: Callable[..., Node]) -> None:
    """The explanation has the lease's position, the limit that it waits for, and how to release it."""
    node = make_node(simulate=1).start()
    assert node.request("POST", "/v1/leases", {"threads": 90, "memory": "1GiB"}).status == 201
    waiter = start_mpsctl(
        node.socket, "run", "--threads", "50", "--memory", "1GiB", "--wait", "60", "--name", "patient", "--", "true"
    )
    try:
        wait_until(lambda: node.events("lease_waits"), what="a request to wait")
        done = node.mpsctl("explain", "patient")
    finally:
        end(waiter)
    assert "waits for it: " in done.stdout
    assert re.search(r"^now   it has waited \d+s, in place 1 for threads: ", done.stdout, re.MULTILINE)
    assert "next  to give it up: mpsctl release lease-" in done.stdout


@needs_root
def test_lease_of_another_user(node: Node) -> None:
    """Another user's lease is explained, but not how to use it; its own leases come first where names are alike."""
    asked = {"threads": 10, "memory": "1GiB", "gpu": "0", "name": "twin"}
    theirs = node.request("POST", "/v1/leases", asked).json["id"]
    done = mpsctl_as_nobody(node, "explain", "twin")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{theirs} (twin), a lease of root\n")
    assert "next  it is a lease of root, who can renew and release it" in done.stdout
    assert theirs in mpsctl_as_nobody(node, "explain", "gpu0").stdout
    refused = mpsctl_as_nobody(node, "show", "twin", "-o", "env")
    assert (refused.returncode, refused.stdout) == (77, "(exit 77)\n")
    assert "belongs to another user" in refused.stderr
    assert mpsctl_as_nobody(node, "release", "twin").returncode == 77
    with calling(node.socket, uid=NOBODY) as caller:
        own = caller.admit(**{**asked, "gpu": "1"}).json["id"]
        assert mpsctl_as_nobody(node, "show", "twin").stdout.split()[:2] == ["lease", own]
        assert mpsctl_as_nobody(node, "release", "twin").stdout == f"{own} is released\n"
        assert mpsctl_as_nobody(node, "show", "twin").stdout.split()[:2] == ["lease", own]  # the ended one
    done = node.mpsctl("release", "twin")  # root means the living one
    assert (done.returncode, done.stdout) == (0, f"{theirs} is released\n")


@needs_root
def test_closed(make_node: Callable[..., Node]) -> None:
    """On a closed node, another user's lease is shown only as the existence of events, and the sum of such leases."""
    node = make_node(simulate=1, config="[api]\nopen = false\n").start()
    asked = {"threads": 10, "memory": "1GiB", "gpu": "0", "name": "secret"}
    theirs = node.request("POST", "/v1/leases", asked).json["id"]
    refused = mpsctl_as_nobody(node, "explain", theirs)
    assert (refused.returncode, refused.stdout) == (77, ""), refused
    assert "belongs to another user" in refused.stderr
    for subject in (theirs[:-1], "secret"):
        unknown = mpsctl_as_nobody(node, "explain", subject)
        assert (unknown.returncode, unknown.stdout) == (1, ""), unknown
    done = mpsctl_as_nobody(node, "explain", "gpu0")
    assert done.returncode == 0, done.stderr
    assert theirs not in done.stdout
    assert re.search(r"^\(\d+ events? of leases of other users\)$", done.stdout, re.MULTILINE)
    assert "other users have 10% of the threads" in done.stdout
    assert "control.log, cannot be read here: Permission denied" in done.stdout
