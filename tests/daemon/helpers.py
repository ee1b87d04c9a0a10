"""Actions that several tests of the daemon need: they end processes, read limits, and replace programs by stand-ins."""

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import pytest

from mpsd.simulator.control import DEFAULT_BRANCH
from mpsd.simulator.control import program as simulator
from tests.daemon.leases.line import Talk
from tests.driven_program import DrivenProgram
from tests.harness import look_at, wait_until
from tests.node import Node
from tests.real import RealDaemon, real_daemon_params
from tests.simulated_clients import WAITS, variables
from tests.tools import lacking

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

SOON = 2.0
"""Seconds within which a stranger's change must be undone and reported."""

MIB = 1024**2
GIB = 1024**3

PERCENTAGE = """
[limits]
active_thread_percentage = 50.0
"""

LIMITS = f"""{PERCENTAGE}
pinned_device_mem_limit = "8GiB"
"""

BRISK = """
[daemon]
answer_deadline = 0.7
probe_interval = 0.5
"""
"""For tests that wait until a control daemon is unresponsive, or answers again."""

SWIFT: Final = {"mpsd.daemon.control.process._STEP": 1}
"""`Node.durations` for tests in which the servers of a daemon do not end when it quits, and mpsd forces them."""

IMPATIENT: Final = {"mpsd.core.enforcement.ending.PATIENCE": 2} | SWIFT
"""`Node.durations` for tests in which mpsd waits for a daemon that stays silent, until it ends that by force."""


def branches(*wanted: int) -> list["ParameterSet"]:
    """Return these driver branches as parameters; all of them when none is named.

    Most tests of a running mpsd take the oldest and the newest, which differ the most: the contract suite shows what
    each driver answers, and `test_main_job` that mpsd does its job on all of them.
    """
    return [
        param for param in real_daemon_params() if not wanted or cast("RealDaemon", param.values[0]).branch in wanted
    ]


def limits_for(real: RealDaemon) -> str:
    """Return a configuration with the limits that this driver has: 470 has none for memory."""
    return LIMITS if real.branch >= 535 else PERCENTAGE


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process that is no child of the tests."""
    os.kill(pid, number)


_OF_USER: Final = """
import os, sys
from mpsd.simulator.client import main
uid = int(os.environ["CLIENT_UID"])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
sys.exit(main())
"""
"""A client that becomes another user; its first environment stays in /proc/PID/environ."""


def client_of(node: Node, uid: int, **asked: Any) -> DrivenProgram:
    """Start a client of another user with a lease, by default a small one, whose holder is this process."""
    with Talk(node.socket, uid=uid) as talk:
        answer = talk.ask("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "gpu": "0", **asked})
    assert answer.status == 201, answer.body
    environment = {**variables(node), **answer.json["env"], "CLIENT_UID": str(uid)}
    return DrivenProgram([sys.executable, "-c", _OF_USER], environment)


def quarantine(node: Node, uid: int, *, since: str = "2099-01-01T00:00:00Z") -> None:
    """Have the next mpsd of a node find that this uid is quarantined; mpsd must not run."""
    quarantined = [{"uid": uid, "since": since, "because": "of a test"}]
    record = {"boot_id": "", "crashes": [], "quarantined": quarantined}
    (node.root / "state" / "quarantines.json").write_text(json.dumps(record))


def is_running(pid: int) -> bool:
    """Return whether a process is running; a stopped process counts as running."""
    found = look_at(pid)
    return found is not None and not found.zombie


def by_hand(node: Node, name: str, real: RealDaemon | None = None) -> tuple[list[str], list[str]]:
    """Return both limits as a front-end reports them; no line for memory where there is no limit."""
    percentage = node.ask(name, "get_default_active_thread_percentage")
    has_memory = real is None or real.branch >= 535
    return percentage, node.ask(name, "get_default_device_pinned_mem_limit 0") if has_memory else []


def next_ready(node: Node, name: str, before: int) -> Any:
    return wait_until(
        lambda: (found := node.daemons()[name])["state"] == "ready" and found["pid"] != before and found,
        what=f"another {name} than pid {before} to be ready; the log is {node.stderr}",
    )


def undone(node: Node, name: str, limit: str, **facts: object) -> dict[str, Any]:
    """Wait for the report that a foreign change of this limit, with these facts, was undone; return the report."""

    def look() -> dict[str, Any] | None:
        found: list[dict[str, Any]] = node.daemons()[name]["undone"]
        return next((each for each in found if each["limit"] == limit and facts.items() <= each.items()), None)

    return wait_until(look, what=f"{limit} of {name} to be put back; the log is {node.stderr}", deadline=SOON)


def event(node: Node, name: str, **facts: object) -> dict[str, Any]:
    """Wait for an event with these facts, and return the first."""
    return wait_until(lambda: node.events(name, **facts), what=f"{name} {facts}; the log is {node.stderr}")[0]


def untouched(daemon: dict[str, Any]) -> tuple[Any, ...]:
    """Return the facts about a control daemon that stay the same as long as nothing happens to it."""
    return tuple(daemon[key] for key in ("pid", "start_time", "state", "since", "ready_since", "limits"))


def states(node: Node, name: str) -> list[str]:
    """Return the states that a control daemon has had, in order."""
    return [line["state"] for line in node.events("daemon_state", daemon=name)]


def program(path: Path, text: str) -> Path:
    """Write a shell script that stands in for a control program."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


