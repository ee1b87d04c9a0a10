"""`mpsctl doctor` on real nodes: its findings with mpsd and without, as root and without rights, and its fixes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.cli.render import as_here
from mpsd.core.doctor.table import CHECKS
from mpsd.core.programs.frameworks import advice
from tests.control_groups import control_group, joins
from tests.daemon.conftest import Start
from tests.daemon.gpu.test_compute_mode import (
    DEFAULT,
    EXCLUSIVE,
    FIRST,
    GPU_IS_LOST,
    ONE_GPU,
    PROHIBITED,
    SET,
    WANTED,
    written,
)
from tests.daemon.helpers import stopped
from tests.fork_server import ForkServer
from tests.gate.source import ROOT
from tests.harness import look_at, wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables
from tests.system.fake_nvml import FakeNvml
from tests.system.processes.test_process_table import running

pytestmark = pytest.mark.thorough

Checks = dict[str, list[Any]]

MPSD: Final = ("mpsd", "version", "configuration", "node")
FILES: Final = ("directories", "disk", "leftovers")
GPUS: Final = ("driver", "architecture", "compute-mode", "compute-mode-left", "persistence", "ecc", "outside")
CONDITION: Final = "condition 0 1 0 0 0 0"
DRIVER, GPU = ONE_GPU

needs_root = pytest.mark.root("be another user, or mount a file system")


def doctor(node: Node, *arguments: str, before: tuple[str, ...] = ()) -> tuple[int, Checks]:
    """Run doctor on the node; return the exit status, and the findings by check.

    Other tests run their own control daemons meanwhile, so each test looks only at its own checks and subjects.
    """
    options = ["doctor", "--root", str(node.root), "-o", "json", *arguments]
    environment = {**os.environ, "PATH": f"{_bin(node)}:{os.environ['PATH']}", **node.env}
    if before or node.fork_server is None or not node.is_forked:
        command = [*before, sys.executable, "-m", "mpsd.cli.main", *options]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env=environment
        )
    else:
        done = node.fork_server.run_mpsctl(options, environment)
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["ok"] == (done.returncode == 0)
    assert answer["ok"] == all(each["verdict"] != "fail" for each in answer["checks"])
    found: Checks = {"fixed": answer["fixed"]}
    for each in answer["checks"]:
        found.setdefault(each["id"], []).append(each)
    return done.returncode, found


def _bin(node: Node) -> str:
    """Return the directory of the node's control program, which on a real node is in PATH."""
    return str(node.control.parent) if node.control is not None else "/nowhere"


def only(*checks: str) -> tuple[str, ...]:
    return tuple(word for check in checks for word in ("--only", check))


def one(found: Checks, check: str, about: str = "") -> dict[str, Any]:
    """Return the only finding of a check about a subject."""
    result: dict[str, Any]
    (result,) = [each for each in found[check] if about in each["subject"]]
    assert result["because"]
    assert result["remedy"] or result["verdict"] in {"ok", "unknown"}
    return result


@pytest.fixture
def node(make_node: Start, nvml: FakeNvml, nvml_fork_server: ForkServer) -> Node:
    """Return a node, not started yet, whose only GPU is the one of the fake NVML."""
    nvml.show(*ONE_GPU, CONDITION)
    return make_node(simulate=None, config=WANTED, env=nvml.variables, fork_server=nvml_fork_server)


@pytest.fixture
def program(node: Node) -> Node:
    """Start mpsd as a program: doctor knows an mpsd by its command line."""
    node.fork_server = None
    return node.start()


@pytest.fixture
def left(node: Node, nvml: FakeNvml) -> Node:
    """Return a node whose mpsd was killed, so that its GPU was left in exclusive-process."""
    node.start()
    node.end(signal.SIGKILL)
    assert nvml.compute_mode(FIRST) == EXCLUSIVE
    return node


