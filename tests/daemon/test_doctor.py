"""`mpsctl doctor`: what it finds on a node whose mpsd runs, and what it finds and mends where none does."""

import json
import os
import signal
import subprocess
import sys
from typing import Any, Final

import pytest

from tests.daemon.conftest import Start
from tests.daemon.scene import stopped
from tests.daemon.test_compute_mode import (
    DEFAULT,
    EXCLUSIVE,
    FIRST,
    GPU_IS_LOST,
    LEAVE,
    ONE_GPU,
    PROHIBITED,
    SET,
    WANTED,
    written,
)
from tests.gate.source import ROOT
from tests.node import Node
from tests.system.fake_nvml import FakeNvml


def doctor(node: Node, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Have the node looked at; return the exit status, and the checks by name."""
    done = node.mpsctl("doctor", "--root", str(node.root), "-o", "json", *arguments, env={**os.environ, **node.env})
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["ok"] == (done.returncode == 0)
    assert answer["ok"] == all(each["verdict"] != "fail" for each in answer["checks"])
    return done.returncode, {each["name"]: each for each in answer["checks"]}


@pytest.fixture
def node(make_node: Start, nvml: FakeNvml) -> Node:
    """Give a node, not started yet, whose one GPU is what the fake NVML shows of it."""
    nvml.show(*ONE_GPU)
    return make_node(simulate=None, config=WANTED, env=nvml.variables)


@pytest.fixture
def left(node: Node, nvml: FakeNvml) -> Node:
    """Give a node whose mpsd was killed, so that its GPU was left in exclusive-process."""
    node.start()
    node.end(signal.SIGKILL)
    assert nvml.compute_mode(FIRST) == EXCLUSIVE
    return node


@pytest.mark.real_daemon(535)
class TestWithMpsd:
    """Where mpsd answers, it is the one that knows, and that mends."""

    def test_well(self, node: Node) -> None:
        """Every check is ok, and the exit status is 0."""
        node.start()
        status, checks = doctor(node)
        assert status == 0
        assert {name: each["verdict"] for name, each in checks.items()} == dict.fromkeys(
            ["mpsd", "node", "GPU 0", "gpu0", "compute mode"], "ok"
        )
        assert node.mpsctl("doctor").stdout.splitlines()[-1] == "5 checks: 0 failed, 0 warnings"

    def test_not_well(self, node: Node, nvml: FakeNvml) -> None:
        """What is wrong has a check that fails, with mpsd's own remedy."""
        nvml.set_compute_mode(FIRST, PROHIBITED)
        node.start(ready=False)
        node.wait_for_state("gpu0", "ready")
        status, checks = doctor(node, "--fix")
        assert status == 1
        assert {name for name, each in checks.items() if each["verdict"] == "fail"} == {"node", "GPU 0"}
        assert "nvidia-smi -i 0 -c DEFAULT" in checks["GPU 0"]["remedy"]
        assert nvml.compute_mode(FIRST) == PROHIBITED

    def test_fails_open(self, node: Node) -> None:
        """That is a warning, and no failure."""
        node.config = LEAVE
        node.start()
        status, checks = doctor(node)
        assert (status, checks["compute mode"]["verdict"]) == (0, "warn")

    def test_mpsd_that_does_not_answer(self, node: Node, nvml: FakeNvml) -> None:
        """One that hangs holds its lock, so that nothing is done behind its back."""
        node.start()
        with stopped(node.pid):
            status, checks = doctor(node, "--fix")
        assert status == 1
        assert "did not answer" in checks["mpsd"]["because"]
        assert "another mpsd has" in checks["compute mode"]["because"]
        assert nvml.compute_mode(FIRST) == EXCLUSIVE


@pytest.mark.real_daemon(535)
class TestWithoutMpsd:
    """Where none runs, a GPU that was left in another mode is found, and given it back."""

    def test_nothing_was_left(self, node: Node) -> None:
        """That is said, and only mpsd is missing."""
        status, checks = doctor(node)
        assert (status, checks["mpsd"]["verdict"], checks["compute mode"]["verdict"]) == (1, "fail", "ok")

    def test_left_behind(self, left: Node, nvml: FakeNvml) -> None:
        """It is found without --fix, which changes nothing, and mended with it."""
        _, checks = doctor(left)
        found = checks["compute mode of GPU 0"]
        assert found["verdict"] == "fail"
        assert "left exclusive-process by an mpsd that found it default" in found["because"]
        assert "mpsctl doctor --fix" in found["remedy"]
        assert (nvml.compute_mode(FIRST), written(left)) == (EXCLUSIVE, {FIRST: "default"})

        _, checks = doctor(left, "--fix")
        assert checks["compute mode of GPU 0"]["verdict"] == "ok"
        assert (nvml.compute_mode(FIRST), written(left)) == (DEFAULT, {})
        _, checks = doctor(left)
        assert checks["compute mode"]["verdict"] == "ok"
        left.start()
        assert (nvml.compute_mode(FIRST), written(left)) == (EXCLUSIVE, {FIRST: "default"})

    def test_somebody_else_mended_it(self, left: Node, nvml: FakeNvml) -> None:
        """What mpsd did not set is left, and nothing is left to be mended."""
        nvml.set_compute_mode(FIRST, PROHIBITED)
        _, checks = doctor(left, "--fix")
        assert checks["compute mode of GPU 0"]["verdict"] == "ok"
        assert (nvml.compute_mode(FIRST), written(left)) == (PROHIBITED, {})

    @pytest.mark.parametrize(
        ("lines", "because"),
        [
            ((*ONE_GPU, SET.format(4)), "Insufficient Permissions"),
            ((*ONE_GPU, SET.format(GPU_IS_LOST)), "GPU is lost"),
            ((*ONE_GPU, f"fault nvmlDeviceGetMemoryInfo_v2 -1 {GPU_IS_LOST}"), "cannot be read"),
            (ONE_GPU[:1], "finds no GPU"),
            ((ONE_GPU[0], ONE_GPU[1].replace("GPU-1", "GPU-2")), "which cannot be read now; it was default"),
            ((*ONE_GPU, "fault nvmlInitWithFlags -1 9"), "kernel driver is not loaded"),
        ],
    )
    def test_it_cannot_be_mended(self, left: Node, nvml: FakeNvml, lines: tuple[str, ...], because: str) -> None:
        """Why not is said, with what to do; what was written down stays for the next chance."""
        nvml.show(*lines)
        status, checks = doctor(left, "--fix")
        wrong = next(each for name, each in checks.items() if name.startswith("compute mode"))
        assert (status, wrong["verdict"]) == (1, "fail")
        assert because in wrong["because"]
        assert wrong["remedy"]
        assert written(left) == {FIRST: "default"}
        nvml.show(*ONE_GPU)
        assert doctor(left, "--fix")[1]["compute mode of GPU 0"]["verdict"] == "ok"
        assert nvml.compute_mode(FIRST) == DEFAULT

    @pytest.mark.parametrize(("name", "verdict"), [("compute-modes.json", "fail"), ("compute-modes.damaged", "warn")])
    def test_record_that_is_damaged(self, left: Node, nvml: FakeNvml, name: str, verdict: str) -> None:
        """Nobody guesses what a mode was: a person is told where to look."""
        path = left.root / "state" / "compute-modes.json"
        path.unlink()
        path.with_name(name).write_text("{")
        _, checks = doctor(left, "--fix")
        wrong = checks["compute mode record"]
        assert (wrong["verdict"], wrong["remedy"].split()[-1]) == (verdict, str(path.with_name(name)))
        assert nvml.compute_mode(FIRST) == EXCLUSIVE

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_not_as_root(self, left: Node) -> None:
        """Who may not read what mpsd wrote down is told to look as root."""
        left.root.chmod(0o711)
        command = [sys.executable, "-c", _AS_NOBODY, str(ROOT), "doctor", "--root", str(left.root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert "compute-modes.json cannot be read" in done.stdout
        assert "remedy: look as root" in done.stdout


_AS_NOBODY: Final = """
import asyncio, os, sys
sys.path.insert(0, sys.argv.pop(1))
from mpsd.cli import doctor, group, left_behind, main
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
main.main()
"""
