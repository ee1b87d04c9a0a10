"""The clock, temperature and power of a GPU, read through NVML once a second while other things are measured."""

import contextlib
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

import pynvml

INTERVAL: Final = 1.0
"""Seconds between two readings."""

DIFFERENT: Final = 0.005
"""The part by which the median clocks of two sides differ before a row says so: half of what `within 1 %` claims."""


class Reading(NamedTuple):
    """One reading."""

    clock: float
    """Of the multiprocessors, in MHz."""
    temperature: float
    """Degrees Celsius."""
    power: float
    """Watts."""


class Sampler:
    """Readings through a `with` block, each with the side that was measured at that moment."""

    def __init__(self, read: Callable[[], Reading | None], interval: float = INTERVAL) -> None:
        """Take readings by this function, which returns None where the GPU gives none."""
        self._interval = interval
        self.readings: list[tuple[str, Reading]] = []
        """In the order of time; the name is that of `during`, empty between blocks."""
        self._read = read
        self._during = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="clocks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(self._interval):
            during, reading = self._during, self._read()
            if reading is not None:
                self.readings.append((during, reading))

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Name the readings of this time."""
        self._during = name
        try:
            yield
        finally:
            self._during = ""

    def clocks(self, name: str) -> list[float]:
        """Return the clocks that were read while this was measured."""
        return [reading.clock for during, reading in self.readings if during == name]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, after the reading that is under way."""
        self._ended.set()
        self._thread.join()


@contextlib.contextmanager
def of_gpu(uuid: str) -> Iterator[Callable[[], Reading | None]]:
    """Open NVML, which also keeps the driver's state of the GPU, and yield the function that reads this GPU.

    Raises NVMLError where NVML does not know the GPU.
    """
    pynvml.nvmlInit()
    try:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)

        def read() -> Reading | None:
            try:
                return Reading(
                    pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
                    pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
                    pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
                )
            except pynvml.NVMLError:
                return None

        yield read
    finally:
        pynvml.nvmlShutdown()


def difference(ones: Sequence[float], others: Sequence[float]) -> float | None:
    """Return by which part the median clock of one side is above that of the other; None where one has no readings."""
    if not ones or not others:
        return None
    return statistics.median(ones) / statistics.median(others) - 1
