"""Permissions on every route, by the uid and groups that the kernel reports."""

import os
from typing import Any, Final

import pytest

from mpsd.core.roles import Role
from mpsd.daemon.api.routes import ROUTES
from tests.daemon.api.conftest import MakeLine
from tests.daemon.caller import NOBODY, Caller, calling, granted, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import client_of
from tests.daemon.leases.line import Line, Talk
from tests.harness import wait_until
from tests.node import TOKEN, Answer, Node, as_listed, outlined, unjudged

pytestmark = [pytest.mark.real_daemon(535), needs_root]

STRANGER, OBSERVER, USER, ADMIN, OTHER, OPERATOR = 2200, 2201, 2202, 2203, 2204, 2205
GROUPS: Final = {Role.OBSERVER: 2211, Role.USER: 2212, Role.OPERATOR: 2214, Role.ADMIN: 2213}
UIDS: Final = {Role.OBSERVER: OBSERVER, Role.USER: USER, Role.OPERATOR: OPERATOR, Role.ADMIN: ADMIN}

CONFIG: Final = f"""
[roles]
observers = ["{OBSERVER}", "%{GROUPS[Role.OBSERVER]}"]
users = ["{USER}", "{OTHER}", "%{GROUPS[Role.USER]}"]
operators = ["{OPERATOR}", "%{GROUPS[Role.OPERATOR]}"]
admins = ["{ADMIN}", "%{GROUPS[Role.ADMIN]}"]
"""
"""Users and groups may be configured by their numbers."""

_BECOME: Final = f"""
os.setgroups([])
os.setresgid({USER}, {USER}, {USER})
os.setresuid({USER}, {USER}, {USER})
"""
_NEW_USER, _NEW_PID = 0x10000000, 0x20000000
"""From linux/sched.h; os.unshare came with CPython 3.12."""

CONTAINED: Final = {
    "user namespace": f"import ctypes, json, os, socket{_BECOME}assert ctypes.CDLL(None).unshare({_NEW_USER}) == 0\n",
    "pid namespace": f"""
import ctypes, json, os, socket
assert ctypes.CDLL(None).unshare({_NEW_PID}) == 0
if pid := os.fork():
    os._exit(os.waitpid(pid, 0)[1])
{_BECOME}""",
    "node that is closed": f"import json, os, socket{_BECOME}",
}
"""How a program becomes one of the plain user that sees sums only; the last one is not contained."""

ALL_ROUTES: Final = [(route.method, route.path, route.role) for route in ROUTES]

