"""Simulated clients that initialise CUDA and make contexts at any time, several of them, and again."""

import os
import signal
import subprocess
from typing import Final

import pytest

from mpsd.core.mps_facts import Binds
from mpsd.core.units import MIB
from mpsd.simulator.devices import MEMORY as WHOLE
from mpsd.simulator.devices import Held, Kind
from tests.daemon.helpers import stopped
from tests.harness import wait_until
from tests.simulator.bench import MEMORY, PERCENTAGE, GpuBench
from tests.simulator.test_clients import DONE, GIB, OUT_OF_MEMORY, error

pytestmark = pytest.mark.thorough

INVALID_CONTEXT: Final = error("INVALID_CONTEXT", 201)


def narrow(bench: GpuBench, server: int) -> None:
    bench.ask(f"set_active_thread_percentage {server} 10", f"set_device_pinned_mem_limit {server} 0 1G")


def widen(bench: GpuBench, server: int) -> None:
    bench.ask(f"set_active_thread_percentage {server} 60", f"set_device_pinned_mem_limit {server} 0 8G")


def parts(answer: dict[str, object]) -> tuple[object, object]:
    return answer["active_thread_percentage"], answer["pinned_device_mem_limit"]


def test_late(bench: GpuBench) -> None:
    """A late client connects when it initialises CUDA, is listed from then on, and uses the GPU with a context."""
    client = bench.late_client()
    assert client.hello == {**DONE, "pid": client.pid}
    assert bench.ask("get_server_list") == []
    where = client.init()
    assert where == {**DONE, "pid": client.pid, "mps": True, "server": where["server"]}
    assert client.init() == where
    assert bench.ask(f"get_client_list {where['server']}") == [str(client.pid)]
    assert client.pid not in bench.device.processes()
    context = client.context()
    assert [context[name] for name in ("context", "multiprocessors", "memory", "total")] == [0, 132, WHOLE, WHOLE]
    assert bench.device.processes()[client.pid] == Held(MIB, Kind.MPS_COMPUTE)


@pytest.mark.parametrize("moment", Binds)
def test_reset(bench: GpuBench, moment: Binds) -> None:
    """A reset drops the primary context with its allocations; the next use makes it again."""
    bench.binds(moment)
    server = bench.server()
    widen(bench, server)
    client = bench.client()
    assert client.alloc("4GiB")["ok"]
    assert client.do("reset") == DONE
    assert client.pid not in bench.device.processes()
    assert bench.ask(f"get_client_list {server}") == [str(client.pid)]
    narrow(bench, server)
    again = client.alloc("4GiB")
    assert again == ({**DONE, "allocated": 4 * GIB} if moment is Binds.CONNECT else OUT_OF_MEMORY)
    assert client.alloc("1GiB")["ok"]


def test_several_contexts(bench: GpuBench) -> None:
    """A process's contexts share its memory limit; each is destroyed with its allocations, and once."""
    client = bench.client(**{MEMORY: "0=3G"})
    assert client.alloc("1GiB")["ok"]
    second = client.context()
    assert second["context"] == 1
    assert client.alloc("2GiB") == {**DONE, "allocated": 3 * GIB}
    assert client.alloc("1B") == OUT_OF_MEMORY
    header, *rows = bench.ask("ps")
    assert [row.split()[:2] for row in rows] == [[str(client.pid), "0"], [str(client.pid), "1"]], header
    assert client.do("destroy 1") == DONE
    assert client.do("destroy 1") == INVALID_CONTEXT
    assert bench.device.processes()[client.pid] == Held(GIB, Kind.MPS_COMPUTE)
    assert client.alloc("2GiB")["ok"]


def test_contexts_without_mps(idle: GpuBench) -> None:
    """A client without MPS also has contexts, each with the whole GPU."""
    client = idle.late_client()
    assert not client.init()["mps"]
    assert idle.device.processes() == {}
    assert [client.context()["context"], client.context()["context"]] == [0, 1]
    assert client.alloc("70GiB")["ok"]
    assert client.do("destroy 1") == DONE
    assert idle.device.processes() == {client.pid: Held(MIB, Kind.COMPUTE)}
    assert client.do("destroy 0") == DONE
    assert idle.device.processes() == {}


def test_own_variables_in_process(bench: GpuBench) -> None:
    """Variables that a process sets for itself before it initialises CUDA count, later ones do not."""
    client = bench.late_client()
    client.do(f"setenv {PERCENTAGE} 25")
    client.init()
    client.do(f"setenv {PERCENTAGE} 10")
    client.do(f"setenv {MEMORY} 0=1G")
    assert parts(client.context()) == (25.0, None)


