"""Pipe access to a control daemon: root, and the uids with a lease on it, from the grant to the end of the last lease.

The subjects are NVIDIA's own control daemons, and NVIDIA's own front-end as the uid in question.
"""

import contextlib
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.caller import Caller, calling, end, granted, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, branches, event, is_running, kill, next_ready, program
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon
from tests.tools import lacking

pytestmark = [needs_root, pytest.mark.thorough]

ANN, BOB = 61001, 61002

SMALL = {"threads": 10, "memory": "1GiB", "gpu": "0"}
REFUSED = (1, "Cannot find MPS control daemon process")
"""The answer of every front-end without access to the directory: the same as without a control daemon."""

DENY = '[enforcement]\nunadmitted = "deny"\n'
DEFAULTS = '[enforcement]\nunadmitted = "defaults"\n'
ALLOW = '[enforcement]\nunadmitted = "allow"\n'


def as_user(uid: int) -> dict[str, Any]:
    """Return the arguments with which subprocess starts a child as another uid, in no other group."""
    return {"user": uid, "group": uid, "extra_groups": []}


def front_end(node: Node, uid: int, name: str = "gpu0") -> tuple[int, str]:
    """Run NVIDIA's front-end as a uid; return its status and its output on both streams."""
    done = node.front_end(name, "get_default_active_thread_percentage\n", cwd="/", **as_user(uid))
    return done.returncode, (done.stdout + done.stderr).strip()


def reaches(node: Node, uid: int, name: str = "gpu0") -> bool:
    """Return whether a uid has access to a control daemon."""
    return clear(lambda: front_end(node, uid, name)) != REFUSED


def clear(ask: Callable[[], tuple[int, str]]) -> tuple[int, str]:
    """Return the answer to a front-end; one that collides with mpsd's own is sent again."""

    def tried() -> tuple[int, str] | None:
        answer = ask()
        return answer if answer == REFUSED or answer in {(0, "0.1"), (0, "10.0"), (0, "100.0")} else None

    return wait_until(tried, what="a clear answer")


def is_shut(node: Node, uid: int) -> None:
    """Wait until a uid has no access to the control daemon."""
    wait_until(lambda: not reaches(node, uid), what=f"uid {uid} to be shut out; the log is {node.stderr}")


@contextlib.contextmanager
def two_callers(node: Node) -> Iterator[tuple[Caller, Caller]]:
    with calling(node.socket, uid=ANN) as ann, calling(node.socket, uid=BOB) as bob:
        yield ann, bob


def facl(path: Path) -> str:
    """Return an ACL in the syntax of getfacl, formatted by the tests; empty where there is none."""
    try:
        raw = os.getxattr(path, "system.posix_acl_access")
    except OSError:
        return ""
    return ",".join(f"{tag}:{bits}:{who}" for tag, bits, who in struct.iter_unpack("<HHI", raw[4:]))


def is_closed(path: Path) -> bool:
    """Return whether only its owner has access to a directory."""
    return path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("real", branches(470, 555))
