"""After an incident, `mpsctl events --since` and `mpsctl explain` show everything that was done, in order.

Each action is real; the output is compared with the pids, the commands and the leases that the test knows.
"""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mpsd.cli.render import as_here
from tests.daemon.helpers import event, kill, next_ready, undone
from tests.disks import as_root, fill, mounted
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient

LOCAL = r"[\d-]{10} [\d:]{8}"
COMMAND = "set_default_active_thread_percentage 10"


def told(node: Node, *arguments: str) -> list[str]:
    """Return the output of mpsctl line by line, without the times of events, as for a program or a wide terminal."""
    done = node.mpsctl(*arguments)
    assert (done.returncode, done.stderr) == (0, ""), done
    return [re.sub(r"^[\d-]{10} [\d:]{8} ", "", line) for line in done.stdout.splitlines()]


def in_order(lines: Sequence[str], *patterns: str) -> None:
    """Check that these lines are in the output, in this order."""
    left = iter(lines)
    for pattern in patterns:
        assert any(re.search(pattern, line) for line in left), f"{pattern} is missing, or too early, in:\n" + "\n".join(
            lines
        )


def environment(granted: Any) -> dict[str, str]:
    return {name: str(value) for name, value in granted["env"].items()}


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    """Start a node of this module: the changes to it persist."""
    return make_node(simulate=2, control=None).start()


@pytest.mark.thorough
def test_a_bad_night(node: Node) -> None:
    """Two deaths, a foreign command, one client too many, and a hold: each is reported with its subject and cause."""
    granted = node.lease(threads=25, gpu="0", name="trainer")
    first = node.daemons()["gpu0"]["pid"]
    kill(first)
    second = next_ready(node, "gpu0", first)["pid"]
    kill(second)
    third = next_ready(node, "gpu0", second)["pid"]
    node.ask("gpu0", COMMAND)
    undone(node, "gpu0", "active_thread_percentage", command=COMMAND)
    with SimulatedClient(environment(granted)) as client:
        event(node, "client_attributed", client=client.hello["pid"])
        with SimulatedClient(environment(granted)) as extra:
            event(node, "violation", pid=extra.hello["pid"])
            open_story = told(node, "explain", granted["id"])
        event(node, "violation_ended", pid=extra.pid)
    node.mpsctl("hold", "gpu0", "--reason", "it died twice")
    refused = node.request("POST", "/v1/leases", {"threads": 1, "memory": "1GiB", "gpu": "0"})
    assert refused.status == 409
    node.request("DELETE", f"/v1/leases/{granted['id']}")

    deeds = (
        f"gpu0 is starting: pid {first} was started",
        rf"{granted['id']}: granted to \S+, pid {os.getpid()}: ",
        rf"^!  gpu0 died: pid {first} killed by SIGKILL; .*mpsd starts it again at once",
        rf"^!  gpu0 died: pid {second} killed by SIGKILL; .*mpsd starts it again in \d\.\d s",
        f"gpu0 is starting: pid {third} was started",
        f"^!  gpu0: a foreign front-end sent the command '{COMMAND}'",
        rf"^!  gpu0: active_thread_percentage is 10% instead of \S+%; the foreign command '{COMMAND}' changed it",
        "^   gpu0: mpsd set it back",
        rf"{granted['id']}: process {client.pid} is its client",
        rf"^!  gpu0: violation \(processes\): .*{extra.pid}.*{granted['id']}",
        rf"gpu0: violation \(processes\) of process {extra.pid} has ended",
        rf"gpu0 is held: {as_here(f'uid {os.getuid()}')} holds it \(it died twice\), at ",
    )
    refusal = r"was refused a lease: gpu0 is held: .*\(it died twice\).* \[daemon_not_ready\]"
    ending = f"{granted['id']}: ended: {as_here(f'uid {os.getuid()}')} released it"
    in_order(told(node, "events", "--since", "1h"), *deeds, refusal, ending)
    in_order(told(node, "explain", "gpu0"), *deeds, ending, r"^now   GPU 0 is ok", "gpu0 has been held for ",
             "^next  gpu0 is held: .*it died twice.* -> resume admission: mpsctl resume gpu0")  # fmt: skip
    in_order(told(node, "explain", "trainer"), *deeds[1:], ending, "^now   it ended ", "^next  .*mpsctl admit")
    in_order(
        open_story,
        *deeds[1:10],
        r"^now   it was granted \d+s ago, and is active: 25% and 1GiB on gpu0",
        "violation: ",
        "^next  .",
    )
    beside = told(node, "explain", "gpu1")
    assert not [line for line in beside if granted["id"] in line or "died" in line]
    assert beside[-1].startswith("next  nothing")


def test_a_daemon_that_is_given_up(make_node: Callable[..., Node]) -> None:
    """The story of a failed daemon has its deaths, the log to read with its last lines, and the remedy."""
    node = make_node(simulate=1, control=None, config="[daemon]\ndeaths = 2\n").start()
    pids = []
    for state in ("ready", "failed"):
        pids.append(node.daemons()["gpu0"]["pid"])
        kill(pids[-1])
        if state == "ready":
            next_ready(node, "gpu0", pids[0])
    node.wait_for_state("gpu0", "failed")
    log = node.control_log("gpu0")
    story = told(node, "explain", "gpu0")
    in_order(
        story,
        f"died: pid {pids[0]} killed",
        f"died: pid {pids[1]} killed by SIGKILL.*; mpsd does not start it again",
        rf"^!! gpu0 is failed: 2 deaths within 60 s, .* it died first at {LOCAL}, and last at {LOCAL}",
        f"the end of {re.escape(str(log))}:",
        f"^  .* {pids[1]}\\]",
        "^next  gpu0 is failed: .* -> " + re.escape(f"read {log}, fix the cause, then: mpsctl reset gpu0"),
    )
    assert not [line for line in story if re.search(r"mpsd-[0-9a-f]{16}|UI closed", line)], "mpsd's own conversations"
    (reason,) = (line for line in node.mpsctl("status").stdout.splitlines() if line.startswith("  gpu0 is failed"))
    assert reason.endswith(f" -> read {log}, fix the cause, then: mpsctl reset gpu0")


@as_root
def test_a_full_disk(make_node: Callable[..., Node]) -> None:
    """A full disk is reported with the cause, and with the times when it was full and when no longer."""
    node = make_node(simulate=1, control=None)
    (node.root / "run").mkdir(mode=0o755)
    with mounted(node.root / "run", "2m", "755"):
        node.start()
        full = fill(node.root / "run")
        labels = {f"l{number}": "x" * 128 for number in range(30)}
        wait_until(
            lambda: (
                node.request(
                    "POST", "/v1/leases", {"threads": 0.1, "memory": "1MiB", "name": "n" * 128, "labels": labels}
                ).status
                == 507
            ),
            what="a lease that cannot be stored",
        )
        in_order(
            told(node, "explain", "gpu0"), "^next  no lease can be granted: .* -> free space on the file system of"
        )
        full.unlink()
        event(node, "store_writable")
        wait_until(lambda: node.get("/v1/status").json["healthy"], what="the node to be healthy again")
        filled, free = "^!! nothing can be stored: .*", "^   leases can be stored again"
        in_order(told(node, "events", "--since", "1h"), filled, r"refused: .* \[storage\]", free)
        in_order(told(node, "explain", "0"), filled, free, "^next  nothing has to be done")
        node.clean_up()
