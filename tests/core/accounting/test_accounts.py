"""The accounts add up to the granted amounts, for any order of changes, and any number of stored samples."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.accounting.accounts import (
    HOUR,
    MINUTE,
    SECOND,
    Accounts,
    GpuReading,
    LeaseRecord,
    Period,
    Periods,
    Rollup,
    Series,
    ShareRecord,
)
from mpsd.core.accounting.report import By, Report, step_of
from mpsd.core.errors import InvalidRequestError
from mpsd.core.units import MIB

START = 1_795_000_000 * SECOND

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "read", "store", "fail", "restart"]),
        st.integers(0, 3 * MINUTE),
        st.integers(0, 5),
    ),
    max_size=60,
)


def record(number: int, at: int, *, name: str = "", gpus: int = 1, uid: int | None = None) -> LeaseRecord:
    shares = tuple(ShareRecord(f"GPU-{gpu}", 10 + number % 7, 100 + number) for gpu in range(gpus))
    return LeaseRecord(f"lease-{number}", number % 3 if uid is None else uid, name, (), shares, at, at)


def summed(periods: Iterable[tuple[Series, Period]]) -> dict[str, list[int]]:
    """Return the threads, the memory and the leases that began, by GPU."""
    sums = defaultdict[str, list[int]](lambda: [0, 0, 0])
    for series, period in periods:
        for place, amount in enumerate((period.threads, period.memory, period.begun)):
            sums[series.gpu][place] += amount
    return {gpu: amounts for gpu, amounts in sums.items() if any(amounts)}


@given(STEPS)
def test_sums_are_exact(steps: list[tuple[str, int, int]]) -> None:
    """Each GPU has the granted amounts of every lease, for the exact time of the lease in microseconds."""
    accounts, now, stored = Accounts(), START, Periods()
    last, disk = START, dict[str, LeaseRecord]()
    begun = list[LeaseRecord]()
    for number, (what, passed, choice) in enumerate(steps):
        now += passed
        alive = list(accounts.open.values())
        if what == "begin":
            begun.append(record(number, now, name=f"n{choice}", gpus=1 + choice % 2))
            accounts.begin(begun[-1])
        elif what == "end" and alive:
            accounts.end(alive[choice % len(alive)].id, now)
        elif what == "read":
            held = {each.id: choice for each in alive[::2]}
            accounts.read({"GPU-0": GpuReading(1000, held), "GPU-1": None}, now)
        elif what in {"store", "fail"}:
            periods = accounts.take(now, everything=choice < 2)
            if what == "fail":
                accounts.put_back(periods)
            else:
                stored += periods
                disk = {each.id: each for each in {**disk, **accounts.changed}.values() if each.ended is None}
                accounts.note_stored()
                last = now
        elif what == "restart" and not accounts.is_changed:
            since = {series: period.end for series, period in stored}
            accounts = Accounts()
            accounts.restore(disk.values(), since, START, last)
    stored += accounts.so_far(now)
    expected = defaultdict[str, list[int]](lambda: [0, 0, 0])
    for each in begun:
        length = (each.ended if each.ended is not None else now) - each.began
        for share in each.shares:
            amounts = expected[share.gpu]
            amounts[0], amounts[1], amounts[2] = (
                amounts[0] + share.threads * length,
                amounts[1] + share.memory * length,
                amounts[2] + 1,
            )
    assert summed(stored) == {gpu: amounts for gpu, amounts in expected.items() if any(amounts)}
    rollup = Rollup()
    rollup.fold(stored)
    assert summed(rollup.sums) == summed(stored)


@given(
    st.lists(st.tuples(st.integers(0, 2 * HOUR), st.integers(0, HOUR), st.integers(0, 10**15)), max_size=20),
    st.sampled_from([1, 7, 60, 3600]),
)
def test_samples_come_to_the_total(periods: list[tuple[int, int, int]], step: int) -> None:
    """A period that overlaps several samples is divided among them without a loss."""
    report = Report(By.GPU, "", START, START + 4 * HOUR, step)
    for begin, length, threads in periods:
        report.add(Series("GPU-0", 1), Period(START + begin, START + begin + length, threads=threads))
    for line in report.lines()[0]:
        assert sum(each.threads for each in line.samples.values()) == pytest.approx(line.total.threads)
        expected = sum(threads for _, length, threads in periods if length) / 10 / SECOND
        assert line.total.threads == pytest.approx(expected)


@given(
    st.lists(st.tuples(st.integers(0, 2 * HOUR), st.integers(0, HOUR), st.integers(0, 10**15)), max_size=20),
    st.sampled_from([1, 7, 60, 3600]),
)
def test_totals_without_samples(periods: list[tuple[int, int, int]], step: int) -> None:
    """A report of totals has the sums of one with samples, and the seconds of its samples."""
    whole, totals = (
        Report(By.GPU, "", START + 90 * SECOND, START + 2 * HOUR, step, totals=each) for each in (False, True)
    )
    for begin, length, threads in periods:
        for report in (whole, totals):
            report.add(Series("GPU-0", 1), Period(START + begin, START + begin + length, threads=threads))
    for line, total in zip(whole.lines()[0], totals.lines()[0], strict=True):
        assert not total.samples
        assert total.total.threads == pytest.approx(line.total.threads)
        assert totals.seconds(total) == pytest.approx(sum(whole.bounds(each)[1] for each in line.samples))


def test_too_many_samples() -> None:
    """A report refuses to become larger than its bound, by the samples of few keys as by many keys."""
    for fit, seconds in ((14, 2000), (15_000, 1)):
        report, period = (
            Report(By.NAME, "", START, START + seconds * SECOND, 1),
            Period(START, START + seconds * SECOND),
        )
        for number in range(fit):
            report.add(Series("GPU-0", 1, f"{number}"), period)
        with pytest.raises(InvalidRequestError, match="more than 30000 keys and samples"):
            report.add(Series("GPU-0", 1, "one more"), period)


def test_any_number_of_leases() -> None:
    """A report by lease keeps the most used leases, however many there are, and counts the others."""
    report, end = Report(By.LEASE, "", START, START + HOUR, 3600, totals=True), START + HOUR
    for number in range(50_000):
        used = record(number, START)
        used.shares = (ShareRecord("GPU-0", 1, 1 + number % 25_000),)
        report.add_lease(used, end)
    lines, left_out = report.lines()
    assert {line.total.memory // (3600 * MIB) for line in lines} == {*range(24_501, 25_001)}
    assert (len(lines), left_out) == (1000, 49_000)


def test_only_what_is_between_counts() -> None:
    """Only the part of a period within the report counts."""
    report = Report(By.GPU, "", START, START + 10 * SECOND, 1)
    report.add(Series("GPU-0", 1), Period(START - 10 * SECOND, START + 10 * SECOND, threads=200 * SECOND, carried=2))
    (line,), left_out = report.lines()
    assert line.total.threads == pytest.approx(10.0)
    assert (line.leases, left_out) == (2, 0)


def held(by_lease: dict[str, Any]) -> GpuReading:
    return GpuReading(1000, by_lease)


def test_what_is_held() -> None:
    """Held memory keeps its last reading, is unknown for an unreadable GPU, and the rest of a GPU has no user."""
    accounts = Accounts()
    accounts.begin(record(1, START))
    accounts.read({"GPU-0": held({"lease-1": 300})}, START + 10 * SECOND)
    accounts.read({"GPU-0": None}, START + 30 * SECOND)
    rollup = Rollup()
    rollup.fold(accounts.take(START + 60 * SECOND, everything=True))
    sums = {series.uid: period for series, period in rollup.sums}
    assert (sums[1].held, sums[1].known) == (300 * 20 * SECOND, 20 * SECOND)
    assert (sums[None].held, sums[None].known) == (700 * 20 * SECOND, 20 * SECOND)


def test_the_most_that_a_lease_held() -> None:
    """Of each GPU, by any reading, also one between two samples; unknown while a GPU had no reading."""
    accounts, report = Accounts(), Report(By.LEASE, "", START, START + MINUTE, 60)
    for number in (1, 2):
        accounts.begin(record(number, START, gpus=2))
    first, second = (accounts.open[f"lease-{number}"] for number in (1, 2))
    accounts.read({"GPU-0": held({"lease-1": 300})}, START + SECOND)
    accounts.note_most("lease-1", "GPU-0", 700)
    accounts.note_most("lease-1", "GPU-1", 40)
    accounts.note_most("lease-3", "GPU-0", 9000)
    accounts.read({"GPU-0": held({"lease-1": None})}, START + 2 * SECOND)
    accounts.read({"GPU-0": held({"lease-1": 200})}, START + 3 * SECOND)
    for each in (first, second):
        report.add_lease(each, START + 5 * SECOND)
    assert [each.held_most for each in report.lines()[0]] == [740 * MIB, None]
    accounts.read({"GPU-1": held({})}, START + 4 * SECOND)
    report = Report(By.LEASE, "", START, START + MINUTE, 60)
    report.add_lease(second, START + 5 * SECOND)
    assert [each.held_most for each in report.lines()[0]] == [0]


def test_names_are_bounded() -> None:
    """Leases beyond a user's limit on names, or with too long labels, count without name and labels."""
    accounts = Accounts()
    for number in range(100):
        accounts.begin(record(number, START, name=f"n{number}", uid=7))
    assert len(accounts.take(START + SECOND, everything=True)) == 17
    accounts.begin(record(200, START, name="n", uid=8))
    assert {series.name for series, _ in accounts.take(START + 2 * SECOND, everything=True) if series.uid == 8} == {"n"}
    long = record(300, START, uid=9)
    long.labels = (("k", "x" * 300),)
    accounts.begin(long)
    assert not long.labels


def test_users_are_bounded() -> None:
    """Users beyond the limit count together."""
    accounts = Accounts()
    for uid in range(3000):
        accounts.begin(record(uid, START, uid=uid))
    assert len(accounts.take(START + SECOND, everything=True)) == 1025


def test_the_clock_is_set_back() -> None:
    """A clock that is set back adds no time, and later time counts again."""
    accounts = Accounts()
    accounts.begin(record(1, START))
    accounts.take(START + 10 * SECOND, everything=True)
    assert not summed(accounts.take(START - HOUR, everything=True))
    taken = accounts.take(START - HOUR + 5 * SECOND, everything=True)
    assert summed(taken)["GPU-0"][0] == 11 * 5 * SECOND


def test_the_length_of_samples() -> None:
    """mpsd chooses a length with at most 300 samples, and no finer than the stored samples."""
    assert step_of(START, START + HOUR, 1) == 15
    assert step_of(START, START + 10 * SECOND, 1) == 1
    assert step_of(START, START + 24 * HOUR, 60) == 300
    assert step_of(START, START + HOUR, 3600) == 3600
