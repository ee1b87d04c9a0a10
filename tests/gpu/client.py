"""A process that uses CUDA on a real GPU, in the manner of mpsd.simulator.client: `python -m tests.gpu.client`.

It says on stdout, in a line of JSON, where it is, and then answers each line of its stdin with one:

- `info`: the GPU, the driver, the multiprocessors that CUDA tells of, and the memory that is free, and all there is
- `alloc SIZE`, `free`: device memory; all of it
- `alloc-until-refused`: as much as it gets, in pieces of 64 MiB; the answer has how much it holds, and the refusal
- `busy SECONDS`: work for so long; the answer has its rate, and on how many multiprocessors it ran
- `sync`: whether an error is waiting
- `fault`: a store to an address that nobody has
- `create`, `destroy`: one more context, which is the current one from then on; the current one is gone
- `primary`, `reset`: the primary context, as CUDA's runtime has it, is the current one; it is reset, and taken up anew
- `exit`, as does the end of its stdin

An answer has `ok`, and with it what there is to tell, or the CUDA error by name and number, and the call it came of.
With `--probe` it only says whether there is a GPU to use, and creates no context. With `--late` it says first that it
is there, and does what the lines say: `init` initialises CUDA, and what comes after needs that, and a context.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from mpsd.core.units import parse_size
from tests.gpu.cuda import LIBRARY, Cuda, CudaError

PIECE: Final = 64 << 20
"""Bytes that `alloc-until-refused` asks for at a time: so far below a limit it may stop."""


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
"""What is done and answered without more."""


def _do(cuda: Cuda, line: str) -> dict[str, Any]:
    """Do what a line says, and return what there is to tell. Raises CudaError."""
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
    """Connect, and serve until told to exit."""
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
