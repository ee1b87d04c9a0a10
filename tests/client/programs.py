"""Python programs that use mpsd, as processes, for tests."""

import os
import subprocess
import sys
from textwrap import dedent

from tests.cli.conftest import ROOT
from tests.node import Node


def started(node: Node, program: str, **variables: str) -> "subprocess.Popen[str]":
    """Start a Python program that finds the node by its environment."""
    return subprocess.Popen(
        [sys.executable, "-c", dedent(program)],
        cwd=ROOT,
        env={**os.environ, "MPSD_SOCKET": str(node.socket), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def printed(node: Node, program: str, **variables: str) -> list[str]:
    """Return the lines that a Python program prints, which must succeed."""
    with started(node, program, **variables) as process:
        output, _ = process.communicate(timeout=50)
    assert process.returncode == 0, output
    return output.splitlines()
