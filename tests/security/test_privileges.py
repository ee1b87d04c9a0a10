"""The capabilities that mpsd needs: with these everything works, and without any one of them something fails.

The control daemons, servers and clients are the simulator's: measuring what NVIDIA's server and driver need in addition
takes a GPU.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.enforcement.attribution import TOKEN
from mpsd.simulator.devices import Setting, set_setting
from tests.daemon.caller import calling, needs_root
from tests.daemon.helpers import event
from tests.daemon.leases.line import Talk
from tests.driven_program import DrivenProgram
from tests.harness import look_at, wait_until
from tests.node import Node, nodes
from tests.simulated_clients import variables

pytestmark = [needs_root, pytest.mark.thorough]

ANN: Final = 2601

ROOT: Final = Path(__file__).parents[2]

NEEDED: Final = ("chown", "dac_read_search", "kill", "setpcap", "setuid", "sys_ptrace")
"""Names of capabilities(7), in the spelling of setpriv(1)."""

CONFIG: Final = """
[api]
group = "daemon"
open = true
[enforcement]
unadmitted = "deny"
grace = 0.3
on_violation = "terminate"
"""

CLIENT: Final = f"""
import ctypes, os, sys
from mpsd.simulator.client import main
os.setgroups([])
os.setresgid({ANN}, {ANN}, {ANN})
os.setresuid({ANN}, {ANN}, {ANN})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
sys.exit(main())
"""
"""A client that becomes another user; its first environment stays in /proc/PID/environ.