NO_ROUTES: Final = [
    ("GET", "/"),
    ("GET", "/v1/nothing"),
    ("GET", "/v1/leases/"),
    ("HEAD", "/v1/daemons/gpu0/hold"),
    ("OPTIONS", "/v1/leases"),
    ("PUT", "/v1/leases"),
    ("DELETE", "/v1/leases"),
    ("PATCH", "/v1/leases/lease-0"),
    ("TRACE", "/healthz"),
    ("BREW", "/healthz"),
]
"""Requests that match no route: their answers reveal nothing either."""


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start the node that the tests of this module share."""
    return node_for_all(config=f'{CONFIG}[daemon]\nusers = "one"\n').start()


@pytest.fixture
def line(node: Node, make_line: MakeLine) -> Line:
    """Return a line in front of it."""
    return make_line(node)


@pytest.fixture
def lease(line: Line) -> Any:
    """Yield a lease of the plain user."""
    return line.granted(uid=USER, threads=10, memory="1GiB")


@pytest.fixture
def targets(node: Node, lease: Any) -> dict[str, str]:
    """Return for each path of the table a path that names existing resources."""
    operation = node.request("POST", "/v1/daemons/gpu0/reset").json["id"]
    named = {
        "/leases/{id}": f"/leases/{lease['id']}",
        "/operations/{id}": f"/operations/{operation}",
        "{name}": "gpu0",
        "{uid}": str(OTHER),  # this uid has no quarantine
        "{pid}": str(os.getpid()),  # it is no client
    }
    found = {}
    for _, path, _ in ALL_ROUTES:
        found[path] = path
        for name, thing in named.items():
            found[path] = found[path].replace(name, thing)
    assert not any("{" in path for path in found.values()), "this test has to learn what to put into a new path"
    return found


def body_of(method: str, path: str) -> object:
    """Return a body that this route would accept."""
    if (method, path) == ("POST", "/v1/leases"):
        return {"threads": 1, "memory": "1MiB"}
    if path.endswith("/gate"):
        return {"processes": 1, "within": 0.1}
    return {"ttl": 60} if path.endswith("/renew") else None


def not_permitted(answer: Answer) -> None:
    """Check that a request is refused for lack of a role or a right."""
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert (answer.status, answer.json["code"]) == (403, "not_permitted"), answer


class TestStranger:
    """A caller without a role gets 403 from all paths, and learns nothing."""

    @pytest.mark.parametrize(("method", "path"), [(method, path) for method, path, _ in ALL_ROUTES])
    def test_every_route(self, line: Line, lease: Any, targets: dict[str, str], method: str, path: str) -> None:
        """A valid request to any route of the table gets 403, and has no effect."""
        before = line.leases(), line.node.get("/v1/status").json
        answer = line.call(method, targets[path], body_of(method, path), uid=STRANGER).answer()
        not_permitted(answer)
        assert lease["id"] not in answer.body.decode()
        assert (line.leases(), line.node.get("/v1/status").json) == before

    @pytest.mark.parametrize(("method", "path"), NO_ROUTES)
    def test_what_is_no_route(self, line: Line, method: str, path: str) -> None:
        """A request that matches no route also gets 403, where other callers get 404 or 405."""
        answers = [line.call(method, path, uid=uid).answer() for uid in (STRANGER, None)]
        assert answers[0].status == 403
        assert answers[1].status in {400, 404, 405}
        assert answers[1].headers["Content-Type"] == "application/problem+json"
        assert answers[0].headers.get("Allow") is None

    def test_body_is_not_read(self, node: Node) -> None:
        """The request is refused before its announced body has arrived, and without `100 Continue`."""
        with Talk(node.socket, uid=STRANGER) as talk:
            talk.send(b"POST /v1/leases HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 50000\r\n\r\n")
            not_permitted(talk.answer())

    def test_nothing_by_the_process(self, node: Node) -> None:
        """The uid and groups at the time of the connection count: a process that drops its rights first has none."""
        with calling(node.socket, uid=STRANGER) as stranger:
            not_permitted(stranger.admit(threads=1, memory="1MiB"))


class TestRole:
    """Each role has its own rights, and none of a higher role."""

    @pytest.mark.parametrize("role", Role)
    @pytest.mark.parametrize("route", ALL_ROUTES, ids=str)
    def test_every_route(self, line: Line, targets: dict[str, str], role: Role, route: tuple[str, str, Role]) -> None:
        """Every route of the table is refused to every role below the required one, and to no other."""
        method, path, needed = route
        answer = line.call(method, targets[path], body_of(method, path), uid=UIDS[role]).answer()
        if role < needed:
            not_permitted(answer)
        else:
            assert answer.status < 500
            assert "needs the role" not in answer.body.decode()
        if path.startswith("/v1/daemons/{name}/"):
            line.call("POST", "/v1/daemons/gpu0/resume", {}, uid=UIDS[Role.ADMIN]).answer()
            line.node.wait_for_state("gpu0", "ready")

    @pytest.mark.parametrize("role", Role)
    @pytest.mark.parametrize("how", ["its own group", "another of its groups"])
    def test_by_group(self, node: Node, role: Role, how: str) -> None:
        """A group can have a role: a process's own group, and any other group that it is in."""
        group = GROUPS[role]
        options: dict[str, Any] = {"uid": group} if how == "its own group" else {"uid": STRANGER, "groups": (group, 7)}
        with calling(node.socket, **options) as caller:
            assert role_of(caller) is role

    def test_everybody_and_names(self, make_node: Start) -> None:
        """By default every uid is a user; `*` means every uid, and names are looked up in the user database."""
        node = make_node(simulate=1, config="").start()
        with calling(node.socket, uid=NOBODY) as caller:
            assert role_of(caller) is Role.USER
            for roles, role in (
                ('users = []\nobservers = ["*"]', Role.OBSERVER),
                ('users = []\nadmins = ["nobody"]', Role.ADMIN),
                ('users = []\nadmins = ["%nogroup"]', Role.ADMIN),
                ('users = []\nadmins = ["%nobody", "nogroup"]', None),
                ('users = []\nadmins = ["65534"]', Role.ADMIN),
                ('users = []\noperators = ["%65534"]', Role.OPERATOR),
                ('observers = ["nobody"]', Role.USER),
            ):
                assert node.reload(f"[roles]\n{roles}\n")["event"] == "settings_reloaded"
                assert role_of(caller) is role, roles
        (told,) = node.events("names_unknown")
        assert "%nobody, nogroup" in told["because"]
        assert told["hint"]

    def test_many_groups(self, node: Node) -> None:
        """Of several roles the highest applies, and the last of a thousand groups counts like the first."""
        for groups, role in (((), Role.OBSERVER), ((GROUPS[Role.USER],), Role.USER), (GROUPS.values(), Role.ADMIN)):
            with calling(node.socket, uid=OBSERVER, groups=(*range(100000, 100990), *groups)) as caller:
                assert role_of(caller) is role

    def test_operator_ends_nobody_s_lease(self, line: Line, lease: Any) -> None:
        """An operator drains and waits; a drain that ends clients after a timeout is reserved to administrators."""
        path = "/v1/daemons/gpu0/drain"
        not_permitted(line.call("POST", path, {"timeout": 1}, uid=OPERATOR).answer())
        not_permitted(line.call("DELETE", f"/v1/leases/{lease['id']}", uid=OPERATOR).answer())
        assert line.node.daemons()["gpu0"]["state"] == "ready"
        assert line.call("POST", path, {}, uid=OPERATOR).answer().status == 202
        assert line.call("POST", "/v1/daemons/gpu0/resume", uid=OPERATOR).answer().status == 202
        line.node.wait_for_state("gpu0", "ready")


