"""The compute mode is recorded before it is changed, and restored after every death, at the next opportunity."""

import json
import signal
from collections.abc import Callable
from typing import Any, Final

import pytest

from mpsd.core.compute_mode import ComputeMode
from tests.daemon.conftest import Start
from tests.fork_server import ForkServer
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, gpus, leased, outside
from tests.system.fake_nvml import FakeNvml

pytestmark = pytest.mark.thorough

LEAVE: Final = ""
WANTED: Final = '[daemon]\ncompute_mode = "exclusive-process"\n'

DEFAULT, THREAD, PROHIBITED, EXCLUSIVE = range(4)
"""nvmlComputeMode_t."""

FIRST: Final = "GPU-11111111-2222-4333-8444-555555555555"
SECOND: Final = "GPU-66666666-7777-4888-8999-aaaaaaaaaaaa"
TWO_GPUS: Final = (
    "driver 535.261.03",
    f"gpu {FIRST} 9.0 0 85520809984 640000000 0 NVIDIA H100 80GB HBM3",
    f"gpu {SECOND} 8.0 0 85520809984 640000000 0 NVIDIA A100-SXM4-80GB",
)
ONE_GPU: Final = TWO_GPUS[:2]

SET: Final = "fault nvmlDeviceSetComputeMode -1 {}"
READ: Final = "fault nvmlDeviceGetComputeMode -1 {}"
HANG: Final = -1
NO_PERMISSION: Final = 4
GPU_IS_LOST: Final = 15

SMALL: Final = {"threads": 10, "memory": "1GiB"}


@pytest.fixture
def node(make_node: Start, nvml: FakeNvml, nvml_fork_server: ForkServer) -> Node:
    nvml.show(*ONE_GPU)
    return make_node(simulate=None, config=WANTED, env=nvml.variables, fork_server=nvml_fork_server)


def written(node: Node) -> dict[str, str]:
    """Return the modes that mpsd has recorded, by UUID."""
    try:
        text = (node.root / "state" / "compute-modes.json").read_text()
    except FileNotFoundError:  # the file is removed with its last entry
        return {}
    found: dict[str, str] = json.loads(text)["found"]
    return found


def gpu(node: Node, index: int = 0) -> dict[str, Any]:
    """Return a GPU as the API has it."""
    found: dict[str, Any] = node.get("/v1/gpus").json["gpus"][index]
    return found


def look(node: Node) -> Callable[[], dict[str, Any]]:
    """Return a function that makes mpsd read its GPUs now and returns the first.

    By itself mpsd reads them every ten seconds.
    """
    node.wait_for_state("gpu1", "ready")
    lease = node.request("POST", "/v1/leases", {**SMALL, "gpu": "1"}).json["id"]

    def read() -> dict[str, Any]:
        node.get(f"/v1/leases/{lease}/verify")
        return gpu(node)

    return read


# -- the way it goes ---------------------------------------------------------------------------------------------------


