"""A waiting mpsctl says so, keeps its place while mpsd restarts, and gives it up on a signal."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from mpsd.cli.users import name_of
from tests.cli.answering import Answering, answering, http
from tests.cli.conftest import ROOT, end, run_mpsctl, start_mpsctl
from tests.harness import wait_until
from tests.node import Node
from tests.terminals import Terminal

pytestmark = pytest.mark.thorough

MOST = ("--threads", "60", "--memory", "1GiB")
"""A share that fits on a GPU once."""

TOLD = "mpsctl: waiting in place {} for threads: "

USER = name_of(os.geteuid())

AWAY = (
    "mpsctl: interrupted; mpsd does not answer now: it gives up the place when the caller is gone"
    " (admission.hang_up_grace)\n"
)


def take_most(node: Node) -> list[str]:
    """Take most of every GPU for the tests' own process, and return the leases."""
    request = {"threads": 60, "memory": "1GiB"}
    answers = [node.request("POST", "/v1/leases", request) for _ in node.get("/v1/gpus").json["gpus"]]
    assert [answer.status for answer in answers] == [201] * len(answers)
    return [answer.json["id"] for answer in answers]


def waiting(node: Node) -> list[Any]:
    """Return the waiting leases in order."""
    found = [lease for lease in node.leases() if lease["state"] == "waiting"]
    return sorted(found, key=lambda lease: lease["wait"]["position"])


def wait_for(node: Node, count: int) -> list[Any]:
    """Return the waiting leases, once there are that many."""
    return wait_until(lambda: found if len(found := waiting(node)) == count else None, what=f"{count} leases to wait")


