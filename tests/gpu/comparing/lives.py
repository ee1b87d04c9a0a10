"""Many clients that come and go: whether each gets what its lease says, and whether an end harms a neighbour."""

import contextlib
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any, Final

from tests.gpu import machine
from tests.gpu.comparing.estimates import estimate
from tests.gpu.comparing.rows import Row, number
from tests.gpu.comparing.site import LEAVES, Mode, Site, Timer, Wanted, Worker, WrongError

THREADS: Final = (5.0, 10.0, 20.0, 30.0)
MEMORY: Final = (1024, 2048, 4096, 8192)
"""The leases of clients that come and go: percent and MiB."""

KILLS: Final = 4
"""How often mpsd is killed and started again meanwhile, where the time suffices."""

KILL_INTERVAL: Final = 3.0
"""Seconds between two of these kills at least, so that clients get leases in between."""

KILLED: Final = 0.2
"""The part of the clients that SIGKILL ends, while they are idle."""

FEWEST: Final = 8
"""Multiprocessors that the smallest percentage gives (measured on 580, an H200)."""

KERNEL: Final = 6.0
"""Seconds of the kernel in whose middle a client is ended, where the time suffices."""

NEIGHBOUR: Final = 8.0
"""Seconds of a neighbour's work at most: all of it ends so long after a signal."""

SHORTEST_KERNEL: Final = 1.5
"""Seconds of such a kernel at least: it has to outlast the start of mpsctl."""

WAIT: Final = "30"
"""Seconds that a client waits for its lease."""

UNREACHABLE: Final = 69
"""The status of mpsctl where no mpsd listens, as while it is killed and started again."""


NOT_READY: Final = "CUDA_ERROR_MPS_SERVER_NOT_READY"


class Tally:
    """Counts, and the first things that were wrong, of several threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def add(self, what: str, times: int = 1) -> None:
        with self._lock:
            self.counts[what] += times

    def fail(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)


@contextlib.contextmanager
def _living(tally: Tally, *groups: tuple[int, Callable[[random.Random], None]]) -> Iterator[threading.Event]:
    """Have so many threads live one life after the other during this block; yield the event that ends them early."""
    ended = threading.Event()

    def lives(life: Callable[[random.Random], None], seed: int) -> None:
        picks = random.Random(seed)
        while not ended.is_set():
            try:
                life(picks)
            except (AssertionError, OSError, WrongError, subprocess.TimeoutExpired) as error:
                tally.fail(str(error))
                ended.wait(1)

    with ThreadPoolExecutor(sum(count for count, _ in groups)) as pool:
        try:
            for count, life in groups:
                for seed in range(count):
                    pool.submit(lives, life, seed)
            yield ended
        finally:
            ended.set()


def churn(site: Site, timer: Timer) -> Iterator[Row]:
    """Have clients with mixed leases come and go while mpsd is killed and started again."""
    with site.clients([Wanted(Mode.OUTSIDE)], site.memory(1)) as (outside,):
        whole = outside.checked()["multiprocessors"]
    tally, serves = Tally(), threading.Event()
    serves.set()

    def life(picks: random.Random) -> None:
        threads, memory = picks.choice(THREADS), picks.choice(MEMORY)
        with site.start(Wanted(Mode.MPSD, threads), memory, "--wait", WAIT) as client:
            if not _admitted(client):
                tally.add("refused")
                serves.wait(1)
                return
            tally.add("clients")
            if not fits(client.checked(), whole, threads, memory):
                tally.fail(f"a lease of {threads:g} % and {memory} MiB gave {client.hello}")
            client.perform("busy 0.3", 0.3)
            if picks.random() < KILLED:
                client.kill(signal.SIGKILL)
                tally.add("killed")

    over = looks = kills = 0
    interval = max(timer.left / (KILLS + 1), KILL_INTERVAL)
    until_kill = Timer(interval)
    with _living(tally, (site.at_once, life)) as ended:
        while timer.left > 0:
            ended.wait(min(1.0, interval / 2))
            with contextlib.suppress(OSError, HTTPException):
                over += _overcommitted(site)
                looks += 1
            if kills < KILLS and until_kill.left < 0:
                serves.clear()
                site.node.end(signal.SIGKILL)
                site.node.start()
                serves.set()
                kills += 1
                until_kill = Timer(interval)
    counts = tally.counts
    text = (
        f"{counts['clients']} clients, {site.at_once} at a time, {counts['killed']} of them killed while idle, "
        f"mpsd killed {kills} times; {counts['refused']} refused while no mpsd listened; "
        f"{over} over-commitments at {looks} looks; {_wrong(tally)}"
    )
    failed = bool(tally.wrong or over or not counts["clients"])
    values = {name: [value] for name, value in counts.items()}
    yield Row("churn: clients with what their leases say", text, values=values, failed=failed)


def _admitted(client: Worker) -> bool:
    """Wait for a client's context, and return whether it has one; not where no mpsd listened. Raises WrongError."""
    try:
        client.checked()
    except WrongError:
        if client.process.poll() == UNREACHABLE:
            return False
        raise
    return True


