"""Environments that clients of MPS invent: their lease's own, none, larger limits, and nonsense."""

import random
from typing import Final

from mpsd.core.model import Limits

PERCENTAGE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEM_LIMIT: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"

_PERCENTAGES: Final = ("100", "99.9", "1000", "-1", "0", "", "inf", "nan", "0x64", "all", "1e9", "100%")
_MEM_LIMITS: Final = ("0=80G", "0=999999G", "0=0", "0=-1M", "0=", "0", "", ",", "0=all", "0=18446744073709551615M")
"""No entry for a GPU that the client does not see: by NVIDIA's own guide that drops even the server's limit, so that
nothing can limit such a client to its share; it is a violation (tests/daemon/leases/test_violations.py).
"""


def any_environment(dice: random.Random, own: Limits) -> dict[str, str]:
    """Return the two limits as a client may set them whose lease gives it `own`."""
    assert own.pinned_device_mem_limit is not None
    environment = {}
    for name, mine, others in (
        (PERCENTAGE, f"{own.active_thread_percentage}", _PERCENTAGES),
        (MEM_LIMIT, f"0={own.pinned_device_mem_limit.mebibytes}M", _MEM_LIMITS),
    ):
        match dice.choice(["own", "unset", "other"]):
            case "own":
                environment[name] = mine
            case "other":
                environment[name] = dice.choice(others)
    return environment