@pytest.mark.real_daemon(535)
class TestWanted:
    """The settings request exclusive-process."""

    @pytest.mark.parametrize(("found", "name"), [(DEFAULT, "default"), (THREAD, "exclusive-thread")])
    def test_set_and_given_back(self, node: Node, nvml: FakeNvml, found: int, name: str) -> None:
        """The mode is set before any lease is granted, survives mpsd, and is restored when the settings drop it."""
        nvml.set_compute_mode(FIRST, found)
        node.start()
        assert (nvml.compute_mode(FIRST), written(node)) == (EXCLUSIVE, {FIRST: name})
        assert (gpu(node)["compute_mode"], gpu(node)["health"]) == ("exclusive-process", "ok")
        (was_set,) = node.events("compute_mode_set")
        assert (was_set["uuid"], was_set["found"], was_set["mode"]) == (FIRST, name, "exclusive-process")
        assert was_set["because"] == 'daemon.compute_mode = "exclusive-process"'
        assert node.get("/v1/status").json["notes"] == []

        node.end()
        assert (nvml.compute_mode(FIRST), written(node)) == (EXCLUSIVE, {FIRST: name})
        node.start()
        assert len(node.events("compute_mode_set")) == 1

        answer = node.reload(LEAVE)
        assert answer["applied"] == ["daemon.compute_mode"]
        wait_until(lambda: not written(node), what="the mode to be given back")
        assert nvml.compute_mode(FIRST) == found
        (given_back,) = node.events("compute_mode_restored")
        assert (given_back["mode"], given_back["because"]) == (name, 'daemon.compute_mode = "leave"')
        assert gpu(node)["compute_mode"] == name

    def test_driver_that_was_loaded_anew(self, node: Node, nvml: FakeNvml) -> None:
        """After a reload of the driver it is set again, and the mode that was found first is the one restored."""
        nvml.set_compute_mode(FIRST, THREAD)
        node.start()
        node.end()
        nvml.set_compute_mode(FIRST, DEFAULT)
        node.start()
        assert (nvml.compute_mode(FIRST), written(node)) == (EXCLUSIVE, {FIRST: "exclusive-thread"})

    def test_given_back_when_the_daemons_are_stopped(self, node: Node, nvml: FakeNvml) -> None:
        """An mpsd that stops its control daemons restores the mode in order: after the daemons."""
        node.config, node.arguments = WANTED, ("--stop-daemons-on-exit",)
        node.start()
        assert (nvml.compute_mode(FIRST), written(node)) == (EXCLUSIVE, {FIRST: "default"})
        assert node.end() == 0
        assert (nvml.compute_mode(FIRST), written(node)) == (DEFAULT, {})
        (given_back,) = node.events("compute_mode_restored")
        assert given_back["because"] == "an operator stopped the control daemons"
        (down,) = node.events("daemon_state", state="down", before="stopping")
        assert down["at"] < given_back["at"]

    def test_by_a_reload(self, node: Node, nvml: FakeNvml) -> None:
        """A reload sets the mode, and the next one restores it, any number of times."""
        node.config = LEAVE
        node.start()
        for _ in range(2):
            node.reload(WANTED)
            wait_until(lambda: gpu(node)["compute_mode"] == "exclusive-process", what="it to be set")
            assert gpu(node)["health"] == "ok"
            node.reload(LEAVE)
            wait_until(lambda: gpu(node)["compute_mode"] == "default", what="it to be given back")
        assert (nvml.compute_mode(FIRST), written(node)) == (DEFAULT, {})

    def test_what_is_there_already_is_not_ours(self, node: Node, nvml: FakeNvml) -> None:
        """A GPU that already was in the requested mode stays in it."""
        nvml.set_compute_mode(FIRST, EXCLUSIVE)
        node.start()
        assert written(node) == {}
        node.reload(LEAVE)
        node.end()
        node.start()
        assert (nvml.compute_mode(FIRST), written(node)) == (EXCLUSIVE, {})
        assert not node.events("compute_mode_set")
        assert not node.events("compute_mode_restored")

    def test_gpus_that_cannot_run_mps_are_left(self, node: Node, nvml: FakeNvml) -> None:
        """A GPU with MIG on has no control daemon, and keeps its mode."""
        nvml.show(*ONE_GPU, f"gpu {SECOND} 8.0 1 85520809984 640000000 0 NVIDIA A100-SXM4-80GB")
        node.start()
        assert (nvml.compute_mode(FIRST), nvml.compute_mode(SECOND)) == (EXCLUSIVE, DEFAULT)
        assert nvml.functions().count("nvmlDeviceSetComputeMode") == 1
        assert gpu(node, 1)["health"] == "unsupported"

    def test_record_of_another_boot(self, node: Node, nvml: FakeNvml) -> None:
        """A reboot resets the mode, so an older record is ignored."""
        (node.root / "state").mkdir()
        path = node.root / "state" / "compute-modes.json"
        path.write_text(json.dumps({"boot_id": "another", "found": {FIRST: "prohibited"}}))
        nvml.set_compute_mode(FIRST, EXCLUSIVE)
        node.config = LEAVE
        node.start()
        assert nvml.compute_mode(FIRST) == EXCLUSIVE
        assert not node.events("compute_mode_restored")

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"boot_id": "x", "found": {}, "more": 1}'])
    def test_record_that_is_damaged(self, node: Node, nvml: FakeNvml, text: str) -> None:
        """A damaged record is set aside for inspection and reported; mpsd does not guess the mode of a GPU."""
        (node.root / "state").mkdir()
        path = node.root / "state" / "compute-modes.json"
        path.write_text(text)
        nvml.set_compute_mode(FIRST, EXCLUSIVE)
        node.config = LEAVE
        node.start()
        assert nvml.compute_mode(FIRST) == EXCLUSIVE
        (told,) = node.events("compute_mode_not_stored")
        assert "compute-modes.damaged" in told["because"]
        assert path.with_suffix(".damaged").read_text() == text

    def test_nowhere_to_write_it_down(self, node: Node, nvml: FakeNvml) -> None:
        """A mode that cannot be recorded is not changed, and no lease is granted until the cause is removed."""
        path = node.root / "state" / "compute-modes.json"
        path.mkdir(parents=True)
        (path / "x").touch()
        node.start(ready=False)
        assert nvml.compute_mode(FIRST) == DEFAULT
        assert "cannot be recorded" in gpu(node)["because"]
        (path / "x").unlink()
        path.rmdir()
        assert node.request("POST", "/v1/daemons/gpu0/reset").status == 202
        wait_until(lambda: gpu(node)["health"] == "ok", what="it to be tried again")
        assert (nvml.compute_mode(FIRST), written(node)) == (EXCLUSIVE, {FIRST: "default"})


