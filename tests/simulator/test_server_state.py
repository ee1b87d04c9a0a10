"""The state and the answers of a simulated server, without a process: states, clients, limits and its log."""

from typing import Final

import pytest

from mpsd.core.mps_facts import Binds
from mpsd.core.units import GIB
from mpsd.simulator.cuda import PER_CONTEXT, CudaError, Pinned
from mpsd.simulator.server_state import Client, Context, Server, Start, Status

GPU: Final = "GPU-00000000-0000-4000-8000-000000000000"


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def server(log: list[str]) -> Server:
    server = Server(77, Start((GPU,), 50.0, {0: 2 * GIB}, priority=1), log.append)
    server.begin()
    return server


def admit(server: Server, pid: int) -> Client:
    """Admit a client with an empty environment, and without a context yet."""
    client = server.admit(pid, f"./program-{pid}", "4026531836", {})
    assert isinstance(client, Client)
    return client


def context(server: Server, pid: int) -> Pinned:
    """Make a context of a client, which is admitted if necessary; return the limits that it is bound to."""
    if pid not in server.clients:
        admit(server, pid)
    made = server.context(pid)
    assert isinstance(made, Context)
    return made.pinned


def test_begin(server: Server, log: list[str]) -> None:
    """A server logs its initial limits: the only proof that they were applied."""
    assert log[-4:] == [
        "Active Threads Percentage set to 50.0",
        "Device pinned memory limit for device 0 set to 0x80000000 bytes",
        "Server Priority set to 1",
        "Server has started",
    ]
    assert server.answer("get_server_status", []).printed == ["ACTIVE"]


def test_not_begun(log: list[str]) -> None:
    """A server that initialises accepts no client."""
    server = Server(77, Start((GPU,), 50.0, {}, priority=0), log.append)
    assert server.status is Status.INITIALIZING
    assert server.admit(1, "", "", {}) is CudaError.MPS_SERVER_NOT_READY


@pytest.mark.parametrize("places", [16, 48, 60])
def test_places(log: list[str], places: int) -> None:
    """Contexts are counted: one client can use up all places, of which there are 16 before Volta and 60 from 590 on."""
    server = Server(77, Start((GPU,), 100.0, {}, priority=0, places=places), log.append)
    server.begin()
    for _ in range(places):
        context(server, 1)
    admit(server, 2)
    assert server.context(1) is server.context(2) is CudaError.MPS_MAX_CLIENTS_REACHED
    assert server.destroy(1, 3)
    context(server, 2)


@pytest.mark.parametrize(
    ("value", "fit", "error"),
    [
        (None, 48, CudaError.MPS_MAX_CLIENTS_REACHED),
        ("2", 48, CudaError.MPS_MAX_CLIENTS_REACHED),
        ("8", 15, CudaError.OUT_OF_MEMORY),
        ("32", 3, CudaError.OUT_OF_MEMORY),
    ],
)
def test_connections(server: Server, value: str | None, fit: int, error: CudaError) -> None:
    """The more connections clients have, the fewer fit, as measured on 580; an end makes room for another one."""
    environment = {} if value is None else {"CUDA_DEVICE_MAX_CONNECTIONS": value}
    for pid in range(fit + 1):
        assert isinstance(server.admit(pid, "./program", "1", environment), Client)
        assert (server.context(pid) is error) == (pid == fit)
    server.left(0, said=True)
    assert isinstance(server.context(fit), Context)


def test_lists(server: Server) -> None:
    """Clients are listed in the order of their arrival: alone, by device, and with details."""
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
    """Limits apply to later clients; an invalid one changes nothing, and 0 removes a limit."""
    before = context(server, 1)
    assert server.answer("set_active_thread_percentage", ["12.5"]).printed == ["12.5"]
    assert server.answer("set_active_thread_percentage", ["101"]).printed == ["12.5"]
    assert server.answer("set_device_pinned_mem_limit", ["0", "4G"]).printed == []
    assert server.answer("set_device_pinned_mem_limit", ["1", "1G"]).printed == []  # there is one device
    after = context(server, 2)
    assert (before.percentage, before.memory) == (50.0, 2 * GIB)
    assert (after.percentage, after.memory) == (12.5, 4 * GIB)
    assert server.answer("get_device_pinned_mem_limit", ["0"]).printed == ["4G"]
    server.answer("set_device_pinned_mem_limit", ["0", "0"])
    assert server.answer("get_device_pinned_mem_limit", ["0"]).printed == []
    assert context(server, 3).memory is None


