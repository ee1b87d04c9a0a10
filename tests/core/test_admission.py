"""Whether a request fits, where it goes best, and which refusal is told; and that nothing is ever given twice."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core import admission
from mpsd.core.admission import Amount, Offer, Refusal, Shortage
from mpsd.core.errors import (
    DaemonNotReadyError,
    DoesNotFitError,
    ExceedsDaemonLimitError,
    InvalidRequestError,
    MpsdError,
    NeverFitsError,
)
from mpsd.core.ledger import Ledger, Now, Rules
from mpsd.core.model import Lease, LeaseRequest, LeaseState, Limits, Owner, ProcessIdentity, Share
from mpsd.core.settings import Placement
from mpsd.core.units import GIB, ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.usage import Usage

NO_LIMITS: Final = Limits(ActiveThreadPercentage(1000), None)
OFFER: Final = Offer(
    gpu="GPU-0",
    daemon="gpu0",
    pipe_directory="/run/mpsd/mps/gpu0",
    threads=1000,
    memory=79 * GIB,
    clients=48,
    limits=NO_LIMITS,
    many_users=True,
)
OTHER: Final = replace(OFFER, gpu="GPU-1", daemon="gpu1")
NOW: Final = Now(100.0, datetime(2026, 1, 1, tzinfo=UTC))


def request(threads: float | None = 10, gib: float | None = 1, **more: Any) -> LeaseRequest:
    """Return a request for this many percent and GiB."""
    return replace(
        LeaseRequest(
            threads=None if threads is None else ActiveThreadPercentage.parse(threads),
            memory=None if gib is None else PinnedDeviceMemLimit(int(gib * 1024)),
        ),
        **more,
    )


def fraction(part: float, **more: Any) -> LeaseRequest:
    """Return a request for a part of a GPU."""
    return request(None, None, fraction=part, **more)


def share_of(asked: LeaseRequest, offer: Offer = OFFER) -> Share:
    """Return what a request comes to, where it comes to something."""
    share = admission.share_on(asked, offer)
    assert isinstance(share, Share)
    return share


# -- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request(None, 1), "threads is missing"),
        (request(10, None), "memory is missing"),
        (request(None, None), "threads is missing"),
        (fraction(0), "(0, 1]"),
        (fraction(-0.5), "(0, 1]"),
        (fraction(1.01), "(0, 1]"),
        (request(10, None, fraction=0.5), "a fraction stands for"),
        (request(None, 1, fraction=0.5), "a fraction stands for"),
        (request(processes=0), "one process"),
        (request(gpus=0), "one GPU"),
        (request(gpus=2, gpu="GPU-0"), "one was named"),
    ],
)
def test_what_cannot_be_meant(asked: LeaseRequest, words: str) -> None:
    """A request that does not say what it wants, or says it twice, is refused with the way out."""
    with pytest.raises(InvalidRequestError) as refused:
        admission.check(asked)
    assert words in refused.value.detail
    assert refused.value.hint


@pytest.mark.parametrize(
    ("part", "tenths", "mebibytes"), [(1, 1000, 79 * 1024), (0.25, 250, 20224), (0.29, 290, 23459), (0.001, 1, 80)]
)
def test_fraction(part: float, tenths: int, mebibytes: int) -> None:
    """A fraction is that part of the threads and of what there is of memory to give, in decimals, and never more."""
    share = share_of(fraction(part))
    assert (share.threads.tenths, share.memory.mebibytes) == (tenths, mebibytes)


@given(st.integers(1, 1000))
def test_fractions_add_up(tenths: int) -> None:
    """As many equal fractions as make a whole always fit, for any thousandth of a GPU."""
    asked = fraction(tenths / 1000)
    admission.check(asked)
    share = share_of(asked)
    count = 1000 // tenths
    assert share.threads.tenths == tenths
    assert count * share.threads.tenths <= OFFER.threads
    assert count * share.memory.bytes <= OFFER.memory


def test_environment() -> None:
    """The environment names the daemon's pipe directory, the one GPU by UUID, and the limits of each process."""
    assert share_of(request(25, 2)).env == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mpsd/mps/gpu0",
        "CUDA_VISIBLE_DEVICES": "GPU-0",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25.0",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G",
    }
    shared = share_of(request(25, 2, processes=3))
    assert (shared.threads.tenths, shared.memory.mebibytes) == (250, 2048)
    assert shared.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "8.3"
    assert shared.env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=682M"


