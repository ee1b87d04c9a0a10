"""A control daemon's limits are open for leases whose clients are still to come, and closed otherwise.

The subjects are NVIDIA's own control daemons, read with NVIDIA's own front-end.
"""

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, GIB, MIB, branches, by_hand, program
from tests.harness import wait_until
from tests.node import Node
from tests.real import RealDaemon

pytestmark = pytest.mark.thorough

STRICT: Final = '[enforcement]\nattach = "strict"\nattach_window = 1.0\n'


def lease(node: Node, threads: float = 25, memory: int = 2 * GIB, **more: Any) -> str:
    answer = node.request("POST", "/v1/leases", {"threads": threads, "memory": memory, "gpu": "0", **more})
    assert answer.status == 201, answer.body
    found: str = answer.json["id"]
    return found


def release(node: Node, lease_id: str) -> None:
    assert node.request("DELETE", f"/v1/leases/{lease_id}").status == 204


def read(node: Node, name: str = "gpu0") -> tuple[str, str | None]:
    """Return the limits that NVIDIA's front-end reads; the memory limit is None where the driver has none."""
    (percentage,), memory = by_hand(node, name)
    return percentage, memory[0] if memory and memory[0][0].isdigit() else None


def limits(real: RealDaemon, percentage: str, memory: str) -> tuple[str, str | None]:
    """Return the limits that a driver is expected to answer: drivers before 495 have no memory limit."""
    return percentage, memory if real.branch >= 495 else None


def closes(node: Node, closed: tuple[str, str | None]) -> None:
    """Wait until a client that connects now gets at most these limits."""
    wait_until(lambda: read(node) == closed, what=f"{closed}; the log is {node.stderr}")


@pytest.mark.parametrize("real", branches(470, 555))
class TestEveryDriver:
    """The ceiling on each of NVIDIA's control daemons."""

    def test_open_and_closed(self, make_node: Start, real: RealDaemon) -> None:
        """The ceiling opens before the grant is answered, as far as the largest lease needs, and closes afterwards."""
        node = make_node(simulate=2, control=real.control, config="").start()
        closed = limits(real, "0.1", "1M")
        assert read(node) == closed
        large = lease(node)
        assert read(node) == limits(real, "25.0", "2G")
        small = lease(node, threads=12.5, memory=4 * GIB)
        assert read(node) == limits(real, "25.0", "4G")
        assert read(node, "gpu1") == closed
        release(node, large)
        closes(node, limits(real, "12.5", "4G"))
        release(node, small)
        closes(node, closed)
        # mpsd itself made all these changes.
        assert node.events("limit_drift") == node.events("foreign_command") == []

    def test_strict(self, make_node: Start, real: RealDaemon) -> None:
        """In strict mode a grant is answered when its turn comes. The ceiling is that lease's own, even if smaller."""
        node = make_node(simulate=1, control=real.control, config=STRICT).start()
        lease(node, threads=50, memory=4 * GIB)
        assert read(node) == limits(real, "50.0", "4G")
        small = lease(node, threads=10, memory=1 * GIB)
        assert read(node) == limits(real, "10.0", "1G")
        release(node, small)
        closes(node, limits(real, "50.0", "4G"))


_STUBBORN: Final = """
[ "$1" = -f ] && exec {control} "$@"
[ -e {spell} ] && exec sed 's/^\\(set_default_active_thread_percentage\\) .*/\\1 0.1/' | {control}
exec {control}
"""


@pytest.mark.real_daemon(535)
class TestOneDriver:
    """Behaviour that does not depend on the driver, on driver 535."""

    def test_unadmitted(self, make_node: Start) -> None:
        """A client without a lease gets nothing, or what [limits] allows, or what an operator has set."""
        node = make_node(simulate=1, config="").start()
        assert read(node) == ("0.1", "1M")
        some = '[limits]\nactive_thread_percentage = 30.0\npinned_device_mem_limit = "3GiB"\n'
        for config, closed in (
            (some, ("30.0", "3G")),
            (some + '[enforcement]\nunadmitted = "allow"\n', ("100.0", None)),
            (some + '[enforcement]\nunadmitted = "deny"\n', ("0.1", "1M")),
            ('[enforcement]\nunadmitted = "defaults"\n', ("100.0", None)),
        ):
            node.reload(config)
            closes(node, closed)

    def test_turns(self, make_node: Start) -> None:
        """In strict mode each lease is answered in its own turn."""
        node = make_node(simulate=1, config=STRICT).start()
        asked = {
            (threads, memory): {"threads": threads, "memory": memory * GIB}
            for threads, memory in ((10, 3), (20, 2), (30, 1))
        }
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(lease, node, **each) for each in asked.values()]
            assert len({call.result(timeout=30) for call in calls}) == len(calls)
        opened = [
            (line["active_thread_percentage"], line["pinned_device_mem_limit"])
            for line in node.events("limits_verified", daemon="gpu0")
        ]
        # No mixture is ever in force, such as the threads of one lease and the memory of another.
        assert set(opened) <= {(0.1, MIB), *((threads, memory * GIB) for threads, memory in asked)}
        first = opened[1]
        wait_until(
            lambda: (
                [line["active_thread_percentage"] for line in node.events("limits_verified", daemon="gpu0")].count(
                    first[0]
                )
                > 1
            ),
            what="the first to have another turn",
        )

    def test_turn_is_handed_on(self, make_node: Start) -> None:
        """The next lease gets its turn as soon as the one before it ends, also if it needs the same limits."""
        node = make_node(simulate=1, config='[enforcement]\nattach = "strict"\nattach_window = 600.0\n').start()
        current = lease(node, threads=10)
        with ThreadPoolExecutor(4) as pool:
            waiting = {pool.submit(lease, node, threads=10) for _ in range(4)}
            wait_until(lambda: len(node.get("/v1/leases").json["leases"]) == 5, what="the others to wait")
            while waiting:
                release(node, current)
                told, waiting = wait(waiting, timeout=5, return_when=FIRST_COMPLETED)
                (next_one,) = told
                current = next_one.result()

    def test_limits_that_do_not_open(self, make_node: Start, short_tmp: Path, control: Path) -> None:
        """When the limits cannot be opened, the grant fails: the caller gets the reason, and nothing stays held."""
        spell = short_tmp / "spell"
        stubborn = program(short_tmp / "nvidia-cuda-mps-control", _STUBBORN.format(control=control, spell=spell))
        node = make_node(simulate=1, control=stubborn, config=BRISK).start()
        spell.touch()
        answer = node.request("POST", "/v1/leases", {"threads": 25, "memory": "1GiB"})
        assert (answer.status, answer.json["code"], answer.json["limit"]) == (409, "daemon_not_ready", "health")
        assert "gpu0" in answer.json["detail"]
        assert node.get("/v1/leases").json["leases"] == []
        spell.unlink()
        node.wait_for_state("gpu0", "ready")
        lease(node)
        assert read(node) == ("25.0", "2G")

    def test_follows_each_other(self, make_node: Start) -> None:
        """Grants and releases that follow each other at once cost one conversation together, not one each."""
        node = make_node(simulate=1, config="").start()
        for _ in range(50):
            release(node, lease(node))
        closes(node, ("0.1", "1M"))
        assert len(node.events("limits_verified", daemon="gpu0")) < 10
