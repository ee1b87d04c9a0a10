"""Clients with an invented environment never get more than was open to them: real processes on a simulated node.

MPSD_RUNS says how many clients of leases each mode has; a dozen when it is not set.
"""

import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import pytest

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.enforcement.ceiling import SMALLEST
from mpsd.core.model import Limits
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.settings import Attach
from mpsd.simulator.client import program
from tests.daemon.caller import needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, MIB, event
from tests.environments import any_environment
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import WAITS, SimulatedClient, gpus, variables

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("binds")]

RUNS: Final = int(os.environ.get("MPSD_RUNS", "12"))
TOGETHER: Final = 4

_AS_ANOTHER: Final = """
import os, sys
sys.path.insert(0, sys.argv[1])
from mpsd.simulator import client
os.setgroups([]); os.setresgid(61003, 61003, 61003); os.setresuid(61003, 61003, 61003)
sys.exit(client.main())
"""
"""Becomes a client of another uid, which may be unable to read the program."""


@dataclass(frozen=True)
class Seen:
    """The tenths of a percent of the threads, the memory limit, and the bytes that a client could allocate."""

    threads: int
    limit: int | None
    allocated: int

    def within(self, threads: int, memory: int) -> bool:
        """Return whether the client has at most this."""
        return self.threads <= threads and self.limit is not None and self.limit <= memory and self.allocated <= memory


def look_at(client: SimulatedClient) -> Seen:
    """Have a client allocate until it is refused, and return what it has."""
    size, allocated = 64 * GIB, 0
    while size >= MIB:
        answer = client.alloc(f"{size}B")
        allocated = answer["allocated"] if answer["ok"] else allocated
        size = size if answer["ok"] else size // 2
    hello = client.hello
    assert hello["mps"]
    return Seen(round(hello["active_thread_percentage"] * 10), hello["pinned_device_mem_limit"], allocated)


def granted_client(node: Node, dice: random.Random) -> tuple[Limits, Seen]:
    """Have a process request a lease, become a client in an environment of its own, and exit; return both."""
    limits = Limits(
        ActiveThreadPercentage(dice.randint(1, 999 // TOGETHER)), PinnedDeviceMemLimit(dice.randint(1, 16 * 1024))
    )
    memory = limits.pinned_device_mem_limit
    assert memory is not None
    with SimulatedClient({**variables(node), **any_environment(dice, limits)}, before=WAITS) as client:
        asked = {"threads": float(limits.active_thread_percentage), "memory": memory.bytes, "gpu": "0"}
        answer = node.request("POST", "/v1/leases", {**asked, "pid": client.pid})
        assert answer.status == 201, answer.body
        assert client.process.stdin is not None
        client.process.stdin.write(b"\n")
        assert client.hello["ok"], client.hello
        return limits, look_at(client)


def late_client(node: Node, dice: random.Random) -> None:
    """Have the second process of a lease connect after the window of `attach`, and return what it has."""
    threads, memory = dice.randint(1, 100), dice.randint(1, 1024)
    asked = {"threads": threads / 5, "memory": 2 * memory * MIB, "gpu": "0", "processes": 2}
    granted = node.request("POST", "/v1/leases", asked)
    assert granted.status == 201, granted.body
    lease = granted.json["id"]
    part = Limits(ActiveThreadPercentage(threads), PinnedDeviceMemLimit(memory))
    with SimulatedClient({**variables(node), **any_environment(dice, part)}) as first:
        event(node, "client_attributed", client=first.hello["pid"])
        answer = node.request("POST", f"/v1/leases/{lease}/attach")
        assert answer.status == 200, answer.body
        with SimulatedClient({**variables(node), **any_environment(dice, part)}) as second:
            for client in (first, second):
                assert look_at(client).within(threads, memory * MIB)
    node.request("DELETE", f"/v1/leases/{lease}")


def stray(node: Node, dice: random.Random) -> None:
    """Have a process without a lease connect when no client is awaited, and return what it has."""

    def is_closed() -> bool:
        daemon: dict[str, Any] = node.daemons()["gpu0"]
        return bool(daemon["verified"]) and daemon["limits_wanted"] == {
            "active_thread_percentage": 0.1,
            "pinned_device_mem_limit": MIB,
        }

    wait_until(is_closed, what=f"the limits to be closed; the log is {node.stderr}")
    whole = Limits(ActiveThreadPercentage(1000), PinnedDeviceMemLimit(80 * 1024))
    with SimulatedClient({**variables(node), **any_environment(dice, whole)}) as client:
        assert look_at(client).within(SMALLEST.active_thread_percentage.tenths, MIB)
    wait_until(lambda: client.hello["pid"] not in clients(node), what="mpsd to see that it has ended")


def foreigner(node: Node) -> dict[str, Any]:
    """Have a process of another uid connect, and return what it says."""
    root, _, _ = program()[3].rpartition("/mpsd/")
    with SimulatedClient(variables(node), before=(sys.executable, "-I", "-S", "-c", _AS_ANOTHER, root)) as client:
        return client.hello


def living(node: Node) -> list[str]:
    """Return the leases that have not ended."""
    return [lease["id"] for lease in node.get("/v1/leases").json["leases"]]


def clients(node: Node) -> list[int]:
    """Return the clients with and without a lease: the resources that they use are granted to no other process."""
    return [client["pid"] for client in node.get("/v1/clients").json["clients"]]


@needs_root
@pytest.mark.timeout(60 + 2 * RUNS)
@pytest.mark.parametrize("mode", Attach)
def test_never_more(make_node: Start, mode: Attach) -> None:
    """No client has more than its share in strict mode, or than the largest share otherwise.

    Other processes get nothing.
    """
    dice = random.Random(mode)
    node = make_node(simulate=1, control=None, config=f'[enforcement]\nattach = "{mode}"\n').start()
    gpus(node)[0].set_compute_mode(ComputeMode.EXCLUSIVE_PROCESS)
    runs = 0
    with SimulatedClient(variables(node)) as keeper, ThreadPoolExecutor(TOGETHER + 1) as pool:
        assert keeper.hello["mps"]  # so that a server runs, and the GPU is taken
        assert keeper.alloc("1MiB")["ok"]  # so that mpsd no longer waits for its context
        own = node.request("POST", "/v1/leases", {"threads": 0.1, "memory": MIB, "gpu": "0", "pid": keeper.pid}).json[
            "id"
        ]
        while runs < RUNS:
            together = dice.randint(1, TOGETHER)
            other = pool.submit(foreigner, node)
            calls = [pool.submit(granted_client, node, random.Random(dice.random())) for _ in range(together)]
            found = [call.result(timeout=60) for call in calls]
            assert other.result(timeout=60)["error"] == "CUDA_ERROR_DEVICE_UNAVAILABLE"
            sizes = [limits for limits, _ in found]
            threads = [each.active_thread_percentage.tenths for each in sizes]
            memory = [each.pinned_device_mem_limit.bytes for each in sizes if each.pinned_device_mem_limit]
            for number, (_, seen) in enumerate(found):
                if mode is Attach.STRICT:
                    assert seen.within(threads[number], memory[number]), node.stderr
                else:
                    assert seen.within(max(threads), max(memory)), node.stderr
            runs += together
            wait_until(lambda: living(node) == [own], what="their leases to end")
            stray(node, dice)
            if dice.random() < 0.3:
                late_client(node, dice)
                runs += 2
                stray(node, dice)
            wait_until(lambda: clients(node) == [keeper.pid], what="all clients to be gone, and the GPU to be free")
