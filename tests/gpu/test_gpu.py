"""MPS on a real GPU with real clients, under mpsd: `pytest -m gpu tests/gpu`; docs/gpu.md has the figures.

Every other run has the same tests on a simulated GPU, where they prove that they can still be run, and no more. It is
one module, so that one worker has the GPU to itself. Rates are compared with rates of the same run, and the bands are
wide, since threads are granted in whole pairs of multiprocessors and the clock depends on the temperature: they
distinguish a limit that holds from one that does not, and measure nothing. `python -m tests.gpu.report` does.
"""

import signal
from typing import Any, Final

import pytest

from tests.daemon.helpers import GIB, is_running, kill, next_ready, undone
from tests.gpu.client import PIECE
from tests.gpu.machine import Client, doubt_about, leased, unadmitted
from tests.harness import wait_until
from tests.node import Node

pytestmark = [pytest.mark.timeout(300), pytest.mark.thorough]

CLOSED: Final = {"active_thread_percentage": 0.1, "pinned_device_mem_limit": 1 << 20}
"""The limits of a client without a lease (docs/enforcement.md)."""


def proven(node: Node, client: Client) -> None:
    """Check that a client has a context, and is a client of MPS, whose limits mean something."""
    assert client.hello["ok"], client.hello
    doubt = doubt_about(node, client)
    assert not doubt, doubt


def attached(node: Node, client: Client) -> Any:
    """Wait until mpsd has attributed a client to a lease, and return it."""

    def look() -> Any:
        clients = node.get("/v1/clients").json["clients"]
        return next((each for each in clients if each["pid"] == client.pid and each["lease"] is not None), None)

    proven(node, client)
    return wait_until(look, what=f"client {client.pid} to be that of a lease; the log is {node.stderr}")


def is_closed(node: Node) -> bool:
    """Return whether the control daemon and each of its servers give the next client next to nothing."""
    daemon = node.daemons()["gpu0"]
    return all(each["limits"] == CLOSED for each in [daemon, *daemon["servers"]])


def finish(client: Client) -> float:
    """End a client's work, which nothing has ended before, and return its rate."""
    assert not client.has_answered, client.answer()
    answer = client.finish()
    assert answer["ok"], answer
    rate: float = answer["rate"]
    return rate


def seconds(node: Node) -> float:
    """Return how long a rate is measured: that of a simulated GPU needs no long time."""
    return 2 if node.simulate is None else 0.1


def rate_of(node: Node, threads: float) -> tuple[float, int]:
    """Return the rate of a single lease, and the number of its multiprocessors."""
    with leased(node, threads=threads, memory="2GiB") as client:
        attached(node, client)
        answer = client.do(f"busy {seconds(node)}")
        assert answer["ok"], answer
        assert client.end() == 0
    return answer["rate"], answer["multiprocessors"]


def test_thread_ceiling(node: Node) -> None:
    """A quarter of the threads computes less than half as fast as all of them, on less than half of the GPU."""
    whole, all_of_them = rate_of(node, 100)
    quarter, some = rate_of(node, 25)
    assert 0.10 < quarter / whole < 0.45
    assert some < 0.45 * all_of_them


def test_memory_ceiling(node: Node) -> None:
    """A lease of 4 GiB is refused more, though the GPU has more; CUDA's own part of it is less than 1 GiB."""
    with leased(node, threads=50, memory="4GiB") as client:
        lease = attached(node, client)["lease"]
        assert client.hello["total"] > 6 * GIB, "this GPU is too small to tell"
        answer = client.do("alloc-until-refused")
        assert answer["refused"] == "CUDA_ERROR_OUT_OF_MEMORY"
        assert 3 * GIB <= answer["held"] <= 4 * GIB
        # NVML reports no more than the limit, so that no honest client is a violation.
        (process,) = node.get(f"/v1/leases/{lease}/verify").json["processes"]
        assert process["memory_held"] <= 4 * GIB
        # The client can allocate freed memory again, and no more than that.
        assert client.do("free")["ok"]
        assert client.do("alloc-until-refused")["held"] == pytest.approx(answer["held"], abs=2 * PIECE)
        assert client.end() == 0


def test_memory_ceiling_without_its_variable(node: Node) -> None:
    """The limit is the server's: a client that dropped its own variables is refused all the same."""
    lease = node.request("POST", "/v1/leases", {"threads": 25, "memory": "4GiB", "gpu": "0"})
    assert lease.status == 201, lease.body
    with unadmitted(node) as client:
        proven(node, client)
        answer = client.do("alloc-until-refused")
        assert answer["refused"] == "CUDA_ERROR_OUT_OF_MEMORY"
        assert answer["held"] <= 4 * GIB
        assert client.end() == 0


def test_closed_ceiling(strict_node: Node) -> None:
    """A client without a lease gets no context or no memory, also while another client has a lease (strict)."""
    node = strict_node
    with leased(node, threads=50, memory="4GiB") as holder:
        attached(node, holder)
        wait_until(lambda: is_closed(node), what="the ceiling to be closed", deadline=30)
        with unadmitted(node) as client:
            if client.hello["ok"]:
                proven(node, client)
                refused = client.do(f"alloc {PIECE >> 20}MiB")
                assert refused["error"] == "CUDA_ERROR_OUT_OF_MEMORY", refused
            else:
                assert client.hello["error"] == "CUDA_ERROR_OUT_OF_MEMORY", client.hello
        # The client with the lease is unaffected.
        assert holder.do("alloc 1GiB")["ok"]
        assert holder.end() == 0


