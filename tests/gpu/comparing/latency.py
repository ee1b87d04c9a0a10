"""How long things take: a kernel's launch, a step beside other work, and the start of a client."""

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tests.gpu.comparing.blocks import COARSE, LONGEST, SHORTEST, prepare
from tests.gpu.comparing.estimates import estimate, order, ratios
from tests.gpu.comparing.rows import Row, number, ratio
from tests.gpu.comparing.site import Mode, Site, Timer, Wanted, Worker

LAUNCHES: Final = 4000
"""Launches of a block at most; 4 of them are above its 99.9th percentile."""

FEWEST: Final = 100
"""Launches of a block at least; as many tell how long a launch takes."""

QUANTILES: Final = ("p50", "p99", "p99.9")

BESIDE: Final = {
    "mpsd 50/50": (Wanted(Mode.MPSD, 50), Wanted(Mode.MPSD, 50)),
    "bare MPS 50/50": (Wanted(Mode.BARE, 50), Wanted(Mode.BARE, 50)),
    "mpsd 75/25": (Wanted(Mode.MPSD, 75), Wanted(Mode.MPSD, 25)),
    "mpsd 25/75": (Wanted(Mode.MPSD, 25), Wanted(Mode.MPSD, 75)),
    "time-slicing": (Wanted(Mode.OUTSIDE), Wanted(Mode.OUTSIDE)),
}
"""A client that waits for requests, and one that works without a pause, by the name of the setting."""

ALONE: Final = "alone"

MOST_STARTS: Final = 30


def latency(site: Site, timer: Timer) -> Iterator[Row]:
    """Compare the time from a kernel's launch to its end, with clients of each way, each on a processor of its own."""
    kinds = {"mpsd": Wanted(Mode.MPSD, 50), "bare MPS": Wanted(Mode.BARE, 50), "outside MPS": Wanted(Mode.OUTSIDE)}
    with site.clients([*kinds.values()], site.memory(4)) as workers:
        pinned = _pin(workers)
        by = workers[0].checked()["by"] + ("" if pinned else ", not pinned")
        named = dict(zip(kinds, workers, strict=True))
        rounds = 2 * COARSE
        count = _launches(workers, timer.left / (2 * rounds * len(named)))
        blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in named}
        for first in order(rounds):
            for name in [*named][:: 1 if first else -1]:
                blocks[name].append(named[name].perform(f"latency {count}"))
        for quantile in QUANTILES:
            values = {name: [1000 * each[quantile] for each in told] for name, told in blocks.items()}
            pairs = ratios(values["mpsd"], values["bare MPS"])
            yield ratio(f"launch to end of a kernel, {quantile}: mpsd / bare MPS", "us", by, estimate(pairs), values)


def _pin(workers: Sequence[Worker]) -> bool:
    """Give each client a processor of its own, and return whether there are enough, beside one for the others."""
    processors = sorted(os.sched_getaffinity(0))[1:]
    if len(processors) < len(workers):
        return False
    for worker, processor in zip(workers, processors, strict=False):
        os.sched_setaffinity(worker.pid, {processor})
    return True


def _launches(workers: Sequence[Worker], seconds: float) -> int:
    """Return how many launches each of these clients can have in these seconds, one client after the other."""
    begin = time.perf_counter()
    for worker in workers:
        worker.perform(f"latency {FEWEST}")
    one = (time.perf_counter() - begin) / (FEWEST * len(workers))
    return min(max(int(seconds / one), FEWEST), LAUNCHES)


def beside(site: Site, timer: Timer) -> Iterator[Row]:
    """Compare the steps of a client that waits for requests beside one that works without a pause, and its rate."""
    step, batch = ("decode:1", "matmul") if site.engine == "torch" else ("integer", "integer")
    wanted = [each for pair in BESIDE.values() for each in pair]
    with site.clients(wanted, site.memory(6)) as workers:
        pairs = dict(zip(BESIDE, zip(workers[::2], workers[1::2], strict=True), strict=True))
        by = workers[0].checked()["by"]
        for quick, busy in pairs.values():
            prepare([quick], step)
            prepare([busy], batch)
        settings = [*pairs, ALONE]
        steps: dict[str, list[dict[str, Any]]] = {name: [] for name in settings}
        rates: dict[str, list[float]] = {name: [] for name in pairs}
        for done, first in enumerate(order(COARSE)):
            seconds = min(max(timer.left / ((COARSE - done) * len(settings)), SHORTEST), LONGEST)
            for name in settings[:: 1 if first else -1]:
                quick, busy = pairs[name if name in pairs else "time-slicing"]
                if name in pairs:
                    busy.tell(f"run {batch} {seconds:.3f}")
                steps[name].append(quick.perform(f"steps {step} {seconds:.3f}", seconds))
                if name in pairs:
                    rates[name].append(busy.result(seconds)["rate"])
    for name in settings:
        p50, p99 = ([each[quantile] for each in steps[name]] for quantile in ("p50", "p99"))
        other = f"; {number(estimate(rates[name]).value)} {batch}/s beside it" if name in rates else ""
        text = f"{number(estimate(p50).value)} ms, p99 {number(estimate(p99).value)} ms{other}"
        values = {"p50": p50, "p99": p99, "rate": rates.get(name, [])}
        yield Row(f"a step of {step} beside {batch}, p50: {name}", text, by, estimate(p50), values)


def start(site: Site, timer: Timer) -> Iterator[Row]:
    """Compare the time from a client's start to its first context, without PyTorch, for each way."""
    kinds = {
        "mpsctl run": Wanted(Mode.MPSD, 50),
        "bare MPS": Wanted(Mode.BARE, 50),
        "outside MPS": Wanted(Mode.OUTSIDE),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    by, done = "", 0
    first_ones = [Wanted(Mode.MPSD), Wanted(Mode.BARE)]
    with site.clients(first_ones, site.memory(4), engine=site.plain):  # the servers are there
        for first in order(MOST_STARTS):
            if done >= COARSE and timer.left < _round(times):
                break
            for name in [*kinds][:: 1 if first else -1]:
                begin = time.perf_counter()
                with site.start(kinds[name], site.memory(4), engine=site.plain) as client:
                    by = client.checked()["by"]
                    times[name].append(1000 * (time.perf_counter() - begin))
            done += 1
    for name, each in times.items():
        told = estimate(each)
        yield Row(f"start to first context: {name}", f"{number(told.value)} ms", by, told, {name: each})
    more = [one - other for one, other in zip(times["mpsctl run"], times["bare MPS"], strict=True)]
    told = estimate(more)
    yield Row("start to first context: mpsctl run, more than bare MPS", f"{number(told.value)} ms", by, told, times)


def _round(times: dict[str, list[float]]) -> float:
    """Return the seconds that a round of starts takes."""
    return sum(estimate(each).value for each in times.values()) / 1000
