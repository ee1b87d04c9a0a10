"""How much work clients do: with mpsd and with bare MPS, with MPS and without, and many of them on one GPU."""

from collections.abc import Iterator
from typing import Final

from tests.gpu.comparing.blocks import FINE, Side, compared, drop
from tests.gpu.comparing.estimates import estimate
from tests.gpu.comparing.rows import Row, number
from tests.gpu.comparing.site import Mode, Site, Timer, Wanted, WrongError

HALVES: Final = (Wanted(Mode.MPSD, 50), Wanted(Mode.BARE, 50), Wanted(Mode.OUTSIDE))
"""The kinds of two clients that share a GPU."""

REQUESTS: Final = (1, 4, 8)
"""Requests that each of two decoders serves."""

JOBS: Final = (2, 4, 8)


def throughput(site: Site, timer: Timer) -> Iterator[Row]:
    """Compare two clients of 50 % of mpsd with those of bare MPS, with time-slicing, and with one client alone."""
    works = ("matmul", "copy", "short") if site.engine == "torch" else ("integer", "short")
    with site.clients([each for each in HALVES for _ in range(2)], site.memory(4)) as workers:
        mpsd, bare, outside = workers[:2], workers[2:4], workers[4:]
        for done, work in enumerate(works):
            own = timer.part(1, len(works) - done)
            what = f"{work}, two clients of 50 %"
            one, other = Side("mpsd", mpsd, work), Side("bare MPS", bare, work)
            yield from compared(what, one, other, timer=own.part(3, 5), rounds=FINE)
            others = {"time-slicing": outside, "one client alone": outside[:1]}
            for left, (name, clients) in enumerate(others.items()):
                one, other = Side("mpsd", mpsd, work), Side(name, clients, work)
                yield from compared(what, one, other, timer=own.part(1, len(others) - left))
            drop(*workers)


def decoders(site: Site, timer: Timer) -> Iterator[Row]:
    """Compare two decoders that share a GPU with other ways to share it, and with one decoder on a whole one.

    That one has the requests of both, as a GPU of its own would; or those of one of them.
    """
    is_decoder = site.engine == "torch"
    wanted = [*(each for each in HALVES for _ in range(2)), Wanted(Mode.MPSD, 100), Wanted(Mode.MPSD, 100)]
    with site.clients(wanted, site.memory(4)) as workers:
        mpsd, bare, outside, whole = (workers[at : at + 2] for at in (0, 2, 4, 6))
        counts = REQUESTS if is_decoder else (1,)
        for done, requests in enumerate(counts):
            own = timer.part(1, len(counts) - done)
            work, double = (f"decode:{requests}", f"decode:{2 * requests}") if is_decoder else ("integer", "integer")
            what = f"two decoders with {requests} requests each" if is_decoder else "two clients with integer work"
            others = [
                Side("bare MPS 50/50", bare, work),
                Side("time-slicing", outside, work),
                Side("mpsd 100/100", whole, work),
                Side("one alone with the requests of one" if is_decoder else "one alone", outside[:1], work),
            ]
            if is_decoder:
                others.append(Side("one alone with the requests of both", outside[:1], double))
            for left, side in enumerate(others):
                one = Side("mpsd 50/50", mpsd, work)
                yield from compared(what, one, side, timer=own.part(1, len(others) - left))
                drop(*side.workers)
            drop(*mpsd)


def jobs(site: Site, timer: Timer) -> Iterator[Row]:
    """Compare n clients of 1/n of a GPU with as many that the driver time-slices."""
    work = "decode:1" if site.engine == "torch" else "integer"
    for done, count in enumerate(JOBS):
        own = timer.part(1, len(JOBS) - done)
        share = Wanted(Mode.MPSD, 100 / count)
        try:
            with site.clients([share] * count + [Wanted(Mode.OUTSIDE)] * count, site.memory(count)) as workers:
                one = Side(f"mpsd {share.threads:g} %", workers[:count], work)
                other = Side("time-slicing", workers[count:], work)
                apart = site.engine == "torch"  # their weights do not fit twice
                yield from compared(f"{count} jobs of {work}", one, other, timer=own, apart=apart)
                spread = [min(rates) / max(rates) for rates in one.rates]
                unequal = estimate(spread)
                text = f"{number(unequal.value)} of the fastest one's rate"
                by = workers[0].checked()["by"]
                yield Row(f"{count} jobs: the slowest one under mpsd", text, by, unequal, {"part": spread})
        except (AssertionError, OSError, WrongError) as error:
            yield Row(f"{count} jobs of {work}", str(error), site.engine, failed=True)