def test_drift_undone_under_load(strict_node: Node) -> None:
    """A stranger's limits are undone while a client works, without an effect on this client or the next (strict)."""
    node = strict_node
    with leased(node, threads=50, memory="2GiB") as client:
        server = attached(node, client)["server"]
        before = client.busy(seconds(node))
        wait_until(lambda: is_closed(node), what="mpsd to be done with the limits", deadline=30)
        client.begin()
        node.ask("gpu0", f"set_active_thread_percentage {server} 77\nset_default_active_thread_percentage 77")
        undone(node, "gpu0", "active_thread_percentage", server=server)
        undone(node, "gpu0", "active_thread_percentage", server=None)
        assert 0.7 < finish(client) / before < 1.4
        with leased(node, threads=25, memory="2GiB") as other:
            attached(node, other)
            assert other.busy(seconds(node)) < 0.9 * before
            assert other.end() == 0
        assert client.end() == 0


def test_two_leases_side_by_side(node: Node) -> None:
    """Two leases work at the same time, each within its share; the memory of one does not reduce the other's.

    A percentage is a cap and reserves nothing: two of 50 % may share multiprocessors, and then each has half of its
    rate alone. Below that, one of them would be waiting for the other.
    """
    alone, _ = rate_of(node, 50)
    with (
        leased(node, threads=50, memory="4GiB") as one,
        leased(node, threads=50, memory="4GiB") as other,
    ):
        assert attached(node, one)["server"] == attached(node, other)["server"]
        for client in (one, other):
            client.tell(f"busy {2 * seconds(node)}")
        for client in (one, other):
            work = client.answer()
            assert work["ok"], work
            assert 0.35 < work["rate"] / alone < 1.3
        for client in (one, other):
            assert 3 * GIB <= client.do("alloc-until-refused")["held"] <= 4 * GIB
        for client in (one, other):
            assert client.end() == 0


def test_blast_radius_of_a_fault(node: Node) -> None:
    """A fault of one client hits every client of its GPU; no client is admitted until the last one has ended."""
    daemon = node.daemons()["gpu0"]["pid"]
    with (
        leased(node, threads=25, memory="2GiB") as guilty,
        leased(node, threads=25, memory="2GiB") as victim,
    ):
        leases = {attached(node, guilty)["lease"], attached(node, victim)["lease"]}
        victim.begin()
        failed = guilty.do("fault")
        assert failed["error"] in {"CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED"}, failed
        assert victim.answer()["error"] == failed["error"]
        (told,) = wait_until(
            lambda: node.events("leases_faulted"), what=f"the fault to be told; the log is {node.stderr}"
        )
        assert set(told["leases"]) == leases
        for client in (guilty, victim):
            wait_until(lambda: node.get("/readyz").status == 503, what="the node not to be ready")
            refused = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "gpu": "0"})
            assert (refused.status, refused.json["code"]) == (409, "daemon_not_ready"), refused.json
            client.end()
    wait_until(lambda: node.get("/readyz").status == 200, what="the node to be ready", deadline=60)
    assert node.daemons()["gpu0"]["pid"] == daemon
    assert rate_of(node, 25)[0] > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_adoption_with_a_client_running(node: Node, number: signal.Signals) -> None:
    """mpsd restarts while a client works on; daemon, server, client and lease are unchanged."""
    with leased(node, threads=50, memory="4GiB") as client:
        before, known = attached(node, client), node.daemons()["gpu0"]
        client.begin()
        node.end(number)
        node.start()
        after = attached(node, client)
        assert (after["lease"], after["server"]) == (before["lease"], before["server"])
        assert node.daemons()["gpu0"]["pid"] == known["pid"]
        assert finish(client) > 0
        assert 3 * GIB <= client.do("alloc-until-refused")["held"] <= 4 * GIB
        assert client.end() == 0
    wait_until(lambda: not node.leases(), what="the lease to end with its client")


def test_control_daemon_killed_with_a_client_running(node: Node) -> None:
    """A control daemon dies, and with it its server and its clients; the next one serves new clients.

    Driver 580 does so within a second. The client's process lives on, and so does its lease.
    """
    with leased(node, threads=50, memory="2GiB") as client:
        known = attached(node, client)
        before = node.daemons()["gpu0"]["pid"]
        client.begin()
        kill(before)
        ended = client.answer()
        assert ended["error"].startswith("CUDA_ERROR_MPS_"), ended
        wait_until(lambda: not is_running(known["server"]), what="the server to be gone")
        next_ready(node, "gpu0", before)
        assert rate_of(node, 50)[0] > 0
        assert known["lease"] in {each["id"] for each in node.leases()}
        client.end()
    wait_until(lambda: node.get("/v1/status").json["healthy"], what="the node to be healthy")
    wait_until(lambda: not node.leases(), what="the lease to end with its client")
