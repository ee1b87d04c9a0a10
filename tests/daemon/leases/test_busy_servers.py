"""A busy server answers nothing, which is no sign that it has no clients: they stay known, and so do their limits."""

import shlex
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.daemon.leases.lease_store import LEASES_SCHEMA, PUT_LEASE
from mpsd.simulator.control import program as simulator
from mpsd.system import clock
from mpsd.system.files.database import Database, summed
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, MIB, SWIFT, event, program
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import WAITS, SimulatedClient, leased, variables

pytestmark = [pytest.mark.enforcement, pytest.mark.thorough]

CONFIG: Final = '[enforcement]\nattach = "{mode}"\nattach_window = 0.5\n[daemon]\nprobe_interval = 0.3\n'

PROMPT: Final = SWIFT | {"mpsd.daemon.control.replacement._RECOVERY": 1.0}
"""`Node.durations` for tests that wait until a daemon is replaced."""

_BUSY: Final = """
case "$1" in -f) exec {command} "$@" ;; esac
touch {conversed}
[ -e {busy} ] || exec {command} "$@"
sed -E '{edit}' | {command} | sed -E '{answers}'
"""
"""A control program whose front-ends send and answer other lines while a file exists. A line that is no command is
echoed."""

_NOTHING: Final = "/^[gs]et_(client_list|server_status|active_thread_percentage|device_pinned_mem_limit) /d"
"""Asks servers nothing, so that these seem to be busy."""


class Server:
    """The servers of a node, which can be busy, or answer otherwise, by an `edit` of the questions or `answers`."""

    def __init__(self, node: Node, folder: Path, edit: str = _NOTHING, answers: str = "") -> None:
        self._busy, self._conversed = folder / "busy", folder / "conversed"
        command = shlex.join(simulator(550, str(node.root / "run" / "simulated")))
        script = _BUSY.format(command=command, busy=self._busy, conversed=self._conversed, edit=edit, answers=answers)
        node.control = program(folder / "nvidia-cuda-mps-control", script)

    def turn(self, *, busy: bool) -> None:
        if busy:
            self._busy.touch()
        else:
            self._busy.unlink()

    def converse(self) -> None:
        """Wait until mpsd has processed a conversation that begins from now on."""
        for _ in range(2):  # the second begins after the first has been processed
            self._conversed.unlink(missing_ok=True)
            wait_until(self._conversed.exists, what="a conversation")


def made(make_node: Start, folder: Path, mode: str) -> tuple[Node, Server]:
    node = make_node(simulate=1, config=CONFIG.format(mode=mode))
    return node, Server(node, folder)


def verified(node: Node) -> dict[str, Any]:
    (lease,) = node.get("/v1/leases").json["leases"]
    found: dict[str, Any] = node.get(f"/v1/leases/{lease['id']}/verify").json
    return found


def test_clients_stay_known(make_node: Start, short_tmp: Path) -> None:
    """The clients of a server that is busy for a while stay listed, and have the limits that were open to them."""
    node, server = made(make_node, short_tmp, "strict")
    node.start()
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        assert client.alloc("1MiB")["ok"]
        event(node, "client_attributed", client=client.pid)
        assert verified(node)["verdict"] == "ok"
        wait_until(
            lambda: node.daemons()["gpu0"]["limits"]["pinned_device_mem_limit"] == MIB, what="the end of the window"
        )
        before = node.get("/v1/clients").json
        server.turn(busy=True)
        server.converse()
        assert node.get("/v1/clients").json == before
        server.turn(busy=False)
        server.converse()
        assert verified(node)["verdict"] == "ok"
        assert node.events("violation") == []


def test_clients_without_a_lease_count(make_node: Start, short_tmp: Path) -> None:
    """The share of a client without a lease is not granted again while its server is busy, nor by the next mpsd."""
    node, server = made(make_node, short_tmp, "anytime")
    node.start()
    lease = node.request("POST", "/v1/leases", {"threads": 60, "memory": 60 * GIB}).json
    with SimulatedClient({**variables(node), **lease["env"]}) as client:
        event(node, "client_attributed", client=client.pid)
        assert client.alloc("50GiB")["ok"]
        assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
        server.turn(busy=True)
        server.converse()
        for _ in range(2):
            answer = node.request("POST", "/v1/leases", {"threads": 60, "memory": 60 * GIB})
            assert (answer.status, answer.json["limit"]) == (409, "threads")
            node.end(signal.SIGKILL)
            node.start(ready=False)
            node.wait_for_state("gpu0", "ready")
        client.end()
        server.converse()
        wait_until(lambda: node.get("/v1/clients").json["clients"] == [], what="the client that has ended to be gone")
        server.turn(busy=False)


