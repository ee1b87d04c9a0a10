"""The canary: a client of mpsd's own that needs only libcuda and shows whether CUDA can be used through MPS.

`python -m mpsd.system.mps.canary --alarm SECONDS [--as UID:GID[:GROUP]]` becomes that user and prints `begins`. Then it
initialises CUDA, makes a context on the first GPU that it sees, and prints the result as a line of JSON: `ok` or the
name and number of the error and the call that failed, and `mps`, whether CUDA says that its contexts are of MPS (null
if it does not say). It stays until its stdin ends, so that its parent can ask the control daemon whether it is a
client. The parent must set a deadline: in a wedge the canary prints nothing more. It launches no kernel, so it may be
killed at any time. It ends with its parent, and in any case SECONDS after it began, or after its result: the next mpsd
would take it for a client.

It becomes the user after all imports, since that user may not be able to read mpsd's files. Source of each signature:
NVIDIA's cuda.h. A name with a suffix (`_v2`) is the one that the header's plain name stands for.
"""

import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int, c_void_p
from dataclasses import dataclass, field
from typing import Any, Final

BEGINS: Final = "begins"
"""The line that the program prints just before it initialises CUDA."""

_PR_SET_PDEATHSIG: Final = 1
"""Source: linux/prctl.h."""

_LIBRARY: Final = "libcuda.so.1"

_MPS_ENABLED: Final = 133
"""CU_DEVICE_ATTRIBUTE_MPS_ENABLED: whether contexts on the device are of MPS (1 inside and 0 outside, measured on
580)."""


@dataclass(frozen=True, slots=True)
class CanaryProgram:
    """The program that runs as the canary: this module, or the simulator's client."""

    argv: tuple[str, ...] = (sys.executable, "-I", "-m", "mpsd.system.mps.canary")
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that it gets in addition to those of every client."""


class _CudaError(Exception):
    """A CUDA call returned a code other than CUDA_SUCCESS."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(function, code, name)
        self.answer = {"ok": False, "error": name, "code": code, "call": function}


def _call(library: ctypes.CDLL, function: str, *arguments: object) -> None:
    code = getattr(library, function)(*arguments)
    if code == 0:
        return
    name = c_char_p()
    library.cuGetErrorName(c_int(code), byref(name))  # leaves NULL where it does not know the code
    raise _CudaError(function, code, (name.value or b"unknown").decode())


def _sing(seconds: int, context: c_void_p) -> dict[str, Any]:
    """Make this context, and return the result as the program prints it."""
    mps: bool | None = None
    try:
        library = ctypes.CDLL(_LIBRARY)
        device, value = c_int(), c_int()
        print(BEGINS, flush=True)  # noqa: T201 - this is a program
        signal.alarm(seconds)
        _call(library, "cuInit", c_int(0))
        _call(library, "cuDeviceGet", byref(device), c_int(0))
        if library.cuDeviceGetAttribute(byref(value), c_int(_MPS_ENABLED), device) == 0:
            mps = bool(value.value)
        _call(library, "cuCtxCreate_v2", byref(context), c_int(0), device)
    except OSError as error:
        return {"ok": False, "error": f"{_LIBRARY} cannot be loaded: {error}", "code": None, "call": "dlopen"}
    except _CudaError as error:
        return {**error.answer, "mps": mps}
    return {"ok": True, "mps": mps}


def become(user: str) -> None:
    """Become the user `UID:GID` for good, in no other group than those that follow (`UID:GID:GROUP`).

    Raises OSError, and ValueError for a text of another form.
    """
    uid, gid, *groups = (int(each) for each in user.split(":"))
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _end_with_parent(seconds: int) -> None:
    """Have the kernel end this process when its parent ends, or after this time, also inside a call of libcuda.

    A change of the user clears the former. Source: PR_SET_PDEATHSIG(2const). A parent that ended before it was set has
    closed stdin.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([0], [], [], 0)[0]:
        sys.exit(1)


def main(arguments: list[str]) -> int:
    """Run the canary and return its exit status."""
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    if "--as" in options:
        become(options["--as"])
    seconds = int(options["--alarm"])
    _end_with_parent(seconds)
    context = c_void_p()
    answer = _sing(seconds, context)
    print(json.dumps({"pid": os.getpid(), **answer}), flush=True)  # noqa: T201 - this is a program
    signal.alarm(seconds)
    os.read(0, 1)
    if answer["ok"]:
        ctypes.CDLL(_LIBRARY).cuCtxDestroy_v2(context)
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
