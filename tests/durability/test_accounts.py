"""mpsd is ended by SIGKILL at each store operation of a short life, and the history still tells what the events do."""

import http.client
from contextlib import suppress

import pytest

from tests.accounts import check_one_story
from tests.durability.conftest import Fork
from tests.durability.forked import ForkedNode
from tests.durability.test_crash import begin, end

pytestmark = pytest.mark.thorough

OPERATIONS = range(1, 200, 4)
"""Store operations of a life, counted from its start: opening the stores, leases, events and samples."""

SHARED = 5
"""Tests that these are divided among."""

LOST = (OSError, http.client.HTTPException, AssertionError)
"""How a request ends for whose answer mpsd did not live."""


def use(node: ForkedNode) -> None:
    """Take out and release leases until mpsd is dead."""
    with suppress(*LOST):
        for number in range(200):
            answer = node.request("POST", "/v1/leases", {"threads": 5, "memory": "1GiB", "name": f"n{number % 3}"})
            assert answer.status in {201, 409}
            if number % 3 and answer.status == 201:
                node.request("DELETE", f"/v1/leases/{answer.json['id']}")


@pytest.mark.parametrize("share", range(SHARED))
def test_killed_at_each_store_operation(fork: Fork, share: int) -> None:
    """Whichever is the last, done or half done, no grant is lost, counted twice, or counted for another time."""
    node = fork(config="[api]\nlines_per_uid = 100000\n")
    for operation in OPERATIONS[share::SHARED]:
        if begin(node, kill_at=operation, torn=bool(operation % 8 == 1)):
            use(node)
        end(node)
        assert begin(node)
        check_one_story(node)
        for lease in node.leases():
            node.request("DELETE", f"/v1/leases/{lease['id']}")
        check_one_story(node)
        node.end()
