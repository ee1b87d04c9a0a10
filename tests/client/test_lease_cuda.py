"""`mpsd.lease` beside the driver's library in the same process: a libcuda.so.1 built from fake_cuda.c."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Final

import pytest

from tests.cli.conftest import ROOT
from tests.node import Node
from tests.tools import compiler

LIBRARY: Final = "libcuda.so.1"

PREAMBLE: Final = """
import ctypes, mpsd

def loads():
    return "libcuda" in open("/proc/self/maps").read()

def cuda():
    library = ctypes.CDLL("libcuda.so.1")
    assert library.cuInit(0) == 0
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the library once, and return its directory."""
    directory = tmp_path_factory.mktemp("cuda")
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}"]
    source = Path(__file__).parent / "fake_cuda.c"
    subprocess.run([compiler(), *options, "-o", directory / LIBRARY, source], check=True)
    return directory


def printed(node: Node, library: Path, program: str, mps: str | None = None) -> list[str]:
    """Return the lines that a program with this library prints, which must succeed."""
    variables = {"MPSD_SOCKET": str(node.socket), "LD_LIBRARY_PATH": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + dedent(program)],
        cwd=ROOT,
        env={**os.environ, **variables, **({} if mps is None else {"FAKE_CUDA_MPS": mps})},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_initialised(node: Node, library: Path) -> None:
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
    refusal, *rest = printed(node, library, program)
    assert refusal.startswith("CUDA is initialised in this process already, which fixed its limits")
    assert "before the first use of CUDA" in refusal
    assert rest == ["True 0", "granted"]


def test_not_initialised(node: Node, library: Path) -> None:
    """A library that is loaded and not initialised is no obstacle; one that is not loaded stays so."""
    program = """
        with mpsd.lease(fraction=0.25) as lease:
            print(lease.state, lease.verify().inside, loads())
        ctypes.CDLL("libcuda.so.1")
        with mpsd.lease(fraction=0.25) as lease:
            print(lease.state, lease.verify().inside, loads())
    """
    assert printed(node, library, program) == ["granted None False", "granted None True"]


def test_initialised_while_it_waits(node: Node, library: Path) -> None:
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
    assert printed(node, library, program) == ["cuda_initialized 0"]


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
def test_inside(node: Node, library: Path, mps: str | None, inside: str, said: str) -> None:
    """Once CUDA is initialised, the driver is asked, and its word stands beside that of mpsd."""
    program = """
        with mpsd.lease(fraction=0.25) as lease:
            cuda()
            found = lease.verify()
            print(found.inside, found.outside["verdict"], found.is_verified)
            print(found.because)
    """
    first, sentence = printed(node, library, program, mps)
    assert first == f"{inside} nothing False"
    assert sentence.startswith(said)