_GATED: Final = """
case "$1" in -f) exec {command} "$@" ;; esac
said=$(cat)
printf '%s\\n' "$said" | {command} "$@"
while [ -e {gate} ] && [ "$said" != "${{said#*$(cat {gate} 2>/dev/null)}}" ]; do
    touch {held}
    sleep 0.01
done
"""


class Gate:
    """A node's control program: the simulator's, whose front-ends stay after their last answer while it is shut."""

    def __init__(self, node: Node, folder: Path, branch: int = DEFAULT_BRANCH) -> None:
        """Give a node, which is not started yet, this control program, written into a folder."""
        self._gate, self._held = folder / "gate", folder / "held"
        command = shlex.join(simulator(branch, str(node.root / "run" / "simulated")))
        script = _GATED.format(command=command, gate=self._gate, held=self._held)
        node.control = program(folder / "nvidia-cuda-mps-control", script)

    @contextlib.contextmanager
    def shut(self, command: str) -> Iterator[None]:
        """Hold the front-ends that send this command, until the end of the block."""
        self._gate.with_suffix(".new").write_text(command)
        self._gate.with_suffix(".new").rename(self._gate)
        yield
        self._gate.unlink()

    def has_held(self) -> bool:
        return self._held.exists()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process by SIGSTOP, and continue it at the end."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: (found := look_at(pid)) is None or found.state == "T", what=f"{pid} to stop")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # mpsd may have ended it meanwhile
            os.kill(pid, signal.SIGCONT)


_LAST_PID: Final = Path("/proc/sys/kernel/ns_last_pid")

needs_last_pid = pytest.mark.root("say which pid a process gets")


def with_pid(pid: int, *command: str, env: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """Start a process with this pid, which must be free; it becomes a command once it is sent a line."""
    if not os.access(_LAST_PID, os.W_OK):
        lacking(f"{_LAST_PID} cannot be written here")
    for _ in range(100):
        last = _LAST_PID.read_text(encoding="ascii")
        _LAST_PID.write_text(f"{pid - 1}", encoding="ascii")
        started = subprocess.Popen(
            [*WAITS, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, bufsize=0
        )
        _LAST_PID.write_text(last, encoding="ascii")  # the following pids may be those that other tests wait for
        if started.pid == pid:
            return started
        started.communicate()
    raise AssertionError(f"pid {pid} could not be had")


@contextlib.contextmanager
def holding(node: Node, name: str, command: str = "anybody-there", last: str = "") -> Iterator[int]:
    """Hold a front-end open on a control daemon after a first command; yield its pid. At the end give the last command.

    The answer to the first command proves that the daemon serves this front-end: one that comes while mpsd talks is
    turned away. Answers come at once only on a terminal.
    """
    terminal, its_terminal = os.openpty()
    try:
        front_end = wait_until(
            lambda: _held(node, name, command, terminal, its_terminal), what=f"a front-end to be let in to {name}"
        )
        try:
            yield front_end.pid
        finally:
            front_end.communicate(last, timeout=10)
    finally:
        os.close(terminal)
        os.close(its_terminal)


def _held(node: Node, name: str, command: str, terminal: int, its_terminal: int) -> "subprocess.Popen[str] | None":
    """Start a front-end; return it once it has answered, or None when it was turned away."""
    front_end = subprocess.Popen(
        node.front_end_program, stdin=subprocess.PIPE, stdout=its_terminal, env=node.by_hand(name), text=True
    )
    assert front_end.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        print(command, file=front_end.stdin, flush=True)
    wait_until(
        lambda: front_end.poll() is not None or select.select([terminal], [], [], 0)[0], what="an answer, or a refusal"
    )
    if front_end.poll() is None and not os.read(terminal, 1000).startswith(b"Cannot"):
        return front_end
    front_end.communicate(timeout=10)
    return None
