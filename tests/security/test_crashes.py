"""A uid with access that crashes a control daemon gains little power, and does not take the GPU from other users.

The subjects are NVIDIA's own control daemons. A signal of root's stands in for the effect of bytes on their socket: the
kernel reports both in the same way.
"""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.core.capabilities import DAEMON, Capability
from tests.daemon.caller import Caller, calling, needs_root
from tests.daemon.conftest import Start, make_node
from tests.daemon.helpers import branches, client_of
from tests.harness import look_at, wait_until
from tests.node import Node
from tests.real import RealDaemon

__all__ = ["make_node"]

pytestmark = [needs_root, pytest.mark.thorough]

ANN, BOB = 61001, 61002
"""Two uids without rights and without a name."""


def status_of(pid: int) -> dict[str, str]:
    """Return /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def sets(pid: int) -> dict[str, int]:
    """Return the capability sets of a process."""
    return {name: int(value, 16) for name, value in status_of(pid).items() if name.startswith("Cap")}


def stand_in(directory: Path) -> dict[str, str]:
    """Put a stand-in for NVIDIA's server first in PATH."""
    directory.mkdir()
    program = directory / "nvidia-cuda-mps-server"
    program.write_text("#!/bin/sh\nexec sleep 1000\n", encoding="ascii")
    program.chmod(0o755)
    return {"PATH": f"{directory}:/usr/bin:/bin"}


def server_for(node: Node, uid: int) -> int:
    """Have the control daemon start a server, and return its pid once the stand-in runs."""
    node.ask("gpu0", f"start_server -uid {uid}")
    (pid,) = wait_until(lambda: node.ask("gpu0", "get_server_list"), what="a server")

    def runs() -> bool:
        found = look_at(int(pid))
        return found is not None and "sleep" in found.command

    wait_until(runs, what="the stand-in to run")
    return int(pid)


ONE: Final = '[daemon]\nusers = "one"\n'


@pytest.mark.parametrize("real", branches(470, 555))
class TestCapabilities:
    """Capabilities of each of NVIDIA's control daemons that serve one user at a time, started by mpsd."""

    def test_control_daemon(self, make_node: Start, real: RealDaemon, short_tmp: Path) -> None:
        """The daemon and its servers never have more than the listed capabilities.

        mpsd keeps its own, and everything works.
        """
        config = f"{ONE}answer_deadline = 0.3\n"  # a tenth of the patience with a silent server
        node = make_node(simulate=1, control=real.control, env=stand_in(short_tmp / "bin"), config=config).start()
        before = sets(node.pid)
        listed = sum(1 << each for each in DAEMON)
        daemon = node.daemons()["gpu0"]["pid"]
        assert sets(daemon) == {"CapInh": 0, "CapPrm": listed, "CapEff": listed, "CapBnd": listed, "CapAmb": 0}
        server = server_for(node, ANN)
        assert status_of(server)["Uid"].split() == [str(ANN)] * 4
        assert sets(server) == {"CapInh": 0, "CapPrm": 0, "CapEff": 0, "CapBnd": listed, "CapAmb": 0}
        assert sets(node.pid) == before
        # With force, since the stand-in never ends: the daemon ends it, and then itself.
        assert node.mpsctl("restart", "gpu0", "--timeout", "0").returncode == 0
        wait_until(lambda: (found := look_at(server)) is None or found.zombie, what="the server to be ended")
        assert sets(node.wait_for_state("gpu0", "ready")["pid"])["CapBnd"] == listed

    def test_setting(self, make_node: Start, real: RealDaemon) -> None:
        """An operator can give them more of mpsd's capabilities."""
        config = f'{ONE}capabilities = ["CAP_SYS_PTRACE", "SYS_NICE"]\n'
        node = make_node(simulate=1, control=real.control, config=config).start()
        more = DAEMON | {Capability.SYS_PTRACE, Capability.SYS_NICE}
        assert sets(node.daemons()["gpu0"]["pid"])["CapBnd"] == sum(1 << each for each in more)