@given(st.integers(1, 1000), st.integers(1, 4096), st.integers(1, 64))
def test_parts_never_exceed_the_whole(tenths: int, mebibytes: int, processes: int) -> None:
    """The limits that the processes of a lease get never sum up to more than the lease has."""
    asked = LeaseRequest(ActiveThreadPercentage(tenths), PinnedDeviceMemLimit(mebibytes), processes=processes)
    share = admission.share_on(asked, OFFER)
    if isinstance(share, Shortage):
        assert tenths < processes or mebibytes < processes
        assert share.error is InvalidRequestError
        return
    each = ActiveThreadPercentage.parse(share.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
    memory = share.env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"].removeprefix("0=")
    each_mebibytes = int(memory[:-1]) * (1024 if memory.endswith("G") else 1)
    assert 0 < each.tenths * processes <= tenths
    assert 0 < each_mebibytes * processes <= mebibytes


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "offer", "limit", "error"),
    [
        (request(10, 80), OFFER, "memory", NeverFitsError),
        (request(10, 79), OFFER, None, None),
        (request(10, 1, processes=49), OFFER, "clients", NeverFitsError),
        (request(10, 1, processes=48), OFFER, None, None),
        (request(60, 1), replace(OFFER, threads=500), "threads", NeverFitsError),
        (
            request(60, 1),
            replace(OFFER, limits=Limits(ActiveThreadPercentage(500), None)),
            "limits.active_thread_percentage",
            ExceedsDaemonLimitError,
        ),
        (request(60, 1, processes=2), replace(OFFER, limits=Limits(ActiveThreadPercentage(500), None)), None, None),
        (
            request(10, 5),
            replace(OFFER, limits=Limits(ActiveThreadPercentage(1000), PinnedDeviceMemLimit(4096))),
            "limits.pinned_device_mem_limit",
            ExceedsDaemonLimitError,
        ),
        (
            request(10, 4),
            replace(OFFER, limits=Limits(ActiveThreadPercentage(1000), PinnedDeviceMemLimit(4096))),
            None,
            None,
        ),
    ],
)
def test_what_can_never_be(asked: LeaseRequest, offer: Offer, limit: str | None, error: type[MpsdError] | None) -> None:
    """What waiting cannot help is told apart, with the limit that forbids it and the error that it is."""
    shortage = admission.never(asked, share_of(asked, offer), offer)
    assert (shortage.limit if shortage else None, shortage.error if shortage else None) == (limit, error)
    assert shortage is None or (shortage.hint and not shortage.temporary)


FREE: Final = Amount(1000, 79 * GIB, 48)


@pytest.mark.parametrize(
    ("asked", "free", "uids", "limit"),
    [
        (request(10, 1), FREE, {}, None),
        (request(10, 1), Amount(100, GIB, 1), {}, None),
        (request(10.1, 1), Amount(100, GIB, 1), {}, "threads"),
        (request(10, 1.5), Amount(100, GIB, 1), {}, "memory"),
        (request(10, 1, processes=2), Amount(100, GIB, 1), {}, "clients"),
        (request(10, 1), Amount(-50, -GIB, -1), {}, "threads"),
        (request(10, 1), FREE, {7: 1}, "user"),
        (request(10, 1), FREE, {1000: 2}, None),
    ],
)
def test_what_is_not_free_now(asked: LeaseRequest, free: Amount, uids: dict[int, int], limit: str | None) -> None:
    """What is not free is told with its limit; on a daemon that serves one uid, the uid that has it is a limit, too."""
    offer = replace(OFFER, many_users=False)
    shortage = admission.lacks(asked, share_of(asked), offer, free=free, uids=uids, uid=1000)
    assert (shortage.limit if shortage else None) == limit
    assert shortage is None or (shortage.error is DoesNotFitError and shortage.temporary and shortage.hint)
    if limit == "user":
        assert admission.lacks(asked, share_of(asked), OFFER, free=free, uids=uids, uid=1000) is None


def test_refused_gpu() -> None:
    """A GPU that takes nobody says why, before anything is counted."""
    offer = replace(OFFER, refusal=Refusal("health", "it is down", "mend it"))
    shortage = admission.lacks(request(), share_of(request()), offer, free=Amount(), uids={7: 1}, uid=1000)
    assert shortage == Shortage("health", "it is down", "mend it", DaemonNotReadyError)


def test_what_is_left_is_told() -> None:
    """A refusal names what was asked and what is left, and never less than nothing."""
    threads = admission.lacks(
        request(39.6, 1), share_of(request(39.6, 1)), OFFER, free=Amount(395, GIB, 1), uids={}, uid=0
    )
    memory = admission.lacks(
        request(10, 2), share_of(request(10, 2)), OFFER, free=Amount(1000, -GIB, 1), uids={}, uid=0
    )
    assert threads is not None
    assert threads.because == "39.6 % of the threads were asked for, and 39.5 % are left"
    assert memory is not None
    assert memory.because.startswith("2GiB of memory were asked for, and 0")


def test_the_closest_refusal_is_told() -> None:
    """Of several refusals that one is told whose GPU could do most about it."""
    errors: Sequence[type[MpsdError]] = (NeverFitsError, ExceedsDaemonLimitError, DaemonNotReadyError, DoesNotFitError)
    shortages = [Shortage(error.code, "because", "hint", error) for error in errors]
    for count in range(1, len(shortages) + 1):
        assert admission.closest(shortages[:count]).error is errors[count - 1]
        assert admission.closest(shortages[:count][::-1]).error is errors[count - 1]


