"""The health of the offered devices, from mpsd's report on their GPU and from the age of that report. Pure."""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from mpsd.core.kubernetes.devices import Gpu

HEALTHY: Final = "ok"
"""The health of a GPU that may be granted."""

READY: Final = "ready"
"""The state of a control daemon in which mpsd grants leases on its GPU."""


class Seen(NamedTuple):
    """A GPU and its control daemon, as mpsd reports them."""

    uuid: str
    mebibytes: int
    health: str
    because: str
    daemon: str
    state: str
    state_because: str
    pipe_directory: str
    driver: int | None
    position: int = 0
    model: str = ""
    version: str = ""


def offered(seen: Iterable[Seen], before: Mapping[str, Gpu]) -> dict[str, Gpu]:
    """Return the GPUs to offer: those that mpsd reports now and, as unhealthy, those that it reported before."""
    now = dict[str, Gpu]()
    for each in seen:
        because = ""
        if each.health != HEALTHY:
            because = f"GPU {each.uuid} is {each.health}: {each.because}"
        elif each.state != READY:
            because = f"control daemon {each.daemon} is {each.state}: {each.state_because}"
        now[each.uuid] = Gpu(
            each.uuid,
            each.mebibytes,
            each.daemon,
            each.pipe_directory,
            each.driver,
            because,
            each.position,
            each.model,
            each.version,
        )
    gone = {
        uuid: gpu._replace(because="mpsd does not show it any more") for uuid, gpu in before.items() if uuid not in now
    }
    return {**gone, **now}


def unreachable(before: Mapping[str, Gpu], because: str) -> dict[str, Gpu]:
    """Return the GPUs of an mpsd that has not answered for too long, as unhealthy: a claim on them would fail."""
    return {uuid: gpu._replace(because=f"mpsd does not answer: {because}") for uuid, gpu in before.items()}
