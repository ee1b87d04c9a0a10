"""Simulated servers and clients as processes, by the rules that NVIDIA documents."""

import os
import select
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.core.mps.log_parser import ClientArrived, LogReader, ServerExited, ServerFaulted, ServerReady
from mpsd.simulator.answers import BRANCHES
from tests.contract.subjects import AS_STRANGER, STRANGER, as_root
from tests.harness import look_at, wait_until
from tests.simulated_clients import SimulatedClient
from tests.simulator.bench import GpuBench

pytestmark = pytest.mark.thorough

GIB: Final = 2**30
DONE: Final = {"ok": True}


def error(name: str, code: int) -> dict[str, Any]:
    """Return the answer to a call that fails with this error."""
    return {"ok": False, "error": f"CUDA_ERROR_{name}", "code": code}


OUT_OF_MEMORY: Final = error("OUT_OF_MEMORY", 2)
LAUNCH_FAILED: Final = error("LAUNCH_FAILED", 719)
NOT_READY: Final = error("MPS_SERVER_NOT_READY", 807)
TERMINATED: Final = error("MPS_CLIENT_TERMINATED", 810)


def limits(client: SimulatedClient) -> tuple[float, int | None]:
    return client.hello["active_thread_percentage"], client.hello["pinned_device_mem_limit"]


# -- connecting --------------------------------------------------------------------------------------------------------


def test_first_client_starts_a_server(bench: GpuBench) -> None:
    """A client has a server started for its user, waits until it is ready, and is listed; the next client finds it."""
    client = bench.client()
    assert client.hello["mps"]
    server = client.hello["server"]
    assert bench.ask("get_server_list", f"get_client_list {server}", f"get_server_status {server}") == [
        str(server),
        str(client.pid),
        "ACTIVE",
    ]
    process = look_at(server)
    assert process is not None
    assert process.parent == bench.daemon.pid
    assert process.command.split()[0].endswith("/nvidia-cuda-mps-server")
    second, uid = bench.client(), os.geteuid()
    assert second.hello["server"] == server
    assert [row.split()[0] for row in bench.ask(f"ps -p {server}")] == ["PID", str(client.pid), str(second.pid)]
    bench.complete_log()
    assert [line for line in bench.log() if "NEW CLIENT" in line or "NEW SERVER" in line or "Starting new" in line] == [
        f"NEW CLIENT {client.pid} from user {uid}: Server is not ready, push client to pending list",
        f"Starting new server {server} for user {uid}",
        f"NEW SERVER {server}: Ready",
        f"NEW CLIENT {second.pid} from user {uid}: Server already exists",
    ]


def test_server_stays_without_clients(bench: GpuBench) -> None:
    """A server outlives its clients, and logs the same when they exit and when they are killed."""
    first, second = bench.client(), bench.client()
    server = first.hello["server"]
    assert second.hello["server"] == server
    assert first.end() == 0
    # The server notices two ends at almost the same time in any order.
    wait_until(lambda: bench.ask(f"get_client_list {server}") == [str(second.pid)], what="the first to be gone")
    assert second.kill() == -signal.SIGKILL
    wait_until(lambda: bench.ask(f"get_client_list {server}") == [], what="both to be gone")
    assert bench.ask("get_server_list") == [str(server)]
    gone = [line for line in bench.server_log() if line.endswith(" exit") or "Receive command" in line]
    assumes = "Receive command failed, assuming client exit. Client process disconnected"
    assert gone == [
        line for each in (first, second) for line in (assumes, f"Client {{PID: {each.pid}, Context ID: 0}} exit")
    ]


# -- limits ------------------------------------------------------------------------------------------------------------


def test_defaults_are_for_the_next_server(bench: GpuBench) -> None:
    """A default that is changed beside a server does not affect it; its own limits are read and set by its pid."""
    server = bench.server()
    bench.ask("set_default_active_thread_percentage 30", "set_default_device_pinned_mem_limit 0 3G")
    ask = (f"get_active_thread_percentage {server}", f"get_device_pinned_mem_limit {server} 0")
    assert bench.ask(*ask) == ["100.0"]
    bench.ask(f"set_device_pinned_mem_limit {server} 0 1536M", f"set_active_thread_percentage {server} 150")
    assert bench.ask(*ask) == ["100.0", "1G"]
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: bench.ask("get_server_list") == [], what="its end")
    again = bench.server()
    assert bench.ask(*(line.replace(str(server), str(again)) for line in ask)) == ["30.0", "3G"]


# -- faults ------------------------------------------------------------------------------------------------------------


def test_terminated_client(bench: GpuBench) -> None:
    """`terminate_client` prints 0; the client keeps the error and its process lives; other clients are unaffected."""
    victim, other = bench.client(), bench.client()
    server = victim.hello["server"]
    assert other.hello["server"] == server
    victim.alloc("1GiB")
    assert bench.ask(f"terminate_client {server} {victim.pid}") == ["0"]
    assert victim.sync() == TERMINATED
    assert victim.alloc("1MiB") == TERMINATED
    assert victim.pid not in bench.device.processes()
    assert bench.ask(f"get_client_list {server}", f"get_server_status {server}") == [str(other.pid), "ACTIVE"]
    assert other.alloc("1GiB")["ok"]
    assert bench.ask(f"terminate_client {server} {victim.pid}") == ["1"]
    assert victim.end() == 0


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.usefixtures("branch")
def test_log_has_the_words_of_nvidias(bench: GpuBench) -> None:
    """mpsd parses every line that clients and servers of each branch make the simulator log, to the right event."""
    first, second, third = bench.client(), bench.client(), bench.client()
    server = first.hello["server"]
    assert second.hello["server"] == third.hello["server"] == server
    bench.ask(f"terminate_client {server} {first.pid}")
    first.end()
    second.fault()
    second.end()
    third.kill()
    recovered = "Destroy server context on device 0"
    wait_until(lambda: recovered in bench.server_log(), what="the server to recover")
    bench.ask(f"shutdown_server {server}")
    bench.wait_for_log(f"Server {server} exited with status 0")
    control, served = LogReader(), LogReader()
    told = control.read(bench.raw_log())
    assert {event.pid for event in told if isinstance(event, ClientArrived)} == {first.pid, second.pid, third.pid}
    assert ServerReady(server) in told
    assert ServerExited(server, 0) in told
    told = served.read((bench.logs / "server.log").read_text().splitlines())
    assert {event.server for event in told if isinstance(event, ServerFaulted)} == {server}
    assert [*control.latest, *served.latest] == []


