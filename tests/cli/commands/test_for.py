"""`mpsctl run --for FRAMEWORK`: variables are set, options are told, and arguments stay as they are."""

import os
import subprocess
from typing import Any

import pytest

from mpsd.core.programs.frameworks import advice
from tests.cli.conftest import run_mpsctl
from tests.node import Node

SHOW = ("--", "sh", "-c", 'echo "$XLA_CLIENT_MEM_FRACTION|$TF_FORCE_GPU_ALLOW_GROWTH|$*"', "sh")


def run(node: Node, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return run_mpsctl(node.socket, "run", "--gpu", "0", *arguments, env={**os.environ, **variables})


def total(node: Node) -> int:
    found: dict[str, Any] = node.get("/v1/gpus").json["gpus"][0]
    return int(found["memory_total"])


def test_variable(node: Node) -> None:
    """It is set for the part of one process, and said; the user's own stays."""
    asked = ("--threads", "10", "--memory", "8GiB", "--processes", "2", "--for", "JAX", *SHOW)
    fraction = f"{advice('jax', 4 << 30, total(node)).fraction:g}"
    done = run(node, *asked)
    assert (done.returncode, done.stdout) == (0, f"{fraction}||\n"), done.stderr
    assert done.stderr.startswith(f"mpsctl: XLA_CLIENT_MEM_FRACTION={fraction} is set (JAX ")
    done = run(node, *asked, XLA_CLIENT_MEM_FRACTION=".01")
    assert (done.returncode, done.stdout, done.stderr) == (0, ".01||\n", "")


def test_option(node: Node) -> None:
    """It is told once, before the program starts, and not added; a value that is too large is told too."""
    fraction = f"{advice('vllm', 8 << 30, total(node)).fraction:g}"
    asked = ("--threads", "10", "--memory", "8GiB", "--for", "vllm", *SHOW)
    done = run(node, *asked, "serve", "m")
    assert (done.returncode, done.stdout) == (0, "||serve m\n"), done.stderr
    assert done.stderr.startswith(f"mpsctl: add --gpu-memory-utilization {fraction} to the command: it does not start")
    assert len(done.stderr.splitlines()) == 1
    done = run(node, *asked, "--gpu-memory-utilization", "0.9")
    assert (done.returncode, done.stdout) == (0, "||--gpu-memory-utilization 0.9\n"), done.stderr
    assert done.stderr.startswith("mpsctl: --gpu-memory-utilization takes ")
    assert f"of the 8GiB that each process has: use --gpu-memory-utilization {fraction} (" in done.stderr
    done = run(node, *asked, "--gpu-memory-utilization", fraction)
    assert (done.returncode, done.stderr) == (0, "")


def test_any_number_of_processes(node: Node) -> None:
    """Each may use all of the lease."""
    fraction = f"{advice('jax', 8 << 30, total(node)).fraction:g}"
    done = run(node, "--threads", "10", "--memory", "8GiB", "--processes", "any", "--for", "jax", *SHOW)
    assert (done.returncode, done.stdout) == (0, f"{fraction}||\n"), done.stderr


@pytest.mark.parametrize(("name", "near"), [("vlm", "did you mean vllm?"), ("auto", "vllm, sglang, triton")])
def test_unknown_name(node: Node, name: str, near: str) -> None:
    """It is refused before a lease is taken."""
    done = run(node, "--fraction", "0.1", "--wait", "forever", "--for", name, *SHOW)
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no advice for" in done.stderr
    assert near in " ".join(done.stderr.split())
    assert node.leases() == []
