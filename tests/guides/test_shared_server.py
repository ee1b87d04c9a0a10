"""The guide to a shared server: ten users have what it says, under the configuration that `configure` writes."""

from contextlib import ExitStack
from typing import Final

import pytest

from mpsd.core.configuration.profiles import Machine, Profile, text_of
from mpsd.core.model import Gpu
from tests.daemon.caller import Caller, calling, needs_root
from tests.daemon.conftest import Start, make_node  # noqa: F401 - a fixture
from tests.daemon.helpers import branches
from tests.node import Node
from tests.real import RealDaemon

pytestmark = needs_root

TOTAL: Final = 80 * 2**30
GPUS: Final = tuple(
    Gpu(index, f"GPU-{index}", "NVIDIA H100", TOTAL, (9, 0), mig=False, driver_version="1") for index in range(2)
)
FIFTH: Final = {"threads": 20, "memory": "15GiB"}
FIRST: Final = 3001


def _users(stack: ExitStack, node: Node, count: int) -> list[Caller]:
    return [stack.enter_context(calling(node.socket, uid=FIRST + number)) for number in range(count)]


def test_ten_users(make_node: Start) -> None:  # noqa: F811 - the fixture
    """They share two GPUs at the same time, see each other's leases, and none gets more than the quota."""
    machine = Machine(GPUS, many_users=True, administrators="root")
    node = make_node(simulate=2, control=None, config=text_of(Profile.SHARED_SERVER, machine)).start()
    with ExitStack() as stack:
        users = _users(stack, node, 11)
        granted = [user.admit(**FIFTH) for user in users[:10]]
        assert [each.status for each in granted] == [201] * 10
        assert [each.json["expires"] for each in granted].count(None) == 0
        assert [gpu["threads_granted"] for gpu in node.get("/v1/gpus").json["gpus"]] == [100, 100]
        full = users[10].admit(**FIFTH)
        assert (full.status, full.json["code"]) == (409, "does_not_fit")
        greedy = users[0].admit(threads=90, memory="1GiB")
        assert (greedy.status, greedy.json["limit"]) == (403, "quota.threads")
        owners = {each["owner"]["uid"] for each in users[10].request("GET", "/v1/leases").json["leases"]}
        assert owners == {FIRST + number for number in range(10)}
        assert users[1].request("DELETE", f"/v1/leases/{granted[0].json['id']}").status == 403


@pytest.mark.parametrize("real", branches(535))
def test_one_user_at_a_time(make_node: Start, real: RealDaemon) -> None:  # noqa: F811 - the fixture
    """With a driver that serves one, two GPUs serve two users, as the file says, and none keeps both."""
    machine = Machine(GPUS, many_users=False, administrators="root")
    node = make_node(simulate=2, control=real.control, config=text_of(Profile.SHARED_SERVER, machine)).start()
    with ExitStack() as stack:
        users = _users(stack, node, 3)
        assert [user.admit(**FIFTH).status for user in users[:2]] == [201, 201]
        refused = users[2].admit(**FIFTH)
        assert (refused.status, refused.json["limit"]) == (409, "user")
        small = users[0].admit(threads=1, memory="1GiB")
        assert (small.status, small.json["limit"]) == (422, "admission.smallest_share")
