"""A process whose files in /proc never finish reading makes neither mpsd nor another user wait: it is unknown.

The hostile processes are real ones (`tests/hanging.py`); they need FUSE.
"""

import json
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.core.enforcement.attribution import TOKEN
from tests.daemon.caller import calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import client_of, event, is_running
from tests.hanging import hang, hanging
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import variables

pytestmark = [
    needs_root,
    pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="it takes FUSE: /dev/fuse"),
]

ANN, BOB, MALLORY = 61001, 61002, 61003

SMALL: Final = {"threads": 10, "memory": "1GiB", "gpu": "0"}
MANY: Final = '[daemon]\nusers = "many"\n'


@pytest.fixture
def silent(short_tmp: Path) -> Path:
    """Return the directory of a file system that does not answer."""
    short_tmp.chmod(0o755)
    return short_tmp / "silent"


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None, config=MANY).start()


def by_pid(node: Node) -> dict[int, dict[str, Any]]:
    """Return the clients that mpsd knows."""
    return {each["pid"]: each for each in node.get("/v1/clients").json["clients"]}


def leases(node: Node) -> set[str]:
    return {each["id"] for each in node.get("/v1/leases").json["leases"]}


def test_leases_of_others_end(node: Node, silent: Path) -> None:
    """The lease of another user ends with its holder, and so does the hostile user's own: its carriers are unknown."""
    with calling(node.socket, uid=MALLORY) as first, calling(node.socket, uid=ANN) as second:
        his, hers = first.admit(**SMALL).json, second.admit(**SMALL).json
        with hanging(silent, MALLORY, {TOKEN: his["env"][TOKEN]}) as process:
            hang(process)
            first.kill()
            second.kill()
            wait_until(lambda: hers["id"] not in leases(node), what="the end of the other's lease", deadline=5)
            wait_until(lambda: his["id"] not in leases(node), what="the end of the hostile user's", deadline=5)
            ended = event(node, "lease_ended", lease=his["id"])
            assert "whether others carry its token could not be read" in ended["because"]
            assert is_running(process.pid)


def test_client(node: Node, silent: Path) -> None:
    """A client that cannot be read has its holder's lease, and nobody waits for it, at the end or the start either."""
    with client_of(node, ANN) as honest, calling(node.socket, uid=MALLORY) as holder:
        assert honest.hello["mps"]
        mine = holder.admit(**SMALL).json
        with hanging(silent, MALLORY, {**variables(node), **mine["env"]}) as client:
            assert client.do("init")["mps"]
            assert client.do("context")["ok"]
            daemon = node.daemons()["gpu0"]["pid"]
            node.end(signal.SIGKILL)
            hang(client)
            node.start()
            seen = wait_until(lambda: by_pid(node).get(client.pid), what="the client to be seen")
            assert by_pid(node)[honest.pid]["lease"] is not None
            assert node.daemons()["gpu0"]["pid"] == daemon
            assert seen["lease"] is None or seen["lease"] == mine["id"]
            node.end()
            node.start()
            assert honest.do("sync")["ok"]


def test_adoption(make_node: Start, silent: Path) -> None:
    """mpsd finds a control daemon that it did not record, behind a session leader of root that cannot be read."""
    with hanging(silent, 0, {}) as client:
        node = make_node(simulate=1, control=None).start()
        daemon = node.daemons()["gpu0"]["pid"]
        node.end(signal.SIGKILL)
        record = node.root / "run" / "gpu0.process.json"
        text = json.loads(record.read_text())
        text["record"]["start"]["process"] = None
        record.write_text(json.dumps(text))
        hang(client)
        node.start()
        assert node.wait_for_state("gpu0", "ready")["pid"] == daemon


def test_doctor(node: Node, silent: Path) -> None:
    """The doctor does not wait either."""
    with hanging(silent, MALLORY, variables(node)) as client:
        hang(client)
        assert node.mpsctl("doctor").returncode in {0, 1}
