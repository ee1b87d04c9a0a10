"""mpsd under a service manager: its notifications and when they are sent, and a listening socket that it inherits."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from tests.daemon.caller import NOBODY, calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.leases.line import Talk
from tests.harness import wait_until
from tests.node import Answer, Node, nodes
from tests.simulated_clients import SimulatedClient, variables

pytestmark = pytest.mark.thorough

HAND_OVER: Final = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_FDNAMES="mpsd.socket", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""

STUCK: Final = """
import asyncio, sys
from mpsd.__main__ import main
from mpsd.daemon.control import state
from mpsd.daemon.control.supervisor import Supervisor
state._GRACE = 1.0
one_round = Supervisor._one_round
async def stuck(self):
    await one_round(self)
    if self.name == "gpu1" and self.snapshot().state == "ready":
        await asyncio.Event().wait()
Supervisor._one_round = stuck
main()
"""
"""An mpsd with a defect: once its daemon is ready, one of its supervisors waits forever, and is soon late."""

BLOCKED: Final = """
import asyncio, signal
from mpsd.__main__ import main
from mpsd.daemon.service_manager import ServiceNotifier
run = ServiceNotifier.run
async def blocked(self):
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, signal.sigwait, [signal.SIGUSR2])
    await run(self)
ServiceNotifier.run = blocked
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
main()
"""
"""An mpsd with a defect: from SIGUSR1 to SIGUSR2 its event loop is blocked."""

QUICK: Final = "[daemon]\nstart_deadline = 2.0\nanswer_deadline = 0.1\n"
"""Settings with which a supervisor is soon late."""


@dataclass
class Ears:
    """A service manager's notification socket."""

    name: str
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Listen, on an abstract socket if the name begins with @."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{self.name[1:]}" if self.name[0] == "@" else self.name)
        self._socket.setblocking(False)

    def listen(self) -> list[str]:
        while True:
            try:
                self.said += self._socket.recv(4096).decode().split("\n")
            except BlockingIOError:
                return self.said

    def wait_for(self, assignment: str, after: int = 0) -> int:
        """Wait for an assignment, or for one with this beginning, and return its index."""

        def look() -> list[int]:
            return [at for at, said in enumerate(self.listen()) if at >= after and said.startswith(assignment)]

        return wait_until(look, what=f"{assignment}; said was {self.said}", deadline=30)[0]

    def wait_for_silence(self, seconds: float) -> None:
        """Wait, like a manager with a watchdog, until no notification has arrived for so long."""

        def look() -> bool:
            silent = not select.select([self._socket], [], [], seconds)[0]
            self.listen()
            return silent

        wait_until(look, what=f"silence; said was {self.said}", deadline=30)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def ears(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[Ears]:
    """Yield a notification socket, with a path unless the test names another kind."""
    is_abstract = getattr(request, "param", "path") == "abstract"
    ears = Ears(f"@{short_tmp}/notify" if is_abstract else f"{short_tmp}/notify")
    yield ears
    ears.close()


class TestNotifications:
    """The notifications that the manager gets."""

    def test_life(self, ears: Ears, make_node: Start) -> None:
        """mpsd notifies of its readiness, of signs of life, of changes in health, and of its stop."""
        usec = {"NOTIFY_SOCKET": ears.name, "WATCHDOG_USEC": "300000"}
        node = make_node(config="", env=usec)
        node.launch()
        ears.wait_for("READY=1")
        assert node.get("/healthz").status == 200
        ears.wait_for("STATUS=2 of 2 control daemons ready, 0 leases, 0 waiting")
        environment = Path(f"/proc/{node.daemons()['gpu0']['pid']}/environ").read_text()
        assert "NOTIFY" not in environment
        assert "WATCHDOG" not in environment
        node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
        at = ears.wait_for("STATUS=2 of 2 control daemons ready, 1 lease,")
        for _ in range(3):
            at = ears.wait_for("WATCHDOG=1", at + 1)
        node.end()
        at = ears.wait_for("STOPPING=1")
        ears.wait_for("STATUS=ended; 2 of 2 control daemons keep running", at)
        assert ears.listen().count("READY=1") == 1

    @pytest.mark.parametrize("ears", ["abstract"], indirect=True)
    def test_reload(self, ears: Ears, make_node: Start) -> None:
        """A reload sends its beginning and its end; the status has the reason of a refused one until another reload."""
        node = make_node(simulate=1, config="", env={"NOTIFY_SOCKET": ears.name}).start()
        node.reload("nonsense")
        at = ears.wait_for("RELOADING=1")
        assert ears.said[at + 1].startswith("MONOTONIC_USEC=")
        at = ears.wait_for("READY=1", at)
        assert "reload refused" in ears.said[ears.wait_for("STATUS=", at)]
        node.reload("")
        at = ears.wait_for("READY=1", ears.wait_for("RELOADING=1", at))
        assert "reload" not in ears.said[ears.wait_for("STATUS=", at)]

    def test_what_is_not_well(self, ears: Ears, make_node: Start) -> None:
        """The status has every reason why the node is not healthy, in the words of the API, until it has passed."""
        closed = '[daemon]\ncompute_mode = "exclusive-process"\n'
        node = make_node(control=None, config=closed, env={"NOTIFY_SOCKET": ears.name}).start()
        node.request("POST", "/v1/daemons/gpu1/hold")
        at = ears.wait_for("STATUS=1 of 2 control daemons ready, 0 leases, 0 waiting; gpu1 is held: ")
        assert ears.said[at].endswith(f"; {node.get('/v1/status').json['because']}")
        node.request("POST", "/v1/daemons/gpu1/resume")
        at = ears.wait_for("STATUS=2 of 2 control daemons ready", at)
        assert ears.said[at] == "STATUS=2 of 2 control daemons ready, 0 leases, 0 waiting"
        # The status lists open violations, and the risk that a program which misses MPS gets a GPU.
        node.reload("")
        ears.wait_for("STATUS=2 of 2 control daemons ready, 0 leases, 0 waiting; a program that misses MPS gets all of")
        lease = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "gpu": "0"}).json
        trap = {**variables(node), **lease["env"], "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "1=1G"}
        with SimulatedClient(trap) as client:
            assert client.hello["mps"]
            at = ears.wait_for(
                "STATUS=2 of 2 control daemons ready, 1 lease, 0 waiting; 1 violation: no memory limit: process "
            )
            assert f"process {client.pid} was started with" in ears.said[at]

    def test_long_stop(self, ears: Ears, make_node: Start) -> None:
        """While mpsd waits for clients to leave, it requests more time and states for which clients it waits."""
        node = make_node(env={"NOTIFY_SOCKET": ears.name}, arguments=["--stop-daemons-on-exit"]).start()
        lease = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"}).json["id"]
        os.kill(node.pid, signal.SIGTERM)
        at = ears.wait_for("STOPPING=1")
        ears.wait_for("EXTEND_TIMEOUT_USEC=", at)
        wait_until(lambda: any(lease in said for said in ears.listen()[at:]), what="the lease to be named")
        node.request("DELETE", f"/v1/leases/{lease}")
        assert node.ended() == 0
        ears.wait_for("STATUS=ended; 0 of 2 control daemons keep running", at)

    def test_refused_start(self, ears: Ears, make_node: Start) -> None:
        """In the journal the reason for a refused start is an error, and the unit's status contains it."""
        node = make_node(config="nonsense")
        node.stderr.touch()
        found = node.stderr.stat()
        node.env = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}", "NOTIFY_SOCKET": ears.name}
        status, said = node.refuse()
        ears.wait_for(f"STATUS=refused: {node.configuration}: ")
        assert status == 78
        assert [line[:7] for line in said.splitlines()] == ["<3>mpsd", "<3>  hi"]

    @pytest.mark.parametrize("name", ["gone", "deaf"])
    def test_nobody_listens(self, make_node: Start, short_tmp: Path, name: str) -> None:
        """A manager that is gone, or does not read for long, has no effect on mpsd."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
            deaf.bind(f"{short_tmp}/deaf")
            node = make_node(env={"NOTIFY_SOCKET": f"{short_tmp}/{name}", "WATCHDOG_USEC": "3000"}).start()
            wait_until(lambda: node.get("/readyz").status == 200, what="mpsd to answer on")
            assert node.end() == 0


@dataclass
class Defective(Node):
    """An mpsd with a defect."""

    defect: str = ""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.defect, *super().command[3:]]


@pytest.fixture
def defective(ears: Ears, short_tmp: Path, control: Path) -> Iterator[Callable[..., Defective]]:
    """Return a maker of an mpsd with a defect, which is started as a program."""
    with nodes(Defective, short_tmp, control=control, config=QUICK) as make:
        yield lambda defect, usec: make(defect=defect, env={"NOTIFY_SOCKET": ears.name, "WATCHDOG_USEC": usec})


def test_no_sign_of_life_of_a_stuck_supervisor(ears: Ears, defective: Callable[..., Defective]) -> None:
    """A stuck supervisor is reported, and as long as it is stuck the manager gets no sign of life."""
    node = defective(STUCK, "300000").start(ready=False)
    (told,) = wait_until(lambda: node.events("supervisor_stuck"), what="it to be noticed", deadline=30)
    assert told["daemons"] == ["gpu1"]
    signs = ears.listen().count("WATCHDOG=1")  # whatever was sent until then
    assert signs > 1
    # The loop runs, and sends other notifications.
    for leases in range(1, 6):
        node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
        ears.wait_for(f"STATUS=2 of 2 control daemons ready, {leases} lease")
    assert ears.said.count("WATCHDOG=1") <= signs + 1  # one notification may have been in flight


def test_no_sign_of_life_of_a_blocked_loop(ears: Ears, defective: Callable[..., Defective]) -> None:
    """While the event loop is blocked the manager gets no sign of life; it gets them again afterwards."""
    node = defective(BLOCKED, "1000000").start()
    ears.wait_for("WATCHDOG=1", ears.wait_for("READY=1"))
    os.kill(node.pid, signal.SIGUSR1)
    ears.wait_for_silence(1.0)
    signs = len(ears.said)
    os.kill(node.pid, signal.SIGUSR2)
    ears.wait_for("WATCHDOG=1", signs)
    assert node.end() == 0


@dataclass
class Handed(Node):
    """An mpsd that inherits a listening socket."""

    listener: socket.socket | None = None

    def launch(self) -> None:
        """Start it in the same way as a service manager."""
        assert self.listener is not None
        number = self.listener.fileno()
        with self.stderr.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", HAND_OVER, str(number), *self.command],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.env},
                cwd=Path(__file__).parents[2],
            )


@pytest.fixture
def hand(short_tmp: Path, control: Path) -> Iterator[Callable[..., Handed]]:
    """Return a maker of an mpsd with a socket that exists before it, at its usual path or another."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made: list[Handed] = []

    def make(path: str = "run/mpsd.sock", **options: str) -> Handed:
        place = short_tmp / path
        place.parent.mkdir(exist_ok=True)
        listener.bind(str(place))
        place.chmod(0o666)
        listener.listen(4096)
        made.append(
            Handed(root=short_tmp, simulate=1, control=control, listener=listener, config=options.get("config"))
        )
        return made[-1]

    yield make
    for node in made:
        node.clean_up()
    listener.close()


