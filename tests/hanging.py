"""Processes whose environment, arguments and maps never finish reading, as any user can have them.

`python -m tests.hanging DIRECTORY UID` becomes that user, and is a simulated client of MPS, without a context at first.
On SIGUSR1 it maps a file of a file system that does not answer. One of its threads reads a page of that file by
/proc/self/mem: the kernel then waits for the file system under the lock of the process's memory. Another one maps
memory: it waits for that lock, and so does whoever reads the environment of the process from then on.

Only the mount here takes root: a user with a user namespace can mount a file system of the user's own (FUSE). Since
Linux 4.17 the kernel does not read a page of a file as environment (CVE-2018-1120), so the lock is what remains
(measured on 6.18). Sources: the kernel's include/uapi/linux/fuse.h; mallopt(3), proc_pid_wchan(5).
"""

import ctypes
import mmap
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from mpsd.simulator import client
from tests.driven_program import DrivenProgram
from tests.harness import HANGING, wait_until

_INIT, _LOOKUP, _GETATTR, _OPEN = 26, 1, 3, 14
_WITHOUT_ANSWER: Final = frozenset({2, 15, 36, 42})
"""FUSE_FORGET, FUSE_READ, FUSE_INTERRUPT and FUSE_BATCH_FORGET: only the second is owed an answer."""

_HEAD: Final = struct.Struct("=IIQQIIIHH")
_SIZE: Final = 1 << 20
_ENOSYS: Final = 38

_HEAP_ALONE: Final = {
    "PYTHONMALLOC": "malloc",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
}
"""Has the process take all memory from one heap, and give none back."""
_WAITS: Final = frozenset({b"request_wait_answer", b"vm_mmap_pgoff"})
"""Functions of the kernel: for an answer of the file system, and for the lock to map memory."""
_PR_SET_DUMPABLE: Final = 4
_HEAP: Final = 64 << 20
"""Bytes that are enough for a simulated client."""


def _attributes(node: int) -> bytes:
    mode = 0o40755 if node == 1 else 0o100666
    return struct.pack("=6Q10I", node, _SIZE, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _serve(device: int) -> None:
    """Answer the kernel, but no read, until the file system is gone."""
    while True:
        try:
            request = os.read(device, 1 << 17)
        except OSError:
            return
        _, operation, unique, node, *_ = _HEAD.unpack_from(request)
        if operation in _WITHOUT_ANSWER:
            continue
        bodies = {
            _INIT: struct.pack("=4I2H2I2H8I", 7, 31, 0, 0, 0, 0, 4096, 1, 1, 0, *[0] * 8),
            _LOOKUP: struct.pack("=4Q2I", 2, 0, 3600, 3600, 0, 0) + _attributes(2),
            _GETATTR: struct.pack("=Q2I", 3600, 0, 0) + _attributes(node),
            _OPEN: struct.pack("=Q2I", 1, 0, 0),
        }
        body = bodies.get(operation, b"")
        error = 0 if operation in bodies else -_ENOSYS
        os.write(device, struct.pack("=IiQ", 16 + len(body), error, unique) + body)


def _keep_heap() -> None:
    """Have malloc take all of its memory now, so that nothing but the thread for that maps memory later."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    heap = libc.malloc(_HEAP)
    ctypes.memset(heap, 1, _HEAP)
    libc.free(ctypes.c_void_p(heap))


def _hang(file: Path) -> mmap.mmap:
    """Have one thread wait for a page of a file under the lock of the memory, and another one for that lock.

    The page must not be given back, since that would wait too.
    """
    descriptor = os.open(file, os.O_RDONLY)
    page = mmap.mmap(descriptor, mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    first, second = threading.Event(), threading.Event()

    def read() -> None:
        first.wait()
        with suppress(OSError):  # the file system is gone
            os.pread(memory, 1, address)

    reads = threading.Thread(target=read, daemon=True)
    map_memory = ctypes.CDLL(None).mmap  # lets other threads of Python run, as the module mmap does not
    new = None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    maps = threading.Thread(target=lambda: second.wait() and map_memory(*new), daemon=True)
    for thread in (reads, maps):
        thread.start()
    for thread, begins in ((reads, first), (maps, second)):
        begins.set()
        while not _waits(os.getpid(), thread.native_id):
            os.sched_yield()
    return page


def _waits(pid: int, thread: int | None) -> bool:
    """Return whether a thread waits for the file system, or to map memory."""
    return Path(f"/proc/{pid}/task/{thread}/wchan").read_bytes() in _WAITS


def main() -> None:
    directory, uid = sys.argv.pop(1), int(sys.argv.pop(1))
    file = Path(directory) / "page"
    Path("/proc/self/comm").write_bytes(HANGING.encode())
    os.setsid()
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)  # as a program of that user is
    _keep_heap()
    pages = list[mmap.mmap]()
    signal.signal(signal.SIGUSR1, lambda *_: pages.append(_hang(file)))
    client.main()


@contextmanager
def _file_system(directory: Path) -> Iterator[Callable[[], None]]:
    """Mount a file system that never brings a page; yield a function that ends it, and with it all waiting for it."""
    directory.mkdir()
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"hanging", os.fsencode(directory), b"fuse", 0, options) != 0:
        os.close(device)
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    server = os.fork()
    if server == 0:
        try:
            _serve(device)
        finally:
            os._exit(0)
    os.close(device)
    with ExitStack() as at_end:
        at_end.callback(libc.umount2, os.fsencode(directory), 2)  # MNT_DETACH
        at_end.callback(os.waitpid, server, 0)
        at_end.callback(os.kill, server, signal.SIGKILL)
        yield at_end.close


@contextmanager
def hanging(directory: Path, uid: int, variables: Mapping[str, str]) -> Iterator[DrivenProgram]:
    """Run a client of a user with these variables, which hangs from `hang` on.

    Not even SIGKILL ends it then before the end of its file system, which is mounted on `directory`.
    """
    environment = {**variables, **_HEAP_ALONE, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-P", "-m", "tests.hanging", str(directory), str(uid), "--late"]
    with _file_system(directory) as end, DrivenProgram(command, environment) as client:
        try:
            assert client.hello["ok"]
            yield client
        finally:
            end()


def hang(client: DrivenProgram) -> None:
    """Let nobody read a client any more."""
    client.process.send_signal(signal.SIGUSR1)

    def is_stuck() -> bool:
        threads = [int(each.name) for each in Path(f"/proc/{client.pid}/task").iterdir()]
        return sum(_waits(client.pid, each) for each in threads) == len(_WAITS)

    wait_until(is_stuck, what="nobody to be able to read it")


if __name__ == "__main__":
    main()
