"""`mpsd.lease`: the environment of this process, its end, forks, and machines without mpsd, against a running mpsd."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import mpsd
from mpsd.client import Client
from mpsd.core.errors import InvalidRequestError, NeverFitsError, NotFoundError, UnreachableError
from mpsd.core.mps_facts import CLIENT_PRIORITY
from mpsd.simulator.devices import VARIABLE
from tests.client.programs import printed, started
from tests.daemon.conftest import Start
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    with Client(str(node.socket)) as api:
        yield api


def found(node: Node, name: str) -> Any:
    """Return a lease as mpsd shows it, also when it has ended."""
    return node.get(f"/v1/leases/{name}").json


def test_environment(client: Client, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block has the lease's variables and none of another job; then everything is as before, and the lease over."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv(CLIENT_PRIORITY, "1")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    before = dict(os.environ)
    with mpsd.lease(fraction="1/4", client=client) as lease:
        there = found(node, lease.id)
        own = {**there["env"], "MPSD_SOCKET": str(node.socket)}
        kept = {name: value for name, value in before.items() if name != CLIENT_PRIORITY}
        assert dict(os.environ) == {**kept, **own}
        assert lease.environment == own
        assert (lease.state, lease.uuids, lease.uuid) == ("granted", tuple(there["gpus"]), own["CUDA_VISIBLE_DEVICES"])
        assert (lease.threads, lease.memory) == (25.0, there["pinned_device_mem_limit"])
        assert (lease.holder, lease.is_held_here, there["owner"]["pid"]) == (os.getpid(), True, os.getpid())
        assert mpsd.current() is lease
    assert dict(os.environ) == before
    assert (lease.state, lease.is_held_here, f"{lease}") == ("ended", False, f"<mpsd.Lease {lease.id}: ended>")
    assert found(node, lease.id)["because"].endswith("released it")


def test_exceptions(client: Client, node: Node) -> None:
    """An exception leaves the block as it is; the environment is restored and the lease released all the same."""
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError), mpsd.lease(fraction=0.25, client=client):
        raise ZeroDivisionError(len(node.leases()))
    assert (dict(os.environ), node.leases()) == (before, [])


def test_refusals(client: Client, node: Node) -> None:
    """A refusal of mpsd is its error, and leaves the environment; no other argument turns it into the whole GPU.

    Its traceback ends close to the program, without the way of the request to mpsd.
    """
    before = dict(os.environ)
    lease = mpsd.lease(threads=10, memory="900TiB", client=client, otherwise="whole-gpu")
    with pytest.raises(NeverFitsError) as error, lease:
        pytest.fail("it was granted")
    shown = [Path(f"{each.path}").name for each in error.traceback]
    assert shown == ["test_lease.py", "lease.py", "lease.py", "lease.py"]
    assert (dict(os.environ), node.leases()) == (before, [])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"fraction": "a quarter"}, "'a quarter' is not a fraction", id="fraction"),
        pytest.param({"threads": "x%"}, "'x%' is not a percentage", id="threads"),
        pytest.param({"wait": "soon"}, "'soon' is not a duration", id="wait"),
        pytest.param({"wait": -1}, "-1 is not a duration", id="negative"),
        pytest.param({"ttl": "12000d"}, "longer than", id="ttl"),
        pytest.param({"otherwise": "cpu"}, "otherwise is 'cpu'", id="otherwise"),
        pytest.param({"wait": timedelta(minutes=10)}, "is not a duration", id="timedelta"),
        pytest.param({"wait": ["10m"]}, r"\['10m'\] is not a duration", id="list"),
        pytest.param({"fraction": float("nan")}, "fraction is nan, which is no amount", id="nan"),
    ],
)
def test_invalid_values(options: dict[str, Any], said: str) -> None:
    """A value in no valid notation is refused where the Lease is made, with the valid ones."""
    with pytest.raises(InvalidRequestError, match=said) as error:
        mpsd.lease(**options)
    assert error.value.hint


def test_unknown_arguments() -> None:
    """An argument that is misspelled is an error of Python, with the one that was meant."""
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'fractoin'\. Did you mean 'fraction'\?"):
        mpsd.lease(fractoin=0.25)  # type: ignore[call-arg]


@pytest.mark.parametrize("options", [{"client": "/run/s"}, {"client": mpsd.AsyncClient()}, {"on_ending": "print"}])
def test_arguments_that_are_no_values(options: dict[str, Any]) -> None:
    """What is no client, or no function, is an error of Python that names the argument, before a lease is taken."""
    with pytest.raises(TypeError, match=rf"{next(iter(options))} is an? .*, not "):
        mpsd.lease(fraction=0.25, **options)


def test_a_number_of_bytes(client: Client) -> None:
    """Memory may be a Python number such as 4e9."""
    with mpsd.lease(threads=10, memory=4e9, client=client) as lease:
        assert lease.memory == 4_000_317_440  # whole MiB


def test_several_gpus(client: Client) -> None:
    """A lease on several GPUs has an environment for each, and the first is set."""
    with mpsd.lease(fraction=0.25, gpus=2, client=client) as lease:
        devices = [each["CUDA_VISIBLE_DEVICES"] for each in lease.environments]
        assert sorted(devices) == sorted(lease.uuids)
        assert len(set(devices)) == 2
        assert os.environ["CUDA_VISIBLE_DEVICES"] == devices[0] == lease.uuid


def test_one_inside_another(client: Client) -> None:
    """The inner lease is in force; whichever is closed first, the environment at the end is that before both."""
    before = dict(os.environ)
    with mpsd.lease(fraction=0.25, gpu=0, client=client) as outer:
        with mpsd.lease(fraction=0.25, gpu=1, client=client) as inner:
            assert os.environ["MPSD_LEASE"] == inner.id
        assert os.environ["MPSD_LEASE"] == outer.id
    assert dict(os.environ) == before
    first, second = (mpsd.lease(fraction=0.25, gpu=gpu, client=client).open() for gpu in (0, 1))
    first.close()
    assert os.environ["MPSD_LEASE"] == second.id
    second.close()
    second.close()
    assert dict(os.environ) == before


def test_two_on_one_gpu(client: Client, node: Node) -> None:
    """A process that holds a lease gets no second one for itself on the same GPU: mpsd could not tell its clients."""
    before = dict(os.environ)
    with mpsd.lease(fraction=0.25, gpu=0, client=client) as first:
        with pytest.raises(InvalidRequestError, match=f"this process holds {first.id} on the same GPU"):
            mpsd.lease(fraction=0.25, gpu=0, client=client).open()
        assert [each["id"] for each in node.leases()] == [first.id]
        assert os.environ["MPSD_LEASE"] == first.id
        mpsd.lease(fraction=0.25, gpu=0, client=client).open(sets_environment=False).close()
    assert dict(os.environ) == before


def test_under_mpsctl_run(node: Node) -> None:
    """Likewise for a program that mpsctl run started: it uses that lease; a child of its own may take another."""
    program = """
        import os, mpsd
        own = mpsd.current()
        print(own.holder == os.getpid(), own.is_held_here)
        try:
            mpsd.lease(fraction=0.25, gpu=own.uuid).open()
        except mpsd.errors.InvalidRequestError as error:
            print(error.detail == f"this process holds {own.id} on the same GPU, and mpsd would take it for a client"
                  " of that one", "mpsd.current()" in error.hint, flush=True)
        if os.fork() == 0:
            with mpsd.lease(fraction=0.25, gpu=own.uuid) as lease:
                print(lease.is_held_here, flush=True)
            os._exit(0)
        os.wait()
        print(len(mpsd.Client().leases()["leases"]))
    """
    done = node.mpsctl("run", "--fraction", "0.25", "--", sys.executable, "-c", dedent(program))
    assert done.stdout.splitlines() == ["True True", "True True", "True", "1"], done.stderr


def test_only_for_others(client: Client) -> None:
    """A process may hold a lease for those that it starts, and leave its own environment alone."""
    before = dict(os.environ)
    lease = mpsd.lease(fraction=0.25, processes=2, client=client).open(sets_environment=False)
    assert (dict(os.environ), lease.is_held_here) == (before, True)
    with pytest.raises(RuntimeError, match="cannot be opened again"):
        lease.open()
    lease.close()
    assert lease.state == "ended"


def test_for_another_process(node: Node, client: Client) -> None:
    """A lease that another process holds is no lease of this one, and ends with that process at the latest."""
    with started(node, "input()") as other:
        with pytest.raises(InvalidRequestError, match=f"pid {other.pid} is to hold the lease"):
            mpsd.lease(fraction=0.25, client=client, pid=other.pid).open()
        lease = mpsd.lease(fraction=0.25, client=client, pid=other.pid).open(sets_environment=False)
        assert (lease.holder, lease.is_held_here) == (other.pid, False)
        assert [each["owner"]["pid"] for each in node.leases()] == [other.pid]
        other.kill()
    wait_until(lambda: not node.leases(), what="the lease to end with its holder")
    lease.close()


def test_verify(make_node: Start) -> None:
    """What mpsd says is told apart from the driver, which says nothing where CUDA is not initialised."""
    simulated = make_node(simulate=1, control=None).start()
    with Client(str(simulated.socket)) as api, mpsd.lease(fraction=0.25, client=api) as lease:
        nothing = lease.verify()
        assert (nothing.inside, nothing.is_verified) == (None, False)
        assert nothing.because.startswith("CUDA is not initialised in this process, and mpsd says: no process of lease")
        environment = {**lease.environment, VARIABLE: str(simulated.root / "run" / "simulated")}
        with SimulatedClient(environment) as program:
            assert program.hello["mps"]
            assert lease.verify().is_verified
            assert lease.refresh()["clients"] == [program.pid]
            assert lease.state == "active"


# -- machines without mpsd ---------------------------------------------------------------------------------------------


def test_without_mpsd(short_tmp: Path) -> None:
    """Without mpsd a lease fails, and the hint names the option with which the program goes on, aloud."""
    client, before = Client(f"{short_tmp}/s"), dict(os.environ)
    with pytest.raises(UnreachableError, match="there is no socket") as error, mpsd.lease(fraction=0.5, client=client):
        pytest.fail("it was granted")
    assert 'otherwise="whole-gpu"' in error.value.hint
    with pytest.warns(mpsd.WholeGpuWarning, match="continues with the whole GPU, without limits") as warned:
        opened = mpsd.lease(fraction=0.5, client=client, otherwise="whole-gpu").open()
    assert [each.filename for each in warned] == [__file__]
    with contextlib.closing(opened) as lease:
        assert dict(os.environ) == before
        assert (lease.is_whole_gpu, lease.state, lease.memory, lease.is_held_here) == (True, "whole-gpu", None, False)
        verification = lease.verify()
        assert (verification.is_verified, verification.outside) == (False, None)
        assert "there is no lease" in verification.because
        with pytest.raises(UnreachableError):
            lease.refresh()


@pytest.mark.thorough
def test_an_mpsd_that_died(make_node: Start) -> None:
    """Where mpsd dies while the lease is waited for, and does not come back, that is no machine without mpsd."""
    node = make_node(simulate=1).start()
    node.lease(threads=100)
    program = """
        import mpsd
        try:
            mpsd.lease(fraction=0.25, wait=1, otherwise="whole-gpu").open()
        except mpsd.errors.UnreachableError as error:
            print(error.socket == mpsd.Client().path)
    """
    with started(node, program) as process:
        wait_until(lambda: len(node.leases()) == 2, what="the program to wait")
        node.end(signal.SIGKILL)
        assert process.communicate(timeout=50)[0] == "True\n"


# -- other processes ---------------------------------------------------------------------------------------------------


def test_a_forked_child(node: Node) -> None:
    """A child does not hold the lease, says who does, and neither leaving the block nor close() there releases it."""
    program = """
        import os, mpsd
        with mpsd.lease(fraction=0.25) as lease:
            child = os.fork()
            if child == 0:
                print(lease.is_held_here, lease.holder == os.getppid(), flush=True)
                print(repr(lease), mpsd.current() is lease, flush=True)
                with mpsd.lease(fraction=0.25) as own:
                    print(own.is_held_here, own.id != lease.id, os.environ["MPSD_LEASE"] == own.id, flush=True)
                print(os.environ["MPSD_LEASE"] == lease.id, flush=True)
                lease.close()
            else:
                os.waitpid(child, 0)
                print(lease.is_held_here, lease.refresh()["state"], len(mpsd.Client().leases()["leases"]))
        if child == 0:
            print("MPSD_LEASE" in os.environ, flush=True)
            os._exit(0)
        print(lease.state, len(mpsd.Client().leases()["leases"]))
    """
    first, second, *rest = printed(node, program)
    assert first == "False True"
    assert second.endswith("the process that forked this one> True")
    assert rest == ["True True True", "True", "False", "True granted 1", "ended 0"]


def test_current(node: Node, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is started under a lease finds it, does not hold it, and does not end it."""
    program = """
        import os, mpsd
        lease = mpsd.current()
        print(lease.id, lease.holder, lease.is_held_here, lease.environment["CUDA_VISIBLE_DEVICES"])
        lease.close()
    """
    with mpsd.lease(fraction=0.25, gpus=2, client=client) as lease:
        (line,) = printed(node, program, **lease.environments[1])
        assert line == f"{lease.id} {os.getpid()} False {lease.uuids[1]}"
        assert found(node, lease.id)["state"] == "granted"
    assert mpsd.current() is None
    monkeypatch.setenv("MPSD_LEASE", "lease-0")
    monkeypatch.setenv("MPSD_SOCKET", str(node.socket))
    with pytest.raises(NotFoundError):
        mpsd.current()


