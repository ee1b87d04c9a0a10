"""A bad night on a shared server: what went wrong is found first, and the proposed commands end it and nothing else.

Eight GPUs, thirty leases of eight users, a fatal fault, a program without a lease, and a failed control daemon.
"""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pytest
from textual.pilot import Pilot

from mpsd.simulator.client import program
from mpsd.simulator.devices import VARIABLE
from tests.cli.commands.test_top import OFTEN, on_top, rows, run, states, text, until
from tests.daemon.helpers import event, is_running, kill, next_ready
from tests.driven_program import DrivenProgram
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import outside, variables

pytestmark = [pytest.mark.thorough, pytest.mark.root("start programs of other users"), pytest.mark.timeout(120)]

USERS: Final = range(61001, 61009)
STRANGER: Final = 61099
"""A user without any lease."""

FAULTED, ROGUE, FAILED = 2, 5, 7
"""The GPUs on which something is wrong."""

CONFIG: Final = "[daemon]\ndeaths = 2\n[enforcement]\ngrace = 0.3\n"

_LEASED: Final = 'while read -r line && [ "$line" ]; do export "$line"; done; exec "$@"'
"""Becomes a user's program once it has read the variables of its lease."""


@dataclass(frozen=True)
class Night:
    """A node in that state, with its clients."""

    node: Node
    healthy: dict[int, DrivenProgram]
    """By GPU, the clients that nothing is wrong with."""
    faulted: list[DrivenProgram]
    rogue: DrivenProgram
    lost: DrivenProgram
    """The client that lost its server with the failed control daemon."""
    before: dict[str, Any]
    """The control daemons as they were."""

    def check_nobody_else_was_harmed(self) -> None:
        assert all(client.do("sync")["ok"] for client in self.healthy.values())
        leases = {each["owner"]["pid"]: each["state"] for each in self.node.leases()}
        assert {leases[client.pid] for client in self.healthy.values()} == {"active"}
        now = self.node.daemons()
        assert {name for name in now if now[name]["pid"] != self.before[name]["pid"]} == {f"gpu{FAILED}"}


def _as_user(uid: int, *command: str) -> list[str]:
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *command]


def _client(node: Node, uid: int, gpu: int) -> DrivenProgram:
    """Start a client of a user; root takes out its lease."""
    simulated = {VARIABLE: f"{node.root}/run/simulated"}
    started = DrivenProgram(["sh", "-c", _LEASED, "sh", *_as_user(uid, *program())], simulated)
    asked = {"threads": 20, "memory": "8GiB", "gpu": f"{gpu}", "name": f"train-{uid}-{gpu}"}
    lease = node.lease(**asked, pid=started.pid, owner={"uid": uid, "gid": uid, "groups": []})
    assert started.process.stdin is not None
    lines = [f"{name}={value}" for name, value in lease["env"].items()]
    started.process.stdin.write("\n".join([*lines, "", ""]).encode())
    return started


def _idle(node: Node, uid: int, gpu: int, name: str) -> "subprocess.Popen[bytes]":
    holder = subprocess.Popen(["sleep", "600"])
    owner = {"uid": uid, "gid": uid, "groups": []}
    node.lease(threads=5, memory="1GiB", gpu=f"{gpu}", name=name, pid=holder.pid, owner=owner)
    return holder


@contextmanager
def night(node: Node, *, reaches: bool) -> Iterator[Night]:
    """Yield the night; with `reaches` the program without a lease is a client of MPS, otherwise it runs outside."""
    with ExitStack() as stack:
        faulted = [stack.enter_context(_client(node, USERS[each], FAULTED)) for each in (2, 3)]
        lost = stack.enter_context(_client(node, USERS[7], FAILED))
        healthy = {gpu: stack.enter_context(_client(node, USERS[gpu], gpu)) for gpu in (0, 1, 3, 4, ROGUE)}
        for each in (*faulted, lost, *healthy.values()):
            assert each.hello["mps"], each.hello
            assert each.do("alloc 2GiB")["ok"]
            event(node, "client_attributed", client=each.pid)
        for number in range(22):
            holder = stack.enter_context(_idle(node, USERS[number % 8], number * 3 % 8, f"notebook-{number}"))
            stack.callback(holder.kill)
        assert len(node.leases()) == 30
        before = node.daemons()
        kill(before[f"gpu{FAILED}"]["pid"])
        kill(next_ready(node, f"gpu{FAILED}", before[f"gpu{FAILED}"]["pid"])["pid"])
        node.wait_for_state(f"gpu{FAILED}", "failed")
        assert not faulted[0].do("fault")["ok"]
        # A user with a lease on a GPU reaches its control daemon, and others do not.
        own = variables(node, f"gpu{ROGUE}") if reaches else {**outside(node), "CUDA_VISIBLE_DEVICES": f"{ROGUE}"}
        uid = USERS[ROGUE] if reaches else STRANGER
        rogue = stack.enter_context(DrivenProgram(_as_user(uid, *program()), own))
        assert rogue.hello["mps"] is reaches, rogue.hello
        assert rogue.do("alloc 4GiB")["ok"]
        yield Night(node, healthy, faulted, rogue, lost, before)


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node(simulate=8, control=None, config=CONFIG, durations=OFTEN).start()


