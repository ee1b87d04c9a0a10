"""Callers without permission: another user, a container's root, and a process that took the socket's path first."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import pytest

from mpsd.core.settings import LogFormat
from mpsd.daemon.http.peer import RefusalLog
from mpsd.daemon.record.log import configure
from mpsd.system.sockets.credentials import PeerCredentials
from tests.control_groups import control_group
from tests.daemon.caller import Caller, calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import event
from tests.daemon.leases.line import Line
from tests.harness import look_at, wait_until
from tests.node import Node
from tests.real import real_daemons
from tests.security.conftest import MakeLine

pytestmark = [pytest.mark.real_daemon(535), needs_root]

ANN, BOB = 2601, 2602
SMALL: Final[dict[str, Any]] = {"threads": 1, "memory": "1GiB"}
ROOT: Final = {"uid": 0, "gid": 0}

CONTAINER: Final = f"""
import ctypes, json, os, signal, socket, sys
os.setgroups([])
os.setresgid({ANN}, {ANN}, {ANN})
os.setresuid({ANN}, {ANN}, {ANN})
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(4, 1)  # PR_SET_DUMPABLE: after a change of uid, the map of the namespace is not writable otherwise
assert libc.unshare(0x10000000 | 0x20000000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWUSER, CLONE_NEWPID
for name, line in (("setgroups", "deny"), ("uid_map", "0 {ANN} 1"), ("gid_map", "0 {ANN} 1")):
    with open(f"/proc/self/{{name}}", "w") as file:
        file.write(line)
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)
libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this process ends with its parent, whose pid the test knows
assert (os.getuid(), os.getpid()) == (0, 1)
"""
"""Becomes root and process 1 of its own namespaces, like the root of a container that a user started."""

OWN_PIDS, OWN_USERS, OWN_MOUNTS = 0x20000000, 0x10000000, 0x00020000
"""CLONE_NEWPID, CLONE_NEWUSER, CLONE_NEWNS."""

ROOT_OF: Final = """
import ctypes, json, os, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
ready, go = os.pipe()
helper = os.fork()
if not helper:
    os.close(go)
    os.read(ready, 1)
    if {flags} & 0x10000000:
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{{os.getppid()}}/{{name}}", "w") as file:
                file.write("0 0 4294967295")
    os._exit(0)
assert libc.unshare({flags}) == 0, os.strerror(ctypes.get_errno())
os.close(go)
assert os.waitpid(helper, 0)[1] == 0
os.close(ready)
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)
libc.prctl(1, signal.SIGKILL)
os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})
"""
"""Becomes a user of its own namespaces in which each uid is itself, as in a container that an operator started."""

LEFT_BEHIND: Final = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    if os.fork():
        os._exit(0)
    sys.stdin.readline()
    connection.sendall(b"POST /v1/daemons/gpu0/hold HTTP/1.1\\r\\nHost: mpsd\\r\\nConnection: close\\r\\n\\r\\n")
    sys.stdout.write(connection.makefile("rb").read().decode())
"""
"""Connects as root, and leaves the connection to a child alone."""

PATHS: Final = """
[paths]
runtime_dir = "{root}/run"
state_dir = "{root}/state"
log_dir = "{root}/log"
"""

IMPOSTOR: Final = """
import os, socket, sys
os.setgroups([])
os.setresgid(*[int(sys.argv[2])] * 3)
os.setresuid(*[int(sys.argv[2])] * 3)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    os.chmod(sys.argv[1], 0o666)
    listener.listen()
    print(flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start the node that the tests of this module share; each test's events are distinguished by their facts."""
    return node_for_all(simulate=1).start()


@pytest.fixture
def line(node: Node, make_line: MakeLine) -> Line:
    return make_line(node)


@pytest.fixture
def container(node: Node) -> Iterator[Caller]:
    """Yield a caller that is root in a container, and ANN outside."""
    with calling(node.socket, before=CONTAINER) as caller:
        yield caller