def test_fault(server: Server, log: list[str]) -> None:
    """A fault hits every client, and none is accepted until the last has left; a second one changes nothing."""
    context(server, 1)
    context(server, 2)
    assert server.fault() == server.fault() == (1, 2)
    assert "Server is handling a fatal GPU error." in log
    for pid in (1, 2):
        assert server.answer("get_server_status", []).printed == ["FAULT"]
        assert server.admit(3, "", "", {}) is CudaError.MPS_SERVER_NOT_READY
        server.left(pid, said=True)
    assert server.status is Status.ACTIVE
    context(server, 3)


# -- contexts, and when limits bind ------------------------------------------------------------------------------------


def bound(log: list[str], moment: Binds) -> Server:
    server = Server(77, Start((GPU,), 80.0, {0: 8 * GIB}, priority=0, binds=moment), log.append)
    server.begin()
    return server


@pytest.mark.parametrize("moment", Binds)
def test_when_limits_bind(log: list[str], moment: Binds) -> None:
    """The driver's setting decides whether limits bind at CUDA's initialisation or with each context."""
    server = bound(log, moment)
    admit(server, 1)
    for percentage in ("10", "60"):
        server.answer("set_active_thread_percentage", [percentage])
        context(server, 1)
    found = [each.pinned.percentage for each in server.clients[1].contexts.values()]
    assert found == ([80, 80] if moment is Binds.CONNECT else [10, 60])


@pytest.mark.parametrize("moment", Binds)
def test_own_variables_bind_when_it_starts(log: list[str], moment: Binds) -> None:
    """A process's own variables bind when it initialises CUDA; a later percentage counts only with the opt-in."""
    server = bound(log, moment)
    variable = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    server.admit(1, "", "", {variable: "50"})
    server.admit(2, "", "", {variable: "50", PER_CONTEXT: "1"})
    found = [server.context(pid, {variable: own}) for pid in (1, 2) for own in ("20", "90", "200")]
    assert [each.pinned.percentage for each in found if isinstance(each, Context)] == [50, 50, 50, 20, 50, 50]


# -- ends --------------------------------------------------------------------------------------------------------------


def test_error_for_the_next_context(server: Server) -> None:
    """On 580, a client killed in mid-kernel without neighbours leaves an error for one context, and no other trace."""
    context(server, 1)
    server.clients[1].working = True
    assert server.left(1, said=False) == ()
    assert (server.status, server.clients) == (Status.ACTIVE, {})
    admit(server, 2)
    assert server.context(2) is CudaError.LAUNCH_FAILED
    context(server, 3)


def test_terminated_too_late(server: Server) -> None:
    """A client that leaves while its contexts are being ended is removed, and then other clients are accepted."""
    context(server, 1)
    server.clients[1].working = True
    assert server.terminate(1).awaits == 1
    server.left(1, said=True)
    assert server.terminate(1).printed == ["1"]
    context(server, 2)


@pytest.mark.parametrize("moment", Binds)
def test_memory_of_a_context(log: list[str], moment: Binds) -> None:
    """A context is refused where its memory limit has less than a context takes; the client stays."""
    start = Start((GPU,), 80.0, {0: GIB}, priority=0, binds=moment, context_memory=GIB + 1)
    server = Server(77, start, log.append)
    server.begin()
    admit(server, 1)
    assert server.context(1) is CudaError.OUT_OF_MEMORY
    assert 1 in server.clients


@pytest.mark.parametrize("said", [False, True])
def test_end_that_wedges(server: Server, log: list[str], *, said: bool) -> None:
    """The end of a client that wedges shows as any other does, and no later client is served."""
    admit(server, 1).wedges = True
    server.left(1, said=said)
    assert server.wedged
    assert 1 not in server.clients
    assert log[-1] == "Client {PID: 1, Context ID: 0} exit"


def test_terminate_that_wedges(server: Server) -> None:
    """The contexts of a client that wedges never end."""
    admit(server, 1).wedges = True
    assert server.terminate(1).awaits == 1
    assert server.wedged