def test_busy_at_first_sight(make_node: Start, short_tmp: Path) -> None:
    """If it is unknown what an earlier mpsd left, so are the limits of clients whose server is busy at first."""
    node, server = made(make_node, short_tmp, "anytime")
    node.start()
    with SimulatedClient(variables(node), before=WAITS) as client:
        asked = {"threads": 25, "memory": GIB, "pid": client.pid}
        lease = node.request("POST", "/v1/leases", asked).json
        node.end()
        assert client.process.stdin is not None
        client.process.stdin.write(b"\n")
        assert client.hello["mps"]
        server.turn(busy=True)
        (node.root / "run" / "gpu0.limits.json").unlink()
        node.start(ready=False)
        server.converse()
        assert node.get("/v1/clients").json["clients"] == []
        server.turn(busy=False)
        event(node, "client_attributed", client=client.pid, lease=lease["id"])
        answer = verified(node)
        assert (answer["verdict"], "could not see" in answer["because"]) == ("unknown", True), answer


def test_not_named_yet(make_node: Start, short_tmp: Path) -> None:
    """A server that has not named its clients yet may have some: a lease that could not be restored keeps its GPU."""
    node, server = made(make_node, short_tmp, "anytime")
    node.start()
    with SimulatedClient(variables(node)) as client:
        daemon, pid = pids(node, client)
        node.end()
        with closing(Database(node.root / "run" / "leases.db", LEASES_SCHEMA)) as database:
            database.commit([(PUT_LEASE, summed(99, clock.boot_id(), 0, "{", "[]"))])
        server.turn(busy=True)
        node.start(ready=False)
        for _ in range(3):
            server.converse()
        assert node.events("lease_not_restored")
        assert node.events("lease_not_restored_ended") == []
        server.turn(busy=False)
        wait_until(
            lambda: [each["pid"] for each in node.get("/v1/clients").json["clients"]] == [client.pid],
            what="the client to be listed",
        )
        assert pids(node, client) == (daemon, pid)
        assert client.process.poll() is None


def pids(node: Node, client: SimulatedClient) -> tuple[int, int]:
    return node.daemons()["gpu0"]["pid"], client.hello["server"]


# -- admission while a server starts, and when it answers in an unforeseen form ----------------------------------------


def wider(node: Node, wait: float | None, threads: int = 50) -> Any:
    """Request a lease that needs wider limits than one of 2 GiB."""
    return node.request("POST", "/v1/leases", {"threads": threads, "memory": 4 * GIB, "wait": wait})


@pytest.mark.parametrize("wait", [60.0, None])
def test_wait_for_a_server_that_starts(make_node: Start, short_tmp: Path, wait: float | None) -> None:
    """A request that waits is granted once the server is ready; one that does not is refused, with that reason."""
    node, server = made(make_node, short_tmp, "anytime")
    node.config = CONFIG.format(mode="anytime") + "answer_deadline = 0.5\n"
    node.start()
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        event(node, "client_attributed", client=client.pid)
        server.turn(busy=True)
        refused = wider(node, 0.0)
        assert (refused.status, refused.json["limit"]) == (409, "health")
        assert f"server {client.hello['server']} is starting" in refused.json["detail"]
        with ThreadPoolExecutor(1) as caller:
            waiting = caller.submit(wider, node, wait)
            # It holds its share while it waits, longer than a request without a wait is patient.
            wait_until(lambda: len(node.get("/v1/leases").json["leases"]) == 2, what="the request to be decided")
            late = wider(node, 0.0, threads=25)
            assert (late.status, late.json["limit"]) == (409, "health")
            assert not waiting.done()
            server.turn(busy=False)
            assert waiting.result().status == 201
        assert client.sync()["ok"]


def test_stop_while_a_request_waits(make_node: Start, short_tmp: Path) -> None:
    """A request that waits for a server does not keep mpsd from stopping."""
    node, server = made(make_node, short_tmp, "anytime")
    node.start()
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        event(node, "client_attributed", client=client.pid)
        server.turn(busy=True)
        with ThreadPoolExecutor(1) as caller:
            waiting = caller.submit(wider, node, 600.0)
            wait_until(lambda: len(node.get("/v1/leases").json["leases"]) == 2, what="the request to be decided")
            node.end()
            assert waiting.exception() is not None or waiting.result().status == 503
        server.turn(busy=False)
        node.start()
        assert wider(node, 60.0).status == 201