class TestEveryDriver:
    """Access to each of NVIDIA's control daemons."""

    def test_from_the_grant_to_the_end(self, make_node: Start, real: RealDaemon) -> None:
        """A uid has access as long as it has a lease there, however that ends; another uid's lease gives it none."""
        node = make_node(simulate=2, control=real.control, config="").start()
        assert front_end(node, ANN) == front_end(node, BOB) == REFUSED
        assert reaches(node, 0)
        with two_callers(node) as (ann, bob):
            first, second = granted(ann), granted(ann)
            assert reaches(node, ANN)
            assert not reaches(node, BOB)
            assert not reaches(node, ANN, "gpu1")

            # Access lasts until the last of its leases has ended: by a release here.
            end(ann, first)
            assert reaches(node, ANN)
            end(ann, second)
            assert not reaches(node, ANN)

            # The next lease is the other user's, and an administrator ends it.
            lease = granted(bob)
            assert reaches(node, BOB)
            assert not reaches(node, ANN)
            assert node.request("DELETE", f"/v1/leases/{lease}").status == 204
            assert not reaches(node, BOB)

            # Access ends when the lease's time to live has passed.
            granted(bob, ttl=1)
            assert reaches(node, BOB)
            is_shut(node, BOB)

            # Access ends with the lease's holder.
            granted(ann)
            assert reaches(node, ANN)
            ann.kill()
            is_shut(node, ANN)
        assert reaches(node, 0)
        assert node.events("pipe_access_drift") == []

    def test_new_daemon(self, make_node: Start, real: RealDaemon) -> None:
        """A control daemon that replaces a dead one makes a socket with access for all; the leases still decide."""
        node = make_node(simulate=1, control=real.control).start()
        with two_callers(node) as (ann, _):
            granted(ann)
            pid = node.daemons()["gpu0"]["pid"]
            kill(pid)
            next_ready(node, "gpu0", pid)
            assert reaches(node, ANN)
            assert not reaches(node, BOB)
            assert (node.pipe_directory("gpu0") / "control").stat().st_mode & 0o007 == 0

    @pytest.mark.parametrize("mpsd_dies", [False, True])
    def test_before_its_limits_hold(
        self, make_node: Start, real: RealDaemon, short_tmp: Path, *, mpsd_dies: bool
    ) -> None:
        """A control daemon starts with everything open: no uid has access to it before its limits are set."""
        gate = short_tmp / "gate"
        slow = program(
            short_tmp / "slow-control",
            f"""case "$1" in -f) ;; *) while [ ! -e {gate} ]; do sleep 0.02; done ;; esac\nexec {real.control} "$@\"""",
        )
        gate.touch()
        node = make_node(simulate=1, control=slow).start()
        with two_callers(node) as (ann, _):
            granted(ann)
            pid = node.daemons()["gpu0"]["pid"]
            socket = node.pipe_directory("gpu0") / "control"
            before = socket.stat().st_ino, socket.stat().st_ctime_ns
            gate.unlink()
            kill(pid)
            node.wait_for_state("gpu0", "starting")
            wait_until(
                lambda: (socket.stat().st_ino, socket.stat().st_ctime_ns) != before,
                what="the next to listen",
                not_yet=(FileNotFoundError,),
            )
            theirs = replace(node, control=real.control)
            assert front_end(theirs, ANN) == REFUSED
            if mpsd_dies:
                node.end(signal.SIGKILL)
                node.start(ready=False)
                wait_until(lambda: node.daemons()["gpu0"]["pid"], what="the next mpsd to adopt it")
                assert front_end(theirs, ANN) == REFUSED
            gate.touch()
            next_ready(node, "gpu0", pid)
            assert reaches(theirs, ANN)

    def test_mpsd_s_death(self, make_node: Start, real: RealDaemon) -> None:
        """After SIGKILL of mpsd the next one gives access by the leases, also where one ended meanwhile."""
        node = make_node(simulate=2, control=real.control).start()
        with two_callers(node) as (ann, bob):
            granted(ann)
            granted(bob, gpu="1")
            node.end(signal.SIGKILL)
            assert reaches(node, ANN)
            bob.kill()
            # The access that mpsd left is not the access that it finds, either.
            os.removexattr(node.pipe_directory("gpu0"), "system.posix_acl_access")
            assert not reaches(node, ANN)
            assert reaches(node, BOB, "gpu1")
            node.start()
            assert reaches(node, ANN)
            assert not reaches(node, BOB)
            wait_until(lambda: not reaches(node, BOB, "gpu1"), what="the end of the lease of the dead holder")

    def test_reload(self, make_node: Start, real: RealDaemon) -> None:
        """A reload changes access at once, in both directions, on running daemons; no lease is lost."""
        node = make_node(simulate=1, control=real.control, config=ALLOW).start()
        with two_callers(node) as (ann, _):
            assert reaches(node, BOB)
            granted(ann)
            assert node.reload(DENY)["applied"] == ["enforcement.unadmitted"]
            assert not reaches(node, BOB)
            assert reaches(node, ANN)
            node.reload(DEFAULTS)
            assert reaches(node, BOB)
            directory = node.pipe_directory("gpu0")
            assert (directory.stat().st_mode & 0o777, facl(directory)) == (0o755, "")
            node.reload(DENY)
            assert not reaches(node, BOB)
            assert reaches(node, ANN)
        assert node.events("pipe_access_drift") == []


