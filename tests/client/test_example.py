"""The example in the client's own description works as it stands."""

import os
import subprocess
import sys
from textwrap import dedent

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