SMALL: Final = {"threads": 10, "memory": "1GiB", "gpu": "0"}
CRASH_OF_BOB: Final = {"daemon": "gpu0", "at": 1.0, "let_in": {"uids": [BOB], "everybody": False, "others": False}}
CRASHES: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT)


def granted(caller: Caller, **asked: Any) -> str:
    """Request a lease; its user has pipe access when this returns."""
    answer = wait_until(
        lambda: found if (found := caller.admit(**{**SMALL, **asked})).status == 201 else None,
        what="a lease to be granted",
        deadline=20,
    )
    return str(answer.json["id"])


def let_in(node: Node, uid: int, name: str = "gpu0") -> bool:
    """Return whether a uid may traverse the pipe directory of a control daemon."""
    done = subprocess.run(
        ["test", "-S", str(node.pipe_directory(name) / "control")],
        check=False, timeout=20, user=uid, group=uid, extra_groups=[], cwd="/",
    )  # fmt: skip
    return done.returncode == 0


def crash(node: Node, name: str = "gpu0", number: signal.Signals = signal.SIGSEGV) -> dict[str, Any]:
    """Crash a control daemon that is ready, and return the event of its death."""
    pid = node.wait_for_state(name, "ready", deadline=40)["pid"]
    os.kill(pid, number)

    def died() -> list[dict[str, Any]]:
        return [each for each in node.events("daemon_death", daemon=name) if f"pid {pid} " in each["how"]]

    found: dict[str, Any] = wait_until(died, what=f"the death of pid {pid} to be told; the log is {node.stderr}")[0]
    return found


def warnings(node: Node) -> dict[str, str]:
    """Return the status's warnings about uids: the kind by uid."""
    found = node.get("/v1/status").json["warnings"]
    return {each["subject"]: each["kind"] for each in found if each["subject"].startswith("uid ")}


BYTES: Final = """
import os, random, socket, sys
uid, path, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
dice = random.Random(seed)
sent = 0
for _ in range(500):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as to:
        try:
            to.connect(path)
            for _ in range(dice.randrange(1, 5)):
                sent += to.send(dice.randbytes(dice.choice([1, 8, 64, 512, 4096, 60000])))
        except OSError:
            pass  # it may have closed the connection, or ended
print(sent)
"""
"""Sends arbitrary bytes as a user."""


