"""The steps that mpsd takes for a GPU's compute mode, from the desired, the saved and the current mode. Pure.

In mode `exclusive-process` only one process may have a context on the GPU: the server of MPS. A process that misses MPS
then gets an error; in mode `default` it would run beside the server without any limit.

NVIDIA's documentation: only root changes the mode, and the change is immediate. The mode is `default` again after each
reboot, and whenever the driver releases the GPU. The driver does that after the last process that uses the GPU, unless
persistence mode is on (nvml.h, nvmlDeviceSetComputeMode; Driver Persistence, "GPU Initialization Lifecycle"). A GPU
with MIG on takes no other mode.
"""

from enum import StrEnum


class ComputeMode(StrEnum):
    """Whether processes may share a GPU (nvmlComputeMode_t). The server of MPS is one process, whatever its clients."""

    DEFAULT = "default"
    """Any number of processes may have contexts on it."""
    EXCLUSIVE_THREAD = "exclusive-thread"
    """NVIDIA no longer supports it."""
    PROHIBITED = "prohibited"
    """No process may have a context on it."""
    EXCLUSIVE_PROCESS = "exclusive-process"
    """One process may have contexts on it: the server of MPS, if it is the first."""


class ComputeModeStep(StrEnum):
    """The next step for a GPU's compute mode."""

    NOTHING = "nothing"
    TAKE = "take"
    """Save the current mode, unless one is saved, and then set exclusive-process."""
    GIVE_BACK = "give_back"
    """Set the saved mode, and then delete the record."""
    FORGET = "forget"
    """Leave the mode as it is and delete the record: the mode is not what mpsd set."""


def step(*, wanted: bool, found: ComputeMode | None, now: ComputeMode | None, held: bool) -> ComputeModeStep:
    """Return the next step for a GPU.

    `wanted` says whether the mode must be exclusive-process. `found` is the mode that was saved before mpsd changed it,
    if it did, and `now` the current mode. `held` says whether this mpsd has already seen the wanted mode. A mode that
    is saved is never replaced by a later one.
    """
    # 1. Several processes may share the GPU, and that is not wanted: take it, even if a mode is saved. mpsd may have
    #    died before it set the mode, or the driver was reloaded. Once this mpsd has seen the wanted mode, the change
    #    was made by others, and stays.
    # 2. Any other mode, where exclusive-process is wanted, is that one already, or prohibited, or unknown.
    # 3. No mode is saved, so mpsd has not changed it.
    # 4. A saved mode is given back while the present one is what mpsd set. Otherwise others have changed it.
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
    """Return why this compute mode keeps a GPU from being granted, with a remedy; None where it does not."""
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
