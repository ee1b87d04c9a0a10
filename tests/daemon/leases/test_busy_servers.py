"""A busy server answers nothing, which is no sign that it has no clients: they stay known, and so do their limits."""

import json
import shlex
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.simulator.control import program as simulator
from mpsd.system import clock, proc
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, MIB, event, program
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import WAITS, SimulatedClient, leased, variables

pytestmark = pytest.mark.usefixtures("binds")

CONFIG: Final = '[enforcement]\nattach = "{mode}"\nattach_window = 0.5\n[daemon]\nprobe_interval = 0.1\n'

_BUSY: Final = """
case "$1" in -f) exec {command} "$@" ;; esac
touch {conversed}
[ -e {busy} ] || exec {command} "$@"
sed -E '/^[gs]et_(client_list|server_status|active_thread_percentage|device_pinned_mem_limit) /d' | {command}
"""
"""A control program whose front-ends ask servers nothing while a file exists, so that these seem to be busy."""


class Server:
    """The servers of a node, which can be busy."""

    def __init__(self, node: Node, folder: Path) -> None:
        self._busy, self._conversed = folder / "busy", folder / "conversed"
        command = shlex.join(simulator(550, str(node.root / "run" / "simulated")))
        script = _BUSY.format(command=command, busy=self._busy, conversed=self._conversed)
        node.control = program(folder / "nvidia-cuda-mps-control", script)

    def turn(self, *, busy: bool) -> None:
        """Make them busy, or ready again."""
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
    """Make a node with this mode, and return it with its servers; it is not started yet."""
    node = make_node(simulate=1, config=CONFIG.format(mode=mode))
    return node, Server(node, folder)


def verified(node: Node) -> dict[str, Any]:
    """Verify the only lease."""
    (lease,) = node.get("/v1/leases").json["leases"]
    found: dict[str, Any] = node.get(f"/v1/leases/{lease['id']}/verify").json
    return found


def test_clients_stay_known(make_node: Start, short_tmp: Path) -> None:
    """The clients of a server that is busy for a while stay listed, and have the limits that were open to them."""
    node, server = made(make_node, short_tmp, "shared")
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
    """The share of a client without a lease is not granted again while its server is busy."""
    node, server = made(make_node, short_tmp, "anytime")
    node.start()
    lease = node.request("POST", "/v1/leases", {"threads": 60, "memory": 60 * GIB}).json
    with SimulatedClient({**variables(node), **lease["env"]}) as client:
        event(node, "client_attributed", client=client.pid)
        assert client.alloc("50GiB")["ok"]
        assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
        server.turn(busy=True)
        server.converse()
        answer = node.request("POST", "/v1/leases", {"threads": 60, "memory": 60 * GIB})
        assert (answer.status, answer.json["limit"]) == (409, "threads")
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


def test_wedged(make_node: Start, short_tmp: Path) -> None:
    """By an earlier mpsd's evidence alone, no control daemon is replaced whose server has not named its clients yet."""
    node, server = made(make_node, short_tmp, "anytime")
    node.start()
    with SimulatedClient(variables(node)) as client:
        daemon, pid = pids(node, client)
        node.end()
        against = [{"pid": each, "start_ticks": proc.start_ticks(each)} for each in (daemon, pid)]
        evidence = {
            "against": dict(zip(("daemon", "server"), against, strict=True)),
            "unserved": {"because": "it answered no canary", "wedged": True},
        }
        (node.root / "run" / "gpu0.evidence.json").write_text(
            json.dumps({"boot_id": clock.boot_id(), "evidence": evidence})
        )
        server.turn(busy=True)
        node.start(ready=False)
        for _ in range(3):
            server.converse()
        server.turn(busy=False)
        wait_until(
            lambda: [each["pid"] for each in node.get("/v1/clients").json["clients"]] == [client.pid],
            what="the client to be listed",
        )
        assert pids(node, client) == (daemon, pid)
        assert client.process.poll() is None


def pids(node: Node, client: SimulatedClient) -> tuple[int, int]:
    """Return the pids of the control daemon and of a client's server."""
    return node.daemons()["gpu0"]["pid"], client.hello["server"]
