"""What NVIDIA's driver says inside this process: whether CUDA is initialised, and whether it is under MPS.

The driver library is called only where the program has loaded it, and is neither loaded nor initialised here: either
would fix the limits of this process. Source of each signature and number: NVIDIA's cuda.h.
"""

import os
from ctypes import CDLL, byref, c_int
from typing import Final

_LIBRARY: Final = "libcuda.so.1"

_NOT_INITIALIZED: Final = 3
"""CUDA_ERROR_NOT_INITIALIZED, which every function of the driver returns before cuInit. Source: NVIDIA, CUDA Driver
API, "Initialization". A process that was forked after its parent called cuInit gets it too, and can never use CUDA."""

_MPS_ENABLED: Final = 133
"""CU_DEVICE_ATTRIBUTE_MPS_ENABLED: whether contexts on the device are of MPS (1 inside and 0 outside, measured on
580). Older drivers return an error."""


def is_initialised() -> bool:
    """Tell whether CUDA is initialised in this process, by the answer of the driver."""
    library = _loaded()
    return library is not None and _is_initialised(library)


def is_under_mps() -> bool | None:
    """Tell whether the contexts of this process are of MPS; None where CUDA is not initialised, or does not say.

    It is asked about the first GPU that the process sees.
    """
    library, device, value = _loaded(), c_int(), c_int()
    if library is None or not _is_initialised(library) or library.cuDeviceGet(byref(device), c_int(0)) != 0:
        return None
    if library.cuDeviceGetAttribute(byref(value), c_int(_MPS_ENABLED), device) != 0:
        return None
    return bool(value.value)


def _loaded() -> CDLL | None:
    """Return the driver library that this process has loaded, by whatever path; None where it has not."""
    try:
        return CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def _is_initialised(library: CDLL) -> bool:
    return int(library.cuDeviceGetCount(byref(c_int()))) != _NOT_INITIALIZED
