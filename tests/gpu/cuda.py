"""CUDA's driver API by ctypes on libcuda.so.1 alone: contexts on the first visible GPU, their memory, three kernels.

It needs no framework and no toolkit: libcuda comes with the driver, and compiles the text below for any GPU. Source of
every signature: NVIDIA's cuda.h. The names with a suffix (`_v2`) are those that the header's plain names stand for.
"""

import ctypes
import time
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Final, NoReturn

LIBRARY: Final = "libcuda.so.1"

BLOCKS: Final = 8192
"""Blocks of a launch: many times as many as the largest GPU runs at a time, so that the last ones hardly count."""

THREADS: Final = 256
"""Threads of a block."""

ROUNDS: Final = 8192
"""Rounds of a thread. A launch takes about 1 ms on a whole data centre GPU, and some 150 ms on one multiprocessor of
it.
"""

_PTX: Final = """
.version 6.0
.target sm_50
.address_size 64

// Every thread computes for so many rounds. Its block then marks the multiprocessor that it ran on: seen[%smid] != 0.
.visible .entry busy(.param .u64 seen, .param .u32 rounds)
{
    .reg .pred %p;
    .reg .u32 %left, %value, %at;
    .reg .u64 %to, %offset;
    ld.param.u64 %to, [seen];
    ld.param.u32 %left, [rounds];
    mov.u32 %value, %tid.x;
again:
    mad.lo.u32 %value, %value, 1664525, 1013904223;
    sub.u32 %left, %left, 1;
    setp.ne.u32 %p, %left, 0;
    @%p bra again;
    or.b32 %value, %value, 1;
    mov.u32 %at, %smid;
    mul.wide.u32 %offset, %at, 4;
    cvta.to.global.u64 %to, %to;
    add.u64 %to, %to, %offset;
    st.global.u32 [%to], %value;
    ret;
}

// Every thread waits until so many nanoseconds have passed: one launch that lasts, to be ended in its middle.
.visible .entry hold(.param .u64 nanoseconds)
{
    .reg .pred %p;
    .reg .u64 %length, %begin, %now, %passed;
    ld.param.u64 %length, [nanoseconds];
    mov.u64 %begin, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %begin;
    setp.lt.u64 %p, %passed, %length;
    @%p bra again;
    ret;
}

// A store to an address that nobody has: a fatal fault.
.visible .entry fault()
{
    .reg .u64 %to;
    mov.u64 %to, 16;
    st.global.u32 [%to], 1;
    ret;
}
"""
"""PTX of 2017, for GPUs since Maxwell (5.0): a driver compiles old PTX for every newer GPU."""

_MOST_MULTIPROCESSORS: Final = 4096
"""Marks that `busy` has room for: far more than the multiprocessors of any GPU."""

_MULTIPROCESSOR_COUNT: Final = 16
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT."""

_MPS_ENABLED: Final = 133
"""CU_DEVICE_ATTRIBUTE_MPS_ENABLED: 1 for a client of MPS, 0 outside (measured on 580); older drivers do not know it."""

_SIGNATURES: Final = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuCtxCreate_v2": [POINTER(c_void_p), c_uint, c_int],
    "cuCtxDestroy_v2": [c_void_p],
    "cuCtxSetCurrent": [c_void_p],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuDevicePrimaryCtxReset_v2": [c_int],
    "cuCtxSynchronize": [],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuLaunchKernel": [
        c_void_p, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_void_p, POINTER(c_void_p), POINTER(c_void_p)
    ],
    "cuMemGetInfo_v2": [POINTER(c_size_t), POINTER(c_size_t)],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemsetD32_v2": [c_uint64, c_uint, c_size_t],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
}  # fmt: skip
"""The functions in use, and the types of their arguments; each returns a CUresult."""


class CudaError(Exception):
    """A call returned something other than CUDA_SUCCESS."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function}: {name} ({code})")
        self.function, self.code, self.name = function, code, name


@dataclass(frozen=True, slots=True)
class Work:
    """The result of `busy` and `loop`."""

    rounds_per_second: float
    kernels: int
    multiprocessors: int
    """The number of different multiprocessors that it ran on."""


@dataclass(frozen=True, slots=True)
class Context:
    """A context, and its kernels."""

    handle: c_void_p
    busy: c_void_p
    hold: c_void_p
    fault: c_void_p
    held: list[c_uint64] = field(default_factory=list)
    """Its allocations."""


