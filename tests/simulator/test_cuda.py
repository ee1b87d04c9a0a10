"""The limits of a client at its connection: from the server's limits and its own environment."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.units import GIB, MIB
from mpsd.simulator.cuda import MULTIPROCESSORS, CudaError, Pinned, pinned, visible

FIRST: Final = "GPU-11111111-2222-4333-8444-555555555555"
SECOND: Final = "GPU-12345678-7777-4888-8999-aaaaaaaaaaaa"
DEVICES: Final = (FIRST, SECOND)

VISIBLE: Final[dict[str | None, tuple[str, ...]]] = {
    None: DEVICES,
    "": (),
    "0": (FIRST,),
    "1,0": (SECOND, FIRST),
    " 1 , 0": (SECOND, FIRST),
    "2": (),
    "0,2,1": (FIRST,),
    "0,0": (FIRST,),
    "-1": (),
    FIRST: (FIRST,),
    f"{SECOND},{FIRST}": (SECOND, FIRST),
    "GPU-12": (SECOND,),
    "GPU-1": (),  # the beginning of two UUIDs
    "11111111": (),  # beyond any ordinal
    "abc": (),
}

PERCENTAGES: Final = {"25": 25.0, "12.5": 12.5, "60": 60.0, "80": 60.0, "0": 60.0, "-5": 60.0, "150": 60.0, "abc": 60.0}

MEMORY: Final[dict[str, int | None]] = {
    # The server's limit on the first device is 8 GiB.
    "": 8 * GIB,
    "0=2G": 2 * GIB,
    "0=512M": 512 * MIB,
    "0=16G": 8 * GIB,
    f"{FIRST}=1G": GIB,
    "0=0": 8 * GIB,
    "0": 8 * GIB,
    "1=1G": 8 * GIB,
    "0=2G,1=1G": 2 * GIB,
    "1=1G,0=2G": 2 * GIB,
    "2=1G": None,  # an entry for an invisible GPU drops every limit
    "0=2G,2=4G": None,
    "0=512MB": 512 * MIB,
}


@pytest.mark.parametrize("variable", VISIBLE)
def test_visible(variable: str | None) -> None:
    """CUDA_VISIBLE_DEVICES selects and orders devices, up to the first invalid entry."""
    assert visible(DEVICES, variable) == VISIBLE[variable]


@pytest.mark.parametrize("own", PERCENTAGES)
def test_percentage(own: str) -> None:
    """A process can only lower the server's percentage."""
    share = pinned(DEVICES, 60.0, {}, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": own})
    assert share == Pinned(FIRST, PERCENTAGES[own], None)


@pytest.mark.parametrize("own", MEMORY)
def test_memory(own: str) -> None:
    """A process can lower the server's memory limit, or drop it altogether; the percentage stays."""
    share = pinned(DEVICES, 60.0, {0: 8 * GIB}, {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": own})
    assert share == Pinned(FIRST, 60.0, MEMORY[own])


def test_limit_of_the_device_that_it_works_on() -> None:
    """The server numbers the devices that it sees, the client those that it sees of them."""
    environment = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=3G"}
    assert pinned(DEVICES, 100.0, {0: GIB, 1: 8 * GIB}, environment) == Pinned(SECOND, 100.0, 3 * GIB)
    assert pinned(DEVICES, 100.0, {0: GIB, 1: 2 * GIB}, environment) == Pinned(SECOND, 100.0, 2 * GIB)
    assert pinned(DEVICES, 100.0, {1: 0}, {"CUDA_VISIBLE_DEVICES": "1"}) == Pinned(SECOND, 100.0, None)
    assert pinned(DEVICES, 100.0, {}, {"CUDA_VISIBLE_DEVICES": ""}) is CudaError.NO_DEVICE


@given(st.floats(min_value=0.1, max_value=100))
def test_multiprocessors(percentage: float) -> None:
    """A percentage is rounded down to whole pairs of multiprocessors, but to at least four pairs."""
    share = Pinned(FIRST, percentage, None)
    assert share.multiprocessors % 2 == 0
    assert share.multiprocessors == 8 or share.rate <= percentage / 100
    assert 8 <= share.multiprocessors <= MULTIPROCESSORS


def test_rates() -> None:
    """The multiprocessors of a percentage are those of an H200 (measured on 580)."""
    measured = {100: 132, 75: 98, 50: 66, 30: 38, 25: 32, 12.5: 16, 10: 12, 1: 8, 0.1: 8}
    assert {percentage: Pinned(FIRST, percentage, None).multiprocessors for percentage in measured} == measured
