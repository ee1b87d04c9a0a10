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
    """Return the server's log."""
    return []


@pytest.fixture
def server(log: list[str]) -> Server:
    """Return a server that has begun."""
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


def test_as_many_as_it_takes(server: Server) -> None:
    """A server takes 48 contexts, of any clients, and another when one of them is gone; processes do not count."""
    for pid in range(1, 47):
        context(server, pid)
    for _ in range(2):
        context(server, 1)
    admit(server, 47)
    assert server.context(47) is CudaError.MPS_MAX_CLIENTS_REACHED
    server.left(7, said=True)
    context(server, 47)
    assert server.context(47) is CudaError.MPS_MAX_CLIENTS_REACHED
    assert server.destroy(1, 1)
    assert not server.destroy(1, 1)
    context(server, 47)
    assert len(server.answer("get_client_list", []).printed) == 46


@pytest.mark.parametrize("places", [16, 60])
def test_places_of_other_gpus_and_drivers(log: list[str], places: int) -> None:
    """There are 16 places before Volta, and 60 from driver 590 on."""
    server = Server(77, Start((GPU,), 100.0, {}, priority=0, places=places), log.append)
    server.begin()
    for _ in range(places):
        context(server, 1)
    assert server.context(1) is CudaError.MPS_MAX_CLIENTS_REACHED


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
    """A fault hits all clients; until the last of them, even a terminated one, has exited, no client is accepted."""
    for pid in (1, 2, 3):
        context(server, pid)
    admit(server, 5)  # without a context the fault does not hit it
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
    """A second fault during the first does not prolong it."""
    context(server, 1)
    assert server.fault() == server.fault() == (1,)
    server.left(1, said=True)
    assert server.status is Status.ACTIVE


def test_terminate(server: Server) -> None:
    """A client is terminated once; a process that is no client cannot be."""
    admit(server, 1)
    answer = server.answer("terminate_client", ["1"])
    assert (answer.printed, answer.terminated) == (["0"], 1)
    answer = server.answer("terminate_client", ["1"])
    assert (answer.printed, answer.terminated) == (["1"], None)
    assert server.clients == {}


# -- contexts, and when limits bind ------------------------------------------------------------------------------------

NARROW: Final = ("set_active_thread_percentage", ["10"])
WIDE: Final = ("set_active_thread_percentage", ["80"])


def bound(log: list[str], moment: Binds) -> Server:
    """Return a server whose limits bind at this moment."""
    server = Server(77, Start((GPU,), 80.0, {0: 8 * GIB}, priority=0, binds=moment), log.append)
    server.begin()
    return server


def test_binds_when_it_connects(log: list[str]) -> None:
    """If limits bind at the connection, all contexts of a client have what was open then, however late."""
    server = bound(log, Binds.CONNECT)
    admit(server, 1)
    server.answer(*NARROW)
    server.answer("set_device_pinned_mem_limit", ["0", "1G"])
    assert context(server, 1) == context(server, 1) == Pinned(GPU, 80.0, 8 * GIB)
    admit(server, 2)
    server.answer(*WIDE)
    assert context(server, 2) == Pinned(GPU, 10.0, GIB)


def test_binds_with_each_context(log: list[str]) -> None:
    """If limits bind with a context, each has what is open at its creation: a second one, and one after a reset."""
    server = bound(log, Binds.CONTEXT)
    admit(server, 1)
    server.answer(*NARROW)
    assert context(server, 1) == Pinned(GPU, 10.0, 8 * GIB)
    server.answer(*WIDE)
    server.answer("set_device_pinned_mem_limit", ["0", "1G"])
    assert context(server, 1) == Pinned(GPU, 80.0, GIB)
    assert server.destroy(1, 0)
    assert context(server, 1) == Pinned(GPU, 80.0, GIB)
    assert [*server.clients[1].contexts] == [1, 2]


@pytest.mark.parametrize("moment", Binds)
def test_own_variables_bind_when_it_starts(log: list[str], moment: Binds) -> None:
    """A process's own variables bind when it initialises CUDA; a later percentage counts only with the opt-in."""
    server = bound(log, moment)
    variable = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    server.admit(1, "", "", {variable: "50"})
    server.admit(2, "", "", {variable: "50", PER_CONTEXT: "1"})
    found = [server.context(pid, {variable: own}) for pid in (1, 2) for own in ("20", "90", "200")]
    assert [each.pinned.percentage for each in found if isinstance(each, Context)] == [50, 50, 50, 20, 50, 50]


