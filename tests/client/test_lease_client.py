"""`mpsd.lease` in programs that use CUDA themselves, on a simulated GPU: what is verified, gates, and advice."""

from pathlib import Path
from textwrap import dedent
from typing import Any, Final

import pytest

import mpsd
from mpsd.client import Client
from mpsd.simulator.devices import VARIABLE
from tests.client import programs
from tests.daemon.conftest import Start
from tests.node import Node

PREAMBLE: Final = """
import ctypes, os, sys, mpsd
from mpsd.simulator.cuda_process import CudaProcess, described

process = CudaProcess()

def cuda():
    return described(process.context())
"""


@pytest.fixture
def simulated(make_node: Start) -> Node:
    return make_node(simulate=1, control=None).start()


def gpus(node: Node) -> dict[str, str]:
    """Return the variable by which a program finds the simulated GPUs of a node."""
    return {VARIABLE: str(node.root / "run" / "simulated")}


def printed(node: Node, program: str, **variables: str) -> list[str]:
    return programs.printed(node, PREAMBLE + dedent(program), **gpus(node), **variables)


def test_a_client_of_its_own(simulated: Node) -> None:
    """A program that takes a lease and then uses CUDA has the limits of its lease, verified, and a gate to itself."""
    program = """
        with mpsd.lease(fraction="1/4") as lease:
            limits = cuda()
            print(limits["active_thread_percentage"], limits["pinned_device_mem_limit"] == lease.memory)
            found = lease.verify()
            print(found.is_verified, found.because)
            print(lease.gate(1, within="30s") == [lease.holder])
            print(lease.advice("vllm").fraction)
    """
    limits, verified, gate, advice = printed(simulated, program)
    assert limits == "25.0 True"
    assert verified.startswith("True CUDA is not initialised in this process, and mpsd says: 1 of 1 processes attached")
    assert gate == "True"
    assert 0 < float(advice) <= 0.25


@pytest.mark.parametrize(("mps", "verified"), [("1", "True"), ("0", "False")])
def test_what_mpsd_cannot_see(simulated: Node, cuda_library: Path, mps: str, verified: str) -> None:
    """Beside a larger lease mpsd does not know what a program set itself; the program and its driver do."""
    program = """
        with mpsd.lease(fraction=0.25) as lease:
            cuda()
            ctypes.CDLL("libcuda.so.1").cuInit(0)
            found = lease.verify()
            print(found.inside, found.outside["verdict"], found.is_verified)
            print(found.because)
    """
    simulated.lease(threads=50)
    first, said = printed(simulated, program, LD_LIBRARY_PATH=str(cuda_library), FAKE_CUDA_MPS=mps)
    assert first == f"{mps == '1'} unknown {verified}"
    assert "was not started in the environment of lease" in said
    assert ("its environment was set before it initialised CUDA" in said) == (mps == "1")


def test_the_gate_of_several(simulated: Node) -> None:
    """Processes of one lease begin together, or learn together why not, each by its own current lease."""
    program = """
        cuda()
        try:
            print(os.getpid() in mpsd.current().gate(2, within=float(sys.stdin.readline())))
        except mpsd.errors.GateFailedError as error:
            print(error.detail)
    """

    def outputs(environment: dict[str, str], count: int, within: str) -> list[str]:
        text = PREAMBLE + dedent(program)
        running: list[Any] = [programs.started(simulated, text, **gpus(simulated), **environment) for _ in range(count)]
        for each in running:
            each.stdin.write(f"{within}\n")
            each.stdin.flush()
        return [each.communicate(timeout=50)[0].strip() for each in running]

    with Client(str(simulated.socket)) as api:
        lease = mpsd.lease(fraction=0.5, processes=2, client=api).open(sets_environment=False)
        assert outputs(lease.environment, 2, "50") == ["True", "True"]
        (alone,) = outputs(lease.environment, 1, "0.5")
        assert alone.startswith(f"1 of 2 processes came to the gate of lease {lease.id} within 0.5 s")
        lease.close()
