"""The quotas of a user: its own, its group's, or the general one, and how a reload changes them."""

import pwd
from typing import Any, Final

import pytest

from mpsd.core import health
from tests.daemon.api.conftest import MakeLine
from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.leases.line import OWN_UID, Line
from tests.harness import wait_until
from tests.node import Answer, Node, unjudged

pytestmark = pytest.mark.real_daemon(535)

ANN, BOB, CAT, GROUP = OWN_UID or 2301, 2302, 2303, 2310
FIRST: Final = "GPU-00000000-0000-4000-8000-000000000000"
SMALL: Final[dict[str, Any]] = {"threads": 1, "memory": "1GiB"}


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start the node that the tests of this module share; each test sets its own quotas."""
    return node_for_all(config="").start()


@pytest.fixture
def line(node: Node, make_line: MakeLine) -> Line:
    """Return a line in front of it."""
    return make_line(node)


def set_quotas(line: Line, **quotas: str) -> None:
    """Set these quotas on the node, by SIGHUP; `everybody` stands for *."""
    names = {"everybody": "*", "ann": str(ANN), "bob": str(BOB), "group": f"%{GROUP}"}
    text = "".join(f'[quota."{names[name]}"]\n{quota}\n' for name, quota in quotas.items())
    assert line.node.reload(text)["event"] == "settings_reloaded"


def over(answer: Answer, limit: str) -> None:
    """Check that a request is refused because of a quota."""
    problem = answer.json
    assert (answer.status, problem["code"], problem["limit"]) == (403, "quota", f"quota.{limit}"), problem


def with_another_group() -> tuple[int, int]:
    """Return a user of the user database whose primary group has another number, and that group."""
    return next((each.pw_uid, each.pw_gid) for each in pwd.getpwall() if each.pw_gid not in {each.pw_uid, 0, GROUP})


@needs_root
def test_group_that_was_given_up(node: Node) -> None:
    """The quota of a group applies to a user whom the user database has there, also if the process has left it."""
    uid, gid = with_another_group()
    assert node.reload(f'[quota."%{gid}"]\nleases = 1\n')["event"] == "settings_reloaded"
    with calling(node.socket, uid=uid) as member, calling(node.socket, uid=ANN) as other:
        for caller in (member, other):
            assert caller.admit(**SMALL, gpu="0" if caller is member else "1").status == 201
        over(member.admit(**SMALL, gpu="0"), "leases")
        assert other.admit(**SMALL, gpu="1").status == 201
    wait_until(
        lambda: node.leases() == [], what="the leases to end with their holders: they would count in other tests"
    )


@needs_root
def test_leases(line: Line) -> None:
    """A user may have as many leases as its quota, waiting ones included.

    Each end frees a place; others are unaffected.
    """
    set_quotas(line, everybody="leases = 3")
    line.granted(uid=ANN, threads=99, memory="1GiB", gpu="0")
    second = line.granted(uid=ANN, **SMALL, gpu="0")
    _, waiting = line.waits(uid=ANN, threads=50, memory="1GiB", gpu="0")
    over(line.ask(uid=ANN, **SMALL), "leases")
    over(line.ask(uid=ANN, **SMALL, wait=None), "leases")
    line.granted(uid=BOB, **SMALL)
    line.release(waiting)
    _, again = line.waits(uid=ANN, threads=50, memory="1GiB", gpu="0")
    line.release(again)
    line.release(second)
    line.granted(uid=ANN, **SMALL, gpu="0")


@pytest.mark.parametrize(
    ("quota", "first", "fits", "too_much"),
    [
        ("threads = 50", {"threads": 30.5}, {"threads": 19.5}, {"threads": 19.6}),
        ('memory = "10GiB"', {"memory": "6GiB"}, {"memory": "4GiB"}, {"memory": "4097MiB"}),
        ("threads = 50", {"threads": 10}, {"threads": 20, "gpus": 2}, {"threads": 20.1, "gpus": 2}),
        ("clients = 50", {"processes": 10}, {"processes": 20, "gpus": 2}, {"processes": 21, "gpus": 2}),
        ("threads = 150", {"fraction": 1.0}, {"fraction": 0.5}, {"fraction": 0.6}),
    ],
)
def test_amounts(line: Line, quota: str, first: dict[str, Any], fits: dict[str, Any], too_much: dict[str, Any]) -> None:
    """Threads, memory and clients are summed over a user's leases and their GPUs."""
    set_quotas(line, ann=quota)
    base, limit = {} if "fraction" in first else {"threads": 5, "memory": "1GiB"}, quota.split(maxsplit=1)[0]
    line.granted(uid=ANN, **{**base, **first})
    over(line.ask(uid=ANN, **{**base, **too_much}), limit)
    over(line.ask(uid=ANN, **{**base, **too_much}, wait=None), limit)
    line.granted(uid=ANN, **{**base, **fits})


