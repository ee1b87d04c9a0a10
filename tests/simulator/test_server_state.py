"""What a simulated server knows and says, without a process: states, clients, limits and its log."""

from typing import Final

import pytest

from mpsd.core.units import GIB
from mpsd.simulator.cuda import CudaError
from mpsd.simulator.server_state import Client, Server, Start, Status

GPU: Final = "GPU-00000000-0000-4000-8000-000000000000"


@pytest.fixture
def log() -> list[str]:
    """Give the server's log."""
    return []


@pytest.fixture
def server(log: list[str]) -> Server:
    """Give a server that has begun."""
    server = Server(77, Start((GPU,), 50.0, {0: 2 * GIB}, priority=1), log.append)
    server.begin()
    return server


def admit(server: Server, pid: int) -> Client:
    """Admit a client with nothing in its environment."""
    client = server.admit(pid, f"./program-{pid}", "4026531836", {})
    assert isinstance(client, Client)
    return client


def test_begin(server: Server, log: list[str]) -> None:
    """A server logs the limits that it begins with: the one proof that they were applied."""
    assert log[-4:] == [
        "Active Threads Percentage set to 50.0",
        "Device pinned memory limit for device 0 set to 0x80000000 bytes",
        "Server Priority set to 1",
        "Server has started",
    ]
    assert server.answer("get_server_status", []).printed == ["ACTIVE"]


def test_not_begun(log: list[str]) -> None:
    """A server that initialises takes nobody."""
    server = Server(77, Start((GPU,), 50.0, {}, priority=0), log.append)
    assert server.status is Status.INITIALIZING
    assert server.admit(1, "", "", {}) is CudaError.MPS_SERVER_NOT_READY


def test_as_many_as_it_takes(server: Server) -> None:
    """A server takes 48 clients, and another when one of them has left."""
    for pid in range(1, 49):
        admit(server, pid)
    assert server.admit(49, "", "", {}) is CudaError.MPS_MAX_CLIENTS_REACHED
    server.left(7, said=True)
    admit(server, 49)
    assert len(server.answer("get_client_list", []).printed) == 48


def test_lists(server: Server) -> None:
    """Clients are listed in the order in which they came: alone, by device, and with what they are."""
    admit(server, 12345)
    admit(server, 9)
    assert server.answer("get_client_list", []).printed == ["12345", "9"]
    assert server.answer("get_device_client_list", []).printed == [GPU, "12345", "9"]
    assert server.answer("ps", []).printed == [
        "PID   ID SERVER DEVICE                 NAMESPACE  COMMAND",
        "12345 0  77     GPU-00000000-0000-4000 4026531836 ./program-12345",
        "9     0  77     GPU-00000000-0000-4000 4026531836 ./program-9",
    ]


def test_setters(server: Server) -> None:
    """Limits are for clients that come afterwards; what makes no sense changes nothing, and 0 takes a limit away."""
    before = admit(server, 1)
    assert server.answer("set_active_thread_percentage", ["12.5"]).printed == ["12.5"]
    assert server.answer("set_active_thread_percentage", ["101"]).printed == ["12.5"]
    assert server.answer("set_device_pinned_mem_limit", ["0", "4G"]).printed == []
    assert server.answer("set_device_pinned_mem_limit", ["1", "1G"]).printed == []  # there is one device
    after = admit(server, 2)
    assert (before.pinned.percentage, before.pinned.memory) == (50.0, 2 * GIB)
    assert (after.pinned.percentage, after.pinned.memory) == (12.5, 4 * GIB)
    assert server.answer("get_device_pinned_mem_limit", ["0"]).printed == ["4G"]
    server.answer("set_device_pinned_mem_limit", ["0", "0"])
    assert server.answer("get_device_pinned_mem_limit", ["0"]).printed == []
    assert admit(server, 3).pinned.memory is None


def test_fault(server: Server, log: list[str]) -> None:
    """A fault is all clients'; until the last of them has exited nobody is taken in, a terminated one included."""
    for pid in (1, 2, 3):
        admit(server, pid)
    assert server.fault() == (1, 2, 3)
    assert server.answer("get_server_status", []).printed == ["FAULT"]
    assert server.answer("terminate_client", ["3"]).terminated == 3
    for pid in (2, 1):
        server.left(pid, said=True)
        assert server.admit(4, "", "", {}) is CudaError.MPS_SERVER_NOT_READY
    before = len(log)
    server.left(3, said=False)
    assert log[before:] == [
        "Receive command failed, assuming client exit. Client process disconnected",
        "Destroy server context on device 0",
        "Creating server context on device 0 (Simulated GPU)",
    ]
    assert server.status is Status.ACTIVE
    admit(server, 4)


def test_fault_again(server: Server) -> None:
    """A second fault while the first is not over makes it no longer."""
    admit(server, 1)
    assert server.fault() == server.fault() == (1,)
    server.left(1, said=True)
    assert server.status is Status.ACTIVE


def test_terminate(server: Server) -> None:
    """A client is terminated once; who is no client cannot be."""
    admit(server, 1)
    answer = server.answer("terminate_client", ["1"])
    assert (answer.printed, answer.terminated) == (["0"], 1)
    answer = server.answer("terminate_client", ["1"])
    assert (answer.printed, answer.terminated) == (["1"], None)
    assert server.clients == {}