# -- SIGKILL -----------------------------------------------------------------------------------------------------------


def kill_at(node: Node, nvml: FakeNvml, *, after: bool) -> None:
    calls = len(nvml.functions())
    nvml.show(*ONE_GPU, SET.format(HANG))
    node.launch()
    wait_until(lambda: "nvmlDeviceSetComputeMode" in nvml.functions()[calls:], what="mpsd to set the mode")
    if after:
        before = nvml.compute_mode(FIRST)
        nvml.show(*ONE_GPU, READ.format(HANG))
        wait_until(lambda: nvml.compute_mode(FIRST) != before, what="the mode to be changed")
    assert node.end(signal.SIGKILL) == -signal.SIGKILL
    nvml.show(*ONE_GPU)


@pytest.mark.real_daemon(535)
class TestDeath:
    """SIGKILL of mpsd between the record and the change, and between the restoration and the removal of the record."""

    @pytest.mark.parametrize("after", [False, True])
    def test_while_it_is_set(self, node: Node, nvml: FakeNvml, after: bool) -> None:  # noqa: FBT001 - a parameter
        """The next mpsd restores the mode if the settings no longer request another."""
        kill_at(node, nvml, after=after)
        assert (nvml.compute_mode(FIRST), written(node)) == (EXCLUSIVE if after else DEFAULT, {FIRST: "default"})
        node.config = LEAVE
        node.start()
        assert (nvml.compute_mode(FIRST), written(node)) == (DEFAULT, {})
        assert len(node.events("compute_mode_restored" if after else "compute_mode_left")) == 1

    @pytest.mark.parametrize("after", [False, True])
    def test_while_it_is_set_and_still_wanted(self, node: Node, nvml: FakeNvml, after: bool) -> None:  # noqa: FBT001
        """The next mpsd continues, and does not take the first one's change for the original mode."""
        kill_at(node, nvml, after=after)
        node.start()
        assert (nvml.compute_mode(FIRST), written(node)) == (EXCLUSIVE, {FIRST: "default"})
        node.reload(LEAVE)
        wait_until(lambda: not written(node), what="the mode to be given back")
        assert nvml.compute_mode(FIRST) == DEFAULT

    @pytest.mark.parametrize("after", [False, True])
    def test_while_it_is_given_back(self, node: Node, nvml: FakeNvml, after: bool) -> None:  # noqa: FBT001 - a parameter
        """The next mpsd completes the restoration."""
        node.start()
        node.end()
        node.config = LEAVE
        kill_at(node, nvml, after=after)
        assert (nvml.compute_mode(FIRST), written(node)) == (DEFAULT if after else EXCLUSIVE, {FIRST: "default"})
        node.start()
        assert (nvml.compute_mode(FIRST), written(node)) == (DEFAULT, {})