@pytest.mark.parametrize("reads", [True, False])
def test_death_of_whom_it_comes_to(tmp_path: Path, *, reads: bool) -> None:
    """A client whose control daemon ends before it has answered, or even read, the request cannot connect."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "simulated_clients"))
        listener.listen()
        with SimulatedClient({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}) as client:
            connection, _ = listener.accept()
            select.select([connection], [], [])
            if reads:
                connection.recv(1 << 18)
            connection.close()
            assert client.hello == error("MPS_CONNECTION_FAILED", 805)


def test_server_that_is_stopped(bench: GpuBench) -> None:
    """A command for a stopped server blocks its control daemon: no other process is served until the server runs.

    The list of servers is still answered before that (measured on 580), and a new client waits.
    """
    server = bench.server()
    os.kill(server, signal.SIGSTOP)
    assert bench.ask("get_server_list") == [str(server)]
    client = bench.late_client()
    client.tell("init")
    with pytest.raises(subprocess.TimeoutExpired):
        bench.front_end(f"get_client_list {server}", seconds=0.3)
    with pytest.raises(subprocess.TimeoutExpired):
        bench.front_end("get_server_list", seconds=0.3)
    assert client.process.stdout is not None
    assert not select.select([client.process.stdout], [], [], 0)[0]
    os.kill(server, signal.SIGCONT)
    assert wait_until(lambda: bench.ask("get_server_list"), what="the daemon to serve again") == [str(server)]
    assert client.answer()["server"] == server


# -- quitting ----------------------------------------------------------------------------------------------------------


def test_quit_waits_for_clients(bench: GpuBench) -> None:
    """`quit` accepts no new clients, and waits for existing ones without a limit; then everything is gone."""
    client = bench.client()
    assert client.hello["ok"]
    with pytest.raises(subprocess.TimeoutExpired):
        bench.front_end("quit", seconds=0.3)
    assert bench.client().hello == NOT_READY
    assert client.alloc("1GiB")["ok"]
    client.end()
    assert bench.ended() == 0
    wait_until(lambda: not bench.processes(), what="the end of the client that was refused")


def test_shutdown(bench: GpuBench) -> None:
    """A server that is shut down exits with its last client; a client that comes meanwhile waits for another server."""
    first = bench.client()
    server = first.hello["server"]
    assert bench.ask(f"shutdown_server {server}") == []
    second = bench.client()
    bench.wait_for_log(
        f"NEW CLIENT {second.pid} from user {os.geteuid()}: Server is not ready, push client to pending list"
    )
    assert first.sync() == DONE
    assert not second.has_answered
    first.end()
    assert second.hello["server"] != server
    assert f"Server {server} exited with status 0" in bench.log()


# -- users -------------------------------------------------------------------------------------------------------------


@as_root
def test_one_user_at_a_time(bench: GpuBench) -> None:
    """Another user's client waits until the last client of the first has exited; then that user's server ends."""
    bench.root.chmod(0o711)
    first = bench.client()
    server = first.hello["server"]
    other = bench.client(*AS_STRANGER)
    bench.wait_for_log(f"NEW CLIENT {other.pid} from user {STRANGER}: Server is not ready, push client to pending list")
    late = bench.client()
    bench.wait_for_log(f"NEW CLIENT {late.pid} from user 0: Server is not ready, push client to pending list")
    assert not other.has_answered
    first.end()
    assert other.hello["server"] != server
    assert bench.ask("get_server_list") == [str(other.hello["server"])]
    assert not late.has_answered
    other.end()
    assert late.hello["mps"]


@as_root
def test_client_that_waited_in_vain(bench: GpuBench) -> None:
    """A client that is killed while it waits is forgotten: no server gets it."""
    bench.root.chmod(0o711)
    first = bench.client()
    assert first.hello["mps"]
    other = bench.client(*AS_STRANGER)
    bench.wait_for_log(f"NEW CLIENT {other.pid} from user {STRANGER}: Server is not ready, push client to pending list")
    other.kill()
    first.end()
    bench.wait_for_log(f"Server {first.hello['server']} exited with status 0")
    assert bench.client().hello["mps"]
    assert not [line for line in bench.server_log() if str(other.pid) in line]


@as_root
def test_many_users(idle: GpuBench) -> None:
    """With -multiuser-server one server of root takes the clients of every user."""
    idle.root.chmod(0o711)
    idle.flags = ("-f", "-multiuser-server")
    idle.start()
    first, other = idle.client(), idle.client(*AS_STRANGER)
    assert first.hello["server"] == other.hello["server"]
    assert look_at(other.hello["server"]) is not None
