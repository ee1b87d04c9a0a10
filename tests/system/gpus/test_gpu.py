"""Reading through NVML: with the real pynvml, in a separate process, and a driver that is a text file."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.errors import ComputeModeError, ExhaustedError, GpuUnknownError, NoDriverError
from mpsd.core.model import Activity, Gpu, GpuFault, GpuProcess, GpuUsage, Hardware, Inventory, Known, Unknown
from mpsd.system.gpus import nvml_readings
from tests.harness import wait_until
from tests.system.fake_nvml import LIBRARY, Child, FakeNvml, child

pytestmark = pytest.mark.thorough

_TOTAL: Final = 85_520_809_984
_RESERVED: Final = 640_000_000
_USED: Final = 3_000_000_000

_FIRST_UUID: Final = "GPU-11111111-2222-4333-8444-555555555555"
_SECOND_UUID: Final = "GPU-66666666-7777-4888-8999-aaaaaaaaaaaa"
_DRIVER: Final = "driver 535.261.03"
_FIRST: Final = f"gpu {_FIRST_UUID} 9.0 0 {_TOTAL} {_RESERVED} {_USED} NVIDIA H100 80GB HBM3"
_SECOND: Final = f"gpu {_SECOND_UUID} 8.0 1 {_TOTAL} {_RESERVED} 0 NVIDIA A100-SXM4-80GB"
_NODE: Final = (_DRIVER, _FIRST, _SECOND)

_FIRST_GPU: Final = Gpu(
    index=0,
    uuid=_FIRST_UUID,
    name="NVIDIA H100 80GB HBM3",
    memory_total=_TOTAL,
    compute_capability=(9, 0),
    mig=False,
    driver_version="535.261.03",
    memory_reserved=_RESERVED,
)
_SECOND_GPU: Final = replace(
    _FIRST_GPU, index=1, uuid=_SECOND_UUID, name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0), mig=True
)

_BY_INDEX: Final = "nvmlDeviceGetHandleByIndex_v2"
_BY_UUID: Final = "nvmlDeviceGetHandleByUUID"
_GPU_IS_LOST: Final = 15
_FUNCTION_NOT_FOUND: Final = 13
_INVALID_ARGUMENT: Final = 2
_NOT_SUPPORTED: Final = 3
_NO_PERMISSION: Final = 4
_HANG: Final = -1
_HOUR: Final = 3600.0


def _fault(function: str, result: int, gpu: int = -1) -> str:
    return f"fault {function} {gpu} {result}"


# -- what NVML says ----------------------------------------------------------------------------------------------------


def test_inventory_is_what_nvml_says(nvml: FakeNvml, gpus: Child) -> None:
    """Each GPU has its own figures; the MIG mode is the current one (the fake's pending one is always on)."""
    nvml.show(*_NODE)
    assert gpus.inventory() == Inventory((_FIRST_GPU, _SECOND_GPU))


def test_what_a_gpu_is(nvml: FakeNvml, gpus: Child) -> None:
    """Brand, architecture and bus are in the words of NVIDIA's driver for Kubernetes; a newer number is no word."""
    hardware = "hardware 0 14 9 00000000:FF:1F.7", "hardware 1 99 99 00010000:04:00.0"
    nvml.show(*_NODE, *hardware, "cuda 12050")
    found = Hardware("Nvidia", "Hopper", "12.5", "0000:ff:1f.7")
    assert gpus.inventory() == Inventory(
        (replace(_FIRST_GPU, hardware=found), replace(_SECOND_GPU, hardware=Hardware(cuda_version="12.5")))
    )


def test_root_complex(tmp_path: Path) -> None:
    """It is the first part of the path to which the kernel links the device's address."""
    devices = tmp_path / "bus/pci/devices"
    devices.mkdir(parents=True)
    (devices / "0000:0f:00.0").symlink_to("../../../devices/pci0000:0a/0000:0a:01.0/0000:0f:00.0")
    (devices / "0000:10:00.0").symlink_to("../../../devices/platform/other")
    assert nvml_readings.pcie_root(tmp_path, "0000:0f:00.0") == "pci0000:0a"
    assert [nvml_readings.pcie_root(tmp_path, f"0000:1{each}:00.0") for each in (0, 1)] == [None, None]


def test_driver_is_opened_once(nvml: FakeNvml, gpus: Child) -> None:
    """Two concurrent requests for the first inventory, and all later ones, share one opening of the driver."""
    nvml.show(*_NODE)
    asked = {gpus.ask("inventory"), gpus.ask("inventory")}
    assert dict(gpus.answer() for _ in asked) == dict.fromkeys(asked, Inventory((_FIRST_GPU, _SECOND_GPU)))
    gpus.inventory()
    assert nvml.functions().count("nvmlInitWithFlags") == 1


def test_gpu_without_mig_mode_is_not_in_it(nvml: FakeNvml, gpus: Child) -> None:
    """NVML answers NOT_SUPPORTED for a GPU without MIG, which means that MIG is off."""
    nvml.show(_DRIVER, _FIRST.replace(" 9.0 0 ", " 7.0 -1 "))
    (gpu,) = gpus.inventory().gpus
    assert (gpu.compute_capability, gpu.mig) == ((7, 0), False)


def test_usage_counts_each_process_once(nvml: FakeNvml, gpus: Child) -> None:
    """A process in both lists counts once, at the larger figure, and as a client of MPS."""
    nvml.show(
        *_NODE,
        "process 0 Compute 100 1000",
        "process 0 Compute 101 2500",
        "process 0 MPSCompute 101 2000",
        "process 0 MPSCompute 102 0",
        "process 1 Compute 103 4000",
    )
    first, second = gpus.inventory().gpus
    held = {
        100: GpuProcess(Known(1000)),
        101: GpuProcess(Known(2500), mps=True),
        102: GpuProcess(Known(0), mps=True),
    }
    assert gpus.usage(first) == Known(GpuUsage(_USED, held))
    assert gpus.usage(second) == Known(GpuUsage(0, {103: GpuProcess(Known(4000))}))


def test_process_of_unknown_size_is_unknown_alone(nvml: FakeNvml, gpus: Child) -> None:
    """A process of unknown size is listed; it is neither omitted nor counted as holding nothing.

    Other figures are known.
    """
    nvml.show(
        *_NODE,
        "process 0 Compute 100 -1",
        "process 0 Compute 101 1000",
        "process 0 MPSCompute 102 -1",
        "process 0 MPSCompute 103 2000",
    )
    first, second = gpus.inventory().gpus
    held = {
        100: GpuProcess(Unknown("NVML does not report how much memory process 100 holds")),
        101: GpuProcess(Known(1000)),
        102: GpuProcess(Unknown("NVML does not report how much memory process 102 holds"), mps=True),
        103: GpuProcess(Known(2000), mps=True),
    }
    assert gpus.usage(first) == Known(GpuUsage(_USED, held))
    assert gpus.usage(second) == Known(GpuUsage(0))


def test_process_is_known_when_either_list_knows_it(nvml: FakeNvml, gpus: Child) -> None:
    """For a process in both lists, the known figure counts, whichever list has it; two unknown figures stay unknown."""
    nvml.show(
        *_NODE,
        "process 0 Compute 100 -1",
        "process 0 Compute 101 1000",
        "process 0 Compute 102 -1",
        "process 0 MPSCompute 100 2000",
        "process 0 MPSCompute 101 -1",
        "process 0 MPSCompute 102 -1",
    )
    first, _ = gpus.inventory().gpus
    held = {
        100: GpuProcess(Known(2000), mps=True),
        101: GpuProcess(Known(1000), mps=True),
        102: GpuProcess(Unknown("NVML does not report how much memory process 102 holds"), mps=True),
    }
    assert gpus.usage(first) == Known(GpuUsage(_USED, held))


def test_usage_goes_by_uuid(nvml: FakeNvml, gpus: Child) -> None:
    """When the driver renumbers its GPUs, no GPU is mistaken for another."""
    nvml.show(*_NODE)
    first, _ = gpus.inventory().gpus
    nvml.show(_DRIVER, _SECOND, _FIRST)
    assert gpus.usage(first) == Known(GpuUsage(_USED))
    nvml.show(_DRIVER, _SECOND)
    assert gpus.usage(first) == Unknown("NVML: Not Found")


def test_drivers_before_510(nvml: FakeNvml, gpus: Child) -> None:
    """A driver without MIG, and with the first version of the memory figures only, can be read too.

    It reports no reserve, which is 0 then and counts as used.
    """
    missing = (_fault(name, _FUNCTION_NOT_FOUND) for name in ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMigMode"))
    nvml.show(_DRIVER, _FIRST, *missing)
    (gpu,) = gpus.inventory().gpus
    assert gpu == replace(_FIRST_GPU, memory_reserved=0)
    assert gpus.usage(gpu) == Known(GpuUsage(_RESERVED + _USED))


@pytest.mark.parametrize("versions", [("", "_v2"), ("_v2",)])
def test_gpu_without_memory_of_its_own(nvml: FakeNvml, gpus: Child, versions: tuple[str, ...]) -> None:
    """An integrated GPU, as of a GB10, has the memory of its host; what NVML says of its processes is not believed."""
    shared = (_fault(f"nvmlDeviceGetMemoryInfo{each}", _NOT_SUPPORTED, gpu=0) for each in versions)
    nvml.show(*_NODE, *shared, "process 0 MPSCompute 100 1000", "process 1 MPSCompute 100 1000")
    first, second = gpus.inventory().gpus
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert first == replace(_FIRST_GPU, memory_total=total, memory_reserved=total // 8, integrated=True)
    assert second == _SECOND_GPU
    silent = Unknown("NVML does not report how much memory process 100 holds")
    assert gpus.usage(first) == Known(GpuUsage(None, {100: GpuProcess(silent, mps=True)}))
    assert gpus.usage(second) == Known(GpuUsage(0, {100: GpuProcess(Known(1000), mps=True)}))


def test_processes_that_are_not_listed(nvml: FakeNvml, gpus: Child) -> None:
    """An integrated GPU whose processes NVML does not list can be read; any other one cannot."""
    shared = [_fault(f"nvmlDeviceGetMemoryInfo{each}", _NOT_SUPPORTED, gpu=0) for each in ("", "_v2")]
    nvml.show(*_NODE, *shared, _fault("nvmlDeviceGetComputeRunningProcesses_v2", _NOT_SUPPORTED))
    first, second = gpus.inventory().gpus
    assert gpus.usage(first) == Known(GpuUsage(None, listed=False))
    assert gpus.usage(second) == Unknown("NVML: Not Supported")


def test_either_version_of_the_process_lists_will_do(nvml: FakeNvml, gpus: Child) -> None:
    """Version 2 is tried first, since version 3 differs between drivers; 3 is used only where there is no 2."""
    processes = ("process 0 Compute 100 1000", "process 0 MPSCompute 101 2000")
    nvml.show(_DRIVER, _FIRST, *processes)
    (gpu,) = gpus.inventory().gpus
    expected = Known(GpuUsage(_USED, {100: GpuProcess(Known(1000)), 101: GpuProcess(Known(2000), mps=True)}))
    assert gpus.usage(gpu) == expected
    assert not [name for name in nvml.functions() if name.endswith("Processes_v3")]

    lists = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")
    nvml.show(_DRIVER, _FIRST, *processes, *(_fault(f"{name}_v2", _FUNCTION_NOT_FOUND) for name in lists))
    assert gpus.usage(gpu) == expected


# -- the compute mode --------------------------------------------------------------------------------------------------


def test_compute_mode(nvml: FakeNvml, gpus: Child) -> None:
    """The mode is read with the usage, in each of NVML's values, and set on the GPU with the given UUID only."""
    nvml.show(_DRIVER, _FIRST, _SECOND.replace(" 8.0 1 ", " 8.0 0 "))
    first, second = gpus.inventory().gpus
    nvml.show(_DRIVER, _SECOND.replace(" 8.0 1 ", " 8.0 0 "), _FIRST)
    for number, mode in enumerate(("default", "exclusive-thread", "prohibited", "exclusive-process")):
        nvml.set_compute_mode(_SECOND_UUID, number)
        assert gpus.usage(second) == Known(GpuUsage(0, compute_mode=ComputeMode(mode)))
        assert gpus.set_compute_mode(first, ComputeMode(mode)) == Known(ComputeMode(mode))
        assert (nvml.compute_mode(_FIRST_UUID), nvml.compute_mode(_SECOND_UUID)) == (number, number)
        assert gpus.usage(first) == Known(GpuUsage(_USED, compute_mode=ComputeMode(mode)))


def test_recovery(nvml: FakeNvml, gpus: Child) -> None:
    """The recovery action is read where the GPU and the driver report it; otherwise it is unknown."""
    nvml.show(*_NODE, "recovery 0 4")
    first, second = gpus.inventory().gpus
    assert gpus.usage(first) == Known(GpuUsage(_USED, recovery=4))
    assert gpus.usage(second) == Known(GpuUsage(0))
    nvml.show(*_NODE, "recovery 0 4", _fault("nvmlDeviceGetFieldValues", _FUNCTION_NOT_FOUND))
    assert gpus.usage(first) == Known(GpuUsage(_USED))


def test_activity(nvml: FakeNvml, gpus: Child) -> None:
    """Utilization, temperature and power are read where the GPU reports them, each for itself; nothing else suffers."""
    lines = (*_NODE, "clock 0 1980 71 612345", "activity 0 97 700")
    nvml.show(*lines)
    first, second = gpus.inventory().gpus

    def read(gpu: Gpu) -> GpuUsage:
        usage = gpus.usage(gpu)
        assert isinstance(usage, Known)
        return usage.value

    assert read(first).activity == Activity(97, 71, 612.345, 700.0)
    assert read(second).activity == Activity(None, 0, 0.0, None)
    lacking = ("nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage")
    nvml.show(*lines, *(_fault(each, _NOT_SUPPORTED, gpu=0) for each in lacking))
    assert read(first) == GpuUsage(_USED)
    assert read(first).activity == Activity(97, None, None, 700.0)


def test_compute_mode_of_another_kind(nvml: FakeNvml, gpus: Child) -> None:
    """A GPU without a compute mode, and one in a mode that is newer than this code, have an unknown mode."""
    nvml.show(*_NODE)
    first, second = gpus.inventory().gpus
    nvml.show(*_NODE, _fault("nvmlDeviceGetComputeMode", _NOT_SUPPORTED, gpu=0))
    nvml.set_compute_mode(_SECOND_UUID, 4)
    assert gpus.usage(first) == Known(GpuUsage(_USED, compute_mode=None))
    assert gpus.usage(second) == Known(GpuUsage(0, compute_mode=None))


@pytest.mark.parametrize(
    ("result", "because", "remedy"),
    [
        (_NO_PERMISSION, "Insufficient Permissions", "sudo nvidia-smi -i 0 -c EXCLUSIVE_PROCESS"),
        (_NOT_SUPPORTED, "Not Supported", "MIG"),
        (_INVALID_ARGUMENT, "Invalid Argument", "MIG"),
    ],
)
def test_compute_mode_that_is_refused(nvml: FakeNvml, gpus: Child, result: int, because: str, remedy: str) -> None:
    """When the driver refuses the change, the error has the reason and a remedy, and the mode is unchanged."""
    nvml.show(*_NODE)
    first, _ = gpus.inventory().gpus
    nvml.show(*_NODE, _fault("nvmlDeviceSetComputeMode", result))
    with pytest.raises(ComputeModeError, match=f"GPU 0 cannot be set to exclusive-process: NVML: {because}") as refused:
        gpus.set_compute_mode(first, ComputeMode.EXCLUSIVE_PROCESS)
    assert remedy in refused.value.hint
    assert nvml.compute_mode(_FIRST_UUID) == 0


def test_compute_mode_of_a_lost_gpu(nvml: FakeNvml, gpus: Child) -> None:
    """A change that failed or timed out is unknown: it may take effect when a hanging call returns."""
    nvml.show(*_NODE)
    first, _ = gpus.inventory().gpus
    nvml.show(*_NODE, _fault("nvmlDeviceSetComputeMode", _GPU_IS_LOST))
    assert gpus.set_compute_mode(first, ComputeMode.EXCLUSIVE_PROCESS) == Unknown("NVML: GPU is lost")
    nvml.show(*_NODE, _fault("nvmlDeviceSetComputeMode", _HANG))
    gpus.do("deadline", 0.2)
    late = Unknown("NVML did not answer within 0.2 s: a call hangs in the driver")
    assert gpus.set_compute_mode(first, ComputeMode.EXCLUSIVE_PROCESS) == late
    gpus.do("deadline", _HOUR)
    nvml.show(*_NODE)
    wait_until(lambda: nvml.compute_mode(_FIRST_UUID) == 3, what="the call to come back")
    wait_until(lambda: isinstance(gpus.usage(first), Known), what="NVML to come back")
    assert gpus.usage(first) == Known(GpuUsage(_USED, compute_mode=ComputeMode.EXCLUSIVE_PROCESS))


# -- what the GPUs report by themselves --------------------------------------------------------------------------------


def test_faults(nvml: FakeNvml, gpus: Child) -> None:
    """Faults are reported as soon as they come, once each, with their GPU.

    Simultaneous faults are reported together.
    """
    nvml.show(*_NODE)
    gpus.inventory()
    gpus.do("patience", _HOUR)
    asked = gpus.ask("faults")
    wait_until(lambda: "nvmlEventSetWait_v2" in nvml.functions(), what="somebody to wait for faults")
    nvml.show(*_NODE, "xid 1 79", "xid 0 31", "xid 1 13")
    faults = (GpuFault(_SECOND_UUID, 79), GpuFault(_FIRST_UUID, 31), GpuFault(_SECOND_UUID, 13))
    assert gpus.answer() == (asked, Known(faults))
    nvml.show(*_NODE, "xid 1 79", "xid 0 31", "xid 1 13", "xid 0 48")
    assert gpus.do("faults") == Known((GpuFault(_FIRST_UUID, 48),))


def test_no_faults(nvml: FakeNvml, gpus: Child) -> None:
    """No fault within the time is a known result; readings continue meanwhile."""
    nvml.show(*_NODE)
    first, _ = gpus.inventory().gpus
    gpus.do("patience", 0.01)
    assert gpus.do("faults") == Known(())
    gpus.do("patience", _HOUR)
    gpus.ask("faults")
    assert gpus.usage(first) == Known(GpuUsage(_USED))


def test_a_storm_of_faults(nvml: FakeNvml, gpus: Child) -> None:
    """In a storm every fault is reported, some dozens in one answer."""
    nvml.show(*_NODE, *(f"xid {number % 2} {number}" for number in range(100)))
    gpus.inventory()
    first, second = gpus.do("faults"), gpus.do("faults")
    assert isinstance(first, Known)
    assert isinstance(second, Known)
    assert [fault.xid for fault in (*first.value, *second.value)] == list(range(100))
    assert len(first.value) == 64


def test_gpu_that_reports_nothing(nvml: FakeNvml, gpus: Child) -> None:
    """A GPU that cannot be read, or has no fault reports, is left out; the others are listened to."""
    nvml.show(*_NODE, _fault(_BY_INDEX, _GPU_IS_LOST, gpu=0), "xid 0 79", "xid 1 31")
    gpus.inventory()
    assert gpus.do("faults") == Known((GpuFault(_SECOND_UUID, 31),))


def test_faults_that_cannot_be_read(nvml: FakeNvml, gpus: Child) -> None:
    """Faults are unknown, at once, before the driver is open and when NVML fails; this passes."""
    nvml.show(*_NODE, "xid 0 31")
    assert gpus.do("faults") == Unknown("NVML: Uninitialized")
    gpus.inventory()
    nvml.show(*_NODE, "xid 0 31", _fault("nvmlEventSetWait_v2", _GPU_IS_LOST))
    assert gpus.do("faults") == Unknown("NVML: GPU is lost")
    nvml.show(*_NODE, "xid 0 31")
    assert gpus.do("faults") == Known((GpuFault(_FIRST_UUID, 31),))


def test_waiting_for_faults_that_hangs(nvml: FakeNvml, gpus: Child) -> None:
    """A hanging wait for faults affects faults only: readings continue, and the process ends in good order."""
    nvml.show(*_NODE)
    first, _ = gpus.inventory().gpus
    nvml.show(*_NODE, _fault("nvmlEventSetWait_v2", _HANG))
    gpus.do("patience", 0.01)
    gpus.do("deadline", 0.2)
    assert gpus.do("faults") == Unknown("NVML did not answer within 0.21 s: a call hangs in the driver")
    gpus.do("deadline", _HOUR)
    assert gpus.usage(first) == Known(GpuUsage(_USED))
    gpus.do("close")
    assert gpus.leave() == 0


# -- what NVML cannot say ----------------------------------------------------------------------------------------------


def test_lost_gpu_is_unknown_alone(nvml: FakeNvml, gpus: Child) -> None:
    """A GPU that fell off the bus is unknown with NVML's reason; the others are unaffected, and it may return."""
    nvml.show(*_NODE, _fault(_BY_INDEX, _GPU_IS_LOST, gpu=0))
    assert gpus.inventory() == Inventory((_SECOND_GPU,), {0: Unknown("NVML: GPU is lost")})
    nvml.show(*_NODE)
    assert gpus.inventory() == Inventory((_FIRST_GPU, _SECOND_GPU))


@pytest.mark.parametrize(
    "function",
    [
        _BY_UUID,
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v2",
        "nvmlDeviceGetMPSComputeRunningProcesses_v2",
        "nvmlDeviceGetComputeMode",
    ],
)
def test_usage_is_unknown_when_any_part_is(nvml: FakeNvml, gpus: Child, function: str) -> None:
    """A reading is complete or unknown, whichever call fails: no result can be mistaken for an idle GPU."""
    nvml.show(*_NODE)
    first, _ = gpus.inventory().gpus
    nvml.show(*_NODE, _fault(function, _GPU_IS_LOST))
    assert gpus.usage(first) == Unknown("NVML: GPU is lost")
    nvml.show(*_NODE)
    assert gpus.usage(first) == Known(GpuUsage(_USED))


def test_all_calls_are_made_on_one_thread(nvml: FakeNvml, gpus: Child) -> None:
    """No call runs on the thread of the event loop, not even the one that names an error unknown to pynvml."""
    not_ready = 27
    nvml.show(*_NODE, _fault(_BY_INDEX, not_ready, gpu=1))
    inventory = gpus.inventory()
    assert inventory == Inventory((_FIRST_GPU,), {1: Unknown("NVML: an error that only NVML can name")})
    gpus.usage(inventory.gpus[0])
    gpus.do("close")
    wait_until(lambda: "nvmlShutdown" in nvml.functions(), what="close to let go of the driver")
    assert "nvmlErrorString" in nvml.functions()
    (thread,) = {thread for thread, _ in nvml.calls()}
    assert thread != gpus.process.pid  # the pid is the id of its main thread


# -- when a call hangs -------------------------------------------------------------------------------------------------


def test_event_loop_goes_on_while_a_call_hangs(nvml: FakeNvml, gpus: Child) -> None:
    """Other work continues while NVML hangs, and pending requests are answered when the call returns."""
    nvml.show(*_NODE)
    first, _ = gpus.inventory().gpus
    gpus.do("deadline", _HOUR)
    nvml.show(*_NODE, _fault(_BY_UUID, _HANG))
    asked = gpus.ask("usage", first)
    wait_until(lambda: _BY_UUID in nvml.functions(), what="the call to hang")
    gpus.do("ping")
    nvml.show(*_NODE)
    assert gpus.answer() == (asked, Known(GpuUsage(_USED)))


def test_hanging_gpu_makes_unknown_what_could_not_be_read(nvml: FakeNvml, gpus: Child) -> None:
    """Values that were read before the hang are known, later ones are not, and all are once the call has returned."""
    nvml.show(*_NODE, _FIRST, _fault(_BY_INDEX, _HANG, gpu=1))
    gpus.do("deadline", 2.0)  # the first GPU must meet this deadline, even on a busy machine
    inventory = gpus.inventory()
    assert inventory.gpus == (_FIRST_GPU,)
    assert inventory.unknown == {
        1: Unknown("NVML did not answer within 2 s: a call hangs in the driver"),
        2: Unknown("NVML does not answer: a call hangs in the driver and has not returned yet"),
    }
    gpus.do("deadline", _HOUR)
    nvml.show(*_NODE, _FIRST)
    wait_until(lambda: not gpus.inventory().unknown, what="NVML to come back")


def test_nobody_waits_for_a_thread_that_is_stuck(nvml: FakeNvml, gpus: Child) -> None:
    """After a call has overrun, later requests are answered at once, whatever their deadline, until it returns."""
    nvml.show(*_NODE)
    first, second = gpus.inventory().gpus
    nvml.show(*_NODE, _fault(_BY_UUID, _HANG))
    gpus.do("deadline", 0.2)
    assert gpus.usage(first) == Unknown("NVML did not answer within 0.2 s: a call hangs in the driver")
    gpus.do("deadline", _HOUR)  # otherwise the test would wait for an answer that never comes
    stuck = Unknown("NVML does not answer: a call hangs in the driver and has not returned yet")
    assert gpus.usage(second) == stuck
    assert gpus.inventory() == Inventory((), {0: stuck, 1: stuck})
    nvml.show(*_NODE)
    wait_until(lambda: gpus.usage(first) == Known(GpuUsage(_USED)), what="NVML to come back")
    assert gpus.inventory() == Inventory((_FIRST_GPU, _SECOND_GPU))


def test_requests_that_nobody_waits_for_are_dropped(nvml: FakeNvml, gpus: Child) -> None:
    """Requests that were abandoned during a hang are not executed afterwards: they would delay live ones."""
    nvml.show(*_NODE)
    first, _ = gpus.inventory().gpus
    nvml.show(*_NODE, _fault(_BY_UUID, _HANG))
    gpus.do("deadline", 0.2)
    asked = {gpus.ask("usage", first) for _ in range(5)}
    given_up = Unknown("NVML did not answer within 0.2 s: a call hangs in the driver")
    assert dict(gpus.answer() for _ in asked) == dict.fromkeys(asked, given_up)
    gpus.do("deadline", _HOUR)
    nvml.show(*_NODE)
    wait_until(lambda: gpus.usage(first) == Known(GpuUsage(_USED)), what="NVML to come back")
    assert nvml.functions().count(_BY_UUID) == 2


def test_few_requests_wait(nvml: FakeNvml, gpus: Child) -> None:
    """At most 64 requests wait within the deadline and are answered; the others are refused with that reason."""
    nvml.show(*_NODE)
    first, _ = gpus.inventory().gpus
    gpus.do("deadline", _HOUR)
    nvml.show(*_NODE, _fault(_BY_UUID, _HANG))
    gpus.ask("usage", first)
    # The hang proves that all requests before it have been served.
    wait_until(lambda: _BY_UUID in nvml.functions(), what="the call to hang")
    for _ in range(69):
        gpus.ask("usage", first)
    too_many = Unknown("NVML is overloaded: 64 requests are waiting for it")
    assert [gpus.answer()[1] for _ in range(6)] == [too_many] * 6
    nvml.show(*_NODE)
    assert [gpus.answer()[1] for _ in range(64)] == [Known(GpuUsage(_USED))] * 64


def test_hanging_call_does_not_keep_the_process(nvml: FakeNvml, gpus: Child) -> None:
    """A process that has finished ends by itself, in good order, while a call still hangs."""
    nvml.show(*_NODE)
    first, _ = gpus.inventory().gpus
    nvml.show(*_NODE, _fault(_BY_UUID, _HANG))
    gpus.do("deadline", 0.2)
    assert isinstance(gpus.usage(first), Unknown)
    gpus.do("close")
    assert gpus.leave() == 0


def test_hang_before_the_first_inventory(nvml: FakeNvml, gpus: Child) -> None:
    """When not even the number of GPUs is known, the result is an error, not a node without GPUs; it passes."""
    nvml.show(*_NODE, _fault("nvmlInitWithFlags", _HANG))
    gpus.do("opening", 0.2)
    with pytest.raises(GpuUnknownError, match=r"did not answer within 0\.2 s") as refused:
        gpus.inventory()
    assert "dmesg" in refused.value.hint
    with pytest.raises(GpuUnknownError, match="has not returned yet"):
        gpus.inventory()
    gpus.do("opening", _HOUR)
    nvml.show(*_NODE)
    # The number of GPUs is known a moment before the thread is free; in that moment each GPU is unknown by itself.
    wait_until(lambda: not gpus.inventory().unknown, what="NVML to come back", not_yet=(GpuUnknownError,))
    assert gpus.inventory() == Inventory((_FIRST_GPU, _SECOND_GPU))
    assert nvml.functions().count("nvmlInitWithFlags") == 1


def test_opening_has_a_deadline_of_its_own(nvml: FakeNvml, gpus: Child) -> None:
    """Opening the driver and reading have separate deadlines, and either may be the longer one."""
    nvml.show(*_NODE, _fault("nvmlInitWithFlags", _HANG))
    gpus.do("opening", _HOUR)
    gpus.do("deadline", 0.0)  # a request without any time would be answered before later requests
    asked = gpus.ask("inventory")
    wait_until(lambda: "nvmlInitWithFlags" in nvml.functions(), what="the opening to hang")
    gpus.do("deadline", _HOUR)
    nvml.show(*_NODE)
    assert gpus.answer() == (asked, Inventory((_FIRST_GPU, _SECOND_GPU)))

    gpus.do("opening", 0.0)
    assert gpus.usage(_FIRST_GPU) == Known(GpuUsage(_USED))
    assert gpus.inventory() == Inventory((_FIRST_GPU, _SECOND_GPU))


# -- when there is no driver -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "because", "opened"),
    [
        ([_fault("nvmlInitWithFlags", 9)], "kernel driver is not loaded", 0),
        ([_fault("nvmlInitWithFlags", 18)], "have different versions", 0),
        ([_fault("nvmlInitWithFlags", 999)], "cannot start: Unknown Error", 0),
        ([_fault("nvmlDeviceGetCount_v2", 999)], "cannot start: Unknown Error", 1),
        ([], "finds no GPU", 1),
    ],
)
def test_node_without_a_driver(nvml: FakeNvml, gpus: Child, faults: list[str], because: str, opened: int) -> None:
    """Each cause of having no GPU is one error that names the cause and the simulation, and it may pass.

    A driver that was opened without result is closed; otherwise it would not look for GPUs again.
    """
    nvml.show(_DRIVER, *faults)
    with pytest.raises(NoDriverError, match=because) as refused:
        gpus.inventory()
    assert "mpsd run --simulate" in refused.value.hint
    assert nvml.functions().count("nvmlShutdown") == opened
    nvml.show(*_NODE)
    assert gpus.inventory() == Inventory((_FIRST_GPU, _SECOND_GPU))


@pytest.mark.parametrize("code", [20, 23])
def test_lack_at_the_start(nvml: FakeNvml, gpus: Child, code: int) -> None:
    """A lack of memory or of the system's resources may pass, and is no reason to give up."""
    nvml.show(*_NODE, _fault("nvmlInitWithFlags", code))
    with pytest.raises(ExhaustedError, match="NVML cannot start"):
        gpus.inventory()
    nvml.show(*_NODE)
    assert gpus.inventory() == Inventory((_FIRST_GPU, _SECOND_GPU))


def test_node_without_the_library(nvml: FakeNvml, tmp_path: Path) -> None:
    """A library that cannot be loaded raises the same error, as in a container without its GPUs."""
    (tmp_path / LIBRARY).write_text("no library\n", encoding="utf-8")
    with child({**nvml.variables, "LD_LIBRARY_PATH": str(tmp_path)}) as gpus:
        with pytest.raises(NoDriverError, match=r"libnvidia-ml\.so\.1 cannot be loaded") as refused:
            gpus.inventory()
        assert "mpsd run --simulate" in refused.value.hint


def test_simulated_node_does_not_pay_for_nvml() -> None:
    """Importing the module does not import pynvml; only an NVML source does."""
    program = "import sys, mpsd.system.gpus.gpu; sys.exit('pynvml' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0


# -- the real one ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_real_driver() -> None:
    """NVIDIA's own library answers every call of mpsd: inventory, usage of each GPU, and faults, all known."""
    with child({}) as gpus:
        inventory = gpus.inventory()
        assert inventory.gpus
        assert inventory.unknown == {}
        for gpu in inventory.gpus:
            assert gpu.uuid.startswith("GPU-")
            reading = gpus.usage(gpu)
            assert isinstance(reading, Known)
            used = reading.value.memory_used
            assert gpu.integrated == (used is None)
            assert 0 <= gpu.memory_reserved + (used or 0) <= gpu.memory_total
        gpus.do("patience", 0.01)
        assert isinstance(gpus.do("faults"), Known)
