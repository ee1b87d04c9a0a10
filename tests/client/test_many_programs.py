"""A thousand leases of eight programs, some of which are killed anywhere: none is left, and none is granted twice."""

import json
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from tests.accounts import check_one_story
from tests.cli.conftest import ROOT
from tests.client.opener import AT_ONCE, CANCELLED, KINDS
from tests.harness import wait_until
from tests.node import Node

PROGRAMS: Final = 8
LEASES: Final = 1000

CONFIG: Final = "[api]\nlines_per_uid = 1000000\n"
"""So that there is an event for each lease."""

KILLS: Final = 2
"""How many processes of each program are killed, at most; the next one opens what is left."""


@dataclass
class Run:
    """One process: what it has closed, what it has cancelled, and whether it was killed."""

    pid: int
    closed: list[str] = field(default_factory=list)
    cancelled: int = 0
    killed: bool = False


def run(node: Node, kind: str, count: int, chance: random.Random, *, last: int | None = None) -> Iterator[Run]:
    """Run a process to its end, or kill it wherever it is after so many leases; yield it after each of its lines."""
    command = [sys.executable, "-m", "tests.client.opener", kind, f"{node.socket}", f"{count}", f"{chance.random()}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        found = Run(process.pid)
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == CANCELLED:
                found.cancelled += 1
            else:
                found.closed.append(line.strip())
            yield found
            if last is not None and len(found.closed) >= last:
                process.kill()
                found.killed = True
    assert process.returncode == (-9 if found.killed else 0)


def killed(node: Node, kind: str, seed: int) -> list[Run]:
    """Open and close a program's part of the leases, in one process after another, of which the first are killed."""
    chance, left, runs = random.Random(f"{kind} {seed}"), LEASES // PROGRAMS, list[Run]()
    while left > 0:
        last = chance.randrange(1, left + 1) if len(runs) < KILLS else None
        *_, done = run(node, kind, left, chance, last=last)
        runs.append(done)
        left -= len(done.closed)
    return runs


def check_that_all_fitted(events: Iterable[Mapping[str, Any]]) -> None:
    """Check, event by event, that no GPU ever had more granted than it has."""
    granted, threads = dict[str, Mapping[str, Any]](), Counter[str]()
    for event in events:
        if event["event"] == "lease_granted":
            granted[event["lease"]] = event
        elif event["event"] == "lease_ended" and event["lease"] in granted:
            threads.subtract(dict.fromkeys(granted[event["lease"]]["gpus"], event_threads(granted[event["lease"]])))
            continue
        else:
            continue
        threads.update(dict.fromkeys(event["gpus"], event_threads(event)))
        assert all(each <= 100 for each in threads.values()), event
    assert not +threads


def event_threads(event: Mapping[str, Any]) -> int:
    return int(event["active_thread_percentage"])


def check(node: Node, kind: str, runs: Iterable[Run]) -> None:
    """Check that every lease has ended, that each request was granted once, and that all of them fitted."""
    wait_until(lambda: not node.leases(), what="every lease to end", deadline=60)
    events = [json.loads(line) for line in node.get("/v1/events?after=0").body.splitlines()]
    granted = defaultdict[int, Counter[str]](Counter)
    for event in events:
        if event["event"] == "lease_granted":
            granted[event["pid"]][event["lease"]] += 1
    for each in runs:
        of_it = granted.pop(each.pid, Counter())
        assert max(of_it.values(), default=1) == 1
        assert {*each.closed} <= of_it.keys()
        assert len(of_it) - len(each.closed) <= each.cancelled + (AT_ONCE[kind] if each.killed else 0), each
    assert not granted
    check_that_all_fitted(events)
    check_one_story(node)


@pytest.mark.thorough
@pytest.mark.timeout(240)  # on a busy machine; 10 s on one that is not
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_leases(make_node: Callable[..., Node], kind: str) -> None:
    """Programs that are killed anywhere leave no lease, and whatever is granted fits at each moment."""
    node = make_node(simulate=2, config=CONFIG).start()
    with ThreadPoolExecutor(PROGRAMS) as programs:
        done = programs.map(lambda seed: killed(node, kind, seed), range(PROGRAMS))
        runs = [each for of_one in done for each in of_one]
    assert sum(len(each.closed) for each in runs) >= LEASES
    assert sum(each.killed for each in runs) >= PROGRAMS
    check(node, kind, runs)


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", KINDS)
def test_restarts(make_node: Callable[..., Node], kind: str) -> None:
    """While mpsd ends and starts again, each request gets one lease, whatever became of its first answer."""
    node, count = make_node(simulate=2, config=CONFIG).start(), 40
    runs = dict[int, Run]()

    def follow(seed: int) -> None:
        for found in run(node, kind, count, random.Random(f"{kind} {seed}")):
            runs[seed] = found

    with ThreadPoolExecutor(PROGRAMS) as programs:
        following = [programs.submit(follow, seed) for seed in range(PROGRAMS)]
        for number, ends in enumerate((signal.SIGTERM, signal.SIGKILL) * 3):
            after = (number + 1) * PROGRAMS * count // 8
            wait_until(lambda: sum(len(each.closed) for each in [*runs.values()]) >= after, what="leases", deadline=60)  # noqa: B023
            node.end(ends)
            node.start()
        for each in following:
            each.result()
    assert [len(each.closed) for each in runs.values()] == [count] * PROGRAMS
    check(node, kind, runs.values())
