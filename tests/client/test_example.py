"""The examples in the client's own descriptions work as they stand."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import mpsd.client
import mpsd.client.lease
from tests.cli.conftest import ROOT
from tests.client.programs import printed
from tests.node import Node


def example(documented: str | None) -> str:
    """Return the program in a description."""
    assert documented is not None
    return dedent("\n".join(line for line in documented.splitlines() if line.startswith("    ") or not line))


def test_example(node: Node) -> None:
    """It takes out a lease, gives the process its environment, and releases it; MPSD_SOCKET names the mpsd."""
    program = example(mpsd.client.__doc__) + "\nprint(lease['id'], os.environ['CUDA_VISIBLE_DEVICES'])"
    (line,) = printed(node, program)
    lease, gpu = line.split()
    (found,) = (each for each in node.get("/v1/leases?ended=true").json["leases"] if each["id"] == lease)
    assert (found["state"], found["gpus"]) == ("ended", [gpu])
    assert found["because"].endswith("released it")


def test_lease(node: Node) -> None:
    """The other one takes a lease for a block."""
    first, verified, last = printed(node, example(mpsd.client.lease.__doc__))
    uuid, memory = first.split()
    (ended,) = node.events("lease_ended", lease=verified.split("lease ")[1].split()[0])
    (granted,) = node.events("lease_granted", lease=ended["lease"])
    assert (granted["gpus"], granted["pinned_device_mem_limit"]) == ([uuid], int(memory))
    assert last == "ended"
    assert ended["because"].endswith("released it")


@pytest.mark.parametrize(
    ("name", "end"),
    [("spawn", " 3"), ("Pool", f"{sum(number**2 for number in range(100))}"), ("process", f"{20352 << 20}")],
)
def test_examples_of_processes(node: Node, short_tmp: Path, name: str, end: str) -> None:
    """Each is a program of its own, beside a `train.py` that exits with 3; afterwards there is no lease."""
    lines = getattr(mpsd, name).__doc__.splitlines()
    program = dedent("\n".join(line for line in lines if line.startswith("        ") or not line))
    (short_tmp / "train.py").write_text("import os, sys; sys.exit(3 if 'MPSD_LEASE' in os.environ else 1)")
    (short_tmp / "example.py").write_text(f"import mpsd\n{program}")
    done = subprocess.run(
        [sys.executable, "example.py"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}", "MPSD_SOCKET": f"{node.socket}"},
        capture_output=True, text=True, check=False, cwd=short_tmp,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{end}\n")
    assert not node.leases()
