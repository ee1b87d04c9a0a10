"""Facts about a GPU: whether it can run MPS, its name in requests, its driver's branch, and its Xids. Pure."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from mpsd.core import gpu_names, mps_facts
from mpsd.core.errors import InvalidRequestError
from mpsd.core.model import Gpu

_DRIVER_VERSION: Final = re.compile(r"([0-9]+)(?:\.[0-9]+)*")


@dataclass(frozen=True, slots=True)
class Condition:
    """The hardware condition that a GPU reports. None: this GPU or driver does not report the value."""

    persistence: bool | None = None
    """Whether persistence mode is on."""
    uncorrected: int | None = None
    """Uncorrected ECC errors since the driver was loaded."""
    retirement_pending: bool | None = None
    """Whether memory pages need a reset to be retired."""
    remapping_pending: bool | None = None
    remapping_failed: bool | None = None
    """Whether memory rows need to be remapped, and whether no spare row was left for one."""


def unsupported(gpu: Gpu) -> tuple[str, str] | None:
    """Return why mpsd cannot run MPS on this GPU, with a remedy; None when it can."""
    if gpu.compute_capability < mps_facts.MINIMUM_COMPUTE_CAPABILITY:
        least = _dotted(mps_facts.MINIMUM_COMPUTE_CAPABILITY)
        return (
            f"its compute capability is {_dotted(gpu.compute_capability)}, and MPS needs {least} or newer",
            "use this GPU for work that does not share it",
        )
    if gpu.mig:
        # MPS does run inside a MIG device, but mpsd runs one control daemon for a whole GPU, and MIG leaves no GPU
        # whole.
        return (
            "MIG mode is on, and mpsd shares whole GPUs only",
            f"turn MIG off (nvidia-smi -i {gpu.index} -mig 0), or leave this GPU to MIG",
        )
    return None


def serve_many_users(gpus: Iterable[Gpu]) -> bool:
    """Tell whether MPS can serve several users at a time on each of these GPUs that mpsd can share.

    Before Volta, a control daemon takes the flag, and clients get NOT_PERMITTED. Source: NVIDIA, "Multi-Process
    Service", section "Architecture".
    """
    return all(each.compute_capability >= mps_facts.VOLTA for each in gpus if unsupported(each) is None)


_PART_OF_HOST: Final = 8
"""The part of a host's memory that its integrated GPU leaves to it: an eighth, by choice and not by measurement."""


def of_host(total: int) -> tuple[int, int]:
    """Return the memory of an integrated GPU, the total and the reserve, from the total of its host."""
    return total, total // _PART_OF_HOST


UNLISTED: Final = "NVML does not list the processes of this GPU"


def unmeasured(gpu: str) -> str:
    """Say what is unknown of the memory of an integrated GPU, which is named so."""
    return (
        f"{gpu} shares the memory of its host: whether MPS limits it there, and whether NVML reports what each process"
        " holds, was not measured"
    )


def _dotted(compute_capability: tuple[int, int]) -> str:
    major, minor = compute_capability
    return f"{major}.{minor}"


def select(gpus: Sequence[Gpu], wanted: str) -> Gpu:
    """Return the GPU that `wanted` names. Raises InvalidRequestError where it names none, or several."""
    numbered = [(gpu.index, gpu.uuid) for gpu in gpus]
    index = gpu_names.find(wanted, numbered)
    if index is None:
        detail, hint = gpu_names.unknown(wanted, numbered)
        raise InvalidRequestError(detail, hint=hint, limit="gpu")
    return next(gpu for gpu in gpus if gpu.index == index)


def driver_branch(version: str) -> int | None:
    """Return the branch of a driver, such as 535 of "535.261.03"; None for a text that is not a driver version."""
    match = _DRIVER_VERSION.fullmatch(version)
    return int(match[1]) if match else None


# -- the errors that a GPU reports -------------------------------------------------------------------------------------

RECOVERY_NONE: Final = 0
"""The recovery action of a GPU that needs nothing, whatever it reported. Source: nvml.h,
nvmlDeviceGpuRecoveryAction_t."""

_RECOVERY: Final = {
    1: ("a reset", "end its processes, then reset it: nvidia-smi -i {index} --gpu-reset"),
    2: ("a reboot of the node", "reboot the node"),
    3: ("its peer-to-peer traffic to end", "end the processes that use NVLink or peer-to-peer access on it"),
    4: (
        "a reset, and works at reduced capacity until then",
        "drain it (mpsctl drain gpu{index}), then reset it: nvidia-smi -i {index} --gpu-reset",
    ),
    5: ("its IMEX domain to be recovered", "recover the IMEX domain of this node"),
    6: ("a reset of its PCIe bus", "end its processes, then reset the bus, or reboot the node"),
    7: ("a reboot of the system", "reboot the system"),
}
"""The other recovery actions by number, and the operator's remedy. No new work may start on the GPU until then. Source:
nvml.h; NVIDIA, GPU Memory Error Management, "Error Recovery and Response Flags"."""


def recovery(action: int, index: int) -> tuple[str, str] | None:
    """Return why a GPU must not be granted according to its recovery action, with a remedy; None where it may be."""
    if action == RECOVERY_NONE:
        return None
    needs, hint = _RECOVERY.get(action, (f"the recovery action {action}, which is unknown", "see nvidia-smi -q"))
    return f"it needs {needs}", f"{hint.format(index=index)}; mpsd reads it again by itself"


RECORDED_XIDS: Final = {63: "memory retirement or row remapping was recorded"}
"""Xids after which the GPU has repaired itself: new work may start, and `mpsctl doctor` reports what a reset
completes."""

APPLICATION_XIDS: Final = {
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "preemptive cleanup, after an error before it",
    68: "video processor exception",
    109: "context switch timeout",
}
"""Xids that a program can cause, and after which the GPU works as before.

Source: the Xids for which NVIDIA's device plugin for Kubernetes does not take a GPU out of service. The words are those
of NVIDIA's list "XID Errors".
"""


def describe_xid(xid: int) -> str:
    """Describe an Xid, and whether a program can cause it."""
    known = {**APPLICATION_XIDS, **RECORDED_XIDS}.get(xid)
    return f"Xid {xid} ({known})" if known is not None else f"Xid {xid}, which no program brings about"


def condemns(xid: int) -> bool:
    """Tell whether a GPU must not be granted after this Xid, unless its recovery action says otherwise."""
    return xid not in APPLICATION_XIDS and xid not in RECORDED_XIDS


def clients_max(gpu: Gpu) -> int:
    """Return the maximum client contexts on a GPU; an unknown driver branch counts as the older, smaller figure.

    mpsd counts each client as one context: no documented command reports how many contexts a client has. Source: the
    man pages of 470 to 555, and NVIDIA, "Multi-Process Service", mpsv2-interface: `get_client_list` and
    `get_device_client_list` print pids, and `ps` lists client processes, whose column ID is not explained.
    """
    if gpu.compute_capability < mps_facts.VOLTA:
        return mps_facts.CLIENTS_BEFORE_VOLTA
    is_new = (driver_branch(gpu.driver_version) or 0) >= mps_facts.R590
    return mps_facts.CLIENTS_R590 if is_new else mps_facts.CLIENTS_VOLTA
