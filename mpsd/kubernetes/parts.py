"""The common ground of all parts: settings, mpsd, the board of its GPUs, the log, and the end of the program.

One thread follows mpsd, and writes each change of the GPUs and their control daemons to the board; the others wait for
changes.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from mpsd.core.errors import ConfigurationError, DaemonNotReadyError, MpsdError
from mpsd.core.kubernetes import capacity, devices
from mpsd.core.kubernetes.capacity import Level, Use
from mpsd.core.kubernetes.devices import Gpu, Kind
from mpsd.core.kubernetes.settings import Settings
from mpsd.kubernetes.log import EventName, Log
from mpsd.kubernetes.mpsd_client import Mpsd
from mpsd.kubernetes.pod_reader import PodReader
from mpsd.system import clock

_LOOK: Final = 1.0
"""Seconds between two queries to mpsd: kubelet reports changes of the devices every 10 s."""


class Board:
    """The GPUs that are offered, and whether new work may start on them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._gpus: Mapping[str, Gpu] = {}
        self._version = 0
        self.is_leaving = False
        """Whether nothing is offered to new pods any more, because the program is about to end."""

    @property
    def gpus(self) -> Mapping[str, Gpu]:
        """The GPUs by UUID; the returned mapping does not change."""
        return self._gpus

    def gpu(self, uuid: str) -> Gpu:
        """Return a GPU. Raises DaemonNotReadyError."""
        if uuid in self._gpus:
            return self._gpus[uuid]
        raise DaemonNotReadyError(f"mpsd does not show GPU {uuid}", hint="see mpsctl gpus on the node")

    def put(self, gpus: Mapping[str, Gpu]) -> bool:
        """Replace the GPUs, and return whether they changed."""
        with self._changed:
            if gpus == self._gpus:
                return False
            self._gpus = dict(gpus)
            self._version += 1
            self._changed.notify_all()
            return True

    def leave(self) -> None:
        """Offer nothing to new pods any more."""
        with self._changed:
            self.is_leaving = True
            self._version += 1
            self._changed.notify_all()

    def await_gpus(self, seconds: float) -> None:
        """Wait until mpsd has reported its GPUs, at most this long: a program that has just started knows none."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._gpus), seconds)

    def wake(self) -> None:
        """Make all waiting threads check their conditions again."""
        with self._changed:
            self._changed.notify_all()

    def changes(self, is_over: Callable[[], bool], every: float | None = None) -> Iterator[Mapping[str, Gpu]]:
        """Yield the GPUs: at first, after each change, and after this many seconds without one, until `is_over`."""
        shown = -1
        while True:
            with self._changed:
                self._changed.wait_for(lambda: is_over() or self._version != shown, every)  # noqa: B023 - called here
                if is_over():
                    return
                shown, gpus = self._version, self._gpus
            yield gpus


class Program(NamedTuple):
    settings: Settings
    mpsd: Mpsd
    board: Board
    log: Log
    ended: threading.Event
    """Set when the program ends: all waits then end."""
    reader: PodReader


def program(settings: Settings, log: Log) -> Program:
    ended = threading.Event()
    return Program(settings, Mpsd(settings, ended), Board(), log, ended, PodReader())


class Part:
    """A part of the program."""

    def __init__(self, program: Program) -> None:
        self._settings, self._mpsd, self._board, self._log, self._ended, self._reader = program


class GpuFollower(Part):
    """The thread that writes the board."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._silent_since: float | None = None
        self._levels: dict[tuple[str, tuple[Kind, int]], Level] = {}

    def run(self) -> None:
        """Update the board each second, until the program ends.

        Raises ConfigurationError where the node cannot be offered as configured.
        """
        while not self._ended.is_set():
            try:
                self._show()
            except ConfigurationError:
                raise
            except MpsdError as error:
                self._miss(error)
            self._ended.wait(_LOOK)

    def _show(self) -> None:
        gpus = devices.offered([self._counted(*each) for each in self._mpsd.seen()], self._board.gpus)
        try:
            devices.check_node(gpus.values(), self._settings)
        except ConfigurationError as error:
            if not self._board.gpus:
                raise
            self._log.error(EventName.NODE_NOT_OFFERED, error)
            gpus = {uuid: gpu._replace(because=error.detail, kind="configuration") for uuid, gpu in gpus.items()}
        if self._silent_since is not None:
            self._silent_since = None
            self._log.info(EventName.MPSD_ANSWERS)
        self._put(devices.of_one_gpu(gpus, self._settings))

    def _counted(self, gpu: Gpu, use: Use | None) -> Gpu:
        """Return a GPU with what Kubernetes can count on: as before, while mpsd refuses all requests for it."""
        before = self._board.gpus.get(gpu.uuid, gpu)
        if use is None:
            return gpu._replace(counts=before.counts, numbers=before.numbers)
        if not gpu.because:
            now = clock.monotonic()
            for resource, found in capacity.counted(gpu, use, self._settings).items():
                level = self._levels.get((gpu.uuid, resource), Level(found))
                self._levels[gpu.uuid, resource] = level.follow(found, now, capacity.LASTING)
        counts = {resource: level.number for (uuid, resource), level in self._levels.items() if uuid == gpu.uuid}
        return gpu._replace(counts=counts, numbers=use.numbers)

    def _miss(self, error: MpsdError) -> None:
        now = clock.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            self._log.warning(EventName.MPSD_UNREACHABLE, error)
        if now - self._silent_since >= self._settings.unreachable_grace:
            self._put(devices.unreachable(self._board.gpus, error.detail))

    def _put(self, gpus: dict[str, Gpu]) -> None:
        before = self._board.gpus
        if not self._board.put(gpus):
            return
        for uuid, gpu in gpus.items():
            if before.get(uuid, gpu)._replace(numbers=gpu.numbers) != gpu or uuid not in before:
                log = self._log.warning if gpu.because else self._log.info
                log(
                    EventName.DEVICES_CHANGED,
                    gpu=uuid,
                    healthy=not gpu.because,
                    because=gpu.because or "mpsd grants leases on it",
                    mebibytes=gpu.mebibytes,
                    devices=list(gpu.counts.values()),
                )
