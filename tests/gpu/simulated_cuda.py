"""CUDA of a process on a simulated GPU (mpsd.simulator), with the methods and the errors of tests.gpu.cuda.

So the programs and the tests of a real GPU run where there is none, and cannot rot. A simulated GPU obeys the limits of
MPS exactly: a rate is proportional to the multiprocessors, and clients do not slow each other down. Nothing that is
seen here is a fact about MPS.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mpsd.simulator.cuda_process import CudaProcess, FailedError
from mpsd.simulator.devices import MEMORY, VARIABLE, Device
from tests.gpu.cuda import CudaError, Work

_KERNEL: Final = 0.01
"""Seconds of a kernel of `busy` and `loop`."""

_OWN: Final = 145 << 20
"""Bytes of its limit that a context takes for CUDA itself (measured on 580, an H200, with 25 % of the threads)."""

_NOT_INITIALIZED: Final = 3
"""CUDA_ERROR_NOT_INITIALIZED."""


class SimulatedCuda:
    """The contexts of a process on the first simulated GPU that it sees. They raise CudaError as those of Cuda do."""

    name = "Simulated GPU"
    driver = "simulated"

    def __init__(self) -> None:
        self._process = CudaProcess()
        self._pid = os.getpid()

    @contextmanager
    def _calling(self, function: str) -> Iterator[None]:
        """Give the error of the simulated process to the function of CUDA's that would return it."""
        if os.getpid() != self._pid:  # a fork loses CUDA (measured on 580)
            raise CudaError(function, _NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED")
        try:
            yield
        except FailedError as failed:
            raise CudaError(function, int(failed.error), failed.error.symbol) from failed

    def init(self) -> None:
        with self._calling("cuInit"):
            self._process.init()

    def create(self) -> None:
        with self._calling("cuCtxCreate_v2"):
            self._process.context()
            self._take()

    def _take(self) -> None:
        """Take the memory of a new context; without it, there is no context."""
        try:
            self._process.alloc(_OWN)
        except FailedError:
            self._process.destroy(self._process.current().number)
            raise

    def destroy(self) -> None:
        with self._calling("cuCtxDestroy_v2"):
            self._process.destroy(self._process.current().number)

    def primary(self) -> None:
        with self._calling("cuDevicePrimaryCtxRetain"):
            self._process.current()
            self._take()

    def reset(self) -> None:
        with self._calling("cuDevicePrimaryCtxReset_v2"):
            self._process.reset()
        self.primary()

    @property
    def inside(self) -> bool | None:
        return self._process.server is not None

    @property
    def multiprocessors(self) -> int:
        with self._calling("cuDeviceGetAttribute"):
            return self._process.current().pinned.multiprocessors

    def memory(self) -> tuple[int, int]:
        with self._calling("cuMemGetInfo_v2"):
            pinned = self._process.current().pinned
        device = Device(Path(os.environ[VARIABLE]), pinned.gpu)
        free = MEMORY - sum(each.memory for each in device.processes().values())
        return free if pinned.memory is None else min(free, pinned.memory - self._process.allocated), MEMORY

    def alloc(self, size: int) -> None:
        with self._calling("cuMemAlloc_v2"):
            self._process.alloc(size)

    def free(self) -> None:
        with self._calling("cuMemFree_v2"):
            self._process.free(self._process.current().allocated - _OWN)

    def busy(self, seconds: float) -> Work:
        """Keep the GPU busy for so long; there is no warm-up."""
        return self._worked(lambda passed: passed < seconds)

    def loop(self, started: Callable[[], None], goes_on: Callable[[], bool]) -> Work:
        self._worked(lambda _: False)
        started()
        return self._worked(lambda _: goes_on())

    def _worked(self, goes_on: Callable[[float], bool]) -> Work:
        """Run kernels while this is so, one at least; the rate is that of its limits, in seconds of the whole GPU."""
        begin, kernels = time.monotonic(), 0
        with self._calling("cuCtxSynchronize"):
            pinned = self._process.current().pinned
            while not kernels or goes_on(time.monotonic() - begin):
                self._process.compute(_KERNEL * pinned.rate)
                kernels += 1
        return Work(pinned.rate, kernels, pinned.multiprocessors)

    def hold(self, seconds: float, launched: Callable[[], None]) -> None:
        with self._calling("cuCtxSynchronize"):
            self._process.compute(seconds * self._process.current().pinned.rate, launched)

    def synchronize(self) -> None:
        with self._calling("cuCtxSynchronize"):
            self._process.sync()

    def fault(self) -> None:
        with self._calling("cuCtxSynchronize"):
            self._process.fault()

    def leave(self) -> None:
        """Say goodbye to the server, as the driver does at the end of a process that was not killed."""
        self._process.leave()
