"""Facts about a GPU: whether it can be used, which GPU a name means, how new its driver is."""

from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.errors import InvalidRequestError
from mpsd.core.gpus import condemns, describe_xid, driver_branch, recovery, select, unsupported
from mpsd.core.model import Gpu
from mpsd.core.units import GIB

_GPU: Final = Gpu(3, "GPU-0a", "NVIDIA H100", 80 * GIB, (9, 0), mig=False, driver_version="535.261.03")


@pytest.mark.parametrize("compute_capability", [(3, 5), (5, 0), (7, 0), (9, 0), (12, 1)])
def test_gpu_will_do_from_3_5_on(compute_capability: tuple[int, int]) -> None:
    """Every compute capability from the minimum on is accepted; 12.1 is greater than 3.5, as a number, not as text."""
    assert unsupported(replace(_GPU, compute_capability=compute_capability)) is None


def test_gpu_that_is_too_old() -> None:
    """The refusal names the GPU's compute capability and the one that MPS needs."""
    refusal = unsupported(replace(_GPU, compute_capability=(3, 0), mig=True))
    assert refusal is not None
    because, hint = refusal
    assert "3.0" in because
    assert "3.5" in because
    assert "nvidia-smi" not in hint  # there is no setting that an operator could change


def test_gpu_in_mig_mode() -> None:
    """The hint of the refusal has the command, with this GPU's own index."""
    refusal = unsupported(replace(_GPU, mig=True))
    assert refusal is not None
    because, hint = refusal
    assert "MIG" in because
    assert "nvidia-smi -i 3 -mig 0" in hint


_FIRST: Final = replace(_GPU, index=0, uuid="GPU-5ba1e000-0000-4000-8000-00000000000a")


def test_start_of_a_uuid_is_not_the_start_of_an_index() -> None:
    """Even on a node with one GPU, neither an empty text nor the common beginning of all UUIDs names it."""
    for wanted in ("", "G", "GPU", "GPU-"):
        with pytest.raises(InvalidRequestError):
            select([_FIRST], wanted)


def test_node_without_gpus_names_none() -> None:
    """A node without GPUs has nothing to choose from, and the hint says where the reason is."""
    with pytest.raises(InvalidRequestError) as refused:
        select([], "0")
    assert "mpsctl gpus" in refused.value.hint


@given(st.sets(st.uuids(version=4), min_size=1, max_size=16), st.data())
def test_selected_gpu_is_the_one_named(uuids: "set[object]", data: st.DataObject) -> None:
    """Any beginning of a UUID on any node selects that GPU, or is refused when another UUID has the same beginning."""
    gpus = [replace(_GPU, index=index, uuid=f"GPU-{uuid}") for index, uuid in enumerate(sorted(map(str, uuids)))]
    meant = data.draw(st.sampled_from(gpus))
    wanted = meant.uuid[: data.draw(st.integers(min_value=len("GPU-") + 1, max_value=len(meant.uuid)))]
    if sum(gpu.uuid.startswith(wanted) for gpu in gpus) == 1:
        assert select(gpus, wanted) is meant
    else:
        with pytest.raises(InvalidRequestError):
            select(gpus, wanted)


@pytest.mark.parametrize(
    ("version", "branch"),
    [
        ("535.261.03", 535),
        ("470.256.02", 470),
        ("555.58", 555),
        ("590", 590),
        ("", None),
        ("N/A", None),
        ("535.", None),
        ("v535.1", None),
        ("535.1-rc1", None),
        ("\u0665\u0663\u0665.1", None),
    ],
)
def test_driver_branch(version: str, branch: int | None) -> None:
    """The branch is the first number of a version; text that is no version has none, which means unknown, not old."""
    assert driver_branch(version) == branch


def test_recovery() -> None:
    """A GPU that reports a recovery action is not granted, and the reason has the remedy; so for an unknown action."""
    assert recovery(0, 1) is None
    for action in (*range(1, 8), 99):
        found = recovery(action, 1)
        assert found is not None
        assert found[0].startswith("it needs ")
    assert recovery(1, 3) == (
        "it needs a reset",
        "end its processes, then reset it: nvidia-smi -i 3 --gpu-reset; mpsd reads it again by itself",
    )


def test_xids() -> None:
    """An Xid that programs cause does not condemn a GPU; every other Xid does, known or not."""
    assert not condemns(31)
    assert "page fault" in describe_xid(31)
    assert not condemns(63)
    assert "was recorded" in describe_xid(63)
    assert all(condemns(each) for each in (48, 79, 94, 95, 119, 999))
    assert "79" in describe_xid(79)
