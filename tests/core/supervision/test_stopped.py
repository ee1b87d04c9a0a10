"""Whether a stopped server is ended: case by case."""

from typing import Final

import pytest

from mpsd.core.model import GpuUsage, Known, Reading, Unknown
from mpsd.core.supervision.stopped import used_by

READ: Final = Known(GpuUsage(0))
DUMB: Final = Unknown("NVML did not answer")
ANN, BOB = 1001, 1002


@pytest.mark.parametrize(
    ("leases", "clients", "usage", "many_users", "words"),
    [
        ({}, (), READ, False, ""),
        ({}, (), READ, True, ""),
        ({"lease-b": {BOB}}, (), READ, False, ""),
        ({"lease-b": {BOB}}, (), READ, True, "lease-b may use it"),
        ({"lease-a": {ANN}}, (), READ, False, "lease-a may use it"),
        ({"lease-r": {0, ANN}}, (), READ, False, "lease-r may use it"),
        ({}, (7,), READ, False, "its clients are 7"),
        ({}, (0,), READ, False, "its clients are a process that mpsd does not see"),
        ({"lease-a": {ANN}}, (9, 8, 7, 6, 5), DUMB, False, "its clients are 5, 6, 7, 2 more"),
        ({}, (), DUMB, False, "whether it has clients is unknown: NVML did not answer"),
        ({"lease-b": {BOB}}, (), DUMB, False, "whether it has clients is unknown: NVML did not answer"),
    ],
)
def test_users(
    leases: dict[str, set[int]], clients: tuple[int, ...], usage: Reading[GpuUsage], *, many_users: bool, words: str
) -> None:
    """A lease of its user, a living client and a GPU that cannot be read each keep a server; nothing else does."""
    assert used_by(ANN, leases, clients, usage, many_users=many_users) == words
