"""What mpsd does about a GPU's compute mode, by what is wanted, what it wrote down, and what is there. Pure.

In mode `exclusive-process` one process may have a context on the GPU: the server of MPS. A process that misses MPS gets
an error, where in mode `default` it would run beside it, without any limit.

What NVIDIA documents of it: only root changes it, at once; it is `default` again after each reboot, and whenever the
driver lets go of the GPU, which it does with the last process that uses it unless persistence mode is on (nvml.h,
nvmlDeviceSetComputeMode; Driver Persistence, "GPU Initialization Lifecycle"). A GPU with MIG on takes no other mode.
"""

from enum import StrEnum


class ComputeMode(StrEnum):
    """Whether processes may share a GPU (nvmlComputeMode_t). The server of MPS is one process, whatever its clients."""

    DEFAULT = "default"
    """Any number of processes may have contexts on it."""
    EXCLUSIVE_THREAD = "exclusive-thread"
    """NVIDIA no longer supports it."""
    PROHIBITED = "prohibited"
    """No process may have one."""
    EXCLUSIVE_PROCESS = "exclusive-process"
    """One process may: the server of MPS, if it is the first."""


class ComputeModeStep(StrEnum):
    """What there is to do about a GPU's compute mode."""

    NOTHING = "nothing"
    TAKE = "take"
    """Write down the mode that is there, unless one is written down, and then set exclusive-process."""
    GIVE_BACK = "give_back"
    """Set the mode that was written down, and then forget it."""
    FORGET = "forget"
    """Leave it as it is and forget what was written down: it is not what mpsd set."""


def step(*, wanted: bool, found: ComputeMode | None, now: ComputeMode | None, held: bool) -> ComputeModeStep:
    """Say what there is to do about a GPU.

    `wanted` is whether it is to be exclusive-process, `found` what was written down before mpsd changed it, if it did,
    `now` what is there, and `held` whether this mpsd has already seen what is wanted: whoever changes it after that is
    not fought. Before that, a mode that others may share is set also where something was written down, because mpsd
    may have died in between, or the driver may have been loaded anew; and what was written down then stays.
    """
    if wanted:
        shared = now in {ComputeMode.DEFAULT, ComputeMode.EXCLUSIVE_THREAD}
        return ComputeModeStep.TAKE if shared and not held else ComputeModeStep.NOTHING
    if found is None:
        return ComputeModeStep.NOTHING
    return ComputeModeStep.GIVE_BACK if now is ComputeMode.EXCLUSIVE_PROCESS else ComputeModeStep.FORGET


def command(index: int, mode: ComputeMode) -> str:
    """Return the command by which root sets the compute mode of a GPU."""
    return f"nvidia-smi -i {index} -c {mode.upper().replace('-', '_')}"


def trouble(*, index: int, wanted: bool, now: ComputeMode | None, held: bool) -> tuple[str, str] | None:
    """Say why a GPU can be given to nobody in this compute mode, and what to do about it; None where it can."""
    if now is ComputeMode.PROHIBITED:
        return (
            "its compute mode is prohibited, so no process can use it",
            f"as root: {command(index, ComputeMode.DEFAULT)}; mpsd then reads the mode again",
        )
    if not wanted or now is ComputeMode.EXCLUSIVE_PROCESS:
        return None
    if now is None:
        return "it has no compute mode that could be set", 'set daemon.compute_mode = "leave"'
    who = "although mpsd had set exclusive-process: it was changed from outside, or the driver unloaded the GPU"
    return (
        f"its compute mode is {now}, {who}" if held else f"its compute mode is {now}, and not exclusive-process yet",
        f'set the mode again: mpsctl reset gpu{index}; or turn this off: daemon.compute_mode = "leave"',
    )
