"""The fixes of `mpsctl doctor --fix`: none harms a running client, and a second run of any of them changes nothing."""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

from mpsd.core.compute_mode import ComputeModeStep, step
from mpsd.core.doctor.finding import Means, Mend
from mpsd.core.errors import ComputeModeError, GpuUnknownError
from mpsd.core.model import Known
from mpsd.core.settings import Settings
from mpsd.system import clock
from mpsd.system.doctor import disk, gpus, proc
from mpsd.system.files import rundir
from mpsd.system.files.rundir import RunDir
from mpsd.system.gpus.gpu import NvmlGpus, change_compute_mode
from mpsd.system.gpus.saved_compute_modes import SavedComputeModes
from mpsd.system.host.journal import Journal, entry
from mpsd.system.processes.foreign_reader import ForeignReader

_FIXED: Final = "doctor_fixed"


async def mend(settings: Settings, check: str, wanted: Mend) -> list[str]:
    """Apply a fix, record in the log each change that it made, and return the changes.

    Takes the lock, so that no mpsd runs meanwhile, and opens the log first, so that nothing changes where the log
    cannot be written. Raises AlreadyRunningError beside an mpsd, and MpsdError and OSError where it is impossible.
    """
    lock = RunDir.claim(settings)
    try:
        with _log(settings) as log:
            done = await _mend(settings, wanted)
            for did in done:
                _write_down(log, check, did)
    finally:
        lock.close()
    return done


async def _mend(settings: Settings, wanted: Mend) -> list[str]:
    match wanted.means:
        case Means.REMOVE:
            return [f"removed {path}" for path in await _free(settings, wanted.targets) if _remove(path)]
        case Means.GIVE_BACK:
            return await _give_back(settings, wanted.targets)


async def _free(settings: Settings, targets: Sequence[str]) -> list[Path]:
    """Return the targets that no process of MPS uses even now: one may have started before the lock was taken."""
    async with ForeignReader() as reader:
        found = await proc.processes((settings.daemon.control,), settings.paths.runtime_dir, reader)
    listened = disk.listened()
    had = {each.pipe_directory for each in found.value} if isinstance(found, Known) else None
    paths = map(Path, targets)
    return [
        path
        for path in paths
        if had is not None and str(path.parent) not in had and str(path.parent / "control") not in listened
    ]


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


async def _give_back(settings: Settings, uuids: Sequence[str]) -> list[str]:
    """Restore the compute modes that mpsd found on these GPUs.

    Raises GpuError; the record keeps every GPU that was not restored.
    """
    found = SavedComputeModes(rundir.saved_compute_modes(settings))
    found.load()
    done: list[str] = []
    there = gpus.find(settings)
    source = NvmlGpus(there.nvml if there else None)
    try:
        by_uuid = {gpu.uuid: gpu for gpu in (await source.inventory()).gpus}
        for uuid in uuids:
            before, gpu = found.by_gpu.get(uuid), by_uuid.get(uuid)
            if before is None or gpu is None:
                continue
            usage = await source.usage(gpu)
            if not isinstance(usage, Known):
                raise GpuUnknownError(f"GPU {gpu.index}: {usage.reason}", hint="see nvidia-smi, then try again")
            now = usage.value.compute_mode
            if step(wanted=False, found=before, now=now, held=False) is ComputeModeStep.FORGET:
                found.forget(uuid)
                done.append(
                    f"removed GPU {gpu.index} from {found.path}: its compute mode is {now}, which mpsd did not set"
                )
                continue
            reading = await change_compute_mode(source, gpu, before)
            if not isinstance(reading, Known):
                raise ComputeModeError(reading.reason, hint="try again")
            found.forget(uuid)
            done.append(f"restored the compute mode {before} of GPU {gpu.index}, which was {now}")
    finally:
        source.close()
    return done


def _log(settings: Settings) -> BinaryIO:
    """Open the file that records the fixes. Raises OSError."""
    path = settings.paths.log_dir / "doctor.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640), "wb")


def _write_down(log: BinaryIO, check: str, did: str) -> None:
    """Append a change as a line of JSON, as in mpsd's own log, and send it to the journal where there is one."""
    line = {
        "at": clock.now().isoformat(),
        "level": "info",
        "event": _FIXED,
        "check": check,
        "did": did,
        "uid": os.geteuid(),
    }
    log.write(json.dumps(line).encode() + b"\n")
    fields = {"MPSD_EVENT": _FIXED, "MPSD_CHECK": check, "MPSD_DID": did}
    with contextlib.closing(Journal()) as journal:
        journal.write(
            entry({"MESSAGE": f"{_FIXED} {check}: {did}", "PRIORITY": "6", "SYSLOG_IDENTIFIER": "mpsctl", **fields})
        )
