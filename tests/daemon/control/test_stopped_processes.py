"""Processes that their user stops or makes hang, beside a stopped server: none keeps a GPU from the next user.

A stopped client, holder or front-end of the user's own, a canary of mpsd's that runs as the user, a server that is
stopped time and again, or hangs without being stopped, and a server that is stopped while it ends a client.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.caller import calling, end, granted, needs_root
from tests.daemon.canary.helpers import canary_of
from tests.daemon.conftest import Start
from tests.daemon.control.operations import begin, ended
from tests.daemon.control.test_stopped_servers import ALONE, SHARE, attached, node  # noqa: F401 - a fixture
from tests.daemon.helpers import IMPATIENT, SWIFT, branches, event, is_running, kill, program
from tests.daemon.leases.test_users import instead, python  # noqa: F401 - a fixture
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon
from tests.simulated_clients import SimulatedClient, leased
from tests.tools import lacking

pytestmark = [needs_root, pytest.mark.thorough]

ANN, BOB = 61501, 61502

SPIN: Final = """
import ctypes, os, sys
pid = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p
libc.ptrace.restype = ctypes.c_long
registers = (ctypes.c_ulonglong * 27)()  # struct user_regs_struct
def trace(request, address=None, data=None):
    ctypes.set_errno(0)
    found = libc.ptrace(request, pid, address, data)
    if found == -1 and ctypes.get_errno():
        sys.exit(os.strerror(ctypes.get_errno()))
    return found
trace(16)  # PTRACE_ATTACH
os.waitpid(pid, 0x40000000)  # __WALL
trace(12, None, ctypes.addressof(registers))  # PTRACE_GETREGS
at = registers[16]  # rip
trace(4, at, ((trace(1, at) & ~0xFFFF) | 0xFEEB) & (2**64 - 1))  # PTRACE_POKETEXT: a jump to itself
registers[15] = 2**64 - 1  # orig_rax: no system call is restarted
trace(13, None, ctypes.addressof(registers))  # PTRACE_SETREGS
trace(17)  # PTRACE_DETACH
"""
"""Makes a process run in a circle for ever, as its user may: it is not stopped, and does nothing any more."""

SITS: Final = """
import os, socket, sys
os.setgroups([])
os.setresgid(*[int(sys.argv[1])] * 3)
os.setresuid(*[int(sys.argv[1])] * 3)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as seat:
    seat.connect(sys.argv[2] + "/control")
    seat.send(b"\\1\\0\\0")
    print(flush=True)
    sys.stdin.read()
"""
"""Connects to a control daemon, and sends the beginning of a message."""


def make_hang(pid: int) -> None:
    if os.uname().machine != "x86_64":
        lacking("the program of this test is for x86-64")
    subprocess.run([sys.executable, "-I", "-c", SPIN, str(pid)], check=True, timeout=20)


@contextmanager
def user_of(node: Node, uid: int, python: str) -> Iterator[SimulatedClient]:  # noqa: F811 - the fixtures
    """Start a client of a user, with a lease, and wait until its lease is known."""
    with leased(node, *SHARE, "--user", str(uid), "--wait", "40", within=instead(python)) as client:
        assert client.hello["mps"]
        attached(node, client)
        yield client


def next_user_is_served(node: Node, python: str) -> None:  # noqa: F811 - the fixtures
    with user_of(node, BOB, python) as bob:
        assert bob.hello["mps"]
        assert bob.compute(0.01)["ok"]


def test_server_that_hangs(node: Node, python: str) -> None:  # noqa: F811 - the fixtures
    """A server that its user makes hang without stopping it is left alone while it is used, and ended then."""
    with user_of(node, ANN, python) as ann:
        server = ann.hello["server"]
        make_hang(server)
        node.wait_for_state("gpu0", "unresponsive")
        with calling(node.socket, uid=BOB) as bob:
            assert bob.admit(threads=10, memory="1GiB").status == 409
        assert is_running(server)
    next_user_is_served(node, python)
    told = event(node, "server_killed", server=server)
    assert (told["uid"], "served nobody any more" in told["because"]) == (ANN, True)
    assert node.events("daemon_death") == []


def test_server_that_is_stopped_time_and_again(node: Node, python: str) -> None:  # noqa: F811 - the fixtures
    """A server that continues for moments only is ended like one that is stopped for good."""
    with user_of(node, ANN, python) as ann:
        server = ann.hello["server"]
    over = threading.Event()

    def stop_and_continue() -> None:
        with suppress(ProcessLookupError):
            while not over.wait(0.01):
                kill(server, signal.SIGSTOP)
                over.wait(0.4)
                kill(server, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    try:
        next_user_is_served(node, python)
        wait_until(lambda: not is_running(server), what="the server to be ended", deadline=20)
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("how", [lambda pid: kill(pid, signal.SIGSTOP), make_hang], ids=["stopped", "hangs"])
def test_server_that_should_end_a_client(make_node: Start, python: str, how: Any) -> None:  # noqa: F811 - the fixtures
    """A server that serves nobody while mpsd has it end a client keeps the GPU no longer than its client lives."""
    config = f"{ALONE}[enforcement]\nterminate_deadline = 2\ngrace = 0.3\n"
    made = make_node(simulate=1, control=None, config=config, durations=IMPATIENT).start()
    with user_of(made, ANN, python) as ann:
        lease, server = attached(made, ann), ann.hello["server"]
        how(server)
        with calling(made.socket, uid=ANN) as caller:
            caller.request("POST", f"/v1/leases/{lease}/end", {})
            assert caller.request("DELETE", f"/v1/leases/{lease}").status == 204
    next_user_is_served(made, python)
    wait_until(lambda: not is_running(server), what="the server to be ended", deadline=20)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_canary(make_node: Start, python: str, number: signal.Signals) -> None:  # noqa: F811 - the fixture
    """A user who stops or ends the canary that examines its server keeps no GPU from the next user."""
    made = make_node(simulate=1, control=None, config=f"{ALONE}canary_deadline = 1.0\n").start()
    with user_of(made, ANN, python) as ann:
        assert ann.do("wedge")["ok"]  # the canary then waits
        ann.launch(60)
        made.end(signal.SIGKILL)
        ann.kill()
    made.start(ready=False)
    kill(canary_of(made), number)
    next_user_is_served(made, python)
    wait_until(lambda: made.events("canary_ended", proof="nothing"), what="the canary to end", deadline=40)


@pytest.mark.parametrize("verb", ["end", "restart"])
def test_client(make_node: Start, python: str, verb: str) -> None:  # noqa: F811 - the fixtures
    """A stopped client, which is its lease's holder too, is ended as any other; the next user is served."""
    config = f"{ALONE}[enforcement]\ngrace = 0.3\n"
    made = make_node(simulate=1, control=None, config=config, durations=IMPATIENT).start()
    with user_of(made, ANN, python) as ann:
        kill(ann.pid, signal.SIGSTOP)
        if verb == "end":
            assert made.request("POST", f"/v1/leases/{attached(made, ann)}/end", {}).status == 202
        else:
            ended(made, begin(made, "restart", timeout=0))
        wait_until(lambda: not is_running(ann.pid), what="the client to be ended", deadline=20)
    next_user_is_served(made, python)
    assert made.events("server_killed") == []


