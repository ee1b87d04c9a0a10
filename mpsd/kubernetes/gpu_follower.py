"""The thread that follows mpsd: it writes each change of the GPUs and their control daemons to the board."""

import threading
from typing import Final

from mpsd.core.errors import ConfigurationError, MpsdError
from mpsd.core.kubernetes import devices
from mpsd.core.kubernetes.devices import Gpu
from mpsd.core.kubernetes.settings import Settings
from mpsd.kubernetes.board import Board
from mpsd.kubernetes.log import EventName, Log
from mpsd.kubernetes.mpsd_client import Mpsd
from mpsd.system import clock

_RETRY: Final = 0.5
"""Seconds until the next query to an mpsd that does not answer."""


class GpuFollower:
    """Follows the GPUs, from `start` until the program ends."""

    def __init__(self, settings: Settings, *, mpsd: Mpsd, board: Board, log: Log, ended: threading.Event) -> None:
        """`ended` is set when the program ends; this class sets it where the node cannot be offered as configured."""
        self._settings = settings
        self._mpsd = mpsd
        self._board = board
        self._log = log
        self._ended = ended
        self._silent_since: float | None = None
        self.failure: ConfigurationError | None = None
        """Why the node cannot be offered as configured."""

    def start(self) -> None:
        threading.Thread(target=self._follow, name="mpsd", daemon=True).start()

    def _follow(self) -> None:
        """Update the board after each event that mpsd logs."""
        after: int | None = None
        while not self._ended.is_set():
            try:
                if after is None:
                    after = self._mpsd.latest_event()
                self._show()
                after = self._mpsd.await_change(after)
            except ConfigurationError as error:
                self.failure = error
                self._ended.set()
            except MpsdError as error:
                after = None
                self._miss(error)
                self._ended.wait(_RETRY)

    def _show(self) -> None:
        gpus = devices.offered(self._mpsd.seen(), self._board.gpus)
        try:
            devices.check_node(gpus.values(), self._settings)
        except ConfigurationError as error:
            if not self._board.gpus:
                raise
            self._log.error(EventName.NODE_NOT_OFFERED, because=error.detail, hint=error.hint)
            gpus = {uuid: gpu._replace(because=error.detail) for uuid, gpu in gpus.items()}
        if self._silent_since is not None:
            self._silent_since = None
            self._log.info(EventName.MPSD_ANSWERS)
        self._put(gpus)

    def _miss(self, error: MpsdError) -> None:
        now = clock.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            self._log.warning(EventName.MPSD_UNREACHABLE, code=error.code, because=error.detail, hint=error.hint)
        if now - self._silent_since >= self._settings.unreachable_grace:
            self._put(devices.unreachable(self._board.gpus, error.detail))

    def _put(self, gpus: dict[str, Gpu]) -> None:
        before = self._board.gpus
        if not self._board.put(gpus):
            return
        for uuid, gpu in gpus.items():
            if before.get(uuid) != gpu:
                log = self._log.warning if gpu.because else self._log.info
                log(
                    EventName.DEVICES_CHANGED,
                    gpu=uuid,
                    healthy=not gpu.because,
                    because=gpu.because or "mpsd grants leases on it",
                    mebibytes=gpu.mebibytes,
                )
