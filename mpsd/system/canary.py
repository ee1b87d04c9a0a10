"""The canary: a client of mpsd's own that needs only libcuda and shows whether CUDA can be used through MPS.

`python -m mpsd.system.canary --alarm SECONDS [--as UID:GID]` becomes that user and prints `begins`. Then it initialises
CUDA, makes a context on the first GPU that it sees, and prints the result as a line of JSON: `ok` or the name and
number of the error and the call that failed, with `mps` where the driver has reported it. The parent must set a
deadline: in a wedge the canary prints nothing more. It launches no kernel, so it may be killed at any time (mps-facts
B4.3). It ends with its parent, and in any case SECONDS after it began: the next mpsd would take it for a client.

It becomes the user after all imports, since that user may not be able to read mpsd's files. Source of each signature:
NVIDIA's cuda.h. A name with a suffix (`_v2`) is the one that the header's plain name stands for.
"""

import ctypes
import json
import os
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
"""CU_DEVICE_ATTRIBUTE_MPS_ENABLED: "contexts created on this device will be shared via MPS". CUDA 12.1 and newer have
it."""

_UNKNOWN_ATTRIBUTE: Final = 1
"""CUDA_ERROR_INVALID_VALUE: the driver does not know the attribute."""


@dataclass(frozen=True, slots=True)
class CanaryProgram:
    """The program that runs as the canary: this module, or the simulator's client."""

    argv: tuple[str, ...] = (sys.executable, "-I", "-m", "mpsd.system.canary")
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


def _sharing(library: ctypes.CDLL, device: c_int) -> dict[str, bool]:
    """Return as `mps` whether contexts are made through MPS; return nothing where the driver does not report it."""
    enabled = c_int()
    try:
        _call(library, "cuDeviceGetAttribute", byref(enabled), c_int(_MPS_ENABLED), device)
    except _CudaError as error:
        if error.answer["code"] == _UNKNOWN_ATTRIBUTE:
            return {}
        raise
    return {"mps": bool(enabled.value)}


def _sing(seconds: int) -> dict[str, Any]:
    """Use CUDA, and return the result as the program prints it."""
    sharing: dict[str, bool] = {}
    try:
        library = ctypes.CDLL(_LIBRARY)
        device, context = c_int(), c_void_p()
        print(BEGINS, flush=True)  # noqa: T201 - this is a program
        signal.alarm(seconds)
        _call(library, "cuInit", c_int(0))
        _call(library, "cuDeviceGet", byref(device), c_int(0))
        sharing = _sharing(library, device)
        _call(library, "cuCtxCreate_v2", byref(context), c_int(0), device)
        _call(library, "cuCtxDestroy_v2", context)
    except OSError as error:
        return {"ok": False, "error": f"{_LIBRARY} cannot be loaded: {error}", "code": None, "call": "dlopen"}
    except _CudaError as error:
        return {**error.answer, **sharing}
    return {"ok": True, **sharing}


def become(user: str) -> None:
    """Become the user `UID:GID` for good, without supplementary groups.

    Raises OSError, and ValueError for a text of another form.
    """
    uid, gid = (int(each) for each in user.split(":"))
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _end_with_parent(seconds: int) -> None:
    """Have the kernel end this process when its parent ends, or after this time, also inside a call of libcuda.

    A change of the user clears the former. Source: PR_SET_PDEATHSIG(2const).
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Run the canary and return its exit status."""
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    if "--as" in options:
        become(options["--as"])
    seconds = int(options["--alarm"])
    _end_with_parent(seconds)
    answer = _sing(seconds)
    print(json.dumps({"pid": os.getpid(), **answer}), flush=True)  # noqa: T201 - this is a program
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
