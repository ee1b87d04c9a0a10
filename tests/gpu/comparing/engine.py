"""The work of a client, which the worker times: what every engine offers, and the one that needs no framework.

Work has a name. The engine of PyTorch (torch_engine) has `matmul`, `copy`, `short` and `decode:N`, a decoder with N
requests. The other one, on libcuda or on the simulator, has `integer`, a kernel of about a millisecond, and `short`.
Both have `least`, the shortest kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tests.gpu.cuda import LIBRARY, Cuda, CudaError
from tests.gpu.simulated_cuda import SimulatedCuda

UNITS: Final = {
    "matmul": "products/s",
    "copy": "GiB/s",
    "short": "kernels/s",
    "integer": "kernels/s",
    "decode": "tokens/s",
}
"""The units of rates, by the name of the work without its number."""

_SHORT: Final = 1e-5
"""Seconds of a short kernel without a framework."""


class FailedError(Exception):
    """CUDA failed; the text is its error."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """Work that is under way, or that begins when it is awaited."""

    amount: float
    """In the work's unit."""
    wait: Callable[[], object]
    """Returns when it is done. Raises FailedError."""


class Engine(Protocol):
    """CUDA in a process that has a context. Every method raises FailedError."""

    by: str
    """Its name, for the table."""

    def describe(self) -> dict[str, Any]:
        """Return `mps`, whether it is a client of MPS, the `multiprocessors`, and `free` and `total` memory in bytes.

        `mps` is None where CUDA does not say.
        """

    def prepare(self, work: str) -> None:
        """Make what this work needs, and do it once or twice."""

    def drop(self) -> None:
        """Free what was made for all work."""

    def submit(self, work: str) -> Submitted:
        """Begin a step of this work."""

    def hold(self, seconds: float, launched: Callable[[], None]) -> None:
        """Run one kernel that lasts so long; `launched` is called in its middle."""

    def leave(self) -> None:
        """End the use of CUDA."""


class PlainEngine:
    """The engine without a framework; its kernels are awaited one by one."""

    def __init__(self, cuda: Cuda | SimulatedCuda) -> None:
        """Make a context. Raises FailedError."""
        self.by = "libcuda" if isinstance(cuda, Cuda) else "simulated"
        self._cuda = cuda
        self._do(cuda.init)
        self._do(cuda.create)

    @staticmethod
    def _do(what: Callable[[], object]) -> None:
        try:
            what()
        except CudaError as error:
            raise FailedError(str(error)) from error

    def describe(self) -> dict[str, Any]:
        free, total = self._cuda.memory()
        multiprocessors = self._cuda.multiprocessors
        return {"mps": self._cuda.inside, "multiprocessors": multiprocessors, "free": free, "total": total}

    def prepare(self, work: str) -> None:
        self.submit(work).wait()

    def drop(self) -> None:
        """Do nothing: no work has much memory."""

    def submit(self, work: str) -> Submitted:
        match work:
            case "integer":
                return Submitted(1, lambda: self._do(self._cuda.work))
            case "short" | "least":
                seconds = _SHORT if work == "short" else 0.0
                return Submitted(1, lambda: self.hold(seconds, lambda: None))
        raise FailedError(f"no work {work!r} without torch")

    def hold(self, seconds: float, launched: Callable[[], None]) -> None:
        self._do(lambda: self._cuda.hold(seconds, launched))

    def leave(self) -> None:
        self._cuda.leave()


def made(name: str) -> Engine:
    """Return the engine of this name: `simulated`, `libcuda` or `torch`. Raises FailedError."""
    match name:
        case "simulated":
            return PlainEngine(SimulatedCuda())
        case "libcuda":
            try:
                return PlainEngine(Cuda())
            except OSError as error:
                raise FailedError(f"{LIBRARY} cannot be loaded: {error}") from error
        case "torch":
            from tests.gpu.comparing.torch_engine import TorchEngine  # noqa: PLC0415 - most machines have no torch

            return TorchEngine()
    raise SystemExit(f"no engine {name!r}")