def problems(status: dict[str, Any]) -> set[str]:
    return {each["kind"] for name in ("reasons", "violations", "warnings") for each in status[name]}


@pytest.mark.parametrize("reaches", [True, False])
def test_status(node: Node, *, reaches: bool) -> None:
    """`mpsctl status` has the three before all else; what it prints ends them, and the client that lost its server."""
    with night(node, reaches=reaches) as found:
        kind = "no_lease" if reaches else "outside"
        expected = {"daemon", "server_fault", "lingers", "clients_lost", "not_closed", kind}
        status = wait_until(
            lambda: problems(now := node.get("/v1/status").json) == expected and len(now["violations"]) == 2 + reaches
            and now,
            what="all of it to be found",
        )  # fmt: skip
        assert [each["kind"] for each in status["reasons"]] == ["daemon", "server_fault"]
        lines = node.mpsctl("status").stdout.splitlines()[1:4]
        for line, subject in zip(lines, (f"gpu{FAILED}", f"gpu{FAULTED}", f"{found.rogue.pid}"), strict=True):
            assert re.search(rf"\b{subject}\b", line), lines

        if not reaches:  # that gpu7 does not answer is no reason to doubt that this is no client
            assert "[not_found]" in node.mpsctl("end", "--yes", f"{found.rogue.pid}").stderr

        commands = re.findall(r"(?:mpsctl (?:reset|end)|kill)(?: \w+)+", "\n".join(_hints(status)))
        for command in dict.fromkeys(commands):
            first, *arguments = command.split()
            if arguments[0] == "reset":
                assert node.mpsctl(*arguments).returncode == 0
                continue
            # A command may be there twice, and a reader does not give it for a process that has ended.
            living = [each for each in arguments if each.isdecimal() and is_running(int(each))]
            if first == "mpsctl" and living:
                done = node.mpsctl("end", "--yes", *living)
                assert (done.returncode, done.stderr) == (0, "")
            elif first == "kill":
                for pid in living:
                    os.kill(int(pid), signal.SIGTERM)
        for ended in (*found.faulted, found.rogue, found.lost):
            assert ended.process.wait(20) == -signal.SIGTERM
        wait_until(lambda: problems(node.get("/v1/status").json) == {"not_closed"}, what="all of it to be over")
        assert node.mpsctl("status").returncode == 0
        found.check_nobody_else_was_harmed()


def _hints(status: dict[str, Any]) -> Iterator[str]:
    """Yield the hints in the order of the output."""
    for name in ("reasons", "violations", "warnings"):
        yield from (each["hint"] for each in status[name])


def _is_gone(pilot: Pilot[None], pid: str) -> bool:
    return all(row["PID"] != pid for row in rows(pilot))


@pytest.mark.parametrize("reaches", [True, False])
def test_top(node: Node, *, reaches: bool) -> None:
    """On 80x24, `mpsctl top` shows the three without a key, and ends the clients and the failure by keys."""
    with night(node, reaches=reaches) as found:

        async def steps(pilot: Pilot[None]) -> None:
            await until(pilot, lambda: "violation" in text(pilot, "headline"))
            await until(pilot, lambda: f"process {found.rogue.pid} " in text(pilot, "faults"))
            await until(pilot, lambda: states(pilot)[FAULTED] == "impaired")
            assert states(pilot)[FAILED] == "failed"
            first, second, _ = text(pilot, "faults").split("\n", 2)
            assert (first[:5], second[:5]) == (f"gpu{FAILED} ", f"gpu{FAULTED}:")
            assert rows(pilot, "gpus")[FAULTED]["FOR YOU"] == "no: fault"
            bad = [*([found.rogue] if reaches else []), *found.faulted]
            await until(pilot, lambda: [row["STATE"] for row in rows(pilot)][: len(bad)] == ["violation"] * len(bad))
            for _ in bad:
                await pilot.press(*["up"] * 9, "k")
                await until(pilot, lambda: len(pilot.app.screen_stack) == 2)
                pid = rows(pilot)[0]["PID"]
                said = on_top(pilot)
                assert said.startswith(f"End process {pid} (")
                assert re.search(r" of 6\d+, which holds \dGiB on GPU \d, (?:without a lease|of lease-)", said)
                await pilot.press("y")
                await until(pilot, partial(_is_gone, pilot, pid))
            await until(pilot, lambda: any(row["STATE"] == "lost" for row in rows(pilot)))
            await pilot.press("tab", *["down"] * FAILED, "x")
            await until(pilot, lambda: len(pilot.app.screen_stack) == 2)
            assert on_top(pilot).startswith(f"Reset gpu{FAILED}, ")
            await pilot.press("y")
            await until(pilot, lambda: text(pilot, "headline").startswith("healthy"))
            assert states(pilot) == ["ok"] * 8

        run(node, steps, (80, 24))
        for ended in (*found.faulted, *([found.rogue] if reaches else [])):
            assert ended.process.wait(20) == -signal.SIGTERM
        found.check_nobody_else_was_harmed()
