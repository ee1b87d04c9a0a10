"""What the event about a violation says to a pod's author."""

import pytest

from mpsd.core.kubernetes.pod_violations import PodViolation, message
from mpsd.core.kubernetes.settings import Offer, Settings
from mpsd.core.model import ViolationKind


def of(kind: str, because: str, policy: str = "report") -> PodViolation:
    return PodViolation(kind, 7, "lease-1", because, policy)


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        (Settings(processes=(1, 4)), "(nvidia.com/gpu.mps-slice.processes-4)"),
        (
            Settings(resources=Offer.THREADS_AND_MEMORY, processes=(1, 2)),
            "core.processes-2, nvidia.com/mps-memory.proc",
        ),
        (Settings(), "ask the administrator for a resource for several processes"),
        (Settings(resources=Offer.DRA), "set the parameter `processes` of its claim"),
    ],
)
def test_processes(settings: Settings, way: str) -> None:
    """It says how the manifest declares several, and is the same for each process, so that it is written once."""
    found = {
        message(
            PodViolation("processes", pid, "lease-1", f"process {pid} is an extra client of lease lease-1"),
            "",
            settings,
        )
        for pid in (7, 77)
    }
    assert len(found) == 1
    assert found.pop().startswith("a process is an extra client of its share; each process has")
    assert way in message(of("processes", ""), "", settings)


@pytest.mark.parametrize(("policy", "ends"), [("report", False), ("terminate", True)])
def test_memory(policy: str, *, ends: bool) -> None:
    """It says whether the process ends for it."""
    found = message(of("memory", "the processes of lease lease-1 hold 3GiB", policy), "container main", Settings())
    assert found.startswith("container main: the processes of its share hold 3GiB")
    assert ("and mpsd ends it" in found) is ends


@pytest.mark.parametrize("kind", [*ViolationKind, "of a later release"])
def test_says_what_to_do(kind: str) -> None:
    """No kind is without a remedy, and none names a lease or a command of mpsd's: a pod's author has neither."""
    found = message(of(kind, "it happened"), "container main", Settings())
    assert found.startswith("container main: it happened")
    assert "; " in found
    assert "mpsctl" not in found


def test_without_pids() -> None:
    """Processes that come and go do not make another event each, except those that hold too much memory."""
    assert message(of("limits", "process 7 was started"), "", Settings()).startswith("a process was started")
    assert message(of("memory", "process 7 holds"), "", Settings()).startswith("process 7 holds")