class TestRefusalLog:
    """A request without permission is reported in mpsd's log, in one line each."""

    def test_break_ins(self, make_node: Start, make_line: MakeLine) -> None:
        """Requests reserved to operators, lease owners and a process's own user are logged with their callers."""
        node = make_node(simulate=1, config="[api]\nopen = false\n").start()
        line = make_line(node)
        lease = line.granted(uid=BOB, **SMALL)
        path = f"/v1/leases/{lease['id']}"
        tries: list[tuple[str, str, object]] = [
            *(("POST", f"/v1/daemons/gpu0/{verb}", None) for verb in ("reset", "hold", "resume")),
            ("GET", path, None),
            ("GET", f"{path}/verify", None),
            ("POST", f"{path}/renew", {"ttl": 1}),
            ("POST", f"{path}/attach", None),
            ("DELETE", path, None),
            ("POST", "/v1/leases", {**SMALL, "pid": 1}),
        ]
        for method, target, body in tries:
            assert line.call(method, target, body, uid=ANN).answer().status == 403
        told = node.events("peer_refused")
        assert [each["asked"] for each in told] == [f"{method} {target}" for method, target, _ in tries]
        assert {(each["uid"], each["pid"], each["level"]) for each in told} == {(ANN, os.getpid(), "warning")}
        assert all(each["because"] for each in told)
        assert line.lease(lease) == lease

    def test_no_flood(self) -> None:
        """At most 16 lines a minute are logged for one uid, with the number left out; other uids are unaffected."""
        asyncio.run(self.flood())

    @staticmethod
    async def flood() -> None:
        """Send more requests without permission than are logged."""
        with TemporaryFile("w+", encoding="utf-8") as stream:
            refusals = RefusalLog(configure(LogFormat.JSON, stream=stream))
            for _ in range(20):
                refusals.record(PeerCredentials(ANN, ANN, 1), "GET /" + "x" * 1000, "no")
            refusals.record(PeerCredentials(BOB, BOB, 1), "GET /", "no")
            refusals._shares._report(ANN)
            stream.seek(0)
            told = [json.loads(each) for each in stream]
        assert [each["uid"] for each in told] == [ANN] * 16 + [BOB, ANN]
        assert (told[-1]["event"], told[-1]["left_out"]) == ("lines_left_out", 4)
        assert max(len(each["asked"]) for each in told[:-1]) == 200


class TestContainer:
    """A caller in a container with the socket: root there, in its own user and pid namespaces."""

    def test_is_no_administrator(self, node: Node, line: Line, container: Caller) -> None:
        """The caller's role is that of its outside user: it operates nothing, and sees and ends only its own leases."""
        lease = line.granted(uid=BOB, **SMALL)
        for method, path in (("POST", "/v1/daemons/gpu0/hold"), ("DELETE", f"/v1/leases/{lease['id']}")):
            answer = container.request(method, path)
            assert (answer.status, answer.json["code"]) == (403, "not_permitted")
        assert container.request("GET", "/v1/leases").json["leases"] == []
        assert {each["uid"] for each in node.events("peer_refused")} == {ANN}
        assert node.daemons()["gpu0"]["state"] == "ready"

    def test_is_known_by_its_process(self, container: Caller, line: Line) -> None:
        """The caller's lease is bound to its process as mpsd sees it, not to its pid inside, and ends with it."""
        lease = container.admit(**SMALL).json
        assert lease["owner"]["uid"] == ANN
        found = look_at(lease["owner"]["pid"])
        assert found is not None
        assert found.parent == container.pid
        container.kill()
        assert "has exited" in line.gone(lease)["because"]

    def test_cannot_name_another(self, node: Node, container: Caller) -> None:
        """A pid that the caller names belongs to its own namespace, and is refused.

        Outside, the pid may be another process's.
        """
        for pid in (2, node.pid):
            answer = container.admit(**SMALL, pid=pid)
            assert (answer.status, answer.json["limit"]) == (422, "pid")
            assert "another pid namespace" in answer.json["detail"]