@pytest.mark.parametrize("function", ["Lease._take", "Lease._accept", "put", "_replace", "take_back", "Lease._release"])
def test_interrupted(node: Node, function: str) -> None:
    """Ctrl-C while it is opened or closed leaves neither a lease nor a variable in a program that goes on."""
    program = """
        import os, sys, mpsd, mpsd.client.watcher
        before, seen = dict(os.environ), 0

        def trace(frame, event, _):
            global seen
            if frame.f_code.co_qualname == sys.argv[1] and "/mpsd/client/" in frame.f_code.co_filename and not seen:
                return last
            return None

        def last(frame, event, _):
            global seen
            if event == "return" and not seen:
                seen += 1
                raise KeyboardInterrupt
            return last

        sys.settrace(trace)
        try:
            with mpsd.lease(fraction=0.25):
                pass
        except KeyboardInterrupt:
            sys.settrace(None)
            print(dict(os.environ) == before, flush=True)
            input()
    """.replace("sys.argv[1]", repr(function))
    with started(node, program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        wait_until(lambda: not node.leases(), what="the lease to be released")
        assert node.events("lease_granted")
        process.kill()


@pytest.mark.parametrize("wait", ["granted", "waiting"])
def test_killed(node: Node, wait: str) -> None:
    """A program that is killed, with its lease or while it waits for it, leaves nothing."""
    program = """
        import sys, mpsd
        with mpsd.lease(fraction=0.25, wait="forever"):
            print("granted", flush=True)
            sys.stdin.read()
    """
    blocker = node.lease(threads=100, gpus=2) if wait == "waiting" else None
    with started(node, program) as process:
        there = wait_until(
            lambda: [each for each in node.leases() if each["owner"]["pid"] == process.pid and each["state"] == wait],
            what="the lease",
        )
        process.send_signal(signal.SIGKILL)
    if blocker is not None:
        node.request("DELETE", f"/v1/leases/{blocker['id']}")
    wait_until(lambda: not node.leases(), what="the lease of the dead program to end")
    assert len(there) == 1
