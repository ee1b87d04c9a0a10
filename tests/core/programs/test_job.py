"""The GPUs of a job, the GPU of each rank, and the share of ranks."""

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.errors import InvalidRequestError
from mpsd.core.programs import job
from mpsd.core.programs.job import JobGpu
from mpsd.core.units import GIB

GPUS = [JobGpu(index, f"GPU-{index}{index}{index}", "H100", index // 2) for index in range(4)]


@pytest.mark.parametrize(
    ("text", "indices"),
    [(None, [0, 1, 2, 3]), ("2", [2]), ("3,1", [3, 1]), ("GPU-11,0", [1, 0]), ("1,1", [1]), (" 1 , 2 ", [1, 2])],
)
def test_visible(text: str | None, indices: list[int]) -> None:
    assert [each.index for each in job.visible(text, GPUS, by_bus=False)] == indices


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the job may see no GPU"),
        ("-1", "the job may see no GPU"),
        ("NoDevFiles", "the job may see no GPU"),
        ("MIG-7", "mpsd supervises whole GPUs"),
        ("4", "CUDA_VISIBLE_DEVICES names '4', and the job may see no such GPU"),
        (",", "there is no GPU for the job"),
    ],
)
def test_visible_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(sentence)):
        job.visible(text, GPUS, by_bus=False)


def test_order_of_different_gpus() -> None:
    """CUDA may count GPUs that differ in another order than NVML, unless the variable says otherwise."""
    different = [*GPUS, JobGpu(4, "GPU-444", "A2")]
    with pytest.raises(InvalidRequestError, match="CUDA_DEVICE_ORDER"):
        job.visible("0", different, by_bus=False)
    assert [each.index for each in job.visible("0", different, by_bus=True)] == [0]
    assert [each.index for each in job.visible("GPU-4", different, by_bus=False)] == [4]


@pytest.mark.parametrize(("text", "indices"), [("all", [0, 1, 2, 3]), ("2", [0, 1]), ("2,", [2]), ("GPU-3,0", [3, 0])])
def test_chosen(text: str, indices: list[int]) -> None:
    assert [each.index for each in job.chosen(text, GPUS)] == indices


@pytest.mark.parametrize("text", ["0", "", ",", "5", "7,", "x", "0,x", "GPU-4"])
def test_chosen_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="--gpus"):
        job.chosen(text, GPUS)


@pytest.mark.parametrize(
    ("text", "count", "is_possible"),
    [("64", None, True), ("GPU-3,0", None, True), ("x", None, False), ("2", 2, True), ("3", 2, False), ("2,", 2, False),
     ("GPU-3,9", 2, True), ("all", 2, True), (",", 2, False)],
)  # fmt: skip
def test_gpus_before_they_are_known(text: str, count: int | None, *, is_possible: bool) -> None:
    """What no node can satisfy is refused; whether a GPU has a UUID is not known yet."""
    with contextlib.nullcontext() if is_possible else pytest.raises(InvalidRequestError, match="--gpus"):
        job.check_gpus(text, count)


@given(st.lists(st.sampled_from([frozenset({0}), frozenset({1}), frozenset({0, 1})]), min_size=4, max_size=70))
def test_spread_evenly(nodes: list[frozenset[int]]) -> None:
    """Every GPU has equally many ranks, or one more, whatever the processors of the ranks are."""
    found = job.spread(dict(enumerate(nodes)), GPUS)
    counts = [[*found.values()].count(each) for each in GPUS]
    assert sum(counts) == len(nodes)
    assert max(counts) - min(counts) <= 1


def test_nearest() -> None:
    """The nearest GPU is taken where that spreads ranks evenly, and blocks of ranks otherwise."""
    crossed = {0: frozenset({1}), 1: frozenset({0}), 2: frozenset({1}), 3: frozenset({0})}
    assert {rank: gpu.node for rank, gpu in job.spread(crossed, GPUS).items()} == {0: 1, 1: 0, 2: 1, 3: 0}
    one_sided = dict.fromkeys(range(8), frozenset({0}))
    assert [gpu.index for gpu in job.spread(one_sided, GPUS).values()] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_ranks_that_span_gpus() -> None:
    with pytest.raises(InvalidRequestError, match="2 ranks for 4 GPUs") as refused:
        job.spread({0: frozenset(), 1: frozenset()}, GPUS)
    assert "--gpus 2" in refused.value.hint


def test_share() -> None:
    def share(ranks: int | None, **given: object) -> dict[str, object]:
        return job.share(ranks, **{"threads": None, "memory": None, "even": False, "free": 80 * GIB + 1, **given})  # type: ignore[arg-type]

    assert share(None) == {"fraction": 1.0, "processes": "any"}
    assert share(8, threads=40.0) == {"threads": 40.0, "memory": 80 * GIB, "processes": "any"}
    assert share(8, even=True) == {"fraction": 1.0, "processes": 8}
    assert share(4, memory=2 * GIB, threads=20.0) == {"threads": 80.0, "memory": 8 * GIB, "processes": 4}
    assert share(3, memory=2 * GIB) == {"threads": pytest.approx(99.9), "memory": 6 * GIB, "processes": 3}
    for refused in ({"even": True}, {"memory": GIB}):
        with pytest.raises(InvalidRequestError, match="the number of ranks is not known"):
            share(None, **refused)
    with pytest.raises(InvalidRequestError, match=r"8 ranks on a GPU with 25 % each"):
        share(8, memory=GIB, threads=25.0)
    with pytest.raises(InvalidRequestError, match=r"8 ranks on a GPU with 11GiB each"):
        share(8, memory=11 * GIB)


def test_placed() -> None:
    found = {0: GPUS[1], 1: GPUS[1], 2: GPUS[0], 4: GPUS[0], 9: GPUS[3]}
    assert job.placed(found) == "ranks 2, 4 on GPU 0, ranks 0 to 1 on GPU 1, rank 9 on GPU 3"
