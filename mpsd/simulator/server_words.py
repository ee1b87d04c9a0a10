"""The words of a simulated server about a fatal fault and the ends of clients, as its driver branch prints them. Pure.

580 was measured on an H200. 470 has the words of a public log of 460, and those of NVIDIA's documentation of that time
for the fault; the branches between have the latter without the prefix, which is a belief.
"""

from collections.abc import Iterator, Sequence
from typing import Final

PAIR: Final = "{{PID: {}, Context ID: {}}}"
"""The log's name for a client's context (LOG). A process without a context is named by its first, which is 0."""

_UNPREFIXED: Final = 535
"""The first branch whose servers print no `Volta MPS: `."""
_MEASURED: Final = 580
"""The branch whose words were measured."""


def fault(branch: int, hit: Sequence[int], devices: int) -> Iterator[str]:
    """Yield the lines about a fault that hits these clients, on this number of devices. The first of them caused it."""
    if branch >= _MEASURED:
        if hit:
            yield f"Client {{PID: {hit[0]}, Context: 1}} encountered a fatal GPU error."
        yield "Server is handling a fatal GPU error."
        for pid in hit:
            yield f"Client {PAIR.format(pid, 1)} on device 0 to be torn down"
        for pid in hit:
            yield f"All clients belonging to error trigging process {pid} will be torn down"
            yield f"Client {PAIR.format(pid, 1)} on the error-trigging process {pid} to be torn down"
        yield "The following devices will be reset:"
    else:
        yield _old(branch, "Server is handling a fatal GPU error.")
        for pid in hit:
            yield _old(branch, f"status of client {PAIR.format(pid, 0)} is INACTIVE")
        yield _old(branch, "The following devices")
    for device in range(devices):
        yield _old(branch, str(device))
    if branch >= _MEASURED:
        yield "The following client process have a sticky error set:"
    else:
        yield _old(branch, "The following clients have a sticky error set:")
    for pid in hit:
        yield _old(branch, str(pid))


def left(branch: int, pid: int, contexts: Sequence[int], *, others: int, listed: bool) -> Iterator[str]:
    """Yield the lines about the end of a client that had these contexts, while its `others` have theirs.

    They are those of every end, also a normal one. `listed` tells whether the server had the client until then.
    """
    if branch >= _MEASURED:
        for left_behind, context in enumerate(reversed(contexts), start=1):
            yield f"Server failed to recevie command with status 806, assuming client {PAIR.format(pid, context)} exit"
            count = others + len(contexts) - left_behind
            yield f"Client {PAIR.format(pid, context)} exiting. Number of active client contexts is {count}."
        yield f"Server failed to recevie command with status 806, assuming client {PAIR.format(pid, 0)} exit"
        yield f"Client process {pid} disconnected"
    elif branch < _UNPREFIXED:
        for left_behind, _ in enumerate(contexts, start=1):
            yield "Receive command failed, assuming client exit"
            count = others + len(contexts) - left_behind
            yield _old(branch, f"Client disconnected. Number of active client contexts is {count}")
        yield "Receive command failed, assuming client exit"
        yield _old(branch, "Client process disconnected")
    else:
        yield "Receive command failed, assuming client exit. Client process disconnected"
        if listed:
            yield f"Client {PAIR.format(pid, 0)} exit"


def _old(branch: int, text: str) -> str:
    return f"Volta MPS: {text}" if branch < _UNPREFIXED else text