def _overcommitted(site: Site) -> bool:
    gpu = machine.first_gpu(site.node)
    return bool(gpu["threads_granted"] > 100.001 or gpu["memory_granted"] > gpu["memory_total"])


def fits(hello: dict[str, Any], whole: int, threads: float, memory: int) -> bool:
    """Return whether a context has what a lease of so many percent and MiB says, on a GPU of `whole` multiprocessors.

    Multiprocessors are given in pairs, or in eights, and never fewer than FEWEST; free memory lacks CUDA's own part.
    """
    share = whole * threads / 100
    return bool(share - FEWEST < hello["multiprocessors"] <= max(share, FEWEST) and hello["free"] <= memory << 20)


def _wrong(tally: Tally) -> str:
    return f"wrong: {len(tally.wrong)}, first {tally.wrong[:3]}" if tally.wrong else "nothing wrong"


def _served(client: Worker, tally: Tally) -> bool:
    """Wait for a client's context, and return whether it has one: a server refuses while it ends another client."""
    try:
        client.checked()
    except WrongError as error:
        if NOT_READY in str(error):
            tally.add("refused")
            return False
        raise
    return True


def ends(site: Site, timer: Timer) -> Iterator[Row]:
    """Have `mpsctl release --end-clients` end clients in mid-kernel, and count the kernels of their neighbours."""
    tally, took = Tally(), list[float]()
    wanted, memory = Wanted(Mode.MPSD, 10), 1024
    seconds, kernel = min(max(timer.left / 6, 0.3), NEIGHBOUR), min(max(timer.left / 8, SHORTEST_KERNEL), KERNEL)

    def neighbour(_picks: random.Random) -> None:
        with site.start(wanted, memory, "--wait", WAIT) as client:
            if not _served(client, tally):
                return
            tally.add("kernels", client.perform(f"busy {seconds:.3f}", 1.25 * seconds)["kernels"])
            tally.add("neighbours")

    def victim(picks: random.Random) -> None:
        name = f"v{picks.getrandbits(60):x}"
        with site.start(wanted, memory, "--wait", WAIT, "--name", name) as client:
            if not _served(client, tally):
                return
            client.perform(f"launch {kernel:.3f}")
            threading.Event().wait(picks.uniform(0.05, 0.5))
            begin = time.perf_counter()
            released = site.node.mpsctl("release", name, "--end-clients")
            took.append(1000 * (time.perf_counter() - begin))
            if released.returncode:
                tally.fail(f"release: {released.returncode}, {released.stderr}")
                return
            client.process.wait(LEAVES)
            with contextlib.suppress(AssertionError):  # it ended before it could say so
                if client.answer(0)["ok"]:
                    tally.add("late")
                    return
            tally.add("ended")

    with _living(tally, (max(site.at_once // 3, 1), neighbour), (max(site.at_once // 2, 1), victim)) as ended:
        ended.wait(max(timer.left, 0))
    counts = tally.counts
    text = (
        f"{counts['ended']} clients ended in a kernel of {kernel:g} s, {counts['late']} after it; "
        f"{counts['neighbours']} neighbours and their {counts['kernels']} kernels unharmed; "
        f"{counts['refused']} new clients refused meanwhile ({NOT_READY}); {_wrong(tally)}"
    )
    failed = bool(tally.wrong or not counts["ended"] + counts["late"] or not counts["neighbours"])
    yield Row("ends in mid-kernel", text, values={name: [n] for name, n in counts.items()}, failed=failed)
    if took:
        told = estimate(took)
        text = f"{number(told.value)} ms, {number(max(took))} ms at most"
        yield Row("ends in mid-kernel: mpsctl release --end-clients", text, told, {"ms": took}, failed=failed)