def test_holder(node: Node, python: str) -> None:  # noqa: F811 - the fixtures
    """A lease ends at its time although its holder is stopped, and the next user is served."""
    with calling(node.socket, uid=ANN) as ann:
        lease = granted(ann, ttl=1)
        kill(ann.pid, signal.SIGSTOP)
        event(node, "lease_ended", lease=lease)
        next_user_is_served(node, python)
        kill(ann.pid, signal.SIGCONT)


def test_mpsd_stops(make_node: Start) -> None:
    """A stopped server that is left does not keep mpsd from stopping its control daemon."""
    made = make_node(simulate=1, control=None, config=ALONE, arguments=["--stop-daemons-on-exit"]).start()
    with leased(made, *SHARE) as client:
        attached(made, client)
        server = client.hello["server"]
        kill(server, signal.SIGSTOP)
    daemon = made.daemons()["gpu0"]["pid"]
    assert made.end() == 0
    assert not is_running(server)
    assert not is_running(daemon)


@contextmanager
def sitting(command: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Start a program that connects to the control daemon and waits, and stop it there."""
    with subprocess.Popen([*command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options) as program:
        assert program.stdin is not None
        try:
            yield program
        finally:
            program.kill()


@pytest.mark.parametrize("real", branches(470, 555))
@pytest.mark.parametrize("which", ["front-end", "half a message"])
def test_seat(make_node: Start, real: RealDaemon, which: str) -> None:
    """A stopped process that has the only seat of NVIDIA's control daemon loses it when its user's lease has ended."""
    made = make_node(simulate=1, control=real.control, config=ALONE, durations=SWIFT).start()
    with calling(made.socket, uid=ANN) as ann, calling(made.socket, uid=BOB) as bob:
        lease, first = granted(ann), made.daemons()["gpu0"]["pid"]
        if which == "front-end":
            options: dict[str, Any] = {"user": ANN, "group": ANN, "extra_groups": [], "cwd": "/"}
            command = [str(real.control)]
            sits = sitting(command, env=made.by_hand("gpu0"), **options)
        else:
            directory = str(made.pipe_directory("gpu0"))
            sits = sitting([sys.executable, "-I", "-c", SITS, str(ANN), directory])
        with sits as program:
            assert program.stdout is not None
            if which != "front-end":
                assert program.stdout.readline() == "\n"
            made.wait_for_state("gpu0", "unresponsive", deadline=40)
            kill(program.pid, signal.SIGSTOP)
            assert made.daemons()["gpu0"]["pid"] == first
            end(ann, lease)
            wait_until(
                lambda: (found := made.daemons()["gpu0"])["state"] == "ready" and found["pid"] != first,
                what=f"another control daemon to be ready; the log is {made.stderr}",
                deadline=40,
            )
            end(bob, granted(bob))
        assert not made.events("daemon_death")


@pytest.mark.parametrize("real", branches(470, 555))
def test_server_that_does_not_end(make_node: Start, short_tmp: Path, real: RealDaemon) -> None:
    """A server that never reports its clients, and does not end with NVIDIA's control daemon, is ended when unused."""
    (short_tmp / "bin").mkdir()
    program(short_tmp / "bin" / "nvidia-cuda-mps-server", "exec sleep 600")
    path = f"{short_tmp / 'bin'}:{os.environ['PATH']}"
    made = make_node(simulate=1, control=real.control, config=ALONE, env={"PATH": path}).start()
    with calling(made.socket, uid=ANN) as ann, calling(made.socket, uid=BOB) as bob:
        lease = granted(ann)
        server = int(made.ask("gpu0", f"start_server -uid {ANN}\nget_server_list")[-1])
        wait_until(lambda: made.daemons()["gpu0"]["servers"], what="the server to be seen")
        end(ann, lease)
        asked = {"threads": 10, "memory": "1GiB", "gpu": "0", "wait": 25}
        assert bob.admit(**asked).status == 201, made.stderr.read_text()
    assert event(made, "server_killed", server=server)["uid"] == ANN