# -- what others do ----------------------------------------------------------------------------------------------------


@pytest.mark.real_daemon(535)
class TestTrouble:
    """Refusals of the driver, and changes by other processes."""

    def test_without_permission(self, node: Node, nvml: FakeNvml) -> None:
        """An mpsd that is not root grants no lease, says who can change the mode and how, and undoes no change."""
        nvml.show(*TWO_GPUS, f"fault nvmlDeviceSetComputeMode 0 {NO_PERMISSION}")
        node.start(ready=False)
        node.wait_for_state("gpu0", "ready")
        wrong = gpu(node)
        assert (wrong["health"], wrong["compute_mode"], written(node)) == (
            "misconfigured",
            "default",
            {SECOND: "default"},
        )
        assert "Insufficient Permissions" in wrong["because"]
        assert "sudo nvidia-smi -i 0 -c EXCLUSIVE_PROCESS" in wrong["hint"]
        assert node.get("/readyz").status == 503
        refused = node.request("POST", "/v1/leases", {**SMALL, "gpu": "0"})
        assert (refused.status, refused.json["code"]) == (409, "daemon_not_ready")
        assert "Insufficient Permissions" in refused.json["detail"]
        assert len(node.events("compute_mode_trouble")) == 1

        read = look(node)
        assert read()["health"] == "misconfigured"
        assert nvml.functions().count("nvmlDeviceSetComputeMode") == 2
        nvml.set_compute_mode(FIRST, EXCLUSIVE)
        assert read()["health"] == "ok"
        assert node.get("/readyz").status == 200
        node.reload(LEAVE)
        wait_until(lambda: not written(node), what="the other one to be given back")
        assert (nvml.compute_mode(FIRST), nvml.compute_mode(SECOND)) == (EXCLUSIVE, DEFAULT)

    def test_somebody_changes_it(self, node: Node, nvml: FakeNvml) -> None:
        """A foreign change is reported, and not undone: no lease is granted until an operator decides."""
        nvml.show(*TWO_GPUS)
        node.start()
        read = look(node)
        nvml.set_compute_mode(FIRST, DEFAULT)
        wrong = read()
        assert (wrong["health"], wrong["compute_mode"]) == ("misconfigured", "default")
        assert "it was changed from outside" in wrong["because"]
        assert node.request("POST", "/v1/leases", {**SMALL, "gpu": "0"}).status == 409
        assert read() == wrong
        (told,) = node.events("compute_mode_trouble")
        assert (told["uuid"], told["mode"]) == (FIRST, "default")
        assert node.request("POST", "/v1/daemons/gpu0/reset").status == 202
        wait_until(lambda: gpu(node)["health"] == "ok", what="it to be set again")
        assert (nvml.compute_mode(FIRST), written(node)) == (EXCLUSIVE, {FIRST: "default", SECOND: "default"})

        nvml.set_compute_mode(FIRST, PROHIBITED)
        node.reload(LEAVE)
        wait_until(lambda: not written(node), what="mpsd to let go of both")
        assert (nvml.compute_mode(FIRST), nvml.compute_mode(SECOND)) == (PROHIBITED, DEFAULT)
        (left,) = node.events("compute_mode_left")
        assert (left["mode"], left["found"]) == ("prohibited", "default")

    def test_gpu_that_was_lost(self, node: Node, nvml: FakeNvml) -> None:
        """A GPU that is back after a reset has its mode set again, without any command."""
        nvml.show(*TWO_GPUS)
        node.start()
        read = look(node)
        nvml.show(*TWO_GPUS, f"fault nvmlDeviceGetMemoryInfo_v2 0 {GPU_IS_LOST}")
        assert read()["health"] == "unknown"
        nvml.set_compute_mode(FIRST, DEFAULT)
        nvml.show(*TWO_GPUS)
        assert read()["health"] == "ok"
        assert nvml.compute_mode(FIRST) == EXCLUSIVE
        assert not node.events("compute_mode_trouble")

    def test_gpu_that_is_gone(self, node: Node, nvml: FakeNvml) -> None:
        """The record of a missing GPU is kept until the GPU returns, and this is reported."""
        nvml.show(*TWO_GPUS)
        node.start()
        node.end()
        node.config = LEAVE
        nvml.show(*ONE_GPU)
        node.start()
        assert written(node) == {SECOND: "default"}
        assert [note for note in node.get("/v1/status").json["notes"] if SECOND in note]
        node.end()
        nvml.show(*TWO_GPUS)
        node.start()
        assert (nvml.compute_mode(SECOND), written(node)) == (DEFAULT, {})

    def test_giving_back_is_refused(self, node: Node, nvml: FakeNvml) -> None:
        """A GPU whose mode cannot be restored keeps working, says so, and is restored on an operator's command."""
        node.start()
        nvml.show(*ONE_GPU, SET.format(NO_PERMISSION))
        node.reload(LEAVE)
        left = wait_until(lambda: (found := gpu(node))["hint"] and found, what="mpsd to be refused")
        assert left["health"] == "ok"
        assert "cannot be set to default: NVML: Insufficient Permissions" in left["because"]
        assert "sudo nvidia-smi -i 0 -c DEFAULT" in left["hint"]
        assert node.get("/readyz").status == 200
        nvml.show(*ONE_GPU)
        node.request("POST", "/v1/daemons/gpu0/reset")
        wait_until(lambda: not written(node), what="the mode to be given back")
        assert (nvml.compute_mode(FIRST), gpu(node)["hint"]) == (DEFAULT, None)