class Cuda:
    """The contexts of a process on the first visible GPU. Every method raises CudaError where a call fails.

    OSError from the constructor: there is no libcuda.so.1 here, and so no driver.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        for function, types in _SIGNATURES.items():
            entry = getattr(self._library, function)
            entry.argtypes, entry.restype = types, c_int
        self._contexts: list[Context] = []
        """The existing contexts, the current one last."""
        self._device = c_int()

    def init(self) -> None:
        """Initialise CUDA: a process that finds MPS connects to it here."""
        self._call("cuInit", 0)
        self._call("cuDeviceGet", byref(self._device), 0)

    def create(self) -> None:
        """Create one more context, with the kernels, and make it the current one."""
        handle = c_void_p()
        self._call("cuCtxCreate_v2", byref(handle), 0, self._device)
        self._contexts.append(self._with_kernels(handle))

    def destroy(self) -> None:
        """Destroy the current context; the context created before it becomes the current one."""
        self._call("cuCtxDestroy_v2", self._contexts.pop().handle)
        if self._contexts:
            self._call("cuCtxSetCurrent", self._contexts[-1].handle)

    def primary(self) -> None:
        """Make the primary context, which a program of CUDA's runtime has, the current one."""
        handle = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(handle), self._device)
        self._call("cuCtxSetCurrent", handle)
        self._contexts.append(self._with_kernels(handle))

    def reset(self) -> None:
        """Reset the primary context, which is the current one, like cudaDeviceReset, and retain it again."""
        self._contexts.pop()
        self._call("cuDevicePrimaryCtxReset_v2", self._device)
        self.primary()

    def _with_kernels(self, handle: c_void_p) -> Context:
        module, busy, hold, fault = c_void_p(), c_void_p(), c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), _PTX.encode())
        self._call("cuModuleGetFunction", byref(busy), module, b"busy")
        self._call("cuModuleGetFunction", byref(hold), module, b"hold")
        self._call("cuModuleGetFunction", byref(fault), module, b"fault")
        return Context(handle, busy, hold, fault)

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            self._fail(function, code)

    def _fail(self, function: str, code: int) -> NoReturn:
        name = c_char_p()
        self._library.cuGetErrorName(code, byref(name))  # leaves NULL for an unknown code
        raise CudaError(function, code, (name.value or b"unknown").decode())

    @property
    def driver(self) -> str:
        """The newest CUDA that the driver supports, such as `12.4`."""
        version = c_int()
        self._call("cuDriverGetVersion", byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    @property
    def name(self) -> str:
        name = ctypes.create_string_buffer(96)
        self._call("cuDeviceGetName", name, len(name), self._device)
        return name.value.decode()

    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors that CUDA reports to this process."""
        count = c_int()
        self._call("cuDeviceGetAttribute", byref(count), _MULTIPROCESSOR_COUNT, self._device)
        return count.value

    @property
    def inside(self) -> bool | None:
        """Whether this process is a client of MPS, as CUDA tells it; None where the driver cannot tell."""
        value = c_int()
        code = self._library.cuDeviceGetAttribute(byref(value), _MPS_ENABLED, self._device)
        return bool(value.value) if code == 0 else None

    def memory(self) -> tuple[int, int]:
        """Return the free bytes of device memory, and the total."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def alloc(self, size: int) -> None:
        self._contexts[-1].held.append(self._allocated(size))

    def free(self) -> None:
        """Free all allocations of the current context."""
        held = self._contexts[-1].held
        while held:
            self._call("cuMemFree_v2", held.pop())

    def busy(self, seconds: float) -> Work:
        """Keep the GPU busy for so long, after a quarter of that as warm-up: clocks rise with the work."""
        return self._worked(lambda passed: passed < seconds / 4, lambda: None, lambda passed: passed < seconds)

    def loop(self, started: Callable[[], None], goes_on: Callable[[], bool]) -> Work:
        """Keep the GPU busy while `goes_on` says so; `started` is called when the first kernel has ended."""
        return self._worked(lambda _: False, started, lambda _: goes_on())

    def _worked(
        self, warms_up: Callable[[float], bool], started: Callable[[], None], goes_on: Callable[[float], bool]
    ) -> Work:
        """Warm up, call `started`, and work, one kernel at least each; both are asked with the seconds passed."""
        seen = self._allocated(4 * _MOST_MULTIPROCESSORS)
        try:
            self._rounds(seen, warms_up)
            self._call("cuMemsetD32_v2", seen, 0, _MOST_MULTIPROCESSORS)
            started()
            rate, kernels = self._rounds(seen, goes_on)
            marks = (c_uint * _MOST_MULTIPROCESSORS)()
            self._call("cuMemcpyDtoH_v2", marks, seen, ctypes.sizeof(marks))
        finally:
            # After a fault nothing can be freed, and the error being raised says more than this one would.
            self._library.cuMemFree_v2(seen)
        return Work(rate, kernels, sum(map(bool, marks)))

    def hold(self, seconds: float, launched: Callable[[], None]) -> None:
        """Run a kernel that lasts so long, with a block on each multiprocessor; `launched` is called in its middle."""
        self._launch(self._contexts[-1].hold, self.multiprocessors, THREADS, c_uint64(int(seconds * 1e9)))
        launched()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the GPU; a pending error is raised here."""
        self._call("cuCtxSynchronize")

    def fault(self) -> None:
        """Store to an invalid address; raises CudaError, unless the GPU ignored it."""
        self._launch(self._contexts[-1].fault, 1, 1)
        self.synchronize()

    def leave(self) -> None:
        """End the use of CUDA: nothing is to be done, since the driver notices the end of the process."""

    def _allocated(self, size: int) -> c_uint64:
        pointer = c_uint64()
        self._call("cuMemAlloc_v2", byref(pointer), size)
        return pointer

    def _rounds(self, seen: c_uint64, goes_on: Callable[[float], bool]) -> tuple[float, int]:
        """Launch `busy` while this is so, once at least; return the rounds per second, and the launches."""
        launches, begin = 0, time.monotonic()
        while goes_on(passed := time.monotonic() - begin) or launches == 0:
            self._launch(self._contexts[-1].busy, BLOCKS, THREADS, seen, c_uint(ROUNDS))
            self.synchronize()
            launches += 1
        return launches * BLOCKS * THREADS * ROUNDS / passed, launches

    def _launch(self, kernel: c_void_p, blocks: int, threads: int, *parameters: c_uint64 | c_uint) -> None:
        pointers = (c_void_p * len(parameters))(*(ctypes.addressof(each) for each in parameters))
        self._call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, None, pointers, None)