def role_of(caller: Caller) -> Role | None:
    """Return the role of a caller, by the requests that it may send; mpsd says the same of it."""
    tried = (("GET", "/healthz"), ("POST", "/v1/leases"), ("POST", "/v1/daemons/gpu0/resume"))
    allowed = [caller.request(*each, {}).status != 403 for each in (*tried, ("POST", "/v1/daemons/gpu0/reset"))]
    assert allowed == sorted(allowed, reverse=True)
    if not any(allowed):
        return None
    role = sorted(Role)[sum(allowed) - 1]
    assert caller.request("GET", "/v1/principal").json["role"] == role.name.lower()
    return role


class TestAnothersLease:
    """Only an administrator can act for another uid."""

    @pytest.mark.parametrize("waiting", [False, True])
    @pytest.mark.parametrize(
        ("method", "path"),
        [
            (route.method, route.path)
            for route in ROUTES
            if route.path.startswith("/v1/leases/{id}") and route.name != "getLease"  # TestSeeing has this one
        ],
    )
    def test_every_route_of_a_lease(self, line: Line, method: str, path: str, waiting: bool) -> None:  # noqa: FBT001
        """Every route that names a lease is refused to a user that is not its owner, without effect.

        An administrator may use it.
        """
        lease = line.granted(uid=USER, threads=100, memory="1GiB", gpu="0")
        if waiting:
            _, lease = line.waits(uid=USER, threads=100, memory="1GiB", gpu="0")
        before, target = line.lease(lease), path.replace("{id}", lease["id"])
        not_permitted(line.call(method, target, body_of(method, path), uid=OTHER).answer())
        assert line.lease(lease) == before
        assert line.call(method, target, body_of(method, path), uid=ADMIN).answer().status in {
            200,
            202,
            204,
            404 if waiting else 200,
            # These are for leases without a holder, and for processes that use the GPU.
            409 if path.endswith(("/cdi", "/gate")) else 200,
        }

    def test_another_s_process(self, node: Node, line: Line) -> None:
        """No lease can be bound to another user's or root's process; one can be bound to a process of one's own."""
        with calling(node.socket, uid=OTHER) as other, calling(node.socket, uid=USER) as mine:
            for pid in (other.pid, node.pid, 1):
                not_permitted(mine.admit(threads=1, memory="1GiB", pid=pid))
            assert mine.admit(threads=1, memory="1GiB", pid=mine.pid).status == 201
            assert line.leases()[0]["owner"]["uid"] == USER

    def test_administrator_for_another(self, node: Node, line: Line) -> None:
        """An administrator can request a lease for another user's process; that user can renew and release it."""
        with calling(node.socket, uid=USER) as user:
            lease = line.granted(uid=ADMIN, threads=1, memory="1GiB", pid=user.pid)
            assert (lease["owner"]["uid"], lease["owner"]["gid"], lease["owner"]["pid"]) == (USER, USER, user.pid)
            path = f"/v1/leases/{lease['id']}"
            assert user.request("POST", f"{path}/renew", {"ttl": 60}).status == 200
            # The GPU's control daemon sees that process's uid, and serves one uid at a time.
            assert line.ask(uid=ADMIN, threads=1, memory="1GiB", gpu=lease["gpus"][0]).json["limit"] == "user"
            assert user.request("DELETE", path).status == 204

    def test_an_observer_takes_what_was_left_for_it(self, node: Node, line: Line) -> None:
        """Where a scheduler's hooks take out the leases, its users need no more than that, and have no more."""
        owner = {"uid": OBSERVER, "gid": OBSERVER}
        holder = {"claim": {"uid": OBSERVER}}
        lease = line.granted(uid=ADMIN, threads=1, memory="1GiB", owner=owner, holder=holder)
        path, token = f"/v1/leases/{lease['id']}", lease["env"]["MPSD_LEASE_TOKEN"]
        with calling(node.socket, uid=USER) as user, calling(node.socket, uid=OBSERVER) as observer:
            not_permitted(observer.admit(threads=1, memory="1GiB"))
            not_permitted(user.request("POST", f"{path}/holders", {"token": token, "pid": user.pid}))
            not_permitted(observer.request("POST", f"{path}/holders", {"token": "no", "pid": observer.pid}))
            taken = observer.request("POST", f"{path}/holders", {"token": token, "pid": observer.pid})
            assert taken.json["owner"]["pid"] == observer.pid
            # It uses the lease, whose limits and end are the hooks'.
            assert observer.request("POST", f"{path}/attach").status == 200
            assert observer.request("POST", f"{path}/gate", {"processes": 1, "within": 1}).status == 409
            not_permitted(observer.request("POST", f"{path}/renew", {"ttl": 60}))
            not_permitted(observer.request("DELETE", path))

    @pytest.mark.parametrize(
        ("limit", "asked"),
        [
            ("labels", {"labels": {"kubernetes/slice": "1"}}),
            ("request_id", {"request_id": "kubernetes/0af54f2c/0"}),
            ("labels", {"labels": {"slurm/job": "1"}}),
            ("request_id", {"request_id": "slurm/7.u3001/0"}),
        ],
    )
    def test_reserved_for_pods_and_jobs(self, line: Line, limit: str, asked: dict[str, Any]) -> None:
        """An administrator alone can use the labels and request ids by which the leases of pods and jobs are found."""
        answer = line.ask(uid=USER, threads=1, memory="1GiB", **asked)
        assert (answer.status, answer.json["code"], answer.json["limit"]) == (403, "not_permitted", limit)
        assert "for administrators" in answer.json["detail"]
        assert "another beginning" in answer.json["hint"]
        assert line.granted(uid=ADMIN, threads=1, memory="1GiB", **asked)["owner"]["uid"] == ADMIN

    def test_request_id_is_one_s_own(self, line: Line) -> None:
        """A request_id that two users have in common finds each user's own lease."""
        theirs = line.granted(uid=USER, threads=1, memory="1GiB", request_id="guessed")
        mine = line.granted(uid=OTHER, threads=1, memory="1GiB", request_id="guessed")
        assert mine["id"] != theirs["id"]
        assert mine["owner"]["uid"] == OTHER


