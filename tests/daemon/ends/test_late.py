"""Servers that do not return from ending a client's contexts: grants wait until something shows that clients can come.

By NVIDIA's documents a server may refuse clients (error 807) as long as it ends the contexts of one, also after mpsd
has stopped waiting for it.
"""

import signal
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.simulator.control import program as simulator
from tests.daemon.conftest import Start
from tests.daemon.ends.clients import BUSY, asked, lease_of, target, unharmed
from tests.daemon.helpers import BRISK, event, is_running, program
from tests.harness import wait_until
from tests.node import Answer, Node
from tests.simulated_clients import SimulatedClient

pytestmark = pytest.mark.thorough

CONFIG: Final = "[enforcement]\ngrace = 0.3\nterminate_deadline = 0.5\n" + BRISK


def begin(node: Node, other: SimulatedClient, client: SimulatedClient) -> None:
    """Have a client ended that computes for long, beside one that computes all the time."""
    other.loop(BUSY / 10)
    client.launch(100.0)
    assert node.request("POST", f"/v1/leases/{lease_of(node, client)}/end").status == 202


def ask(node: Node, **options: Any) -> Answer:
    return node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "gpu": "0", **options})


def is_refused(answer: Answer, client: SimulatedClient) -> bool:
    server = client.hello["server"]
    because = f"server {server} did not end the contexts of client {client.pid} in time"
    return (answer.status, answer.json.get("limit")) == (409, "health") and because in answer.json["detail"]


def test_server_refuses_clients(make_node: Start) -> None:
    """Nothing is granted that a program could not use, also by the next mpsd, until the client is gone."""
    node = make_node(simulate=1, control=None, config=CONFIG).start()
    with target(node) as other, target(node) as client:
        begin(node, other, client)
        wait_until(lambda: asked(node, client.pid), what="its server to be asked")
        assert is_refused(ask(node), client)  # it was decided before the command was late, and is not answered by that
        ended = event(node, "canary_ended", cause="terminate_client")
        assert "MPS_SERVER_NOT_READY (807)" in ended["because"]
        refused = ask(node)
        assert is_refused(refused, client)
        assert "limits" not in refused.json["detail"]  # this request was never decided: another GPU would have got it
        status = node.get("/v1/status").json
        assert status["healthy"]
        assert "client_end_late" in [each["kind"] for each in status["warnings"]]
        assert f"contexts of client {client.pid} in time" in node.daemons()["gpu0"]["because"]
        node.end(signal.SIGKILL)
        node.start(ready=False)
        node.wait_for_state("gpu0", "ready")
        assert is_refused(ask(node), client)
        unharmed(other)
        other.end()
        assert client.process.wait(20) == -signal.SIGTERM
        assert ask(node, wait=20).status == 201


def test_no_canary_can_tell(make_node: Start, short_tmp: Path) -> None:
    """If a canary cannot find out whether clients can come, grants resume: the end alone closes no GPU for long."""
    node = make_node(simulate=1, config=CONFIG.replace("grace = 0.3", "grace = 60.0"))
    command = " ".join(simulator(555, str(node.root / "run" / "simulated")))
    (short_tmp / "bin").mkdir()
    # mpsd takes this for NVIDIA's program, so that the canary is a client of the real CUDA, which finds no GPU.
    node.control = program(short_tmp / "bin" / "nvidia-cuda-mps-control", f'exec {command} "$@"')
    node.start()
    with target(node) as other, target(node) as client:
        begin(node, other, client)
        ended = event(node, "canary_ended", cause="terminate_client")
        assert ended["proof"] == "nothing", ended
        wait_until(lambda: ask(node).status == 201, what="a grant")
        assert is_running(client.pid)
        unharmed(other)
        other.end()
        # The pause until the next request does not matter to a client that is alone.
        assert client.process.wait(20) == -signal.SIGTERM