@pytest.mark.parametrize("moment", Binds)
def test_invisible_gpu_drops_every_limit(log: list[str], moment: Binds) -> None:
    """An entry for an invisible GPU drops every pinned limit of every context; threads stay limited (NVG)."""
    server = bound(log, moment)
    server.admit(1, "", "", {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G,1=4G"})
    assert context(server, 1) == context(server, 1) == Pinned(GPU, 80.0, None)


def test_contexts_in_lists_and_log(server: Server, log: list[str]) -> None:
    """`ps` has a line for each context and one for a client without any; the log names contexts by their numbers."""
    admit(server, 1)
    context(server, 2)
    context(server, 2)
    assert server.answer("get_client_list", []).printed == ["1", "2"]
    assert [line.split()[:2] for line in server.answer("ps", []).printed[1:]] == [["1", "0"], ["2", "0"], ["2", "1"]]
    assert "Client {PID: 2, Context ID: 1} connected" in log
    server.destroy(2, 1)
    assert log[-1] == "Client {PID: 2, Context ID: 1} exit"


# -- ends --------------------------------------------------------------------------------------------------------------


def test_killed_in_mid_kernel_beside_others(server: Server) -> None:
    """A client killed in mid-kernel causes an illegal address in all others with a context, and the server faults."""
    for pid in (1, 2, 3):
        context(server, pid)
    admit(server, 4)
    server.clients[1].working = True
    assert server.left(1, said=False) == (2, 3)
    assert not server.wedged
    assert server.answer("get_server_status", []).printed == ["FAULT"]
    assert server.context(4) is CudaError.MPS_SERVER_NOT_READY
    assert server.left(2, said=False) == server.left(3, said=True) == ()
    assert server.answer("get_server_status", []).printed == ["ACTIVE"]


@pytest.mark.parametrize("how", ["idle", "goodbye", "terminated"])
def test_ends_that_harm_nobody(server: Server, how: str) -> None:
    """A client without a running kernel, after a disconnect, or whose contexts were ended has no effect by its end."""
    context(server, 1)
    context(server, 2)
    server.clients[1].working = how == "goodbye"
    if how == "terminated":
        assert server.terminate(1).printed == ["0"]
    assert server.left(1, said=how == "goodbye") == ()
    assert (server.status, server.wedged) == (Status.ACTIVE, False)
    context(server, 3)


def test_error_for_the_next_context(server: Server) -> None:
    """On 580, a client killed in mid-kernel without neighbours leaves an error for one context, and no other trace."""
    context(server, 1)
    server.clients[1].working = True
    assert server.left(1, said=False) == ()
    assert (server.status, server.clients) == (Status.ACTIVE, {})
    admit(server, 2)
    assert server.context(2) is CudaError.LAUNCH_FAILED
    context(server, 3)


def test_wedge(server: Server, log: list[str]) -> None:
    """A client that wedges, killed in mid-kernel alone, leaves a server that is ACTIVE, lists it, and logs nothing."""
    context(server, 1)
    server.clients[1].wedges = True
    admit(server, 2)  # this client has no context that could consume the fault
    server.clients[1].working = True
    before = list(log)
    assert server.left(1, said=False) == ()
    assert server.wedged
    assert server.answer("get_server_status", []).printed == ["ACTIVE"]
    admit(server, 3)
    assert server.answer("get_client_list", []).printed == ["1", "2", "3"]
    server.left(3, said=False)
    assert server.answer("get_client_list", []).printed == ["1", "2"]
    assert server.terminate(1).awaits == 1  # forever
    assert server.answer("get_server_status", []).printed == ["ACTIVE"]
    assert log == before


def test_terminate_takes_as_long_as_the_work(server: Server) -> None:
    """Contexts end when their work ends: until then nothing is printed, and no other client is accepted (TS)."""
    context(server, 1)
    server.clients[1].working = True
    assert server.answer("terminate_client", ["1"]).awaits == 1
    assert server.admit(2, "", "", {}) is CudaError.MPS_SERVER_NOT_READY
    server.clients[1].working = False
    answer = server.terminate(1)
    assert (answer.printed, answer.terminated, answer.awaits) == (["0"], 1, None)
    context(server, 2)


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
