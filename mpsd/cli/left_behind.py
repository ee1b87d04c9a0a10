"""What an mpsd that runs no more left behind on the GPUs: found, and mended, without it.

The one module of mpsd/cli that looks at the machine itself. `mpsctl doctor` imports it where no mpsd answers.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mpsd.cli.checks import Check, Verdict
from mpsd.core.compute_mode import Step, command, step
from mpsd.core.errors import AlreadyRunningError, ComputeModeError, GpuError, MpsdError
from mpsd.core.model import ComputeMode, Gpu, Known, Unknown
from mpsd.system import found_modes, rundir
from mpsd.system.configuration import read_configuration
from mpsd.system.found_modes import FoundModes
from mpsd.system.gpu import GpuSource, NvmlGpus, change_compute_mode
from mpsd.system.rundir import RunDir

if TYPE_CHECKING:
    from mpsd.core.settings import Settings

_NAME: Final = "compute mode"
_RECORD: Final = "compute mode record"
_REMEDY: Final = "start mpsd, which keeps it or gives it back as its settings say; or, as root: mpsctl doctor --fix"


def checks(config: str | None, root: str | None, *, fix: bool) -> Iterator[Check]:
    """Check whether each GPU has the compute mode that mpsd found on it, and with `fix` give it back."""
    try:
        settings = read_configuration(Path(config) if config else None)
        if root is not None:
            settings = settings.under(Path(root).absolute())
        with contextlib.ExitStack() as claimed:
            if fix:
                claimed.callback(RunDir.claim(settings).close)
            yield from _modes(settings, fix=fix)
    except AlreadyRunningError as error:
        yield Check(_NAME, Verdict.FAIL, f"{error.detail}, and does not answer, so nothing is mended", error.hint)
    except PermissionError as error:
        yield Check(_NAME, Verdict.WARN, f"{error.filename} cannot be read: {error.strerror}", "look as root")
    except OSError as error:
        yield Check(_NAME, Verdict.FAIL, f"{error.filename}: {error.strerror}", "mend that, and look again")
    except MpsdError as error:
        yield Check(_NAME, Verdict.FAIL, error.detail, error.hint)


def _modes(settings: "Settings", *, fix: bool) -> Iterator[Check]:
    import asyncio

    found = FoundModes(rundir.found_modes(settings))
    aside = found_modes.aside(found.path)
    if aside.exists():
        because = f"{aside} could not be understood, so it is not known which GPUs mpsd changed"
        yield Check(_RECORD, Verdict.WARN, because, f"see nvidia-smi -q -d COMPUTE; then remove {aside}")
    try:
        found.load()
    except ValueError as error:
        because = f"{found.path} cannot be understood, so it is not known which GPUs mpsd changed: {error}"
        yield Check(_RECORD, Verdict.FAIL, because, f"see nvidia-smi -q -d COMPUTE; then remove {found.path}")
        return
    if not found.by_gpu:
        yield Check(_NAME, Verdict.OK, "no GPU is left in another compute mode than its own")
        return
    yield from asyncio.run(_of_gpus(found, fix=fix))


async def _of_gpus(found: FoundModes, *, fix: bool) -> list[Check]:
    source = NvmlGpus()
    try:
        there = {gpu.uuid: gpu for gpu in (await source.inventory()).gpus}
        return [
            await _of_gpu(source, there[uuid], found, fix=fix) if uuid in there else _absent(uuid, mode)
            for uuid, mode in dict(found.by_gpu).items()
        ]
    except GpuError as error:
        return [Check(_NAME, Verdict.FAIL, f"{found.path} names GPUs that cannot be read: {error.detail}", error.hint)]
    finally:
        source.close()


def _absent(uuid: str, mode: ComputeMode) -> Check:
    because = f"mpsd changed that of {uuid}, which cannot be read now; it was {mode}"
    return Check(_NAME, Verdict.FAIL, because, "see what nvidia-smi says of that GPU, and look again")


async def _of_gpu(source: GpuSource, gpu: Gpu, found: FoundModes, *, fix: bool) -> Check:
    """Look at one GPU that mpsd has changed, and give it its mode back where that is asked for."""
    name, before = f"{_NAME} of GPU {gpu.index}", found.by_gpu[gpu.uuid]
    usage = await source.usage(gpu)
    if isinstance(usage, Unknown):
        return Check(name, Verdict.FAIL, f"it cannot be read: {usage.reason}", "see nvidia-smi, and look again")
    now = usage.value.compute_mode
    if step(wanted=False, found=before, now=now, held=False) is Step.FORGET:
        if fix:
            found.forget(gpu.uuid)
        return Check(name, Verdict.OK, f"it is {now}, and not what mpsd set")
    if not fix:
        return Check(name, Verdict.FAIL, f"it was left {now} by an mpsd that found it {before}", _REMEDY)
    try:
        reading = await change_compute_mode(source, gpu, before)
    except ComputeModeError as error:
        return Check(name, Verdict.FAIL, error.detail, error.hint)
    if isinstance(reading, Known):
        found.forget(gpu.uuid)
        return Check(name, Verdict.OK, f"it was left {now} by an mpsd that found it {before}, and is that again")
    return Check(name, Verdict.FAIL, f"{reading.reason}", f"look again; or by hand: {command(gpu.index, before)}")