@pytest.mark.parametrize(
    "question",
    ["get_device_pinned_mem_limit", "get_active_thread_percentage", "get_client_list", "get_server_status"],
)
def test_unforeseen_answer(make_node: Start, short_tmp: Path, question: str) -> None:
    """An answer in an unforeseen form is logged once, is a reason of the node, and refuses requests, until it is over.

    The answer contains control characters, which reach no output. Clients work on, and stay known.
    """
    node = make_node(simulate=1, config=CONFIG.format(mode="anytime"))
    server = Server(node, short_tmp, rf"s/^{question} .*/\x1b[2J1073741824{'x' * 200}/")
    node.start()
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        event(node, "client_attributed", client=client.pid)
        before = node.get("/v1/clients").json["clients"]
        server.turn(busy=True)
        told = event(node, "answer_unforeseen")
        assert told["server"] == client.hello["server"]
        assert told["command"].split()[0] == question
        assert "1073741824" in told["answer"]
        assert told["answer"].isprintable()
        assert len(told["answer"]) < 100
        status = wait_until(lambda: not (found := node.get("/v1/status").json)["healthy"] and found, what="the reason")
        (reason,) = status["reasons"]
        assert (reason["kind"], reason["subject"]) == ("answer_unforeseen", "gpu0")
        assert question in reason["because"]
        assert "mpsctl restart gpu0" in reason["hint"]
        assert node.daemons()["gpu0"]["state"] == "ready"
        refused = wider(node, 0.0)
        assert (refused.status, refused.json["limit"]) == (409, "health")
        assert question in refused.json["detail"]
        assert "is starting" not in refused.json["detail"]
        server.converse()
        assert len(node.events("answer_unforeseen")) == 1
        assert [each["pid"] for each in node.get("/v1/clients").json["clients"]] == [each["pid"] for each in before]
        server.turn(busy=False)
        assert wider(node, 60.0).status == 201
        assert node.get("/v1/status").json["healthy"]
        assert client.sync()["ok"]
    assert node.events("violation") == []


def test_replaced_when_unused(make_node: Start, short_tmp: Path) -> None:
    """A control daemon whose server answers in an unforeseen form is replaced once it is unused, and admits again."""
    node = make_node(simulate=1, config=CONFIG.format(mode="anytime"), durations=PROMPT)
    server = Server(node, short_tmp, "s/^get_device_pinned_mem_limit .*/1073741824 bytes/")
    node.start()
    before = node.daemons()["gpu0"]["pid"]
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        server.turn(busy=True)
        event(node, "answer_unforeseen")
        server.converse()
        assert node.daemons()["gpu0"]["pid"] == before
        assert client.sync()["ok"]
    wait_until(lambda: node.daemons()["gpu0"]["pid"] not in {before, None}, what="another control daemon")
    wait_until(lambda: node.get("/v1/status").json["healthy"], what="the node to be healthy")
    assert wider(node, 0.0).status == 201


def test_fault_that_does_not_end(make_node: Start, short_tmp: Path) -> None:
    """A server whose fault outlasts its clients is replaced once it is unused."""
    node = make_node(simulate=1, config=CONFIG.format(mode="anytime"), durations=PROMPT)
    server = Server(node, short_tmp, "", "s/^ACTIVE$/FAULT/")
    node.start()
    before = node.daemons()["gpu0"]["pid"]
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        event(node, "client_attributed", client=client.pid)
        server.turn(busy=True)
        event(node, "leases_faulted", server=client.hello["server"])
        assert client.sync()["ok"]
        assert node.daemons()["gpu0"]["pid"] == before
    wait_until(lambda: node.daemons()["gpu0"]["pid"] not in {before, None}, what="another daemon", deadline=30)
    wait_until(lambda: node.get("/v1/status").json["healthy"], what="the node to be healthy")
    assert wider(node, 0.0).status == 201


def test_nothing_set(make_node: Start, short_tmp: Path) -> None:
    """Nothing at all is a known answer of a server without a memory limit, while it answers other questions."""
    node = make_node(simulate=1, config=CONFIG.format(mode="anytime"))
    server = Server(node, short_tmp, "/^get_device_pinned_mem_limit /d")
    node.start()
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        event(node, "client_attributed", client=client.pid)
        server.turn(busy=True)
        told = event(node, "limit_drift", limit="pinned_device_mem_limit")
        assert told["found"] is None
        assert node.events("answer_unforeseen") == []
        refused = wider(node, 0.0)
        assert refused.json["limit"] == "health"
        assert "pinned_device_mem_limit of server" in refused.json["detail"]
        server.turn(busy=False)
        assert wider(node, 60.0).status == 201
