"""A process that uses CUDA on a real GPU, like mpsd.simulator.client: `python -m tests.gpu.client`.

It describes its GPU in a line of JSON on stdout, and then answers each line of its stdin with one:

- `info`: the GPU, the driver, the multiprocessors that CUDA reports, the free and the total memory, and `mps`: whether
  it is a client of MPS, as CUDA tells it (null: the driver does not know)
- `alloc SIZE`, `free`: allocate device memory; free all of it
- `alloc-until-refused`: as much as possible, in pieces of 64 MiB; the answer has the amount held, and the refusal
- `busy SECONDS`: work for so long; the answer has the rate, and the numbers of kernels and of multiprocessors
- `latency COUNT`: launch the shortest kernel and await it, so often; the answer has the quantiles of the time in ms
- `loop`: work until the next line comes; one answer when the first kernel has ended, and one at the end, as of `busy`
- `launch SECONDS`: run one kernel that lasts so long; one answer when it is launched, and one at its end
- `sync`: whether an error is pending
- `fault`: a store to an invalid address
- `create`, `destroy`: add a context, which becomes the current one; destroy the current one
- `primary`, `reset`: make the primary context of CUDA's runtime the current one; reset it, and retain it again
- `fork`: the errors of cuInit and of a new context in a child that was forked now
- `exit`, or the end of its stdin

An answer has `ok`, with the result, or the CUDA error by name and number, and the failed call. With `--probe` it only
says whether there is a usable GPU, and creates no context. With `--late` it first says that it is there, and then
carries out the lines: `init` initialises CUDA; the later ones need that, and a context. It ignores SIGINT, which a
terminal sends to all programs: who started it ends it, after its kernel.

Where the environment names simulated GPUs (MPSD_SIMULATED_GPUS), its CUDA is that of the simulator.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any, Final

from mpsd.core.units import parse_size
from mpsd.simulator.devices import VARIABLE
from tests.gpu.comparing.estimates import quantile
from tests.gpu.cuda import LIBRARY, Cuda, CudaError, Work
from tests.gpu.simulated_cuda import SimulatedCuda

AnyCuda = Cuda | SimulatedCuda

PIECE: Final = 64 << 20
"""Bytes that `alloc-until-refused` requests at a time; it may stop so far below a limit."""


def _info(cuda: AnyCuda) -> dict[str, Any]:
    free, total = cuda.memory()
    return {
        "pid": os.getpid(),
        "gpu": cuda.name,
        "cuda": cuda.driver,
        "multiprocessors": cuda.multiprocessors,
        "free": free,
        "total": total,
        "mps": cuda.inside,
    }


def _until_refused(cuda: AnyCuda) -> dict[str, Any]:
    held = 0
    while True:
        try:
            cuda.alloc(PIECE)
        except CudaError as error:
            return {"held": held, "refused": error.name}
        held += PIECE


_PLAIN: Final = ("free", "fault", "init", "create", "destroy", "primary", "reset")
"""The actions without a result: methods of Cuda."""


def _more() -> bool:
    """Return whether another line is there: the program that drives a client sends one at a time."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _done(work: Work) -> dict[str, Any]:
    return {"rate": work.rounds_per_second, "kernels": work.kernels, "multiprocessors": work.multiprocessors}


QUANTILES: Final = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


def _latency(cuda: AnyCuda, count: int) -> dict[str, Any]:
    times = list[float]()
    for _ in range(count):
        begin = time.perf_counter_ns()
        cuda.hold(0.0, lambda: None)
        times.append((time.perf_counter_ns() - begin) / 1e6)
    times.sort()
    return {name: quantile(times, part) for name, part in QUANTILES.items()}


def _forked(cuda: AnyCuda) -> dict[str, Any]:
    """Try CUDA in a forked child, and return the names of its errors."""
    source, sink = os.pipe()
    if os.fork() == 0:
        errors: list[str] = []
        for call in (cuda.init, cuda.create):
            errors.append("works")
            with contextlib.suppress(Exception):
                try:
                    call()
                except CudaError as error:
                    errors[-1] = error.name
        os.write(sink, " and ".join(errors).encode())
        os._exit(0)
    os.close(sink)
    with open(source, encoding="utf-8") as said:  # noqa: PTH123 - it is a descriptor
        answer = said.read()
    os.wait()
    return {"child": answer}


_ASKED: Final = {"info": _info, "alloc-until-refused": _until_refused, "fork": _forked}
"""The actions without an argument, by name."""


def _do(cuda: AnyCuda, line: str) -> dict[str, Any]:
    """Carry out a line, and return the result. Raises CudaError."""
    match line.split():
        case ["alloc", size]:
            cuda.alloc(parse_size(size))
        case ["busy", seconds]:
            return _done(cuda.busy(float(seconds)))
        case ["latency", count]:
            return _latency(cuda, int(count))
        case ["loop"]:
            return _done(cuda.loop(lambda: _say({"ok": True}), lambda: not _more()))
        case ["launch", seconds]:
            cuda.hold(float(seconds), lambda: _say({"ok": True}))
        case ["sync"]:
            cuda.synchronize()
        case [asked] if asked in _ASKED:
            return _ASKED[asked](cuda)
        case [plain] if plain in _PLAIN:
            getattr(cuda, plain)()
        case _:
            raise SystemExit(f"nothing that a client does: {line!r}")
    return {}


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _failed(error: CudaError) -> dict[str, Any]:
    return {"ok": False, "error": error.name, "code": error.code, "call": error.function}


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        cuda: AnyCuda = SimulatedCuda() if VARIABLE in os.environ else Cuda()
        if sys.argv[1:] == ["--late"]:
            _say({"ok": True, "pid": os.getpid()})
        else:
            cuda.init()
            if sys.argv[1:] == ["--probe"]:
                _say({"ok": True})
                return 0
            cuda.create()
            _say({"ok": True, **_info(cuda)})
    except OSError as error:
        _say({"ok": False, "error": f"{LIBRARY} cannot be loaded: {error}", "code": None, "call": "dlopen"})
        return 1
    except CudaError as error:
        _say(_failed(error))
        return 1
    for line in sys.stdin:
        if line.strip() == "exit":
            break
        try:
            answer = {"ok": True, **_do(cuda, line)}
        except CudaError as error:
            answer = _failed(error)
        _say(answer)
    cuda.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
