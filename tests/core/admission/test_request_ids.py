"""The lease of each request_id, when another uid takes a claim."""

import pytest
from msgspec import structs

from mpsd.core.admission.ledger import RequestIds
from mpsd.core.errors import RequestIdReusedError
from mpsd.core.model import Claim, Holder, HoldingProcess, Lease, Owner, ProcessIdentity
from tests.core.admission.scenarios import asked, request

ROOT, ANN = 0, 1001
WANTED = request(25, 20, request_id="job-7")
CLAIM = Claim(60.0)
TAKER = HoldingProcess(ProcessIdentity(77, 77))


def known(*leases: Lease) -> RequestIds:
    """Return the request_ids of some leases, none of which has ended."""
    by_id = {each.id: each for each in leases}
    found = RequestIds(by_id.get)
    for lease in leases:
        found.note(lease)
    return found


def claimed() -> Lease:
    return structs.replace(asked(WANTED, uid=ROOT), holders=(), claim=CLAIM, claimed_for=ROOT)


def taken(lease: Lease) -> Lease:
    return structs.replace(lease, owner=Owner(ANN, ANN, 77, None), holders=(TAKER,), claim=None)


@pytest.mark.parametrize("claim", [CLAIM, Claim(5.0)])
def test_it_stays_whoever_takes_it(claim: Claim) -> None:
    """A claim's request is answered with the same lease, also by the next mpsd; its taker's requests are separate."""
    lease = taken(claimed())
    assert known(lease).earlier(WANTED, ROOT, claim) == lease
    assert known(lease).earlier(WANTED, ANN, None) is None


@pytest.mark.parametrize("lease", [claimed(), taken(claimed())])
@pytest.mark.parametrize(("named", "said"), [(None, "its caller"), (TAKER, "pid 77")])
def test_a_request_with_a_holder(lease: Lease, named: Holder | None, said: str) -> None:
    """A request with a holder differs from a request for a claim, taken or not."""
    with pytest.raises(RequestIdReusedError, match=f"the holder was a claim, and is {said}"):
        known(lease).earlier(WANTED, ROOT, named)


def test_a_claim_instead_of_a_holder() -> None:
    """A request for a claim differs from one with a holder; a lease that became a claim later makes no difference."""
    lease = asked(WANTED, uid=ROOT)
    with pytest.raises(RequestIdReusedError, match="and is a claim"):
        known(lease).earlier(WANTED, ROOT, CLAIM)
    left = structs.replace(lease, holders=(), claim=CLAIM)
    assert known(left).earlier(WANTED, ROOT, None) == left


def test_only_its_own_end_forgets_it() -> None:
    """The end of a lease does not remove a newer one with its request_id."""
    older, newer = claimed(), claimed()
    found = known(older, newer)
    found.forget(taken(older))
    assert found.earlier(WANTED, ROOT, CLAIM) == newer
    found.forget(taken(newer))
    assert found.earlier(WANTED, ROOT, CLAIM) is None
