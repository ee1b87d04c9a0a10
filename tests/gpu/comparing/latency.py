"""How long things take: a kernel's launch, and the start of a client."""

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tests.gpu.client import QUANTILES
from tests.gpu.comparing import estimates
from tests.gpu.comparing.estimates import estimate, order, ratios
from tests.gpu.comparing.rows import Row, number, ratio
from tests.gpu.comparing.site import Mode, Site, Timer, Wanted, Worker

LAUNCHES: Final = 4000
"""Launches of a block at most; 4 of them are above its 99.9th percentile."""

FEWEST: Final = 100
"""Launches of a block at least; as many tell how long a launch takes."""

MOST_STARTS: Final = 30


def latency(site: Site, timer: Timer) -> Iterator[Row]:
    """Compare the time from a kernel's launch to its end, with clients of each way, each on a processor of its own."""
    kinds = {"mpsd": Wanted(Mode.MPSD, 50), "bare MPS": Wanted(Mode.BARE, 50), "outside MPS": Wanted(Mode.OUTSIDE)}
    with site.clients([*kinds.values()], site.memory(4)) as workers:
        pinned = _pin(workers)
        named = dict(zip(kinds, workers, strict=True))
        rounds = 2 * estimates.FEWEST
        count = _launches(workers, timer.left / (2 * rounds * len(named)))
        blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in named}
        for first in order(rounds):
            for name in [*named][:: 1 if first else -1]:
                blocks[name].append(named[name].perform(f"latency {count}"))
        for quantile in QUANTILES:
            values = {name: [1000 * each[quantile] for each in told] for name, told in blocks.items()}
            pairs = ratios(values["mpsd"], values["bare MPS"])
            what = f"launch to end of a kernel{'' if pinned else ', not pinned'}, {quantile}: mpsd / bare MPS"
            yield ratio(what, "us", estimate(pairs), values)


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


def start(site: Site, timer: Timer) -> Iterator[Row]:
    """Compare the time from a client's start to its first context, for each way."""
    kinds = {
        "mpsctl run": Wanted(Mode.MPSD, 50),
        "bare MPS": Wanted(Mode.BARE, 50),
        "outside MPS": Wanted(Mode.OUTSIDE),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    first_ones = [Wanted(Mode.MPSD), Wanted(Mode.BARE)]
    with site.clients(first_ones, site.memory(4)):  # the servers are there
        for done, first in enumerate(order(MOST_STARTS)):
            if done >= estimates.FEWEST and timer.left < _round(times):
                break
            for name in [*kinds][:: 1 if first else -1]:
                begin = time.perf_counter()
                with site.start(kinds[name], site.memory(4)) as client:
                    client.checked()
                    times[name].append(1000 * (time.perf_counter() - begin))
    for name, each in times.items():
        told = estimate(each)
        yield Row(f"start to first context: {name}", f"{number(told.value)} ms", told, {name: each})
    more = [one - other for one, other in zip(times["mpsctl run"], times["bare MPS"], strict=True)]
    told = estimate(more)
    yield Row("start to first context: mpsctl run, more than bare MPS", f"{number(told.value)} ms", told, times)


def _round(times: dict[str, list[float]]) -> float:
    """Return the seconds that a round of starts takes."""
    return sum(estimate(each).value for each in times.values()) / 1000