@pytest.fixture
def full_node(node: Node) -> tuple[Node, list[str]]:
    """Return a node without room for another lease of this size, and its leases."""
    return node, take_most(node)


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts mpsctl; the test ends those still running."""
    started = []

    def start(socket: Path, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
        started.append(start_mpsctl(socket, *arguments, **options))
        return started[-1]

    yield start
    for process in started:
        end(process)


def line(process: "subprocess.Popen[str]") -> str:
    """Return the next line of its stderr."""
    assert process.stderr is not None
    return process.stderr.readline()


# -- being granted -----------------------------------------------------------------------------------------------------


def test_a_command_that_waits(full_node: tuple[Node, list[str]], start: Start) -> None:
    """The user sees once the position and the limit that the command waits for.

    It runs when another process releases.
    """
    node, (lease, _) = full_node
    process = start(node.socket, "run", *MOST, "--wait", "forever", "--", "sh", "-c", "echo ran; exit 7")
    assert line(process).startswith(TOLD.format(1))
    listed = node.mpsctl("leases").stdout
    assert re.search(r"^lease-\w+ +waiting, place 1 +- +60% +1GiB ", listed, re.MULTILINE)
    assert process.poll() is None
    assert node.mpsctl("release", lease).returncode == 0
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (7, "ran\n")
    assert re.fullmatch(r"mpsctl: granted after \d+s on GPU 0\n", stderr)


def test_what_is_held(node: Node, start: Start) -> None:
    """The line of a request that waits for no amount has the reason alone."""
    assert node.mpsctl("hold", "--all").returncode == 0
    try:
        process = start(node.socket, "run", *MOST, "--wait", "forever", "--", "true")
        assert re.match(r"mpsctl: waiting in place 1: gpu\d is held: ", line(process))
        assert re.search(r": has waited \d+s: gpu\d is held: ", node.mpsctl("leases").stdout)
    finally:
        assert node.mpsctl("resume", "--all").returncode == 0


def test_a_terminal(full_node: tuple[Node, list[str]], start: Start) -> None:
    """On a terminal, one line shows the wait: how long, at which position, behind whom; then the result."""
    node, (lease, _) = full_node
    first = start(node.socket, "run", *MOST, "--wait", "forever", "--", "true")
    wait_for(node, 1)
    command = [sys.executable, "-m", "mpsd.cli.main", "--socket", f"{node.socket}", "run", *MOST, "--wait", "forever"]
    with Terminal.running([*command, "--", "echo", "ran"], os.environ, cwd=ROOT) as terminal:
        terminal.wait_for(rf"mpsctl: \d+s: waiting in place 2 behind {USER} for threads: ")
        end(first)
        terminal.wait_for(r"mpsctl: \d+s: waiting in place 1 for threads: ")
        seconds = [int(each) for each in re.findall(r"mpsctl: (\d+) s: waiting", terminal.text)]
        assert seconds == sorted(seconds)
        assert "\n" not in terminal.raw, "it is no line that is updated"
        assert max(len(each) for each in terminal.raw.split("\r\x1b[K")) < 80
        node.request("DELETE", f"/v1/leases/{lease}")
        assert terminal.wait_for_the_end() == 0
    assert re.search(r"\r\x1b\[Kmpsctl: granted after \d+s on GPU 0\r\nran\r\n$", terminal.raw)


# -- giving it up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (("admit",), signal.SIGINT),
        (("admit",), signal.SIGHUP),
        (("admit", "-o", "env"), signal.SIGINT),
        (("admit", "-o", "env"), signal.SIGTERM),
        (("run", "true"), signal.SIGINT),
        (("run", "true"), signal.SIGTERM),
    ],
)
def test_an_end_by_a_signal(
    full_node: tuple[Node, list[str]], start: Start, command: tuple[str, ...], number: signal.Signals
) -> None:
    """A signal such as Ctrl-C releases the place before mpsctl exits.

    Then mpsctl dies of the signal, or `eval` fails.
    """
    node, _ = full_node
    name, *rest = command
    process = start(node.socket, name, *MOST, "--wait", "forever", *rest)
    (lease,) = wait_for(node, 1)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (-number, "mpsctl: interrupted; the place in the queue is given up\n")
    assert stdout == (f"(exit {128 + number})\n" if "env" in rest else "")
    found = node.get(f"/v1/leases/{lease['id']}").json
    assert (found["state"], found["because"]) == ("ended", f"uid {os.getuid()} released it")


@pytest.mark.parametrize("command", [("admit",), ("run", "true")], ids=lambda command: command[0])
def test_an_end_while_mpsd_is_away(make_node: Callable[..., Node], start: Start, command: tuple[str, ...]) -> None:
    """A signal ends it also while mpsd is down or hangs, and it says what becomes of the place."""
    node = make_node(simulate=1).start()
    take_most(node)
    name, *rest = command
    gone, hung = (start(node.socket, name, *MOST, "--wait", "forever", *rest) for _ in range(2))
    wait_for(node, 2)
    for process in (gone, hung):
        assert "waiting in place" in line(process)
    os.kill(node.pid, signal.SIGSTOP)
    hung.send_signal(signal.SIGTERM)
    _, stderr = hung.communicate(timeout=30)
    os.kill(node.pid, signal.SIGCONT)
    assert (hung.returncode, stderr) == (-signal.SIGTERM, AWAY)
    node.end(signal.SIGKILL)
    assert "mpsd is gone" in line(gone)
    gone.send_signal(signal.SIGTERM)
    _, stderr = gone.communicate(timeout=30)
    assert (gone.returncode, stderr) == (-signal.SIGTERM, AWAY)


def test_a_twin_keeps_its_place(full_node: tuple[Node, list[str]], start: Start) -> None:
    """Of two that wait for the same share, for the same process, Ctrl-C ends only the one that received it."""
    node, _ = full_node
    first = start(node.socket, "admit", *MOST, "--wait", "forever")
    assert line(first).startswith(TOLD.format(1))
    second = start(node.socket, "admit", *MOST, "--wait", "forever")
    one, two = wait_for(node, 2)
    assert one["owner"]["pid"] == two["owner"]["pid"] == os.getpid()
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=30)
    assert [lease["id"] for lease in waiting(node)] == [one["id"]]
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)
    assert waiting(node) == []


def test_an_ignored_signal(full_node: tuple[Node, list[str]]) -> None:
    """A command started with a signal ignored, as by `nohup`, keeps waiting at that signal, and runs like that."""
    node, (lease, _) = full_node
    ignoring = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"]
    mpsctl = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket)]
    command = [*mpsctl, "run", *MOST, "--wait", "forever", "--", "grep", "SigIgn", "/proc/self/status"]
    with subprocess.Popen([*ignoring, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(node, 1)
            process.send_signal(signal.SIGHUP)
            node.request("DELETE", f"/v1/leases/{lease}")
            stdout, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert int(stdout.split()[1], 16) & 1 << (signal.SIGHUP - 1)


# -- restarts of mpsd --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_restart_of_mpsd(make_node: Callable[..., Node], start: Start, number: signal.Signals) -> None:
    """Waiting commands keep their leases and their order while mpsd is down, and get free shares once it is back."""
    node = make_node(simulate=1).start()
    (lease,) = take_most(node)
    first = start(node.socket, "run", *MOST, "--wait", "1000", "--name", "first", "--", "cat")
    wait_for(node, 1)
    second = start(node.socket, "admit", *MOST, "--wait", "forever", "--name", "second", "-o", "json")
    before = wait_for(node, 2)
    assert line(first).startswith(TOLD.format(1))
    assert line(second).startswith(TOLD.format(f"2 behind {USER}"))

    node.end(number)
    for process in (first, second):
        told = r"mpsctl: mpsd is gone \(.+\); retrying until it is back, which keeps the place in the queue\n"
        assert re.fullmatch(told, line(process))
    node.start()

    after = wait_for(node, 2)
    assert [one["id"] for one in after] == [one["id"] for one in before]
    assert [one["name"] for one in after] == ["first", "second"]
    node.request("DELETE", f"/v1/leases/{lease}")
    (left,) = wait_for(node, 1)
    assert left["id"] == before[1]["id"]
    assert first.communicate("done", timeout=30)[0] == "done"
    granted = json.loads(second.communicate(timeout=30)[0])
    assert (granted["id"], granted["owner"]["pid"]) == (before[1]["id"], os.getpid())


def test_restarts_under_callers(make_node: Callable[..., Node]) -> None:
    """While mpsd restarts again and again, each caller that may wait gets one lease, and no caller an error."""
    node, ended = make_node(simulate=1).start(), Event()

    def call() -> list[tuple[int, str]]:
        outcomes = []
        while not ended.is_set():
            done = run_mpsctl(node.socket, "run", "--threads", "1", "--memory", "1GiB", "--wait", "60", "--", "true")
            outcomes.append((done.returncode, done.stderr if done.returncode else ""))
        return outcomes

    with ThreadPoolExecutor(4) as callers:
        running = [callers.submit(call) for _ in range(4)]
        try:
            for number in (signal.SIGTERM, signal.SIGKILL) * 6:
                wait_until(lambda: node.events("lease_ended"), what="a lease to end")
                node.end(number)
                node.start()
        finally:
            ended.set()
        outcomes = [each for caller in running for each in caller.result()]
    assert {*outcomes} == {(0, "")}
    listed = node.get("/v1/events?after=0").body.splitlines()
    leases = Counter(each["lease"] for each in map(json.loads, listed) if each["event"] == "lease_granted")
    assert (len(leases), {*leases.values()}) == (len(outcomes), {1})
    wait_until(lambda: not node.leases(), what="every lease to end")


def test_an_mpsd_that_never_comes(short_tmp: Path) -> None:
    """An mpsd that never answered is waited for a moment, which is said, and no longer than the caller may wait."""
    done = run_mpsctl(short_tmp / "s", "run", *MOST, "--wait", "1", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (69, "")
    assert re.match(r"mpsctl: mpsd is gone \(there is no socket .+\); retrying for \d+ s\n", done.stderr)


def test_an_mpsd_that_comes(make_node: Callable[..., Node], start: Start) -> None:
    """A caller that comes before mpsd gets its lease."""
    node = make_node(simulate=1)
    process = start(node.socket, "run", *MOST, "--wait", "60", "--", "echo", "ran")
    assert "retrying" in line(process)
    node.start()
    assert process.communicate(timeout=30)[0] == "ran\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_watched_list(make_node: Callable[..., Node], start: Start, number: signal.Signals) -> None:
    """A list that is repeated survives a restart of mpsd, and says that it is gone, and of when the list is."""
    node = make_node(simulate=1).start()
    process = start(node.socket, "daemons", "--no-headers", "--watch", "0.1")
    rows = process.stdout
    assert rows is not None
    assert rows.readline().startswith("gpu0 ")
    node.end(number)
    assert re.fullmatch(r"mpsctl: mpsd is gone \(.+\); the list is of \d\d:\d\d:\d\d, and .*\n", line(process))
    node.start()
    assert node.mpsctl("hold", "gpu0").returncode == 0
    wait_until(lambda: " held " in rows.readline(), what="the list to continue")


def test_a_watched_list_of_no_mpsd(short_tmp: Path) -> None:
    """Where mpsd has never answered, nothing is repeated."""
    assert run_mpsctl(short_tmp / "s", "leases", "-w").returncode == 69


def granted() -> bytes:
    """Return the answer that grants a lease."""
    lease = {"id": "lease-1", "state": "granted", "because": "", "gpus": ["GPU-1"], "expires": None}
    return http({**lease, "env": {"CUDA_VISIBLE_DEVICES": "GPU-1"}}, "201 Created")


def test_the_same_request(short_tmp: Path) -> None:
    """After any loss of the connection, mpsctl repeats exactly the request that mpsd has, with less time."""
    stopping = http({"code": "stopping", "detail": "mpsd is stopping", "hint": "ask again"}, "503 Service Unavailable")
    breaking: list[Any] = [[Answering.hang_up], stopping, [granted()[:40], Answering.hang_up], granted()]
    with answering(short_tmp / "s", *breaking) as server:
        done = run_mpsctl(short_tmp / "s", "run", *MOST, "--wait", "1000", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert len(done.stderr.splitlines()) == 1
    requests = [json.loads(request.partition(b"\r\n\r\n")[2]) for request in server.requests]
    assert len(requests) == 4
    assert len({request["request_id"] for request in requests}) == 1
    times = [request.pop("wait") for request in requests]
    assert sorted(times, reverse=True) == times
    assert max(times) <= 1000
    assert all(request == requests[0] for request in requests)


def test_another_request(short_tmp: Path) -> None:
    """Two calls are two requests, even if equal."""
    with answering(short_tmp / "s", granted(), granted()) as server:
        for _ in range(2):
            run_mpsctl(short_tmp / "s", "run", *MOST, "--wait", "forever", "--", "true")
    one, other = (json.loads(request.partition(b"\r\n\r\n")[2]) for request in server.requests)
    assert one["wait"] is None
    assert one["request_id"] != other["request_id"]


def test_an_mpsd_that_does_not_come_back(short_tmp: Path) -> None:
    """Retries end with the wait, and the error then says why there was no answer."""
    with answering(short_tmp / "s", [Answering.hang_up]) as server:
        process = start_mpsctl(short_tmp / "s", "run", *MOST, "--wait", "1", "--", "echo", "ran")
        assert server.asked.wait(30)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (69, "")
    asking, error, hint = stderr.splitlines()
    assert "retrying" in asking
    assert error == f"mpsctl: nothing listens on {short_tmp}/s [unreachable]"
    assert hint.startswith("  hint: ")