def test_waiting_counts(line: Line) -> None:
    """Waiting requests count like leases, so that no user can fill the queue in advance."""
    set_quotas(line, ann="threads = 100")
    line.granted(uid=ANN, threads=60, memory="1GiB", gpu="0")
    line.waits(uid=ANN, threads=40, memory="79GiB", gpu="0")
    over(line.ask(uid=ANN, threads=0.1, memory="1GiB", wait=None), "threads")


def test_coming_back(line: Line) -> None:
    """A caller that returns for its lease, or for its place in the queue, uses no more of its quota."""
    set_quotas(line, ann="leases = 2\nthreads = 50")
    lease = line.granted(uid=ANN, threads=40, memory="79GiB", gpu="0", request_id="held")
    assert line.granted(uid=ANN, threads=40, memory="79GiB", gpu="0", request_id="held") == lease
    asked = {"threads": 10, "memory": "79GiB", "gpu": "0", "request_id": "waiting"}
    call, waiting = line.waits(uid=ANN, **asked)
    call.hang_up()
    again = line.call("POST", "/v1/leases", {**asked, "wait": None, "name": waiting["name"]}, uid=ANN)
    over(line.ask(uid=ANN, **SMALL, request_id="another"), "leases")
    line.release(lease)
    assert again.answer().json["id"] == waiting["id"]


@needs_root
def test_priority(line: Line) -> None:
    """A priority above 0 needs a quota, and cannot exceed it."""
    set_quotas(line, ann="priority = 5", bob="priority = -1")
    assert line.granted(uid=ANN, **SMALL, priority=5, gpu="0")["priority"] == 5
    over(line.ask(uid=ANN, **SMALL, priority=6), "priority")
    over(line.ask(uid=CAT, **SMALL, priority=1), "priority")
    over(line.ask(uid=BOB, **SMALL), "priority")
    assert line.granted(uid=BOB, **SMALL, priority=-1, gpu="1")["priority"] == -1


@needs_root
def test_time_to_live(line: Line) -> None:
    """A quota sets the longest time to live, for renewals too, and the default of a lease without one."""
    set_quotas(line, ann="ttl = 100")
    over(line.ask(uid=ANN, **SMALL, ttl=101), "ttl")
    lease = line.granted(uid=ANN, **SMALL)
    assert lease["expires"] is not None
    path = f"/v1/leases/{lease['id']}/renew"
    over(line.call("POST", path, {"ttl": 101}, uid=ANN).answer(), "ttl")
    assert line.call("POST", path, {"ttl": 99}, uid=ANN).answer().status == 200
    assert line.granted(uid=BOB, **SMALL, gpu="1")["expires"] is None


def test_gpus(line: Line) -> None:
    """A quota may restrict a user to some GPUs: its requests are placed there, and wait for those alone."""
    set_quotas(line, ann=f'gpus = ["{FIRST}"]')
    line.granted(uid=ANN, threads=90, memory="1GiB")
    assert line.ask(uid=ANN, threads=20, memory="1GiB").json["limit"] == "threads"
    assert line.gpu(1)["threads_granted"] == 0
    for beyond in ({"gpu": "1"}, {"gpus": 2}):
        over(line.ask(uid=ANN, threads=1, memory="1GiB", wait=None, **beyond), "gpus")


@needs_root
def test_gpu_count(line: Line) -> None:
    """A user has leases on as many GPUs at a time as its quota, and one user cannot keep all GPUs with tiny shares."""
    set_quotas(line, everybody="gpu_count = 1")
    kept = line.granted(uid=ANN, threads=0.1, memory="1MiB", gpu="0")
    over(line.ask(uid=ANN, threads=0.1, memory="1MiB", gpu="1"), "gpu_count")
    over(line.ask(uid=ANN, threads=0.1, memory="1MiB", gpus=2, wait=None), "gpu_count")
    assert line.granted(uid=ANN, threads=0.1, memory="1MiB")["gpus"] == kept["gpus"]
    other = line.granted(uid=BOB, **SMALL)
    assert other["gpus"] != kept["gpus"]
    # A request that waits for any GPU counts for a GPU of its own; several that wait for one GPU count once.
    line.waits(uid=ANN, threads=100, memory="1GiB")
    _, elsewhere = line.waits(uid=CAT, threads=100, memory="1GiB")
    over(line.ask(uid=CAT, **SMALL), "gpu_count")
    line.release(elsewhere)
    waiting = [line.waits(uid=CAT, threads=100, memory="1GiB", gpu=other["gpus"][0]) for _ in range(2)]
    for _, each in waiting:
        line.release(each)
    line.release(other)
    assert line.granted(uid=CAT, **SMALL)["gpus"] == other["gpus"]


@needs_root
def test_gpu_count_of_a_claim(line: Line) -> None:
    """A holder takes no claim on a further GPU than the quota of its user allows."""
    set_quotas(line, ann="gpu_count = 1")
    claims = [line.granted(**SMALL, gpu=gpu, holder={"claim": {}}) for gpu in "01"]
    with calling(line.node.socket, uid=ANN) as caller:
        taken = [
            caller.request("POST", f"/v1/leases/{each['id']}/holders", {"token": each["env"]["MPSD_LEASE_TOKEN"]})
            for each in claims
        ]
        assert taken[0].status in {200, 201}, taken[0].body
        over(taken[1], "gpu_count")