def test_framework(bench: GpuBench) -> None:
    """A program that takes a part of the GPU's total memory, which a limit does not lower, hits the limit (NVG)."""
    client = bench.client(**{MEMORY: "0=8G"})
    assert client.hello["total"] == WHOLE
    assert client.do("framework 0.9") == OUT_OF_MEMORY
    assert client.do("framework 0.1") == {**DONE, "allocated": WHOLE // 10}


# -- ends --------------------------------------------------------------------------------------------------------------


def status(bench: GpuBench, server: int) -> list[str]:
    return bench.ask(f"get_server_status {server}", f"get_client_list {server}")


def ends_by(how: str) -> signal.Signals:
    return signal.Signals[f"SIG{how.rpartition(' ')[2]}"]


@pytest.mark.parametrize("how", ["KILL", "TERM", "caught TERM"])
def test_killed_in_mid_kernel(bench: GpuBench, how: str) -> None:
    """A client that ends in mid-kernel harms its neighbours: by SIGKILL, by SIGTERM, and even if it catches that."""
    client, neighbour, idle = bench.client(), bench.client(), bench.late_client()
    server = client.hello["server"]
    assert neighbour.hello["server"] == idle.init()["server"] == server
    if how == "caught TERM":
        client.do("catch TERM")
    client.launch(30)
    client.kill(ends_by(how))
    wait_until(lambda: status(bench, server)[0] == "FAULT", what="the fault")
    assert neighbour.sync() == error("ILLEGAL_ADDRESS", 700)
    assert idle.sync() == DONE
    neighbour.end()
    wait_until(lambda: status(bench, server) == ["ACTIVE", str(idle.pid)], what="the server to recover")
    assert idle.context()["ok"]


@pytest.mark.parametrize("how", ["obey", "terminate", "done"])
def test_ends_that_harm_nobody(bench: GpuBench, how: str) -> None:
    """A client that disconnects, whose contexts were ended, or without a running kernel harms no client by its end."""
    client, neighbour = bench.client(), bench.client()
    server = client.hello["server"]
    assert neighbour.hello["server"] == server
    client.do("obey TERM")
    client.launch(0.2)
    if how == "obey":
        assert client.kill(ends_by("TERM")) == 0
    else:
        assert client.answer()["ok"]
        if how == "terminate":
            assert bench.ask(f"terminate_client {server} {client.pid}") == ["0"]
        client.kill()
    wait_until(lambda: status(bench, server) == ["ACTIVE", str(neighbour.pid)], what="it to be gone")
    assert neighbour.sync() == DONE
    assert bench.client().hello["mps"]


def test_terminate_client_waits_for_the_work(bench: GpuBench) -> None:
    """`terminate_client` has the only connection until the kernel ends.

    Clients that come meanwhile get error 807 (TS).
    """
    client = bench.client(**{PERCENTAGE: "50"})
    server = client.hello["server"]
    client.loop(0.5)
    # A simulated server learns the end of a kernel from its client, so a client that is stopped has one in flight.
    with stopped(client.pid):
        front_end = bench.open_front_end()
        assert front_end.stdin is not None
        front_end.stdin.write(f"terminate_client {server} {client.pid}\nget_server_list\n".encode())
        front_end.stdin.flush()
        wait_until(lambda: bench.client().hello == error("MPS_SERVER_NOT_READY", 807), what="the server to begin")
    assert client.answer() == error("MPS_CLIENT_TERMINATED", 810)
    assert front_end.communicate()[0].decode().splitlines() == ["0", str(server)]
    assert status(bench, server) == ["ACTIVE"]
    client.kill()
    assert bench.client().hello["server"] == server


def test_terminate_client_without_its_front_end(bench: GpuBench) -> None:
    """A server ends contexts after its front-end is gone, too, and refuses clients until then."""
    client = bench.client(**{PERCENTAGE: "50"})
    server = client.hello["server"]
    client.launch(0.8)
    with pytest.raises(subprocess.TimeoutExpired):
        bench.front_end(f"terminate_client {server} {client.pid}", seconds=0.5)
    assert bench.client().hello == error("MPS_SERVER_NOT_READY", 807)
    assert client.answer()["ok"]
    wait_until(lambda: status(bench, server) == ["ACTIVE"], what="the contexts to be ended")
    assert client.sync() == error("MPS_CLIENT_TERMINATED", 810)
    assert bench.client().hello["server"] == server


def test_wedge(bench: GpuBench) -> None:
    """A client that wedges, killed in mid-kernel, leaves a server that serves no client and says that it is well.

    The server logs nothing, lists the dead client and those that hang, and does not even end on command: a new one
    serves.
    """
    client = bench.client()
    server = client.hello["server"]
    assert client.do("wedge")["ok"]
    client.launch(30)
    logged = bench.server_log()
    client.kill()
    late = bench.client()
    wait_until(lambda: status(bench, server) == ["ACTIVE", str(client.pid), str(late.pid)], what="it to be listed")
    assert bench.server_log() == logged
    with pytest.raises(subprocess.TimeoutExpired):
        bench.front_end(f"terminate_client {server} {client.pid}", seconds=0.5)
    assert status(bench, server)[0] == "ACTIVE"
    assert not late.has_answered
    late.kill()
    wait_until(lambda: status(bench, server) == ["ACTIVE", str(client.pid)], what="it to be gone")
    bench.ask(f"shutdown_server {server}")
    assert bench.ask("get_server_list") == [str(server)]
    bench.ask(f"shutdown_server {server} -f")
    wait_until(lambda: bench.ask("get_server_list") == [], what="its end")
    assert bench.client().hello["mps"]


def test_quit_of_a_wedged_daemon(bench: GpuBench) -> None:
    """A control daemon with a wedged server quits only by force."""
    client = bench.client()
    assert client.do("wedge")["ok"]
    client.launch(30)
    client.kill()
    late = bench.client()
    bench.wait_for_log(f"NEW CLIENT {late.pid} from user {os.geteuid()}: Server already exists")
    bench.front_end("quit -t 0")
    assert bench.ended() == 0
    assert late.hello == error("MPS_CONNECTION_FAILED", 805)