By PR_SET_DUMPABLE (linux/prctl.h), its files in /proc belong to that user, like those of a program that the user
starts. After a change of uid alone, they belong to root. Source: proc(5).
"""


@dataclass
class Bounded(Node):
    """An mpsd that is root, and has only these capabilities."""

    capabilities: Sequence[str] = field(default=NEEDED)
    more: Sequence[str] = ()

    @property
    def command(self) -> list[str]:
        bounding_set = ",".join(("-all", *(f"+{each}" for each in self.capabilities)))
        return ["setpriv", f"--bounding-set={bounding_set}", "--inh-caps=-all", *self.more, *super().command]


@pytest.fixture
def make(short_tmp: Path) -> Iterator[Callable[..., Bounded]]:
    """Return a maker of an mpsd with these privileges."""
    with nodes(Bounded, short_tmp, simulate=1, config=CONFIG) as make:
        yield make


def status_of(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split("\t")[1] for line in lines if line.startswith(f"{name}:"))


def client_of(node: Node, environment: Mapping[str, str]) -> DrivenProgram:
    return DrivenProgram([sys.executable, "-c", CLIENT], {**variables(node), **environment})


def leased(node: Node) -> DrivenProgram:
    """Start another user's client with a lease whose holder is this process, acting as that user."""
    with Talk(node.socket, uid=ANN) as talk:
        answer = talk.ask("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
    assert answer.status == 201, answer.body
    return client_of(node, {name: str(value) for name, value in answer.json["env"].items()})


def serves(node: Node) -> bool:
    """Return whether another user's client gets a server, which is that user's."""
    with Talk(node.socket, uid=ANN) as talk:
        answer = talk.ask("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
    if answer.status != 201:
        assert (answer.status, answer.json["code"]) == (403, "not_permitted")
        assert "CAP_SETUID" in answer.json["detail"]
        return False
    with leased(node) as client:
        return bool(client.hello["ok"]) and look_at(client.hello["server"]) is not None


def knows_limits(node: Node) -> bool:
    """Return whether an mpsd without records of an older client of another user's lease knows what it can use.

    An mpsd that may not read the namespaces of root's processes takes them for a container's, and shows them sums.
    """
    with leased(node) as client:
        assert client.hello["ok"]
        node.end(signal.SIGKILL)
        for name in ("clients.json", "gpu0.limits.json"):
            (node.root / "run" / name).unlink(missing_ok=True)
        node.start()
        wait_until(lambda: node.get("/v1/gpus").json["gpus"][0]["clients"], what="the client to be seen")
        if not (leases := node.get("/v1/leases").json["leases"]):
            return False
        (lease,) = leases
        processes = node.get(f"/v1/leases/{lease['id']}/verify").json["processes"]
        (limits,) = (each["limits_in_force"] for each in processes if each["pid"] == client.hello["pid"])
        return limits is not None and limits["active_thread_percentage"] == 10


def bears(node: Node) -> bool:
    """Return whether a lease outlives its holder while another process of its user carries its token."""
    with calling(node.socket, uid=ANN) as holder:
        lease = holder.admit(threads=10, memory="1GiB").json
        ann = ("setpriv", f"--reuid={ANN}", f"--regid={ANN}", "--clear-groups")
        token = f"{TOKEN}={lease['env'][TOKEN]}"
        with subprocess.Popen([*ann, "env", token, "sleep", "inf"]) as carrier:
            try:
                wait_until(lambda: token.encode() in environ(carrier.pid), what="it to carry the token")
                holder.end()
                decided = ("lease_borne", "lease_ended")
                wait_until(
                    lambda: any(node.events(each, lease=lease["id"]) for each in decided), what="it to live or end"
                )
                ended = node.events("lease_ended", lease=lease["id"])
                assert all(
                    f"may not read whether process {carrier.pid} carries its token" in each["because"] for each in ended
                )
                return bool(node.events("lease_borne", lease=lease["id"], pids=[carrier.pid]))
            finally:
                carrier.kill()


def environ(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def ends(node: Node) -> bool:
    """Return whether a client of another user is ended for which its lease has no room."""
    with leased(node) as first:
        wait_until(
            lambda: any(each["pid"] == first.pid and each["lease"] for each in node.get("/v1/clients").json["clients"]),
            what="the first to be the lease's",
        )
        with client_of(node, {}) as second:
            event(node, "violation", pid=second.pid)
            wait_until(
                lambda: second.process.poll() is not None or node.events("client_forced", step="none", pid=second.pid),
                what="it to be ended, or that to be impossible",
            )
            return second.process.poll() is not None


def finds_orphans(node: Node) -> bool:
    """Return whether a new mpsd finds another user's server whose control daemon died together with the last mpsd."""
    set_setting(node.root / "run" / "simulated", Setting.OUTLIVES)
    with leased(node) as client:
        server = client.hello["server"]
        pid = node.daemons()["gpu0"]["pid"]
        node.end(signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        node.start(ready=False)
        node.wait_for_state("gpu0", "ready")
        return bool(event(node, "server_orphaned", server=server))


@pytest.mark.parametrize("looks", [(serves, bears, ends), (knows_limits,), (finds_orphans,)])
def test_enough(make: Callable[..., Bounded], looks: tuple[Callable[[Node], bool], ...]) -> None:
    """With these alone everything works; the others, absent from the bounding set too, can never be gained."""
    node = make().start()
    assert (node.root / "run" / "mpsd.sock").stat().st_gid == 1
    bits = int(status_of(node.pid, "CapEff"), 16)
    assert bits == int(status_of(node.pid, "CapBnd"), 16)
    assert bits.bit_count() == len(NEEDED)
    for look in looks:
        assert look(node), look
        for lease in node.leases():
            assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204


@pytest.mark.parametrize(
    ("lacks", "look"),
    [
        ("setuid", serves),
        ("sys_ptrace", knows_limits),
        ("dac_read_search", knows_limits),
        ("dac_read_search", bears),
        ("kill", ends),
    ],
)
def test_each_is_needed(make: Callable[..., Bounded], lacks: str, look: Callable[[Node], bool]) -> None:
    """Without any one of them something fails for users other than root."""
    node = make(capabilities=[each for each in NEEDED if each != lacks]).start()
    assert not look(node)
    assert "Traceback" not in node.stderr.read_text()


def test_unseen_daemon(make: Callable[..., Bounded]) -> None:
    """A control daemon that mpsd may not inspect is neither adopted nor joined by another on its directory."""
    node = make(capabilities=(*NEEDED, "setgid", "mknod"))
    node.start()
    daemon = node.daemons()["gpu0"]["pid"]
    node.end(signal.SIGKILL)
    (node.root / "run" / "gpu0.process.json").unlink()
    node.capabilities = ("chown", "kill", "setpcap", "setuid")
    node.start(ready=False)
    because = node.wait_for_state("gpu0", "failed")["because"]
    assert "mpsd cannot see the process that has the socket" in because
    assert look_at(daemon) is not None


CONNECTED: Final = """
import asyncio, json, sys
from pathlib import Path
from mpsd.daemon.control.pipe_access import connected_to
print(json.dumps(asyncio.run(connected_to([Path(sys.argv[1])]))))
"""

CONNECTS: Final = f"""
import ctypes, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
os.setresuid({ANN}, {ANN}, {ANN})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
print(flush=True)
sys.stdin.read()
"""


def test_unseen_connection(short_tmp: Path) -> None:
    """Beside connections that mpsd sees, one that it may not see counts as one of an unknown user."""
    path = short_tmp / "s"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as ours:
        listener.bind(os.fspath(path))
        listener.listen()
        ours.connect(os.fspath(path))
        command = [sys.executable, "-c", CONNECTS, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as theirs:
            assert theirs.stdout is not None
            assert theirs.stdout.readline()
            with listener.accept()[0], listener.accept()[0]:
                for bounding_set, seen in (
                    ("-all,+dac_read_search,+sys_ptrace", {os.getpid(): 0, theirs.pid: ANN}),
                    ("-all,+sys_ptrace", {os.getpid(): 0, 0: None}),
                ):
                    bounded = ["setpriv", f"--bounding-set={bounding_set}", "--inh-caps=-all", sys.executable, "-c"]
                    done = subprocess.run(
                        [*bounded, CONNECTED, str(path)], capture_output=True, text=True, check=True, cwd=ROOT
                    )
                    assert json.loads(done.stdout) == {str(pid): uid for pid, uid in seen.items()}
            theirs.kill()


def test_unseen_mounts(make: Callable[..., Bounded]) -> None:
    """A holder whose mounts mpsd may not read gets its lease, and the log says that they are unknown."""
    node = make(capabilities=("chown", "kill", "setpcap", "setuid")).start()
    with calling(node.socket, uid=ANN) as holder:
        assert holder.admit(threads=10, memory="1GiB").status == 201
        (told,) = node.events("mounts_unknown", pid=holder.pid)
        assert f"/proc/{holder.pid}/" in told["because"]


def test_group_needs_chown(make: Callable[..., Bounded]) -> None:
    """Without CHOWN the socket cannot be given to a group, either."""
    node = make(capabilities=[each for each in NEEDED if each != "chown"])
    status, said = node.refuse()
    assert status == 78
    assert "cannot listen on" in said
    assert "Operation not permitted" in said


def test_no_new_privileges(make: Callable[..., Bounded]) -> None:
    """`no_new_privs` reaches the control daemon and its servers: mpsd does not set it, and works under it."""
    node = make(more=["--no-new-privs"]).start()
    daemon = node.daemons()["gpu0"]["pid"]
    with leased(node) as client:
        assert client.hello["ok"]
        found = [status_of(pid, "NoNewPrivs") for pid in (node.pid, daemon, client.hello["server"], client.pid)]
    assert found == ["1", "1", "1", "0"]