class TestSeeing:
    """The information that a user gets about other users."""

    def test_outlines(self, line: Line) -> None:
        """A user sees its own leases with their environment, and an outline of the rest. An administrator sees all."""
        mine = line.granted(uid=USER, threads=10, memory="1GiB", gpu="0")
        labels = {"project": "secret"}
        theirs = line.granted(uid=OTHER, threads=30, memory="2GiB", gpu="1", name="train", labels=labels)
        _, waits = line.waits(uid=OTHER, threads=80, memory="1GiB", gpu="1", labels=labels)
        path = f"/v1/leases/{theirs['id']}"
        for uid in (USER, OBSERVER, OPERATOR, ADMIN, None):
            answer, sees_all = line.call("GET", "/v1/leases", uid=uid).answer(), uid in {ADMIN, None}
            seen = {each["id"]: unjudged(each) for each in answer.json["leases"]}
            assert seen[mine["id"]] == (as_listed(mine) if sees_all or uid == USER else outlined(mine))
            assert seen[theirs["id"]] == (as_listed(theirs) if sees_all else outlined(theirs))
            assert (seen[waits["id"]]["wait"]["position"], seen[waits["id"]]["name"]) == (1, waits["name"])
            assert (b"secret" in answer.body) is sees_all
            assert answer.json["others"] == dict.fromkeys(answer.json["others"], 0)
            alone = unjudged(line.call("GET", path, uid=uid).answer().json)
            assert alone == (theirs if sees_all else outlined(theirs))
            assert (line.call("GET", f"{path}/verify", uid=uid).answer().status == 200) is sees_all

    def test_clients(self, make_node: Start) -> None:
        """A user sees whose process holds memory on which GPU, for which lease, but not the program of another user."""
        node = make_node(simulate=1, control=None, config=f'{CONFIG}[daemon]\nusers = "many"\n').start()
        with client_of(node, OTHER) as theirs, calling(node.socket, uid=USER) as user:
            assert theirs.hello["ok"]
            found = {uid: self._client(node, caller) for uid, caller in ((USER, user), (None, node))}
            (lease,) = node.leases()
            assert found[None]["name"].startswith("python")
            assert found[USER] == {**found[None], "name": ""}
            assert (found[USER]["uid"], found[USER]["lease"], found[USER]["pid"]) == (OTHER, lease["id"], theirs.pid)
            assert found[USER]["memory_held"] > 0

    def _client(self, node: Node, caller: Caller | Node) -> Any:
        """Return the client of a node as a caller sees it, once its memory was read, as a verification has it."""
        for lease in node.leases():
            node.get(f"/v1/leases/{lease['id']}/verify")

        def seen() -> Any:
            clients = caller.request("GET", "/v1/clients").json["clients"]
            return next((each for each in clients if each["memory_held"]), None)

        return wait_until(seen, what=f"a client with memory; the log is {node.stderr}")

    @pytest.mark.parametrize("where", CONTAINED)
    def test_sums(self, make_node: Start, where: str) -> None:
        """A caller in a container sees its own leases and clients, and sums of the rest; without `api.open`, all do."""
        is_closed = where == "node that is closed"
        config = f'{CONFIG}[daemon]\nusers = "many"\n' + "[api]\nopen = false\n" * is_closed
        node = make_node(simulate=1, control=None, config=config).start()
        with (
            client_of(node, OTHER, threads=30, memory="2GiB", name="theirs", labels={"team": "a"}) as client,
            calling(node.socket, before=CONTAINED[where]) as user,
            calling(node.socket, uid=USER) as outside,
            calling(node.socket, uid=ADMIN) as admin,
        ):
            assert client.hello["ok"]
            held = self._client(node, admin)["memory_held"]
            mine = granted(outside)
            theirs = next(each for each in node.leases() if each["id"] != mine)
            seen = user.request("GET", "/v1/leases").json
            assert [each["id"] for each in seen["leases"]] == [mine]
            sums = {"leases": 1, "waiting": 0, "threads_granted": 30.0, "memory_granted": 2 * 1024**3}
            assert seen["others"] == sums
            clients = user.request("GET", "/v1/clients").json
            assert clients == {"clients": [], "others": {"clients": 1, "memory_held": held}}
            not_permitted(user.request("GET", f"/v1/leases/{theirs['id']}"))
            not_permitted(user.request("GET", f"/v1/leases/{theirs['id']}/verify"))
            (gpu,) = user.request("GET", "/v1/gpus").json["gpus"]
            assert gpu["users"] == [USER]
            assert f'uid="{OTHER}"' not in user.request("GET", "/metrics").body.decode()
            assert "theirs" not in user.admit(threads=90, memory="1GiB").body.decode()
            for by, keys in (("user", [str(USER)]), ("lease", [mine]), ("name", [None])):
                found = user.request("GET", f"/v1/history?by={by}").json["history"]
                assert [each["key"] for each in found] == keys
            assert outside.request("GET", "/v1/leases").json["others"]["leases"] == int(is_closed)
            assert outside.request("GET", "/v1/clients").json["others"]["clients"] == int(is_closed)
            assert admin.request("GET", "/v1/leases").json["others"]["leases"] == 0

    def test_history(self, make_node: Start, make_line: MakeLine) -> None:
        """Users see what all users had, by user, name and lease; labels only of their own leases."""
        line = make_line(make_node(simulate=1, control=None, config=f'{CONFIG}[daemon]\nusers = "many"\n').start())
        leases = {
            line.granted(uid=uid, threads=10, memory="1GiB", name=f"n{uid}", labels={"team": f"t{uid}"})["id"]
            for uid in (USER, OTHER)
        }
        for by, keys in (
            ("user", {str(USER), str(OTHER)}),
            ("lease", leases),
            ("name", {f"n{USER}", f"n{OTHER}"}),
            ("label:team", {f"t{USER}"}),
        ):
            found = line.call("GET", f"/v1/history?by={by}", uid=USER).answer().json["history"]
            assert {each["key"] for each in found} == keys

    def test_who_keeps_a_gpu(self, line: Line) -> None:
        """Everybody sees which uid keeps a GPU whose control daemon serves one uid at a time, and how much it has."""
        line.granted(uid=USER, threads=0.1, memory="1MiB", gpu="0")
        for uid in (OBSERVER, OTHER, None):
            for found in (line.call("GET", path, uid=uid).answer().json for path in ("/v1/status", "/v1/gpus")):
                assert [(each["users"], each["threads_granted"]) for each in found["gpus"]] == [([USER], 0.1), ([], 0)]
        refused = line.call("POST", "/v1/leases", {"threads": 1, "memory": "1GiB", "gpu": "0"}, uid=OTHER).answer().json
        assert refused["detail"].startswith(f"uid {USER} has 0.1 % and 1MiB of the GPU, ")

    def test_token(self, make_node: Start, make_line: MakeLine) -> None:
        """A lease's token is visible to its owner and to administrators, and only where a single lease is requested."""
        line = make_line(make_node(simulate=1, config=CONFIG).start())
        lease = line.granted(uid=USER, threads=10, memory="1GiB", ttl=1000)
        path, token = f"/v1/leases/{lease['id']}", lease["env"][TOKEN]
        assert len(bytes.fromhex(token)) >= 16
        assert token != line.granted(uid=USER, threads=10, memory="1GiB")["env"][TOKEN]
        for uid in (USER, ADMIN, None):
            assert line.call("GET", path, uid=uid).answer().json["shares"][0]["env"] == lease["env"]
            renewed = line.call("POST", f"{path}/renew", {"ttl": 2000}, uid=uid).answer().json
            assert renewed["env"] == lease["env"]
            assert token not in line.call("GET", "/v1/leases", uid=uid).answer().body.decode()
            for other in ("/verify", "/nothing"):
                assert token not in line.call("GET", f"{path}{other}", uid=uid).answer().body.decode()
        for uid in (OTHER, OBSERVER, OPERATOR):
            seen = unjudged(line.call("GET", path, uid=uid).answer().json)
            assert seen == outlined({**lease, "expires": seen["expires"]})
        assert line.call("DELETE", path, uid=USER).answer().status == 204
        for told in ("/v1/events?after=0", "/v1/status", "/v1/clients", "/metrics"):
            assert token not in line.call("GET", told, uid=None).answer().body.decode()
        assert token not in line.node.stderr.read_text()

    def test_changes(self, line: Line) -> None:
        """The list of another user has each change of a lease at once."""
        lease = line.granted(uid=USER, threads=10, memory="1GiB", name="first")
        path = f"/v1/leases/{lease['id']}"

        def listed() -> Any:
            found = line.call("GET", "/v1/leases?ended=true", uid=OTHER).answer().json["leases"]
            return next(each for each in found if each["id"] == lease["id"])

        assert [listed()["expires"], listed()["expires"]] == [None, None]
        line.call("POST", f"{path}/renew", {"ttl": 1000}, uid=USER).answer()
        assert listed()["expires"] is not None
        line.call("DELETE", path, uid=USER).answer()
        assert listed()["state"] == "ended"

    def test_reload(self, make_node: Start, make_line: MakeLine) -> None:
        """A reload opens the node: then every user sees all leases, but still changes only its own."""
        line = make_line(make_node(simulate=1, config="[api]\nopen = false\n").start())
        lease = line.granted(uid=USER, threads=10, memory="1GiB")
        path = f"/v1/leases/{lease['id']}"
        not_permitted(line.call("GET", path, uid=OTHER).answer())
        assert line.node.reload("")["applied"] == ["api.open"]
        assert unjudged(line.call("GET", path, uid=OTHER).answer().json) == outlined(lease)
        not_permitted(line.call("DELETE", path, uid=OTHER).answer())
        not_permitted(line.call("POST", f"{path}/renew", {"ttl": 1}, uid=OTHER).answer())
