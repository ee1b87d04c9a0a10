"""Another build of mpsd replaces a running one, as an upgrade does."""

import shutil
import signal
from pathlib import Path

import pytest

import mpsd
from mpsd import __version__
from tests.durability.conftest import Start
from tests.durability.streams import events, gapless
from tests.harness import wait_until
from tests.simulated_clients import leased

pytestmark = pytest.mark.thorough

ANOTHER = "0.1.99"
"""The version of the other build."""

KEPT = ("id", "state", "holders", "env", "shares", "granted", "clients")
"""The fields of a lease that stay as they are."""


def built(directory: Path) -> Path:
    """Make a copy of mpsd that has another version, and return the directory that Python finds it in."""
    source = Path(mpsd.__file__).parent
    shutil.copytree(source, directory / "mpsd", ignore=shutil.ignore_patterns("__pycache__"))
    module = directory / "mpsd" / "__init__.py"
    text = module.read_text()
    assert text.count(f'"{__version__}"') == 1
    module.write_text(text.replace(f'"{__version__}"', f'"{ANOTHER}"'))
    return directory


def test_takes_over(make_node: Start, tmp_path: Path) -> None:
    """The other build adopts the control daemons, and continues the leases, their clients and the event numbers."""
    node = make_node(simulate=2, control=None).start()
    with leased(node, "--threads", "25", "--memory", "2GiB", "--gpu", "0") as client:
        assert client.hello["ok"], client.hello
        wait_until(lambda: node.events("client_attributed", client=client.pid), what="the client to be attributed")
        assert node.mpsctl("hold", "gpu1").returncode == 0
        node.wait_for_state("gpu1", "held")
        client.loop(0.01)
        (lease,) = node.leases()
        daemons = node.daemons()
        assert node.get("/v1/status").json["version"] == __version__
        assert node.end(signal.SIGTERM) == 0

        node.fork_server, node.env = None, {"PYTHONPATH": str(built(tmp_path)), "PYTHONSAFEPATH": "1"}
        node.start(ready=False)
        node.wait_for_state("gpu0", "ready")
        node.wait_for_state("gpu1", "held")
        assert node.get("/v1/status").json["version"] == ANOTHER
        assert {name: each["pid"] for name, each in node.daemons().items()} == {
            name: each["pid"] for name, each in daemons.items()
        }
        assert node.daemons()["gpu1"]["because"] == daemons["gpu1"]["because"]
        (continued,) = node.leases()
        assert {name: continued[name] for name in KEPT} == {name: lease[name] for name in KEPT}
        client.tell("sync")
        assert client.answer()["kernels"] > 0  # those of the loop since its start
        assert client.answer()["ok"]
        context = client.context()
        assert context["ok"], context
        assert (context["active_thread_percentage"], context["pinned_device_mem_limit"]) == (25.0, 2 * 1024**3)
        assert node.mpsctl("release", lease["id"]).returncode == 0
    wait_until(lambda: node.events("lease_ended", lease=lease["id"]), what="the lease to end")
    told = events(node)
    assert gapless(told, 0)
    assert [each["event"] for each in told].count("node_started") == 2
    assert not list(node.root.rglob("*.set-aside-*"))
    assert not list(node.root.rglob("*.damaged"))