def waiting(node: Node) -> int:
    """Count the callers that wait at a socket without a process that accepts.

    The listing includes the socket itself.
    """
    return Path("/proc/net/unix").read_text().count(f" {node.socket}\n") - 1


class TestSocket:
    """A socket that exists before mpsd and after it."""

    def test_it_stays(self, hand: Callable[..., Handed]) -> None:
        """A caller that connects while mpsd is down waits, and the next mpsd answers it over the same socket."""
        node = hand()
        before = node.socket.stat()
        node.start()
        node.end()
        answers: list[int] = []
        caller = threading.Thread(target=lambda: answers.append(node.get("/healthz").status))
        caller.start()
        node.start()
        caller.join()
        assert answers == [200]
        node.end()
        after = node.socket.stat()
        assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)

    def test_who_stays_connected_is_told_to_come_again(self, hand: Callable[..., Handed]) -> None:
        """When mpsd stops, the answer to a caller that keeps its connection says that it is the last one there."""
        node = hand()
        node.start()
        assert node.process is not None
        with Talk(node.socket) as silent, Talk(node.socket) as talk:  # mpsd waits a moment for the silent one
            assert talk.ask("GET", "/healthz").status == 200
            node.process.send_signal(signal.SIGTERM)
            answers: list[Answer] = []
            while not answers or answers[-1].headers.get("Connection") != "close":
                answers.append(talk.ask("GET", "/healthz"))
            assert {each.status for each in answers} == {200}
            assert (talk.rest(), silent.rest()) == (b"", b"")
        assert node.ended() == 0

    def test_nobody_sees_a_restart(self, hand: Callable[..., Handed]) -> None:
        """During restarts, leases are requested and released all the time, and every answer is right."""
        node = hand().start()
        wrong: list[str] = []
        over = threading.Event()

        def come_and_go() -> None:
            while not over.is_set():
                try:
                    answer = node.request("POST", "/v1/leases", {"threads": 1, "memory": "1MiB"})
                    if answer.status == 201:
                        answer = node.request("DELETE", f"/v1/leases/{answer.json['id']}")
                    if answer.status not in {200, 204}:
                        wrong.append(f"{answer.status} {answer.body!r}")
                except OSError as error:
                    wrong.append(repr(error))

        callers = [threading.Thread(target=come_and_go) for _ in range(3)]
        for caller in callers:
            caller.start()
        try:
            for _ in range(3):
                before = node.pid
                node.end()
                node.start()
                assert node.pid != before
        finally:
            over.set()
            for caller in callers:
                caller.join()
        assert not wrong, wrong

    @needs_root
    def test_refused_start(self, hand: Callable[..., Handed]) -> None:
        """A caller of an mpsd that is refused gets that answer at once, root with the reason.

        No caller triggers a new start.
        """
        node = hand(config="nonsense")
        node.root.chmod(0o711)
        with ThreadPoolExecutor(2) as pool, calling(node.socket, uid=NOBODY) as nobody:
            told, refused = pool.submit(node.mpsctl, "status"), pool.submit(nobody.request, "GET", "/readyz")
            wait_until(lambda: waiting(node) == 2, what="both of them to be waiting")
            status, said = node.refuse()
        assert status == 78
        reason = said.removeprefix("mpsd: ").partition(" [configuration]")[0]
        assert str(node.configuration) in reason
        assert told.result().returncode == 69
        assert told.result().stderr.startswith(f"mpsctl: mpsd cannot start: {reason} [unreachable]\n")
        assert told.result().stderr.endswith("mpsctl doctor diagnoses the node, even without mpsd\n")
        assert refused.result().status == 503
        assert refused.result().json["detail"] == "mpsd cannot start"
        assert node.listener is not None
        assert not select.select([node.listener], [], [], 0)[0]

    def test_mended_start(self, hand: Callable[..., Handed]) -> None:
        """A cause that is removed while callers are still being answered is noticed at once, by the same mpsd."""
        node = hand(config="nonsense")
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(node.get, "/readyz")
            wait_until(lambda: waiting(node) == 1, what="the caller to be waiting")
            node.launch()
            assert told.result().status == 503
            node.configuration.write_text("")
            os.kill(node.pid, signal.SIGHUP)  # like `systemctl reload`
            wait_until(lambda: node.get("/readyz").status == 200, what="the same mpsd to be ready")
        assert node.exited() is None

    def test_another_path(self, hand: Callable[..., Handed]) -> None:
        """A socket at another path than the configured one is refused, with both paths."""
        node = hand("other.sock")
        status, said = node.refuse()
        assert status == 78
        assert "other.sock, but api.socket is" in said
        assert "ListenStream=" in said

    def test_another_mode(self, hand: Callable[..., Handed]) -> None:
        """A socket with another mode than api.mode is refused, and left unchanged."""
        node = hand(config='[api]\nmode = "0660"\n')
        status, said = node.refuse()
        assert status == 78
        assert "SocketMode=" in said
        assert node.socket.stat().st_mode & 0o777 == 0o666

    def test_no_socket(self, short_tmp: Path) -> None:
        """A descriptor that is not a listening unix socket is refused."""
        node = Handed(root=short_tmp)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.listen()
            node.listener = listener
            status, said = node.refuse()
        assert status == 78
        assert "not a listening unix socket" in said
