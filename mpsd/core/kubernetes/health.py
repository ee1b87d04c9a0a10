"""The GPUs to offer, from mpsd's report on them and from the age of that report. Pure."""

from collections.abc import Iterable, Mapping

from mpsd.core.kubernetes.devices import Gpu


def offered(seen: Iterable[Gpu], before: Mapping[str, Gpu]) -> dict[str, Gpu]:
    """Return the GPUs to offer: those that mpsd reports now and, as unhealthy, those that it reported before."""
    now = {each.uuid: each for each in seen}
    gone = {
        uuid: gpu._replace(because="mpsd does not show it any more") for uuid, gpu in before.items() if uuid not in now
    }
    return {**gone, **now}


def unreachable(before: Mapping[str, Gpu], because: str) -> dict[str, Gpu]:
    """Return the GPUs of an mpsd that has not answered for too long, as unhealthy: a claim on them would fail."""
    return {uuid: gpu._replace(because=f"mpsd does not answer: {because}") for uuid, gpu in before.items()}