@pytest.mark.parametrize("real", branches(555))
def test_many_users(make_node: Start, real: RealDaemon) -> None:
    """On a daemon that serves many uids, the access of each follows its own leases."""
    node = make_node(simulate=1, control=real.control, config='[daemon]\nusers = "many"\n').start()
    with two_callers(node) as (ann, bob):
        anns, bobs = granted(ann), granted(bob)
        assert reaches(node, ANN)
        assert reaches(node, BOB)
        end(ann, anns)
        assert not reaches(node, ANN)
        assert reaches(node, BOB)
        end(bob, bobs)
        assert not reaches(node, BOB)


_KEEPER = """
import os, socket, sys
os.setgroups([]); os.setresgid(*[int(sys.argv[2])] * 3); os.setresuid(*[int(sys.argv[2])] * 3)
directory = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
kept = os.open(sys.argv[1] + "/control", os.O_PATH)
os.chdir(sys.argv[1])
for line in sys.stdin:
    ways = (sys.argv[1] + "/control", "control", f"/proc/self/fd/{directory}/control", f"/proc/self/fd/{kept}")
    for way in ways:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                connection.connect(way)
                print("connected", end=" ")
            except PermissionError:
                print("refused", end=" ")
    print(flush=True)
"""


@pytest.mark.parametrize("real", branches(470, 555))
def test_what_was_kept_from_a_lease(make_node: Start, real: RealDaemon) -> None:
    """A uid that kept the directory or the socket open from its lease cannot connect when the lease has ended."""
    node = make_node(simulate=1, control=real.control).start()
    with two_callers(node) as (ann, _):
        lease = granted(ann)
        with subprocess.Popen(
            [sys.executable, "-I", "-c", _KEEPER, str(node.pipe_directory("gpu0")), str(ANN)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        ) as keeper:
            assert keeper.stdin is not None
            assert keeper.stdout is not None

            def tried() -> list[str]:
                assert keeper.stdin is not None
                assert keeper.stdout is not None
                print(file=keeper.stdin, flush=True)
                return keeper.stdout.readline().split()

            assert tried() == ["connected"] * 4
            end(ann, lease)
            assert tried() == ["refused"] * 4
            granted(ann)
            assert tried() == ["connected"] * 4


@pytest.mark.parametrize("real", branches(470, 555))
def test_conversation_that_outlasts_its_lease(make_node: Start, real: RealDaemon) -> None:
    """A front-end that outlives its lease locks mpsd out as any stranger's does, and is named."""
    node = make_node(simulate=1, control=real.control, config=BRISK).start()
    with two_callers(node) as (ann, bob):
        lease = granted(ann)
        with subprocess.Popen(
            [str(real.control)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/",
            env=node.by_hand("gpu0"), **as_user(ANN),
        ) as kept:  # fmt: skip
            node.wait_for_state("gpu0", "unresponsive")
            end(ann, lease)
            daemon = node.wait_for_state("gpu0", "unresponsive")
            wait_until(
                lambda: f"pid {kept.pid} (uid {ANN})" in node.daemons()["gpu0"]["because"],
                what="the front-end to be named",
            )
            assert is_running(daemon["pid"])
            assert bob.admit(**SMALL).json["code"] == "daemon_not_ready"
            kept.communicate(timeout=10)
        node.wait_for_state("gpu0", "ready")
        assert not reaches(node, ANN)


@pytest.mark.real_daemon(535)
class TestOneDriver:
    """Behaviour that does not depend on the driver, on driver 535."""

    def test_user_namespace(self, make_node: Start) -> None:
        """Access goes by the uid on the node, not by the uid in a process's own user namespace."""
        node = make_node(simulate=1).start()
        with two_callers(node) as (ann, _):
            granted(ann)
            assert clear(lambda: in_user_namespace(node, inside=1, outside=ANN)) == (0, "10.0")
            assert clear(lambda: in_user_namespace(node, inside=0, outside=ANN)) == (0, "10.0")
            assert clear(lambda: in_user_namespace(node, inside=ANN, outside=BOB)) == REFUSED
            assert clear(lambda: in_user_namespace(node, inside=0, outside=BOB)) == REFUSED

    def test_changed_by_hand(self, make_node: Start) -> None:
        """Access that another process changed is restored at the next check, and reported as it was found."""
        node = make_node(simulate=1).start()
        directory = node.pipe_directory("gpu0")
        with two_callers(node) as (ann, _):
            granted(ann)
            kept = facl(directory)
            directory.chmod(0o755)
            wait_until(lambda: facl(directory) == kept, what="the directory to be closed again")
            told = node.events("pipe_access_drift", path=str(directory))
            assert [line["found"] for line in told] == ["user::rwx,user:61001:r-x,group::---,mask::r-x,other::r-x"]
            (directory / "control").chmod(0o666)
            wait_until(
                lambda: node.events("pipe_access_drift", path=str(directory / "control")), what="that to be told too"
            )
            wait_until(lambda: reaches(node, ANN) and not reaches(node, BOB), what="all to be as before")
        wait_until(lambda: is_closed(directory), what="the lease's end")
        assert node.get("/v1/status").status == 200  # mpsd has also read the access back
        directory.chmod(0o755)
        again = "user::rwx,group::r-x,other::r-x"
        event(node, "pipe_access_drift", path=str(directory), found=again)
        wait_until(lambda: is_closed(directory), what="the directory to be closed once more")

    def test_grant_that_cannot_be_opened(self, make_node: Start) -> None:
        """A grant whose access cannot be opened fails: it is refused with the reason, and nothing remains."""
        node = make_node(simulate=1).start()
        directory = node.pipe_directory("gpu0")
        with two_callers(node) as (ann, _), unchangeable(directory):
            answer = ann.admit(**SMALL)
            assert (answer.status, answer.json["code"], answer.json["limit"]) == (
                409,
                "pipe_access",
                "enforcement.unadmitted",
            )
            assert str(directory) in answer.json["detail"]
            assert answer.json["hint"]
            assert node.get("/v1/leases").json["leases"] == []
        assert not reaches(node, ANN)

    def test_grant_to_one_that_waits_that_cannot_be_opened(self, make_node: Start) -> None:
        """A waiting request whose access cannot be opened fails in the same way."""
        node = make_node(simulate=1).start()
        first = node.request("POST", "/v1/leases", SMALL).json["id"]
        with two_callers(node) as (ann, _), unchangeable(node.pipe_directory("gpu0")), ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ann.admit, **SMALL, wait=30)
            wait_until(lambda: node.events("lease_waits", uid=ANN), what="a request to wait")
            assert node.request("DELETE", f"/v1/leases/{first}").status == 204
            answer = asked.result(timeout=20)
            assert (answer.status, answer.json["code"]) == (409, "pipe_access")
            assert node.get("/v1/leases").json["leases"] == []
        ended = wait_until(lambda: node.events("lease_ended", uid=ANN), what="that to be told")
        assert [line["because"] for line in ended] == [answer.json["detail"]]

    def test_way_that_cannot_be_closed(self, make_node: Start) -> None:
        """While access cannot be closed, the node is not ready: it says so, grants no lease there, and retries."""
        node = make_node(simulate=1, config=BRISK).start()
        with two_callers(node) as (ann, _):
            lease = granted(ann)
            with unchangeable(node.pipe_directory("gpu0")):
                end(ann, lease)
                wait_until(lambda: node.events("pipe_access_not_held"), what="that to be told")
                wait_until(lambda: not node.get("/v1/status").json["healthy"], what="the node to be unhealthy")
                refused = node.request("POST", "/v1/leases", SMALL)
                assert refused.json["code"] == "daemon_not_ready"
                assert "cannot be set to" in refused.json["detail"]
            node.wait_for_state("gpu0", "ready")
            assert not reaches(node, ANN)

    def test_file_system_without_acls(self, make_node: Start, short_tmp: Path) -> None:
        """On a file system without ACLs mpsd says so before it starts, with what helps; so does `mpsd check`."""
        paths = short_tmp / "plain"
        paths.mkdir()
        node = make_node(simulate=1, rooted=False)
        state = f'state_dir = "{node.root}/state"\nlog_dir = "{node.root}/log"\n'
        node.config = f'[paths]\nruntime_dir = "{paths}/run"\n{state}'
        node.configuration.write_text(node.config)
        assert check(node).returncode == 0
        with mounted("ramfs", paths):
            status, said = node.refuse()
            assert status == 78
            checked = check(node)
            assert checked.returncode == 78
            for words in (said, checked.stderr):
                assert "does not support POSIX ACLs" in words
                assert 'enforcement.unadmitted = "defaults"' in words
            # The remedy in the hint works; and no reload may undo it.
            node.config += DEFAULTS
            node.launch()
            api = paths / "run" / "mpsd.sock"
            wait_until(api.is_socket, what="mpsd to listen")
            with calling(api, uid=ANN) as ann:
                wait_until(lambda: ann.admit(**SMALL).status == 201, what="a grant")
            refused = node.reload(node.config.replace("defaults", "deny"))
            assert refused["event"] == "settings_refused"
            node.end()
            for line in node.events("daemon_state", state="starting"):
                kill(line["pid"])
                wait_until(partial(gone, line["pid"]), what="the control daemon to end")


def gone(pid: int) -> bool:
    return not is_running(pid)


def check(node: Node) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mpsd", "check", "--config", str(node.configuration)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=30, cwd=Path(__file__).parents[3]
    )


