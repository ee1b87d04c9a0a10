"""A process that uses CUDA on a real GPU, like mpsd.simulator.client: `python -m tests.gpu.client`.

It describes its GPU in a line of JSON on stdout, and then answers each line of its stdin with one:

- `info`: the GPU, the driver, the multiprocessors that CUDA reports, and the free and the total memory
- `alloc SIZE`, `free`: allocate device memory; free all of it
- `alloc-until-refused`: as much as possible, in pieces of 64 MiB; the answer has the amount held, and the refusal
- `busy SECONDS`: work for so long; the answer has the rate, and the number of multiprocessors that it ran on
- `launch SECONDS`: run one kernel that lasts so long; one answer when it is launched, and one at its end
- `sync`: whether an error is pending
- `fault`: a store to an invalid address
- `create`, `destroy`: add a context, which becomes the current one; destroy the current one
- `primary`, `reset`: make the primary context of CUDA's runtime the current one; reset it, and retain it again
- `exit`, or the end of its stdin

An answer has `ok`, with the result, or the CUDA error by name and number, and the failed call. With `--probe` it only
says whether there is a usable GPU, and creates no context. With `--late` it first says that it is there, and then
carries out the lines: `init` initialises CUDA; the later ones need that, and a context.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from mpsd.core.units import parse_size
from tests.gpu.cuda import LIBRARY, Cuda, CudaError

PIECE: Final = 64 << 20
"""Bytes that `alloc-until-refused` requests at a time; it may stop so far below a limit."""


def _info(cuda: Cuda) -> dict[str, Any]:
    free, total = cuda.memory()
    return {
        "pid": os.getpid(),
        "gpu": cuda.name,
        "cuda": cuda.driver,
        "multiprocessors": cuda.multiprocessors,
        "free": free,
        "total": total,
    }


def _until_refused(cuda: Cuda) -> dict[str, Any]:
    held = 0
    while True:
        try:
            cuda.alloc(PIECE)
        except CudaError as error:
            return {"held": held, "refused": error.name}
        held += PIECE


_PLAIN: Final[dict[str, Callable[[Cuda], None]]] = {
    "free": Cuda.free,
    "sync": Cuda.synchronize,
    "fault": Cuda.fault,
    "init": Cuda.init,
    "create": Cuda.create,
    "destroy": Cuda.destroy,
    "primary": Cuda.primary,
    "reset": Cuda.reset,
}
"""The actions without a result."""


def _do(cuda: Cuda, line: str) -> dict[str, Any]:
    """Carry out a line, and return the result. Raises CudaError."""
    match line.split():
        case ["info"]:
            return _info(cuda)
        case ["alloc", size]:
            cuda.alloc(parse_size(size))
        case ["alloc-until-refused"]:
            return _until_refused(cuda)
        case ["busy", seconds]:
            work = cuda.busy(float(seconds))
            return {"rate": work.rounds_per_second, "multiprocessors": work.multiprocessors}
        case ["launch", seconds]:
            cuda.launch(float(seconds))
            _say({"ok": True})
            cuda.synchronize()
        case [plain] if plain in _PLAIN:
            _PLAIN[plain](cuda)
        case _:
            raise SystemExit(f"nothing that a client does: {line!r}")
    return {}


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _failed(error: CudaError) -> dict[str, Any]:
    return {"ok": False, "error": error.name, "code": error.code, "call": error.function}


def main() -> int:
    """Connect, and serve until the command to exit."""
    try:
        cuda = Cuda()
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
