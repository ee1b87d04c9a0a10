"""A request that its own user's leases obstruct reserves nothing: other users get the same with it or without it."""

from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpsd.core.admission.admission import Amount
from mpsd.core.errors import DoesNotFitError
from mpsd.core.model import Lease, LeaseState
from mpsd.core.settings import Placement
from tests.core.admission.scenarios import Desk, gpu, granted_on, now, offer

pytestmark = pytest.mark.thorough

MALLORY, ANN, BOB = 1, 2, 3
GPUS: Final = 3

sizes = st.fixed_dictionaries(
    {"threads": st.sampled_from((5, 20, 50, 100)), "memory": st.sampled_from((1, 1, 30, 80))},
    optional={
        "gpu": st.sampled_from([gpu(index) for index in range(GPUS)]),
        "processes": st.sampled_from((1, 20, 48)),
        "priority": st.sampled_from((-1, 1)),
    },
)
small = st.builds(lambda index: {"threads": 5, "memory": 1, "gpu": gpu(index)}, st.integers(0, GPUS - 1))
several = st.builds(lambda size, gpus: {**size, "gpu": "any", "gpus": gpus}, sizes, st.integers(2, GPUS))
steps = st.lists(
    st.tuples(st.just("ask"), sizes | several, st.sampled_from((ANN, BOB)))
    | st.tuples(st.just("end"), st.integers(0, 100), st.none())
    | st.tuples(st.just("pass"), st.sampled_from((1.0, 100.0, 1000.0)), st.none()),
    min_size=1,
    max_size=20,
)


class Node:
    """A desk, and the grants of users other than Mallory so far, by number."""

    def __init__(self, *, many_users: bool, placement: Placement) -> None:
        self.desk = Desk(
            *(offer(index, many_users=many_users) for index in range(GPUS)), patience=50.0, placement=placement
        )
        self.asked: list[Lease] = []

    def take(self, step: tuple[str, Any, Any]) -> None:
        """Carry out a step, and grant what can be granted."""
        what, value, uid = step
        if what == "ask":
            self.asked.append(self.desk.ask(**value, uid=uid, wait=None))
        elif what == "pass":
            self.desk.at += value
        elif self.asked:
            self.desk.ledger.end(self.asked[value % len(self.asked)].id, "released", now(self.desk.at))
        self.desk.settle()

    def places(self) -> list[list[str] | None]:
        """Return where each of the others' requests was granted; None for one that waits, or has ended."""
        found = [self.desk.ledger.leases.get(each.id) for each in self.asked]
        return [None if each is None else [share.gpu for share in each.shares] for each in found]


def is_in_its_own_way(node: Node, lease: Lease) -> bool:
    """Return whether a request of Mallory's could not be granted even if all other users were gone."""
    mine = [each for each in node.desk.ledger.leases.values() if each.owner.uid == MALLORY]
    request, fits = lease.request, 0
    assert request.threads is not None
    assert request.memory is not None
    for index in range(GPUS):
        need = Amount(request.threads.tenths, request.memory.bytes, request.processes or 1)
        total = granted_on(mine, gpu(index)) + need
        there = request.gpu in {"any", gpu(index)}
        fits += there and total.threads <= 1000 and total.memory <= offer().memory and total.clients <= 48
    return fits < request.gpus


@settings(max_examples=600)
@given(
    many_users=st.booleans(),
    placement=st.sampled_from(Placement),
    before=steps,
    holds=st.lists(small, min_size=2, max_size=6),
    wants=st.lists(sizes | several, min_size=1, max_size=4),
    after=steps,
)
def test_others_get_the_same(  # noqa: PLR0917
    many_users: bool,  # noqa: FBT001 - drawn, not passed
    placement: Placement,
    before: list[Any],
    holds: list[dict[str, Any]],
    wants: list[dict[str, Any]],
    after: list[Any],
) -> None:
    """Mallory holds leases that obstruct its own waiting request; other users get the same grants as without that."""
    without, beside = (Node(many_users=many_users, placement=placement) for _ in range(2))
    for node in (without, beside):
        for step in before:
            node.take(step)
        for each in holds:
            try:
                node.desk.ask(**each, uid=MALLORY)
            except DoesNotFitError:
                continue
    for each in wants:
        lease = beside.desk.ask(**each, uid=MALLORY, wait=None)
        if lease.state is not LeaseState.WAITING or not is_in_its_own_way(beside, lease):
            beside.desk.ledger.end(lease.id, "it is not what this is about", now(beside.desk.at))
            beside.desk.settle()
    assert beside.places() == without.places()
    for step in after:
        for node in (without, beside):
            node.take(step)
        assert beside.places() == without.places()