# -- what it is good for, on simulated GPUs ----------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LEAVE, WANTED])
def test_prohibited(make_node: Start, config: str) -> None:
    """A GPU in prohibited mode is granted to no request, and left unchanged."""
    node = make_node(simulate=2, control=None, config=LEAVE).start()
    node.end()
    gpus(node)[0].set_compute_mode(ComputeMode.PROHIBITED)
    node.config = config
    node.start(ready=False)
    wrong = wait_until(lambda: (found := gpu(node))["health"] == "misconfigured" and found, what="it to be seen")
    assert "no process can use it" in wrong["because"]
    assert "nvidia-smi -i 0 -c DEFAULT" in wrong["hint"]
    assert node.request("POST", "/v1/leases", {**SMALL, "gpu": "0"}).status == 409
    node.wait_for_state("gpu1", "ready")
    assert node.request("POST", "/v1/leases", {**SMALL, "gpu": "1"}).status == 201
    assert gpus(node)[0].compute_mode is ComputeMode.PROHIBITED


def test_who_misses_mps_is_kept_out(make_node: Start) -> None:
    """In the default mode, MPS fails open, and the status says so; in exclusive-process a program gets an error."""
    node = make_node(simulate=1, control=None, config=LEAVE).start()
    said = node.mpsctl("status")
    first, second, *_ = said.stdout.splitlines()
    assert (said.returncode, first) == (0, "healthy, not closed: a program that misses MPS gets all of GPU 0")
    assert 'daemon.compute_mode = "exclusive-process"' in second
    (told,) = node.events("node_not_closed")
    assert told["because"] in first
    with leased(node, "--threads", "25", "--memory", "2GiB") as client, SimulatedClient(outside(node)) as stray:
        assert client.hello["mps"]
        assert stray.hello["ok"]
        assert not stray.hello["mps"]
    node.reload(WANTED)
    wait_until(lambda: gpu(node)["compute_mode"] == "exclusive-process", what="the mode to be set")
    assert node.get("/v1/status").json["headline"].startswith("healthy: ")
    with leased(node, "--threads", "25", "--memory", "2GiB") as client, SimulatedClient(outside(node)) as stray:
        assert client.hello["mps"]
        assert stray.hello["error"] == "CUDA_ERROR_DEVICE_UNAVAILABLE"
    assert gpus(node)[0].compute_mode is ComputeMode.EXCLUSIVE_PROCESS
