"""The compute modes of the GPUs: recorded, then set where the settings require it, and restored later. See step()."""

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from mpsd.core import compute_mode, gpus
from mpsd.core.compute_mode import ComputeMode, ComputeModeStep, step
from mpsd.core.errors import ComputeModeError
from mpsd.core.events import EventName
from mpsd.core.model import Gpu, GpuUsage, Known, Reading, Unknown
from mpsd.core.settings import WantedComputeMode
from mpsd.daemon.record.log import Logger
from mpsd.system.files.encoding import DamagedError
from mpsd.system.gpus.gpu import GpuSource, change_compute_mode
from mpsd.system.gpus.saved_compute_modes import SavedComputeModes

_EXCLUSIVE: Final = ComputeMode.EXCLUSIVE_PROCESS
_NO_ROOM: Final = "free space on the file system of paths.state_dir, then: mpsctl reset gpu{index}"


class ComputeModes:
    """The compute mode of each GPU. `advance` is called with each reading, one at a time."""

    def __init__(self, source: GpuSource, found: SavedComputeModes, log: Logger) -> None:
        self._source = source
        self._saved = found
        self._log = log
        self._wanted = False
        self._because = ""
        self._held: set[str] = set()
        """GPUs seen in exclusive-process mode since the setting required it, they were found, and an operator last
        reset them."""
        self._refused: dict[str, tuple[str, str]] = {}
        """Why a GPU's mode could not be changed, with a remedy. mpsd retries only after an event that may help."""
        self._logged: dict[str, str] = {}
        """The last logged problem of each GPU."""

    def load(self) -> None:
        """Read the record of an earlier mpsd. A record that does not parse is set aside and logged."""
        try:
            try:
                self._saved.load()
            except DamagedError as error:
                aside = self._saved.set_aside()
                self._log_not_stored(f"{self._saved.path} cannot be parsed, and was moved to {aside}: {error}")
        except OSError as error:
            self._log_not_stored(f"{self._saved.path} cannot be read: {error.strerror}")

    def want(self, wanted: WantedComputeMode, because: str) -> None:
        """Set the wanted mode from now on. With `leave`, the saved modes are restored, with `because` as the reason."""
        exclusive = wanted is WantedComputeMode.EXCLUSIVE_PROCESS
        if exclusive != self._wanted:
            self._held.clear()
        self._wanted, self._because = exclusive, because
        self._refused.clear()

    def reset(self, gpu: str) -> None:
        """Try again on this GPU, on an operator's command."""
        self._held.discard(gpu)
        self._refused.pop(gpu, None)

    # -- reporting ----------------------------------------------------------------------------------------------------

    def trouble(self, gpu: Gpu, now: ComputeMode | None) -> tuple[str, str] | None:
        """Return why this mode keeps a GPU from being granted, with a remedy; None where it does not."""
        wanted, held = self._wanted_on(gpu), gpu.uuid in self._held
        trouble = compute_mode.trouble(index=gpu.index, wanted=wanted, now=now, held=held)
        if trouble is None or now is ComputeMode.PROHIBITED:
            return trouble
        return self._refused.get(gpu.uuid, trouble)

    def left_behind(self, gpu: Gpu) -> tuple[str, str] | None:
        """Return why a GPU's own mode is not restored although no other is wanted, with a remedy; None otherwise."""
        return None if self._wanted_on(gpu) else self._refused.get(gpu.uuid)

    def notes(self, there: Collection[str]) -> list[str]:
        """Return notes about the modes of the GPUs that are not `there`, by UUID."""
        found = self._saved.by_gpu
        return [
            f"{gpu} cannot be read now; mpsd has changed its compute mode, and will restore {found[gpu]}"
            for gpu in sorted(found.keys() - there)
        ]

    def _wanted_on(self, gpu: Gpu) -> bool:
        return self._wanted and gpus.unsupported(gpu) is None

    # -- changing -----------------------------------------------------------------------------------------------------

    async def advance(self, gpu: Gpu, usage: Reading[GpuUsage]) -> Reading[GpuUsage]:
        """Take the next step for a GPU that was just read, and return the reading after it."""
        # 1. A GPU that cannot be read may come back reset, together with its mode: nothing about it is remembered.
        # 2. A mode is taken or given back once: where that was refused, new settings or `reset` try again.
        # 3. A mode that is neither the found nor the wanted one is somebody else's: mpsd forgets what it found.
        if isinstance(usage, Unknown):
            self.reset(gpu.uuid)
            return usage
        now = usage.value.compute_mode
        if now is _EXCLUSIVE:
            self._held.add(gpu.uuid)
        found = self._saved.by_gpu.get(gpu.uuid)
        reading: Reading[ComputeMode | None] = Known(now)
        try:
            match step(wanted=self._wanted_on(gpu), found=found, now=now, held=gpu.uuid in self._held):
                case ComputeModeStep.TAKE if now is not None and gpu.uuid not in self._refused:
                    reading = await self._take(gpu, now)
                case ComputeModeStep.GIVE_BACK if found is not None and gpu.uuid not in self._refused:
                    reading = await self._give_back(gpu, found)
                case ComputeModeStep.FORGET:
                    because = f"its compute mode is {now}, which mpsd did not set"
                    self._log.info(EventName.COMPUTE_MODE_LEFT, **_of(gpu), mode=now, found=found, because=because)
                    self._forget(gpu)
                case _:
                    pass
        except ComputeModeError as error:
            self._refused[gpu.uuid] = error.detail, error.hint
        if isinstance(reading, Unknown):
            return reading
        self._log_trouble(gpu, reading.value)
        return Known(replace(usage.value, compute_mode=reading.value))

    async def _take(self, gpu: Gpu, now: ComputeMode) -> Reading[ComputeMode | None]:
        """Record the present mode, and only then change it. Raises ComputeModeError; the mode is then unchanged."""
        try:
            self._saved.note(gpu.uuid, now)
        except OSError as error:
            raise ComputeModeError(
                f"its compute mode {now} cannot be recorded in {self._saved.path}, so the mode was not"
                f" changed: {error.strerror}",
                hint=_NO_ROOM.format(index=gpu.index),
            ) from error
        try:
            reading = await change_compute_mode(self._source, gpu, _EXCLUSIVE)
        except ComputeModeError:
            self._forget(gpu)  # mpsd did not change the mode, so it must not restore one
            raise
        if isinstance(reading, Known):
            self._held.add(gpu.uuid)
            facts = {**_of(gpu), "mode": _EXCLUSIVE, "found": self._saved.by_gpu[gpu.uuid], "because": self._because}
            self._log.info(EventName.COMPUTE_MODE_SET, **facts)
        return reading

    async def _give_back(self, gpu: Gpu, found: ComputeMode) -> Reading[ComputeMode | None]:
        """Set the recorded mode, and only then delete the record. Raises ComputeModeError; the record then stays."""
        reading = await change_compute_mode(self._source, gpu, found)
        if isinstance(reading, Known):
            self._held.discard(gpu.uuid)
            self._log.info(EventName.COMPUTE_MODE_RESTORED, **_of(gpu), mode=found, because=self._because)
            self._forget(gpu)
        return reading

    def _forget(self, gpu: Gpu) -> None:
        self._refused.pop(gpu.uuid, None)
        try:
            self._saved.forget(gpu.uuid)
        except OSError as error:
            self._log_not_stored(f"GPU {gpu.index} cannot be removed from {self._saved.path}: {error.strerror}")

    def _log_trouble(self, gpu: Gpu, now: ComputeMode | None) -> None:
        """Log a problem with a GPU's mode, once."""
        because, _ = self.trouble(gpu, now) or self.left_behind(gpu) or ("", "")
        if because and because != self._logged.get(gpu.uuid):
            self._log.error(EventName.COMPUTE_MODE_TROUBLE, **_of(gpu), mode=now, because=because)
        self._logged[gpu.uuid] = because

    def _log_not_stored(self, because: str) -> None:
        self._log.error(EventName.COMPUTE_MODE_NOT_STORED, because=because)


def _of(gpu: Gpu) -> dict[str, object]:
    return {"index": gpu.index, "uuid": gpu.uuid}
