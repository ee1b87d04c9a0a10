"""What a program requests of a lease, as keyword arguments: the fields of the API, and the notations of mpsctl."""

from collections.abc import Mapping
from math import isfinite
from typing import Literal, TypedDict, cast


class Request(TypedDict, total=False):
    """The request for a lease: `fraction`, or `threads` and `memory`; mpsd has the defaults of the others.

    docs/reference/api.md describes each field. A text is read as the option of `mpsctl run` that has the same name.
    """

    fraction: float | str
    """The part of one GPU's threads and memory: 0.25, `25%` or `1/4`."""
    threads: float | str
    """Percent of the GPU's threads: 25, or `25%`."""
    memory: float | str
    """Device memory: bytes, such as `4e9`, or `8GiB`."""
    gpu: int | str
    """The GPU: its index, `gpu0`, its UUID, or `any`."""
    gpus: int
    """Number of GPUs: the same amount on each, all or nothing. A process uses one of them."""
    processes: int | Literal["any"]
    """Maximum client processes on each GPU, which share the amounts; with `any`, each may use all of them."""
    priority: int
    wait: float | str
    """Seconds to wait in a fair queue until the request fits, `10m`, or `forever`; 0, the default: not at all."""
    ttl: float | str
    """Time to live: seconds, or `2h`. The lease is renewed while its Lease is open."""
    name: str
    labels: Mapping[str, str]
    client_priority: Literal[0, 1]
    connections: int
    """CUDA_DEVICE_MAX_CONNECTIONS of its clients; by default, what this process has."""
    visible: Literal["uuid", "index"]
    stop: Literal["terminate", "sigterm"]
    pid: int
    """The process that holds the lease; by default this one."""


def body(options: Mapping[str, object]) -> dict[str, object]:
    """Return a request as the API has it, without what is None; `wait` and `ttl` are seconds.

    Raises InvalidRequestError for a text in no valid notation, and for an amount or a duration that is none.
    """
    from mpsd.core.errors import InvalidRequestError
    from mpsd.core.units import parse_fraction, parse_percentage, parse_span, parse_wait

    asked = {name: value for name, value in options.items() if value is not None}
    for name, parse in (("fraction", parse_fraction), ("threads", parse_percentage)):
        if isinstance(value := asked.get(name), str):
            asked[name] = parse(value)
    for name in ("fraction", "threads", "memory"):
        if isinstance(value := asked.get(name), float) and not isfinite(value):
            raise InvalidRequestError(f"{name} is {value}, which is no amount", hint="give a finite number", limit=name)
    if isinstance(value := asked.get("memory"), float):
        asked["memory"] = int(value)
    for name, seconds_of in (("wait", parse_wait), ("ttl", parse_span)):
        if name in asked:
            asked[name] = seconds_of(cast("float | str", asked[name]))
    if isinstance(value := asked.get("gpu"), int):
        asked["gpu"] = f"{value}"
    if isinstance(value := asked.get("labels"), Mapping):
        asked["labels"] = dict(value)
    return asked
