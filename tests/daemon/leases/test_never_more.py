"""Clients with an invented environment never get more than was open to them: real processes on a simulated node.

MPSD_RUNS says how many clients of leases each mode has; six when it is not set.
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
from mpsd.core.settings import Attach, Unadmitted
from mpsd.simulator.client import program
from tests.daemon.caller import needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, MIB, event
from tests.environments import any_environment
from tests.harness import wait_until
from tests.node import BINDS, Node
from tests.simulated_clients import WAITS, SimulatedClient, gpus, variables

pytestmark = [pytest.mark.thorough, pytest.mark.enforcement]

RUNS: Final = int(os.environ.get("MPSD_RUNS", "6"))
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

    def within(self, threads: int, memory: int | None) -> bool:
        """Return whether the client has at most this; None: any memory."""
        if memory is None:
            return self.threads <= threads
        return self.threads <= threads and self.limit is not None and self.limit <= memory and self.allocated <= memory


def look_at(client: SimulatedClient) -> Seen:
    """Have a client allocate as much as it can, and return what it has.

    Each size is tried once: a client that tries the last one again and again takes all that others free meanwhile.
    """
    size, allocated = 64 * GIB, 0
    while size >= MIB:
        answer = client.alloc(f"{size}B")
        allocated = answer["allocated"] if answer["ok"] else allocated
        size //= 2
    hello = client.hello
    assert hello["mps"]
    return Seen(round(hello["active_thread_percentage"] * 10), hello["pinned_device_mem_limit"], allocated)


def granted_client(node: Node, dice: random.Random, *, may_be_full: bool) -> tuple[Limits, Seen]:
    """Have a process request a lease, become a client in an environment of its own, and exit; return both.

    `may_be_full`: others may have any memory, so that none is left for its context.
    """
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
        if may_be_full and client.hello.get("error") == "CUDA_ERROR_OUT_OF_MEMORY":
            return limits, Seen(0, 0, 0)
        assert client.hello["ok"], client.hello
        return limits, look_at(client)


def part_of(limits: Limits) -> tuple[int, int | None]:
    memory = limits.pinned_device_mem_limit
    return limits.active_thread_percentage.tenths, memory.bytes if memory else None


def most(limits: list[tuple[int, int | None]]) -> tuple[int, int | None]:
    memory = [size for _, size in limits if size is not None]
    return max(threads for threads, _ in limits), max(memory) if len(memory) == len(limits) else None


def late_client(node: Node, dice: random.Random, mode: Attach, closed: tuple[int, int | None]) -> None:
    """Have the second process of a lease connect after the window of `attach`, and check what it has."""
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
                size = (threads, memory * MIB)
                assert look_at(client).within(*(size if mode is Attach.STRICT else most([size, closed])))
    node.request("DELETE", f"/v1/leases/{lease}")


CLOSED: Final[dict[Unadmitted, tuple[int, int | None]]] = {
    Unadmitted.DENY: (SMALLEST.active_thread_percentage.tenths, MIB),
    Unadmitted.DEFAULTS: (300, 16 * GIB),
    Unadmitted.ALLOW: (1000, None),
}
"""The values of a closed ceiling: tenths of a percent, and bytes, or None for any memory."""

LIMITS: Final = '[limits]\nactive_thread_percentage = 30.0\npinned_device_mem_limit = "16GiB"\n'
"""The values of a closed ceiling with `defaults`; no lease may have more."""


def stray(node: Node, dice: random.Random, closed: tuple[int, int | None]) -> None:
    """Have a process without a lease connect when no client is awaited, and check what it has."""
    threads, memory = closed

    def is_closed() -> bool:
        daemon: dict[str, Any] = node.daemons()["gpu0"]
        return bool(daemon["verified"]) and daemon["limits_wanted"] == {
            "active_thread_percentage": threads / 10,
            "pinned_device_mem_limit": memory,
        }

    wait_until(is_closed, what=f"the limits to be closed; the log is {node.stderr}")
    whole = Limits(ActiveThreadPercentage(1000), PinnedDeviceMemLimit(80 * 1024))
    with SimulatedClient({**variables(node), **any_environment(dice, whole)}) as client:
        assert look_at(client).within(threads, memory)
    wait_until(lambda: client.hello["pid"] not in clients(node), what="mpsd to see that it has ended")


def foreigner(node: Node) -> dict[str, Any]:
    """Have a process of another uid connect, and return what it says."""
    root, _, _ = program()[3].rpartition("/mpsd/")
    with SimulatedClient(variables(node), before=(sys.executable, "-I", "-S", "-c", _AS_ANOTHER, root)) as client:
        return client.hello


def living(node: Node) -> list[str]:
    return [lease["id"] for lease in node.get("/v1/leases").json["leases"]]


def clients(node: Node) -> list[int]:
    """Return the clients with and without a lease: the resources that they use are granted to no other process."""
    return [client["pid"] for client in node.get("/v1/clients").json["clients"]]


@needs_root
@pytest.mark.timeout(60 + 2 * RUNS)
@pytest.mark.parametrize("unadmitted", Unadmitted)
@pytest.mark.parametrize("mode", Attach)
def test_never_more(make_node: Start, mode: Attach, unadmitted: Unadmitted) -> None:
    """No client has more than its share in strict mode, or than the largest share and a closed ceiling otherwise.

    Other processes get what a closed ceiling gives, or nothing where that is denied.
    """
    dice = random.Random(mode)
    config = f'[enforcement]\nattach = "{mode}"\nlimits_bind = "{BINDS}"\nunadmitted = "{unadmitted}"\n'
    config += LIMITS if unadmitted is Unadmitted.DEFAULTS else ""
    node = make_node(simulate=1, control=None, config=config).start()
    gpus(node)[0].set_compute_mode(ComputeMode.EXCLUSIVE_PROCESS)
    runs, closed = 0, CLOSED[unadmitted]
    may_be_full = mode is not Attach.STRICT and closed[1] is None
    with SimulatedClient(variables(node)) as keeper, ThreadPoolExecutor(TOGETHER + 1) as pool:
        assert keeper.hello["mps"]  # so that a server runs, and the GPU is taken
        assert keeper.alloc("1MiB")["ok"]  # so that mpsd no longer waits for its context
        own = node.request("POST", "/v1/leases", {"threads": 0.1, "memory": MIB, "gpu": "0", "pid": keeper.pid}).json[
            "id"
        ]
        while runs < RUNS:
            together = dice.randint(1, TOGETHER)
            others = [pool.submit(foreigner, node)] if unadmitted is Unadmitted.DENY else []
            seeds = [random.Random(dice.random()) for _ in range(together)]
            calls = [pool.submit(granted_client, node, each, may_be_full=may_be_full) for each in seeds]
            found = [call.result(timeout=60) for call in calls]
            assert all(other.result(timeout=60)["error"] == "CUDA_ERROR_DEVICE_UNAVAILABLE" for other in others)
            sizes = [part_of(limits) for limits, _ in found]
            for size, (_, seen) in zip(sizes, found, strict=True):
                threads, memory = size if mode is Attach.STRICT else most([*sizes, closed])
                assert seen.within(threads, memory), node.stderr
            runs += together
            wait_until(lambda: living(node) == [own], what="their leases to end")
            stray(node, dice, closed)
            if dice.random() < 0.3:
                late_client(node, dice, mode, closed)
                runs += 2
                stray(node, dice, closed)
            wait_until(lambda: clients(node) == [keeper.pid], what="all clients to be gone, and the GPU to be free")