# -- where it goes ----------------------------------------------------------------------------------------------------


def test_placement() -> None:
    """Best fit takes the GPU with the least memory left, spread that with the most; as many as are asked for."""
    free = [Amount(1000, gib * GIB, 48) for gib in (30, 10, 20)]
    candidates = [(replace(share_of(request()), gpu=f"GPU-{number}"), each) for number, each in enumerate(free)]
    assert [share.gpu for share in admission.best(candidates, 1, Placement.BEST_FIT)] == ["GPU-1"]
    assert [share.gpu for share in admission.best(candidates, 1, Placement.SPREAD)] == ["GPU-0"]
    assert [share.gpu for share in admission.best(candidates, 2, Placement.BEST_FIT)] == ["GPU-1", "GPU-2"]


# -- nothing is given twice -------------------------------------------------------------------------------------------


def lease(number: int, asked: LeaseRequest, uid: int = 1000) -> Lease:
    """Return a lease that was just asked for, by a caller who does not wait."""
    return Lease(
        id=f"lease-{number}",
        state=LeaseState.WAITING,
        because="",
        owner=Owner(uid, uid, 1, None),
        holder=ProcessIdentity(1, 1),
        request=asked,
        arrival=0,
        created=NOW.time,
        until=NOW.seconds,
    )


_REQUESTS: Final = st.builds(
    request,
    st.integers(1, 1000).map(lambda tenths: tenths / 10),
    st.integers(1, 79),
    gpu=st.sampled_from(["any", "GPU-0", "GPU-1"]),
    processes=st.integers(1, 30),
) | st.builds(fraction, st.sampled_from([0.1, 0.25, 0.29, 0.5, 1]), gpus=st.integers(1, 2))

_STEPS: Final = st.one_of(
    st.tuples(st.just("ask"), _REQUESTS, st.sampled_from([1000, 2000])),
    st.tuples(st.just("end"), st.integers(0, 100), st.none()),
)


@given(st.lists(_STEPS, max_size=60), st.sampled_from(Placement), st.booleans())
def test_never_over_committed(steps: list[tuple[str, object, int | None]], placement: Placement, many: bool) -> None:  # noqa: FBT001
    """Whatever is asked for and ended, no GPU ever gives more than it has, and what has ended is free again."""
    ledger = Ledger(Rules(placement=placement), Usage(3600.0, {}))
    offers = [replace(offer, many_users=many) for offer in (OFFER, OTHER)]
    ledger.offer(offers)
    held: dict[str, Lease] = {}
    hints: list[str] = []
    for number, (step, what, uid) in enumerate(steps):
        if step == "ask":
            assert isinstance(what, LeaseRequest)
            try:
                granted = ledger.submit(lease(number, what, uid or 0), NOW)
            except MpsdError as refused:
                hints.append(refused.hint)
            else:
                held[granted.id] = granted
        elif held:
            assert isinstance(what, int)
            gone = sorted(held)[what % len(held)]
            assert ledger.end(gone, "it ended", NOW) is not None
            assert ledger.end(gone, "again", NOW) is None
            del held[gone]
        for offer in offers:
            parts = [(each, share) for each in held.values() for share in each.shares if share.gpu == offer.gpu]
            total = Amount(
                sum(share.threads.tenths for _, share in parts),
                sum(share.memory.bytes for _, share in parts),
                sum(each.request.processes for each, _ in parts),
            )
            assert ledger.taken(offer.gpu) == total
            assert Amount(offer.threads, offer.memory, offer.clients).holds(total)
            assert many or len({each.owner.uid for each, _ in parts}) <= 1
    assert all(hints)
    for each in list(held):
        ledger.end(each, "it ended", NOW)
    assert all(ledger.taken(offer.gpu) == Amount() for offer in offers)
    assert ledger.user(1000).amount == ledger.user(2000).amount == Amount()


def test_refusals_of_the_ledger() -> None:
    """What is refused says whether asking again can help."""
    ledger = Ledger(Rules(), Usage(3600.0, {}))
    with pytest.raises(DaemonNotReadyError):
        ledger.submit(lease(0, request()), NOW)
    ledger.offer([OFFER, replace(OTHER, memory=10 * GIB)])
    with pytest.raises(NeverFitsError):
        ledger.submit(lease(1, request(10, 80)), NOW)
    with pytest.raises(NeverFitsError):
        ledger.submit(lease(2, request(gpus=3)), NOW)
    ledger.submit(lease(3, request(10, 70)), NOW)
    with pytest.raises(DoesNotFitError) as refused:
        ledger.submit(lease(4, request(10, 20)), NOW)
    assert (refused.value.limit, refused.value.retryable) == ("memory", True)