@pytest.mark.parametrize("real", branches())
def test_arbitrary_bytes(make_node: Start, real: RealDaemon) -> None:
    """The GPU is not given up, whatever bytes a holder sends to the socket, and a crash names the holder alone."""
    node = make_node(simulate=1, control=real.control).start()
    with calling(node.socket, uid=ANN) as ann:
        granted(ann)
        where = str(node.pipe_directory("gpu0") / "control")
        said = subprocess.run(
            [sys.executable, "-I", "-c", BYTES, str(ANN), where, str(real.branch)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert int(said.stdout) > 0
        node.wait_for_state("gpu0", "ready", deadline=40)
        assert all(each["suspects"] == [ANN] for each in node.events("daemon_death"))
        assert not node.events("daemon_state", state="failed")


@pytest.mark.parametrize("real", branches(470, 555))
class TestEveryDriver:
    """Crashes of each of NVIDIA's control daemons."""

    def test_alone_twice(self, make_node: Start, real: RealDaemon) -> None:
        """A uid with sole access at two crashes is quarantined; the next user continues at once, on the same GPU."""
        node = make_node(simulate=1, control=real.control).start()
        with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
            lease = granted(ann)
            first = crash(node)
            assert (first["suspects"], first["verdict"]) == ([ANN], "at_once")
            assert first["how"].endswith(f"killed by SIGSEGV; uid {ANN} had pipe access")
            assert warnings(node) == {f"uid {ANN}": "suspect"}
            wait_until(lambda: let_in(node, ANN), what="the lease to be let in again")

            # Ann releases the lease before the bytes that she sent take effect.
            assert ann.request("DELETE", f"/v1/leases/{lease}").status == 204
            second = crash(node, number=signal.SIGABRT)
            assert (second["suspects"], second["verdict"], second["delay"]) == ([ANN], "at_once", 0.0)
            (told,) = node.events("uid_quarantined")
            assert (told["uid"], told["level"]) == (ANN, "error")
            assert warnings(node) == {f"uid {ANN}": "quarantine"}
            refused = ann.admit(**SMALL)
            assert (refused.status, refused.json["code"], refused.json["limit"]) == (
                403,
                "quarantined",
                "enforcement.crashes",
            )
            assert refused.json["hint"] == f"ask an administrator: mpsctl pardon {ANN}"

            # Other users continue, as if there had been no death.
            node.wait_for_state("gpu0", "ready")
            granted(bob)
            third = crash(node)
            assert (third["suspects"], third["verdict"]) == ([BOB], "at_once")
            assert "gpu0 is failed" not in node.get("/v1/status").json["because"]

    def test_one_after_the_other(self, make_node: Start, real: RealDaemon) -> None:
        """With one user at a time, the next user has a new control daemon, without the last user's crash."""
        node = make_node(simulate=1, control=real.control, config=ONE).start()
        with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
            for caller in (bob, ann):
                assert caller.request("DELETE", f"/v1/leases/{granted(caller)}").status == 204
            assert crash(node)["suspects"] == [ANN]
            assert warnings(node) == {f"uid {ANN}": "suspect"}

    def test_nobody_let_in(self, make_node: Start, real: RealDaemon) -> None:
        """A crash while only root has access names nobody, and counts no more than others: that root may be contained.

        Deaths that only root outside containers can cause count.
        """
        node = make_node(simulate=1, control=real.control, config="[daemon]\ndeaths = 2\n").start()
        for verdict in ("at_once", "later"):
            died = crash(node)
            assert (died["suspects"], died["cgroups"], died["verdict"]) == ([], [], verdict)
            assert died["how"].endswith("root alone had pipe access")
        node.wait_for_state("gpu0", "ready")
        assert node.request("POST", "/v1/leases", SMALL).status == 201
        assert crash(node)["suspects"] == []
        with calling(node.socket, uid=ANN) as ann:
            (own,) = node.get("/v1/leases").json["leases"]
            assert node.request("DELETE", f"/v1/leases/{own['id']}").status == 204
            granted(ann)
            for verdict in ("later", "give_up"):
                died = crash(node, number=signal.SIGKILL)
                assert (died["suspects"], died["verdict"]) == ([], verdict)
        node.wait_for_state("gpu0", "failed")

    def test_across_restarts(self, make_node: Start, real: RealDaemon) -> None:
        """The crashes, the uids with access, and the quarantines survive any death of mpsd."""
        node = make_node(simulate=1, control=real.control).start()
        with calling(node.socket, uid=ANN) as ann:
            lease = granted(ann)
            crash(node)
            wait_until(lambda: let_in(node, ANN), what="the lease to be let in again")
            assert ann.request("DELETE", f"/v1/leases/{lease}").status == 204
        before = node.wait_for_state("gpu0", "ready")["pid"]
        node.end(signal.SIGKILL)
        node.start()
        assert node.daemons()["gpu0"]["pid"] == before
        # The daemon was adopted: its end must be known also to an mpsd that is not its parent.
        died = crash(node)
        assert died["suspects"] == [ANN]
        assert "SIGSEGV" in died["how"]
        for number in (signal.SIGKILL, signal.SIGTERM):
            node.end(number)
            node.start()
            assert warnings(node) == {f"uid {ANN}": "quarantine"}
            with calling(node.socket, uid=ANN) as ann:
                assert ann.admit(**SMALL).json["code"] == "quarantined"
        assert (node.root / "state" / "quarantines.json").stat().st_mode & 0o777 == 0o600
        assert (node.root / "run" / "gpu0.let-in.json").stat().st_mode & 0o777 == 0o600


def quarantined(make_node: Start, **options: Any) -> Node:
    """Start a node on which Ann crashed a control daemon twice, and is quarantined for that."""
    node = make_node(**{"simulate": 1, **options}).start()
    with calling(node.socket, uid=ANN) as ann:
        for _ in range(2):
            assert ann.request("DELETE", f"/v1/leases/{granted(ann)}").status == 204
            crash(node)
    assert node.events("uid_quarantined", uid=ANN)
    return node


@pytest.mark.parametrize("real", branches(555))
def test_always_accompanied(make_node: Start, real: RealDaemon) -> None:
    """When two uids have access at each crash, both are named, none is quarantined, and restarts are delayed."""
    config = '[daemon]\ndeaths = 3\nusers = "many"\n'
    node = make_node(simulate=1, control=real.control, config=config).start()
    with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
        granted(ann)
        granted(bob)
        for number, each in enumerate(CRASHES):
            wait_until(lambda: let_in(node, ANN) and let_in(node, BOB), what="both to be let in", deadline=40)
            died = crash(node, number=each)
            assert died["suspects"] == [ANN, BOB]
            assert died["verdict"] == ("later" if number else "at_once")
            assert each.name in died["how"]
        node.wait_for_state("gpu0", "ready", deadline=40)
        assert not node.events("uid_quarantined")
        assert not node.events("daemon_state", state="failed")
        assert warnings(node) == {f"uid {ANN}": "suspect", f"uid {BOB}": "suspect"}
        assert node.get("/v1/quarantines").json == {
            "quarantines": [],
            "suspects": [{"uid": uid, "crashes": 4, "alone": 0} for uid in (ANN, BOB)],
        }


@pytest.mark.real_daemon(535)
class TestOneDriver:
    """Behaviour that does not depend on the driver, on driver 535."""

    def test_lease_that_it_has(self, make_node: Start) -> None:
        """By default a lease of a quarantined uid stays, but cannot be renewed."""
        node = make_node(simulate=1).start()
        with calling(node.socket, uid=ANN) as ann:
            lease = granted(ann, ttl=600)
            for _ in range(2):
                wait_until(lambda: let_in(node, ANN), what="it to be let in")
                crash(node)
            refused = ann.request("POST", f"/v1/leases/{lease}/renew", {"ttl": 900})
            assert (refused.status, refused.json["code"]) == (403, "quarantined")
            assert ann.request("GET", f"/v1/leases/{lease}").json["state"] == "granted"

    def test_claims(self, make_node: Start) -> None:
        """A quarantined uid takes no claim, also not through an administrator; the claim stays open for another uid."""
        node = quarantined(make_node)
        claim = wait_until(
            lambda: (
                found
                if (found := node.request("POST", "/v1/leases", {**SMALL, "holder": {"claim": {}}})).status == 201
                else None
            ),
            what="a claim to be granted",
            deadline=20,
        ).json
        path, token = f"/v1/leases/{claim['id']}/holders", claim["env"]["MPSD_LEASE_TOKEN"]
        with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
            owned = {"pid": ann.pid, "owner": {"uid": ANN, "gid": ANN}}
            for refused in (
                ann.request("POST", path, {"token": token}),
                node.request("POST", path, {"token": token, **owned}),
                node.request("POST", path, owned),
                node.request("POST", "/v1/leases", {**SMALL, "holder": {"claim": {"uid": ANN, "gid": ANN}}}),
            ):
                assert (refused.status, refused.json["code"]) == (403, "quarantined"), refused.body
            found = node.get(f"/v1/leases/{claim['id']}").json
            assert [each["kind"] for each in found["holders"]] == ["claim"]
            assert not let_in(node, ANN)
            assert bob.request("POST", path, {"token": token}).status == 200
            assert let_in(node, BOB)

    def test_pardon(self, make_node: Start) -> None:
        """Only an administrator lifts a quarantine, for good and with a clean slate."""
        node = quarantined(make_node)
        with calling(node.socket, uid=ANN) as ann:
            assert ann.request("DELETE", f"/v1/quarantines/{ANN}").status == 403
            assert ann.admit(**SMALL).json["code"] == "quarantined"
            for uid in (BOB, "x", "1" * 40, "-1"):
                assert node.request("DELETE", f"/v1/quarantines/{uid}").status == 404
            assert node.mpsctl("pardon", str(BOB)).returncode == 1
            assert node.mpsctl("pardon", str(ANN)).returncode == 0
            assert node.events("uid_pardoned", uid=ANN)
            assert node.get("/v1/quarantines").json == {"quarantines": [], "suspects": []}
            node.end(signal.SIGKILL)
            node.start()
            granted(ann)
            assert crash(node)["suspects"] == [ANN]
            assert warnings(node) == {f"uid {ANN}": "suspect"}

    def test_status(self, make_node: Start) -> None:
        """`mpsctl status` names the quarantined uids, and the command that lifts a quarantine."""
        node = quarantined(make_node)
        # The node has just started: its GPUs may not have been read yet.
        wait_until(lambda: node.mpsctl("status").returncode == 0, what="the node to be healthy")
        shown = node.mpsctl("status")
        assert shown.returncode == 0
        assert f"uid {ANN} has been quarantined since" in shown.stdout
        assert f"mpsctl pardon {ANN}" in shown.stdout

    def test_pardon_that_cannot_be_stored(self, make_node: Start) -> None:
        """A pardon that cannot be stored has no effect."""
        node = quarantined(make_node)
        state = node.root / "state"
        (state / "quarantines.json").unlink()
        hidden = node.root / "hidden"
        state.rename(hidden)
        try:
            assert node.request("DELETE", f"/v1/quarantines/{ANN}").status == 507
            with calling(node.socket, uid=ANN) as ann:
                assert ann.admit(**SMALL).json["code"] == "quarantined"
        finally:
            hidden.rename(state)

    def test_damaged_file(self, make_node: Start) -> None:
        """A damaged file does not prevent mpsd's start: it is set aside, and reported."""
        node = quarantined(make_node)
        node.end()
        path = node.root / "state" / "quarantines.json"
        path.write_bytes(b"\xff" * 100)
        node.start()
        assert node.events("store_set_aside", file=f"{path}.damaged")
        assert warnings(node) == {}

    def test_reboot(self, make_node: Start) -> None:
        """A reboot ends no quarantine; crashes before it no longer count."""
        node = quarantined(make_node)
        node.end()
        path = node.root / "state" / "quarantines.json"
        kept = json.loads(path.read_text())
        path.write_text(json.dumps({**kept, "boot_id": "another", "crashes": [CRASH_OF_BOB] * 2}))
        node.start()
        assert warnings(node) == {f"uid {ANN}": "quarantine"}

    def test_who_waits(self, make_node: Start) -> None:
        """A waiting request of a uid that is quarantined meanwhile is refused, and delays no other request."""
        node = make_node(simulate=2).start()
        own = node.request("POST", "/v1/leases", {**SMALL, "gpu": "1"}).json["id"]
        with (
            calling(node.socket, uid=ANN) as ann,
            ThreadPoolExecutor(1) as pool,
            calling(node.socket, uid=ANN) as other,
        ):
            asked = pool.submit(other.admit, **{**SMALL, "gpu": "1"}, wait=30)
            wait_until(lambda: node.events("lease_waits", uid=ANN), what="a request to wait")
            for _ in range(2):
                assert ann.request("DELETE", f"/v1/leases/{granted(ann)}").status == 204
                crash(node)
            answer = asked.result(timeout=20)
            assert answer.status == 409
            assert "is quarantined" in answer.json["detail"]
        assert [each["id"] for each in node.get("/v1/leases").json["leases"]] == [own]

    @pytest.mark.parametrize("policy", ["report", "terminate"])
    def test_leases(self, make_node: Start, policy: str) -> None:
        """Access is closed on all GPUs at once; the leases end if policy terminates, and stay if it reports."""
        config = f'[violations]\nquarantined = "{policy}"\n'
        node = make_node(simulate=2, config=config).start()
        with calling(node.socket, uid=ANN) as ann:
            lease = granted(ann, gpu="1")
            assert let_in(node, ANN, "gpu1")
            for _ in range(2):
                assert ann.request("DELETE", f"/v1/leases/{granted(ann)}").status == 204
                crash(node)
            assert not let_in(node, ANN, "gpu1")
            if policy == "terminate":
                ended = wait_until(lambda: node.events("lease_ended", lease=lease), what="the lease to end")[0]
                assert ended["because"] == f"uid {ANN} is quarantined"
            else:
                assert ann.request("POST", f"/v1/leases/{lease}/attach").json["code"] == "quarantined"
                assert not node.events("lease_ended", lease=lease)
                assert node.mpsctl("pardon", str(ANN)).returncode == 0
                assert let_in(node, ANN, "gpu1")

    def test_policy_that_changes(self, make_node: Start) -> None:
        """A reload to the policy terminate ends the leases of uids that are already quarantined."""
        node = make_node(simulate=2, config="").start()
        with calling(node.socket, uid=ANN) as ann:
            lease = granted(ann, gpu="1")
            for _ in range(2):
                assert ann.request("DELETE", f"/v1/leases/{granted(ann)}").status == 204
                crash(node)
            assert not node.events("lease_ended", lease=lease)
            node.reload('[violations]\nquarantined = "terminate"\n')
            wait_until(lambda: node.events("lease_ended", lease=lease), what="the lease to end")

    def test_everybody(self, make_node: Start) -> None:
        """Where every local user has access, no uid is named, and the GPU is not given up either."""
        config = '[enforcement]\nunadmitted = "defaults"\n[daemon]\ndeaths = 2\n'
        node = make_node(simulate=1, config=config).start()
        with calling(node.socket, uid=ANN) as ann:
            granted(ann)
            for verdict in ("at_once", "later", "later"):
                died = crash(node)
                assert died["verdict"] == verdict
                assert died["how"].endswith("every local user had pipe access")
        assert not node.events("uid_quarantined")
        node.wait_for_state("gpu0", "ready", deadline=40)

    def test_root(self, make_node: Start) -> None:
        """Root and mpsd's own uid are never suspects."""
        node = make_node(simulate=1).start()
        assert node.request("POST", "/v1/leases", SMALL).status == 201
        assert crash(node)["suspects"] == []
        assert crash(node)["suspects"] == []
        assert node.get("/v1/quarantines").json == {"quarantines": [], "suspects": []}


def test_clients(short_tmp: Path) -> None:
    """Policy ends the clients of a quarantined uid on the other GPUs, too, and no other clients."""
    short_tmp.chmod(0o711)
    config = '[enforcement]\ngrace = 0.3\n[violations]\nquarantined = "terminate"\n[daemon]\nusers = "many"\n'
    node = Node(root=short_tmp, simulate=2, config=config)
    try:
        node.start()
        with client_of(node, ANN, gpu="1") as theirs, client_of(node, BOB, gpu="1") as other:
            assert theirs.hello["ok"]
            assert other.hello["ok"]
            with calling(node.socket, uid=ANN) as ann:
                for _ in range(2):
                    assert ann.request("DELETE", f"/v1/leases/{granted(ann)}").status == 204
                    crash(node)
            wait_until(lambda: theirs.process.poll() is not None, what=f"the client to be ended; {node.stderr}")
            assert node.events("violation", kind="quarantined", pid=theirs.pid)
            assert other.process.poll() is None
            assert not node.events("client_forced", pid=other.pid)
    finally:
        node.clean_up()