_CLONE_NEWUSER = 0x10000000
"""From linux/sched.h; os.unshare came with CPython 3.12."""


def in_user_namespace(node: Node, *, inside: int, outside: int) -> tuple[int, str]:
    """Run NVIDIA's front-end as a uid of a user namespace that is another uid outside."""
    ready, go = os.pipe()
    go_on, went = os.pipe()
    script = (
        "import ctypes, os\n"
        f"os.setgroups([]); ctypes.CDLL(None).unshare({_CLONE_NEWUSER})\n"
        f"os.write({go}, b'x'); os.read({go_on}, 1)\n"
        f"os.setresgid({inside}, {inside}, {inside}); os.setresuid({inside}, {inside}, {inside})\n"
        f"os.execv({str(node.control)!r}, [{str(node.control)!r}])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-I", "-c", script], pass_fds=(go, go_on), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, cwd="/", env=node.by_hand("gpu0"),
    ) as child:  # fmt: skip
        try:
            os.read(ready, 1)
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{child.pid}/{name}").write_text(f"{inside} {outside} 1\n", encoding="ascii")
            os.write(went, b"x")
            said, _ = child.communicate("get_default_active_thread_percentage\n", timeout=20)
        finally:
            for descriptor in (ready, go, go_on, went):
                os.close(descriptor)
    return child.returncode, said.strip()


@contextlib.contextmanager
def unchangeable(path: Path) -> Iterator[None]:
    """Make a file immutable, even for root."""
    if subprocess.run(["chattr", "+i", str(path)], capture_output=True, timeout=10, check=False).returncode != 0:
        pytest.skip("no file can be made immutable here")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True, timeout=10)


@contextlib.contextmanager
def mounted(kind: str, path: Path) -> Iterator[None]:
    """Mount a file system of a kind, and unmount it at the end."""
    done = subprocess.run(["mount", "-t", kind, kind, str(path)], capture_output=True, timeout=10, check=False)
    if done.returncode != 0:
        lacking(f"{kind} cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True, timeout=10)