@needs_root
def test_whose_quota(line: Line) -> None:
    """A user's own quota precedes those of its groups, and these precede the general one; they are not added."""
    set_quotas(line, everybody="threads = 10", group="threads = 20", ann="threads = 30")
    for uid, groups, most in ((ANN, (GROUP,), 30), (BOB, (GROUP,), 20), (BOB, (7,), 10), (GROUP, (), 20)):
        with calling(line.node.socket, uid=uid, groups=groups) as caller:
            over(caller.admit(threads=most + 0.1, memory="1GiB"), "threads")
            lease = caller.admit(threads=most, memory="1GiB")
            assert lease.status == 201, (uid, groups, most)
            line.release(lease.json)


def test_reload(line: Line) -> None:
    """SIGHUP changes what may be requested, and ends no lease; an invalid file changes nothing."""
    set_quotas(line, ann="threads = 50")
    held = line.granted(uid=ANN, threads=50, memory="1GiB", gpu="0")
    set_quotas(line, ann="threads = 20")
    over(line.ask(uid=ANN, **SMALL), "threads")
    assert unjudged(line.lease(held)) == unjudged(held)
    assert line.node.reload('[quota."*"]\nthreads = "many"\n')["event"] == "settings_refused"
    over(line.ask(uid=ANN, **SMALL), "threads")
    set_quotas(line)
    line.granted(uid=ANN, threads=100, memory="1GiB", gpu="1")
    assert line.node.get("/v1/config").json["config"].keys() >= {"roles", "admission"}


def test_administrator_too(line: Line) -> None:
    """A quota is independent of roles: the general quota applies to root too."""
    set_quotas(line, everybody="threads = 50")
    over(line.ask(threads=51, memory="1GiB"), "threads")


@needs_root
def test_what_is_free(line: Line) -> None:
    """Each user sees what its next request can have within its quota, and an administrator sees that of any user."""
    set_quotas(line, bob="threads = 30\nclients = 2")

    def free(uid: int | None = None, caller: int | None = None) -> Any:
        query = "" if uid is None else f"?uid={uid}"
        answer = line.call("GET", f"/v1/gpus{query}", uid=caller).answer()
        if answer.status != 200:
            return answer.status
        return [(each["threads_free"], each["clients_free"]) for each in answer.json["gpus"]]

    (everything, *_) = free()
    assert everything[0] == 100
    assert free(BOB)[0] == free(caller=BOB)[0] == (30, 2)
    assert free(ANN, caller=BOB) == 403
    lease = line.granted(uid=BOB, threads=20, memory="1GiB", gpu="0")
    assert [each[0] for each in free(BOB)] == [10] * len(free())
    line.release(lease)


@needs_root
def test_for_whom(line: Line) -> None:
    """Each user sees why it can have nothing of a GPU now: the error that any request for a share of it gets."""
    set_quotas(line, bob="leases = 1")

    def obstacles(uid: int | None) -> list[tuple[str, str] | None]:
        """Return the code and the limit for each GPU, which are those of a refusal of the smallest share."""
        found = list[tuple[str, str] | None]()
        for gpu in line.call("GET", "/v1/gpus", uid=uid).answer().json["gpus"]:
            answer, obstacle = line.ask(uid=uid, threads=0.1, memory="1MiB", gpu=gpu["uuid"]).json, gpu["obstacle"]
            if obstacle is None:
                line.release(answer)
                found.append(None)
            else:
                found.append((obstacle["code"], obstacle["limit"]))
                assert found[-1] == (answer["code"], answer["limit"])
                assert obstacle["because"]
                assert obstacle["hint"]
        return found

    assert obstacles(ANN) == [None, None]
    full = line.granted(uid=ANN, threads=100, memory="1GiB", gpu="0")
    assert obstacles(BOB) == [("does_not_fit", "user"), None]
    assert obstacles(ANN) == [("does_not_fit", "threads"), None]
    line.granted(uid=BOB, threads=1, memory="1GiB", gpu="1")
    assert obstacles(BOB) == [("quota", "quota.leases")] * 2
    line.release(full)
    line.node.request("POST", "/v1/daemons/gpu0/hold", {"reason": "a fan"})
    assert obstacles(ANN) == [("daemon_not_ready", "hold"), ("does_not_fit", "user")]
    (gpu, _) = line.call("GET", "/v1/gpus", uid=ANN).answer().json["gpus"]
    assert "a fan" in gpu["obstacle"]["because"]
    assert gpu["obstacle"]["hint"] == health.REFUSED_HINT
    line.node.request("POST", "/v1/daemons/gpu0/resume")
    line.node.wait_for_state("gpu0", "ready")