@pytest.mark.real_daemon(535)
class TestWithMpsd:
    """Where mpsd answers, its answers count, and it does the repairs."""

    def test_well(self, program: Node) -> None:
        """Every check of mpsd, its files and its GPUs is ok, and the exit status is 0."""
        status, found = doctor(program, *only(*MPSD, *FILES, *GPUS))
        wrong = {name: each for name in (*MPSD, *FILES, *GPUS) for each in found[name] if each["verdict"] != "ok"}
        assert (status, wrong) == (0, {})
        text = program.mpsctl("doctor", *only("mpsd", "node"))
        assert text.stdout == "2 findings: 0 failed, 0 warnings, 0 unknown, 2 ok\n"
        assert program.mpsctl("doctor", "--all", *only("mpsd")).stdout.startswith("ok ")

    def test_everything_at_once(self, node: Node) -> None:
        """Each check has a result, and none raises an error."""
        node.start()
        _, found = doctor(node)
        assert found.keys() == {"fixed", *CHECKS}

    def test_framework_under_a_lease(self, node: Node, tmp_path: Path) -> None:
        """A framework that asks for more than each process of its lease may have is named, with what to set."""
        node.start()
        (tmp_path / "vllm").write_text("import sys; sys.stdin.read()")
        command = [sys.executable, f"{tmp_path}/vllm", "serve", "--gpu-memory-utilization", "0.4"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as program:
            lease = {"threads": 20, "memory": 8 << 30, "processes": 2, "pid": program.pid}
            granted = node.request("POST", "/v1/leases", lease)
            assert granted.status == 201, granted.body
            _, found = doctor(node, *only("framework-memory"))
            assert program.stdin is not None
            program.stdin.close()
        wrong = one(found, "framework-memory", f"pid {program.pid}")
        assert (wrong["verdict"], wrong["evidence"]["granted"]) == ("warn", 4 << 30)
        assert wrong["because"].endswith(f"a process of {granted.json['id']} may have 4GiB")
        fraction = advice("vllm", 4 << 30, wrong["evidence"]["total"]).fraction
        assert wrong["remedy"] == f"start it with --gpu-memory-utilization {fraction:g}"

    def test_not_well(self, node: Node, nvml: FakeNvml) -> None:
        """Each fault has a check that fails, with mpsd's own remedy; mpsd repairs it, and doctor does not."""
        nvml.set_compute_mode(FIRST, PROHIBITED)
        node.start(ready=False)
        node.wait_for_state("gpu0", "ready")
        status, found = doctor(node, "--fix", *only("node", "compute-mode"))
        assert (status, one(found, "compute-mode")["verdict"]) == (1, "ok")  # said once
        wrong = one(found, "node", "GPU 0")
        assert (wrong["verdict"], "nvidia-smi -i 0 -c DEFAULT" in wrong["remedy"]) == ("fail", True)
        assert nvml.compute_mode(FIRST) == PROHIBITED

    def test_mpsd_that_does_not_answer(self, program: Node, nvml: FakeNvml) -> None:
        """A hung mpsd is named, and holds its lock, so that doctor changes nothing."""
        with stopped(program.pid):
            status, found = doctor(program, "--fix", *only("mpsd", "stopped", "compute-mode-left", "leftovers"))
        assert status == 1
        assert one(found, "mpsd")["evidence"]["lock_holder"] == program.pid
        assert one(found, "stopped", f"pid {program.pid}")["remedy"] == f"kill -CONT {program.pid}"
        assert one(found, "compute-mode-left")["verdict"] == one(found, "leftovers")["verdict"] == "unknown"
        assert nvml.compute_mode(FIRST) == EXCLUSIVE

    def test_settings_that_are_not_in_force(self, program: Node) -> None:
        """Edited settings that are not in force are named; an invalid file fails before a restart would use it."""
        program.configuration.write_text('[limits]\nactive_thread_percentage = 50\n[api]\nmode = "0600"\n')
        _, found = doctor(program, *only("configuration"))
        changed = one(found, "configuration")
        assert changed["verdict"] == "warn"
        assert changed["evidence"]["reload"] == ["daemon.compute_mode", "limits.active_thread_percentage"]
        assert changed["evidence"]["restart"] == ["api.mode"]
        program.configuration.write_text("[limits\n")
        _, found = doctor(program, *only("configuration"))
        assert one(found, "configuration")["verdict"] == "fail"

    @needs_root
    def test_foreign_daemon(self, node: Node) -> None:
        """A control daemon that mpsd did not start, on its directory or on the default one, is named, with its unit."""
        node.start()
        with control_group("name=systemd", "doctor") as group:
            unit = group / "private-mps.service"
            unit.mkdir()
            try:
                with (
                    by_hand(node, node.pipe_directory("gpu9"), *joins(unit)) as first,
                    by_hand(node, Path("/run/nvidia-mps")) as second,
                ):
                    status, found = doctor(node, *only("foreign-daemon", "default-directory"))
            finally:
                wait_until(lambda: not (unit / "cgroup.procs").read_text(), what=f"all in {unit} to have ended")
                unit.rmdir()
        assert status == 1
        foreign = one(found, "foreign-daemon", "gpu9")
        assert (foreign["verdict"], foreign["evidence"]["pid"]) == ("fail", first)
        assert f"CUDA_MPS_PIPE_DIRECTORY={node.pipe_directory('gpu9')}" in foreign["remedy"]
        assert "systemctl disable --now private-mps.service; otherwise: " in foreign["remedy"]
        usual = [each["evidence"]["pid"] for each in found["default-directory"] if each["verdict"] == "fail"]
        assert second in usual

    @needs_root
    def test_other_namespaces(self, program: Node) -> None:
        """Another, too small /dev/shm is seen from inside; from another pid namespace mpsd's own state is not."""
        small = 'mount -t tmpfs -o size=1m,mode=1777 tmpfs /dev/shm && exec "$@"'
        _, found = doctor(program, *only("shm"), before=("unshare", "--mount", "sh", "-c", small, "sh"))
        (place,) = [each for each in found["shm"] if each["evidence"].get("bytes")]
        assert (place["verdict"], place["evidence"]["bytes"]) == ("warn", 1024**2)
        assert one(found, "shm", f"pid {program.pid}")["verdict"] == "warn"
        status, found = doctor(
            program, *only("foreign-daemon", "disk"), before=("unshare", "--pid", "--fork", "--mount-proc")
        )
        assert (status, {each["verdict"] for name in found if name != "fixed" for each in found[name]}) == (
            0,
            {"unknown"},
        )

    @needs_root
    def test_as_nobody(self, node: Node) -> None:
        """Without permissions, the report says what could not be read, and nothing fails for it."""
        node.start()
        node.root.chmod(0o711)
        found = as_nobody(node, "doctor", "--root", str(node.root), *only("shm", "foreign-daemon"))
        assert found.returncode == 0
        assert f"pid {node.daemons()['gpu0']['pid']}" in found.stdout
        assert "0 failed, 0 warnings" in found.stdout
        assert ", 0 ok" in found.stdout
        hide = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
        before = ("unshare", "--mount", "sh", "-c", hide, "sh")
        found = as_nobody(
            node, "doctor", "--root", str(node.root), *only("stopped", "orphans", "look-alikes"), before=before
        )
        assert "0 failed, 0 warnings, 3 unknown, 0 ok" in found.stdout
        assert "/proc hides the processes of others (hidepid)" in found.stdout
        (node.root / "run").chmod(0o700)
        found = as_nobody(node, "doctor", "--root", str(node.root), *only("mpsd"))
        assert found.returncode == 1
        assert as_here(f"uid 65534 may not traverse {node.root / 'run'}") in found.stdout


def as_nobody(node: Node, *arguments: str, before: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    command = [*before, sys.executable, "-c", _AS_NOBODY, str(ROOT), *arguments]
    environment = {**os.environ, **node.env}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@contextmanager
def by_hand(node: Node, directory: Path, *before: str) -> Iterator[int]:
    """Run NVIDIA's control daemon like a stranger, and yield its pid."""
    assert node.control is not None
    logs = node.root / f"by-hand{directory.name}"
    logs.mkdir()
    # In a private mount namespace, so that nothing of it is left on this machine.
    private = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs tmpfs /run && exec {node.control} -f"]
    command = private if directory.parent == Path("/run") else [*before, str(node.control), "-f"]
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(directory), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    null = subprocess.DEVNULL
    with subprocess.Popen(command, env={"PATH": os.environ["PATH"], **variables}, stdout=null, stderr=null) as process:
        try:
            wait_until(
                lambda: (seen := look_at(process.pid)) is not None and "nvidia-cuda-mps-control -f" in seen.command,
                what="the control daemon to run",
            )
            yield process.pid
        finally:
            process.kill()


@pytest.mark.real_daemon(535)
class TestGpus:
    """NVML's facts are checked also if no mpsd runs."""

    @pytest.mark.parametrize(
        ("lines", "wanted"),
        [
            (
                (DRIVER, GPU.replace(" 9.0 0 ", " 9.0 1 "), "condition 0 0 2 0 0 0", "process 0 Compute 1 4096"),
                {
                    "architecture": ("warn", "MIG mode is on"),
                    "persistence": ("warn", "persistence mode is off"),
                    "ecc": ("fail", "2 uncorrected ECC errors"),
                    "outside": ("warn", "pid 1 uses it outside MPS"),
                    "control-program": ("fail", "no nvidia-cuda-mps-server"),  # Debian packages it separately
                },
            ),
            (
                (DRIVER, GPU.replace(" 9.0 0 ", " 6.1 -1 "), "condition 0 1 0 1 0 0"),
                {
                    "architecture": ("fail", "older than Volta"),
                    "ecc": ("fail", "memory pages need a reset to be retired"),
                },
            ),
            ((*ONE_GPU, "condition 0 1 0 0 1 0"), {"ecc": ("warn", "memory rows need a reset to be remapped")}),
            ((*ONE_GPU, "condition 0 1 0 0 1 1"), {"ecc": ("fail", "no spare row is left")}),
            ((*ONE_GPU, f"fault nvmlDeviceGetUUID -1 {GPU_IS_LOST}"), {"driver": ("fail", "GPU is lost")}),
            ((*ONE_GPU, "fault nvmlInitWithFlags -1 18"), {"driver": ("fail", "have different versions")}),
        ],
    )
    def test_gpu(self, node: Node, nvml: FakeNvml, lines: tuple[str, ...], wanted: dict[str, tuple[str, str]]) -> None:
        """Each fault of a GPU, or of the driver, is found by NVML itself."""
        nvml.show(*lines)
        _, found = doctor(node, *only(*wanted))
        for check, (verdict, because) in wanted.items():
            assert (one(found, check)["verdict"], because in one(found, check)["because"]) == (verdict, True)

    def test_versions(self, node: Node, nvml: FakeNvml) -> None:
        """A control program that logs another CUDA version than the driver's is reported."""
        log = node.root / "log" / "gpu0" / "control.log"
        log.parent.mkdir(parents=True)
        log.write_text("[2026-11-21 10:00:00.000 Control 7] CUDA MPS Control binary version: 12020\n")
        nvml.show(*ONE_GPU, "cuda 12020")
        assert one(doctor(node, *only("versions"))[1], "versions")["verdict"] == "ok"
        nvml.show(*ONE_GPU, "cuda 13000")
        wrong = one(doctor(node, *only("versions"))[1], "versions", "gpu0")
        assert wrong["verdict"] == "fail"
        assert wrong["evidence"] == {"log": str(log), "control": 12020, "driver": 13000}


@pytest.mark.real_daemon(535)
class TestWithoutMpsd:
    """Without an mpsd, everything else is checked, and its leftovers are removed."""

    def test_nothing_was_left(self, node: Node) -> None:
        """The report names no leftover, and only mpsd is missing."""
        status, found = doctor(node, *only("mpsd", "compute-mode-left", "version", *FILES))
        assert (status, one(found, "mpsd")["verdict"], one(found, "version")["verdict"]) == (1, "fail", "unknown")
        assert {found[name][0]["verdict"] for name in ("compute-mode-left", *FILES)} == {"ok"}

    def test_left_behind(self, left: Node, nvml: FakeNvml) -> None:
        """The leftover is found without --fix, which changes nothing, and repaired with it.

        A second repair does nothing.
        """
        found = one(doctor(left, *only("compute-mode-left"))[1], "compute-mode-left", "GPU 0")
        assert (found["verdict"], found["fixable"]) == ("fail", True)
        assert (
            "an mpsd that is gone left its compute mode at exclusive-process; it was default before" in found["because"]
        )
        assert "mpsctl doctor --fix" in found["remedy"]
        assert (nvml.compute_mode(FIRST), written(left)) == (EXCLUSIVE, {FIRST: "default"})

        status, checks = doctor(left, "--fix", *only("compute-mode-left"))
        assert (status, one(checks, "compute-mode-left")["verdict"]) == (0, "ok")
        assert checks["fixed"] == ["restored the compute mode default of GPU 0, which was exclusive-process"]
        assert (nvml.compute_mode(FIRST), written(left)) == (DEFAULT, {})
        assert doctor(left, "--fix", *only("compute-mode-left"))[1]["fixed"] == []
        lines = [json.loads(line) for line in (left.root / "log" / "doctor.log").read_text().splitlines()]
        assert [(line["event"], line["check"], line["did"]) for line in lines] == [
            ("doctor_fixed", "compute-mode-left", *checks["fixed"])
        ]
        left.start()
        assert (nvml.compute_mode(FIRST), written(left)) == (EXCLUSIVE, {FIRST: "default"})

    def test_somebody_else_mended_it(self, left: Node, nvml: FakeNvml) -> None:
        """A mode that mpsd did not set is left, and nothing is left to repair."""
        nvml.set_compute_mode(FIRST, PROHIBITED)
        status, found = doctor(left, "--fix", *only("compute-mode-left"))
        assert (status, len(found["fixed"])) == (0, 1)
        assert (nvml.compute_mode(FIRST), written(left)) == (PROHIBITED, {})

    @pytest.mark.parametrize(
        ("lines", "because"),
        [
            ((*ONE_GPU, SET.format(4)), "Insufficient Permissions"),
            ((*ONE_GPU, f"fault nvmlDeviceGetMemoryInfo_v2 -1 {GPU_IS_LOST}"), "cannot be read"),
            (ONE_GPU[:1], "finds no GPU"),
            (
                (ONE_GPU[0], ONE_GPU[1].replace("GPU-1", "GPU-2")),
                "which cannot be read now; the mode was default before",
            ),
            ((*ONE_GPU, "fault nvmlInitWithFlags -1 9"), "kernel driver is not loaded"),
        ],
    )
    def test_it_cannot_be_mended(self, left: Node, nvml: FakeNvml, lines: tuple[str, ...], because: str) -> None:
        """The reason is given with a remedy; the record stays for the next opportunity."""
        nvml.show(*lines)
        status, found = doctor(left, "--fix", *only("compute-mode-left"))
        wrong = one(found, "compute-mode-left")
        assert (status, wrong["verdict"], found["fixed"]) == (1, "fail", [])
        assert because in wrong["because"]
        assert written(left) == {FIRST: "default"}
        nvml.show(*ONE_GPU)
        assert one(doctor(left, "--fix", *only("compute-mode-left"))[1], "compute-mode-left")["verdict"] == "ok"
        assert nvml.compute_mode(FIRST) == DEFAULT

    @pytest.mark.parametrize(("name", "verdict"), [("compute-modes.json", "fail"), ("compute-modes.damaged", "warn")])
    def test_record_that_is_damaged(self, left: Node, nvml: FakeNvml, name: str, verdict: str) -> None:
        """The former mode is not guessed: the report says where to look."""
        path = left.root / "state" / "compute-modes.json"
        path.unlink()
        path.with_name(name).write_text("{")
        wrong = one(doctor(left, "--fix", *only("compute-mode-left"))[1], "compute-mode-left", "record")
        assert (wrong["verdict"], wrong["remedy"].split()[-1]) == (verdict, str(path.with_name(name)))
        assert nvml.compute_mode(FIRST) == EXCLUSIVE

    @needs_root
    def test_not_as_root(self, left: Node) -> None:
        """A user that may not read mpsd's record gets the hint to run doctor as root."""
        left.root.chmod(0o711)
        done = as_nobody(left, "doctor", "--root", str(left.root), *only("compute-mode-left"))
        assert done.returncode == 0
        assert "compute-modes.json cannot be read: Permission denied" in done.stdout
        assert "remedy: run it as root" in done.stdout

    @pytest.mark.root("see the sockets of everybody's processes")
    def test_leftovers(self, left: Node) -> None:
        """Sockets without a process are removed; those of a living control daemon are not touched."""
        gone = left.pipe_directory("gpu8")
        with by_hand(left, gone):
            wait_until((gone / "control").exists, what="its socket")
            there = sorted(left.pipe_directory("gpu0").iterdir())
        _, found = doctor(left, *only("leftovers"))
        assert [each["subject"] for each in found["leftovers"]] == ["gpu8"], found["leftovers"]
        assert "control" in one(found, "leftovers", "gpu8")["evidence"]["entries"]
        _, found = doctor(left, "--fix", *only("leftovers"))
        assert f"removed {gone / 'control'}" in found["fixed"]
        assert one(found, "leftovers")["verdict"] == "ok"
        assert list(gone.iterdir()) == []
        assert sorted(left.pipe_directory("gpu0").iterdir()) == there
        assert doctor(left, "--fix", *only("leftovers"))[1]["fixed"] == []
        assert left.start().daemons()["gpu0"]["state"] == "ready"

    def test_orphans_and_stopped(self, node: Node) -> None:
        """A server whose control daemon is gone, and a stopped process of MPS, are named."""
        directory = node.pipe_directory("gpu0")
        with running("nvidia-cuda-mps-server", pipe_directory=directory) as server, stopped(server.pid):
            status, found = doctor(node, *only("orphans", "stopped"))
        assert status == 1
        assert one(found, "orphans", f"pid {server.pid}")["evidence"]["pipe_directory"] == str(directory)
        assert one(found, "stopped", f"pid {server.pid}")["verdict"] == "fail"

    def test_servers_of_another_mpsd(self, node: Node, make_node: Start) -> None:
        """The server of another mpsd's simulated control daemon has its daemon, and is no orphan."""
        other = make_node(simulate=1, control=None).start()
        with SimulatedClient({**variables(other), **other.lease(threads=10, memory="1GiB")["env"]}) as client:
            server = client.hello["server"]
            assert f"pid {server}" not in {each["subject"] for each in doctor(node, *only("orphans"))[1]["orphans"]}

    def test_caller_that_looks_elsewhere(self, node: Node) -> None:
        """The caller's own environment is checked."""
        _, found = doctor(node, *only("environment"), before=("env", "CUDA_MPS_PIPE_DIRECTORY=/x"))
        assert one(found, "environment")["evidence"] == {"CUDA_MPS_PIPE_DIRECTORY": "/x"}


def test_list(short_tmp: Path) -> None:
    """The checks are listed without running any, and an unknown one is refused."""
    node = Node(short_tmp)
    listed = json.loads(node.mpsctl("doctor", "--list", "-o", "json").stdout)
    assert [each["id"] for each in listed] == list(CHECKS)
    lines = node.mpsctl("doctor", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(CHECKS)
    assert len(lines) == 2 * len(CHECKS)
    done = node.mpsctl("doctor", "--only", "nonsense")
    assert (done.returncode, "there is no check 'nonsense'" in done.stderr) == (2, True)


_AS_NOBODY: Final = """
import asyncio, encodings.ascii, os, pynvml, sys
sys.path.insert(0, sys.argv.pop(1))
import mpsd.core.doctor.table
from mpsd.cli import doctor_run, group, main
from mpsd.cli.commands import doctor
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
main.main()
"""
