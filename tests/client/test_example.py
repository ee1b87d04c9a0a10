"""The examples in the descriptions of the client, and of what starts processes, work as they stand."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import mpsd.client
from tests.cli.conftest import ROOT
from tests.node import Node


def test_example(node: Node) -> None:
    """It takes out a lease, gives the process its environment, and releases it; MPSD_SOCKET names the mpsd."""
    assert mpsd.client.__doc__ is not None
    example = "\n".join(line for line in mpsd.client.__doc__.splitlines() if line.startswith("    "))
    environment = {**os.environ, "MPSD_SOCKET": str(node.socket)}
    program = dedent(example) + "\nprint(lease['id'], os.environ['CUDA_VISIBLE_DEVICES'])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    lease, gpu = done.stdout.split()
    (found,) = (each for each in node.get("/v1/leases?ended=true").json["leases"] if each["id"] == lease)
    assert (found["state"], found["gpus"]) == ("ended", [gpu])
    assert found["because"].endswith("released it")


@pytest.mark.parametrize(
    ("name", "end"),
    [("spawn", " 3"), ("Pool", f"{sum(number**2 for number in range(100))}"), ("process", f"{20352 << 20}")],
)
def test_examples_of_processes(node: Node, short_tmp: Path, name: str, end: str) -> None:
    """Each is a program of its own, beside a `train.py` that exits with 3; afterwards there is no lease."""
    text = getattr(mpsd, name).__doc__
    example = "\n".join(line for line in text.splitlines() if line.startswith("        ") or not line)
    (short_tmp / "train.py").write_text("import os, sys; sys.exit(3 if 'MPSD_LEASE' in os.environ else 1)")
    (short_tmp / "example.py").write_text(f"import mpsd\n{dedent(example)}")
    done = subprocess.run(
        [sys.executable, "example.py"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}", "MPSD_SOCKET": f"{node.socket}"},
        capture_output=True, text=True, check=False, cwd=short_tmp,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{end}\n")
    assert not node.leases()