class TestRootOfAContainer:
    """Uid 0 in a container is uid 0 to the kernel, but it is no administrator of the node."""

    @pytest.fixture
    def node(self, make_node: Start) -> Node:
        """Start a node with an administrator and an operator that are not root."""
        return make_node(simulate=1, config=f'[roles]\nadmins = ["{BOB}"]\noperators = ["{ANN}"]\n').start()

    @pytest.mark.parametrize("flags", [OWN_PIDS, OWN_USERS, OWN_PIDS | OWN_USERS | OWN_MOUNTS])
    @pytest.mark.parametrize("uid", [0, BOB])
    def test_is_a_user(self, node: Node, line: Line, flags: int, uid: int) -> None:
        """With its own pid or user namespace it has a user's role, whatever its uid, and the refusal says why."""
        lease = line.granted(uid=2603, **SMALL)
        with calling(node.socket, before=ROOT_OF.format(flags=flags, uid=uid)) as contained:
            for method, path in (
                ("POST", "/v1/daemons/gpu0/hold"),
                ("POST", "/v1/daemons/gpu0/restart"),
                ("DELETE", f"/v1/leases/{lease['id']}"),
            ):
                answer = contained.request(method, path, {})
                assert (answer.status, answer.json["code"]) == (403, "not_permitted"), answer.json
            answer = contained.request("POST", "/v1/daemons/gpu0/hold")
            assert "another user or pid namespace" in answer.json["detail"]
            assert "roles.operators" in answer.json["hint"]
            assert contained.request("GET", "/v1/leases").json["leases"] == []
            line.release(lease)
            mine = contained.admit(**SMALL)
            assert (mine.status, mine.json["owner"]["uid"]) == (201, uid)
        assert node.daemons()["gpu0"]["state"] == "ready"

    def test_names_its_own_groups(self, node: Node) -> None:
        """It names only its own control group and those below it as a holder, although uid 0 owns all others too.

        Nor does it change the holders of a lease that one of the others holds.
        """
        hierarchy = "name=systemd"
        with (
            control_group(hierarchy, "own") as own,
            control_group(hierarchy, f"{own.name}/below") as below,
            control_group(hierarchy, own.name) as other,
        ):
            enter = f"import os\nopen({str(own / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
            lease = node.request("POST", "/v1/leases", {**SMALL, "holder": {"cgroup": str(other)}, "owner": ROOT}).json
            with calling(node.socket, before=enter + ROOT_OF.format(flags=OWN_PIDS, uid=0)) as contained:
                answers = [contained.admit(**SMALL, ttl=600, holder={"cgroup": str(each)}) for each in (other, own)]
                assert [each.status for each in answers] == [403, 201], answers
                assert (answers[0].json["code"], answers[0].json["limit"]) == ("not_permitted", "cgroup")
                path = f"/v1/leases/{lease['id']}/holders"
                assert contained.request("POST", path, {"replace": True}).status == 403
                mine = f"/v1/leases/{answers[1].json['id']}/holders"
                for group, status in ((other, 403), (below, 200)):
                    answer = contained.request("POST", mine, {"cgroup": str(group), "replace": True})
                    assert answer.status == status, answer.body

    @pytest.mark.parametrize("uid", [0, BOB])
    def test_mounts_say_nothing(self, node: Node, uid: int) -> None:
        """A service of the machine has its own mounts, and is no container."""
        with calling(node.socket, before=ROOT_OF.format(flags=OWN_MOUNTS, uid=uid)) as service:
            for verb in ("hold", "resume"):
                assert service.request("POST", f"/v1/daemons/gpu0/{verb}").status == 202

    def test_operator(self, node: Node) -> None:
        """A uid that the configuration makes an operator holds, drains and resumes from a container, and no more."""
        with calling(node.socket, before=ROOT_OF.format(flags=OWN_PIDS | OWN_USERS, uid=ANN)) as agent:
            for verb in ("hold", "drain", "resume"):
                assert agent.request("POST", f"/v1/daemons/gpu0/{verb}", {}).status == 202
            for verb, body in (("reset", None), ("restart", {}), ("drain", {"timeout": 1})):
                assert agent.request("POST", f"/v1/daemons/gpu0/{verb}", body).status == 403
        node.wait_for_state("gpu0", "ready")

    def test_a_process_that_is_gone(self, node: Node) -> None:
        """A process that left its connection to another has unknown namespaces: the caller is no administrator."""
        with subprocess.Popen(
            [sys.executable, "-I", "-c", LEFT_BEHIND, str(node.socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as connected:
            connected.wait(timeout=10)
            said, _ = connected.communicate("go on\n", timeout=10)
        assert said.startswith("HTTP/1.1 403 "), said


@dataclass
class Contained(Node):
    """An mpsd in its own pid namespace, as in a container without hostPID."""

    @property
    def command(self) -> list[str]:
        return ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *super().command]


def test_mpsd_in_a_container(short_tmp: Path) -> None:
    """An mpsd that cannot see its caller's process (pid 0) binds no lease, and says what it needs."""
    (short_tmp / "n").mkdir()
    short_tmp.chmod(0o711)
    node = Contained(root=short_tmp / "n", simulate=1, control=real_daemons()[535])
    try:
        node.start()
        answer = node.request("POST", "/v1/leases", SMALL)
        assert (answer.status, answer.json["code"]) == (403, "peer_unknown"), answer.json
        assert "mpsd sees its pid as 0" in answer.json["detail"]
        assert "hostPID: true" in answer.json["hint"]
        answer = node.request("POST", "/v1/leases", {**SMALL, "pid": 1})
        assert (answer.status, answer.json["limit"]) == (422, "pid")
        assert node.get("/v1/leases").json["leases"] == []
        assert [each for each in node.get("/v1/status").json["notes"] if "hostPID: true" in each]
        assert node.events("host_requirement_missing", missing="pid namespace")
        assert node.mpsctl("status").returncode == 0
        assert node.request("POST", "/v1/daemons/gpu0/hold").status == 403
        # As with `podman exec` and `kubectl exec`: the process is in the container's own pid namespace.
        (inside,) = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
        entered = ["nsenter", f"--target={inside}", "--pid", sys.executable, "-m", "mpsd.cli.main"]
        done = subprocess.run(
            [*entered, "--socket", str(node.socket), "hold", "gpu0"], capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert node.daemons()["gpu0"]["state"] == "held"
    finally:
        node.clean_up()


class TestImpostor:
    """A process that took the socket's path first."""

    def impostor(self, path: Path) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", IMPOSTOR, str(path), str(ANN)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        return process

    def test_socket_is_replaced(self, make_node: Start) -> None:
        """Where users may remove only their own files, mpsd takes the path."""
        node = make_node(simulate=1, rooted=False)
        shared = node.root / "shared"
        shared.mkdir()
        shared.chmod(0o1777)
        node.config = f'{PATHS.format(root=node.root)}[api]\nsocket = "{shared}/s"\n'
        with self.impostor(shared / "s") as impostor:
            node.launch()
            told = wait_until(
                lambda: node.events("socket_replaced"), what="the other to be told", not_yet=(FileNotFoundError,)
            )
            assert (told[0]["uid"], told[0]["socket"]) == (ANN, f"{shared}/s")
            event(node, "api_listening")
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(f"{shared}/s")
                connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: mpsd\r\n\r\n")
                assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            assert (shared / "s").stat().st_uid == 0
            impostor.communicate(timeout=10)

    def test_place_that_everybody_may_write(self, make_node: Start) -> None:
        """Where any user could take the path again, mpsd does not start."""
        node = make_node(simulate=1, rooted=False)
        shared = node.root / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        node.config = f'{PATHS.format(root=node.root)}[api]\nsocket = "{shared}/s"\n'
        status, said = node.refuse()
        assert status == 78
        assert f"{shared} is world-writable, so every user can replace {shared}/s" in said
