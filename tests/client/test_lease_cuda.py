"""`mpsd.lease` beside the driver's library in the same process: a libcuda.so.1 built from fake_cuda.c."""

from pathlib import Path
from textwrap import dedent
from typing import Final

import pytest

from tests.client import programs
from tests.node import Node

PREAMBLE: Final = """
import ctypes, mpsd

def loads():
    return "libcuda" in open("/proc/self/maps").read()

def cuda():
    library = ctypes.CDLL("libcuda.so.1")
    assert library.cuInit(0) == 0
"""


def printed(node: Node, cuda_library: Path, program: str, mps: str | None = None, **variables: str) -> list[str]:
    """Return the lines that a program with this library prints, which must succeed."""
    driver = {"LD_LIBRARY_PATH": f"{cuda_library}", **({} if mps is None else {"FAKE_CUDA_MPS": mps})}
    return programs.printed(node, PREAMBLE + dedent(program), **driver, **variables)


def test_initialised(node: Node, cuda_library: Path) -> None:
    """A process that has initialised CUDA gets no lease, and keeps its environment; a lease for others it may take."""
    program = """
        import os
        cuda()
        before = dict(os.environ)
        try:
            with mpsd.lease(fraction=0.25):
                print("granted")
        except mpsd.errors.CudaInitializedError as error:
            print(error, error.hint)
        print(dict(os.environ) == before, len(mpsd.Client().leases()["leases"]))
        lease = mpsd.lease(fraction=0.25, processes=2).open(sets_environment=False)
        print(lease.state)
    """
    refusal, *rest = printed(node, cuda_library, program)
    assert refusal.startswith("CUDA is initialised in this process already, which fixed its limits")
    assert "before the first use of CUDA" in refusal
    assert rest == ["True 0", "granted"]


def test_not_initialised(node: Node, cuda_library: Path) -> None:
    """A library that is loaded and not initialised is no obstacle; one that is not loaded stays so."""
    program = """
        with mpsd.lease(fraction=0.25) as lease:
            print(lease.state, lease.verify().inside, loads())
        ctypes.CDLL("libcuda.so.1")
        with mpsd.lease(fraction=0.25) as lease:
            print(lease.state, lease.verify().inside, loads())
    """
    assert printed(node, cuda_library, program) == ["granted None False", "granted None True"]


def test_initialised_while_it_waits(node: Node, cuda_library: Path) -> None:
    """Where another thread initialises CUDA while the lease is waited for, the lease is released and refused."""
    program = """
        import threading
        client = mpsd.Client()
        blocker = client.admit({"threads": 100, "memory": "1GiB", "gpu": "0"})

        def waits():
            while not client.another(deadline=10).leases()["leases"][-1]["wait"]:
                pass
            cuda()
            client.another(deadline=10).release(blocker["id"])

        thread = threading.Thread(target=waits)
        thread.start()
        try:
            mpsd.lease(fraction=0.25, gpu=0, wait="forever").open()
        except mpsd.errors.CudaInitializedError as error:
            thread.join()
            print(error.code, len(client.leases()["leases"]))
    """
    assert printed(node, cuda_library, program) == ["cuda_initialized 0"]


@pytest.mark.parametrize(
    ("mps", "inside", "said"),
    [
        pytest.param("1", "True", "the driver says that this process is under MPS, but mpsd says: ", id="inside"),
        pytest.param("0", "False", "the driver says that this process is outside MPS, where no limits apply, and mpsd"
                     " says: ", id="outside"),
        pytest.param(None, "None", "the driver does not say whether this process is under MPS, and mpsd says: ",
                     id="old driver"),
    ],
)  # fmt: skip
def test_inside(node: Node, cuda_library: Path, mps: str | None, inside: str, said: str) -> None:
    """Once CUDA is initialised, the driver is asked, and its word stands beside that of mpsd."""
    program = """
        with mpsd.lease(fraction=0.25) as lease:
            cuda()
            found = lease.verify()
            print(found.inside, found.outside["verdict"], found.is_verified)
            print(found.because)
    """
    first, sentence = printed(node, cuda_library, program, mps)
    assert first == f"{inside} nothing False"
    assert sentence.startswith(said)
