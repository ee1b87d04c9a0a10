"""The simulator's client: a process that uses CUDA on a simulated GPU, through MPS or, where it finds none, without.

`python -m mpsd.simulator.client [--late]` starts one. Like a CUDA program it takes everything from its environment
(CUDA_MPS_PIPE_DIRECTORY, CUDA_VISIBLE_DEVICES, its own limits), keeps for good the limits that it gets when it connects
or makes a context (`mps_facts.Binds`), and *fails open*: where it reaches no control daemon it runs outside MPS, on the
whole GPU, without a message (NVIDIA's man page; NVG: "nothing reports an error"). Only a GPU in compute mode
exclusive-process refuses it.

With `--alarm SECONDS [--as UID:GID[:GROUP]]` it is the canary of a simulated node, with the interface of
`mpsd.system.mps.canary`.

It initialises CUDA, makes its primary context, and prints its place and its limits as a line of JSON on stdout; with
`--late` it does neither, and prints only its pid. Then it answers each line of its stdin with one line:

- `init`: initialise CUDA, which connects the client to MPS
- `context`: make a context, which becomes the current one; the answer has its number, its limits, and `total`,
  the memory of the whole GPU
- `destroy NUMBER`: destroy a context
- `reset`: drop the primary context; the next use makes it anew
- `setenv NAME VALUE`: set a variable of its own, in os.environ only, which /proc/PID/environ never shows
- `alloc SIZE`, `free [SIZE]`: allocate and free device memory, in units of mpsd; `free` without a size frees all of it
- `framework FRACTION`: allocate this part of the whole GPU's memory, as programs do that size themselves by
  cudaMemGetInfo's total, which a pinned limit does not lower (NVG)
- `compute SECONDS`: run a kernel that takes this time on the whole GPU, and longer on a part of it
- `launch SECONDS`: the same, with an additional answer as soon as the kernel is in flight
- `loop SECONDS`: run such kernels one after the other until the next line comes; one answer when the first is in
  flight, and one at the end with their number
- `sync`: report a pending error, as cudaDeviceSynchronize does
- `fault`: cause a fatal fault of the GPU, such as an illegal address
- `wedge`: have the end of this client, of whatever kind, leave a server that serves no client, and lists this one if
  it was killed in mid-kernel
- `ignore SIGNAL`: ignore a signal such as TERM
- `catch SIGNAL`: exit at once when the signal comes, even during a kernel, as programs in Go and Java do
- `obey SIGNAL`: exit with status 0 when the signal comes and the kernel has ended, after a goodbye to the server
- `exit [STATUS]`: exit, as at the end of stdin

An answer has `ok`, and with it the result, or the CUDA error by name and number. An error after which CUDA cannot
continue stays: every later call returns it. On a terminal the client has a prompt and `help`, and answers in words.
"""

import json
import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, Final, NoReturn

from mpsd.core.errors import InvalidRequestError
from mpsd.core.units import format_size, parse_size
from mpsd.simulator import launch
from mpsd.simulator.cuda import CudaError
from mpsd.simulator.cuda_process import CudaProcess, FailedError, described
from mpsd.simulator.devices import MEMORY


def program(*, late: bool = False) -> tuple[str, ...]:
    """Return the command line that starts a client, wherever and however mpsd is installed."""
    return (*launch.program("client"), *(["--late"] if late else []))


_PR_SET_PDEATHSIG: Final = 1
"""Source: linux/prctl.h."""

PROMPT: Final = "gpu> "

_HELP: Final = """\
alloc SIZE        allocate device memory, such as alloc 1GiB
free [SIZE]       free some of it, or all
compute SECONDS   run a kernel that takes so long on the whole GPU
fault             cause a fatal fault of the GPU
exit              end this client"""


def _say(message: Mapping[str, Any]) -> None:
    sys.stdout.write(f"{_in_words(message) if _is_on_a_terminal() else json.dumps(message)}\n")
    sys.stdout.flush()


def _is_on_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _in_words(message: Mapping[str, Any]) -> str:
    """Describe an answer in words."""
    match message:
        case {"help": said}:
            text = f"{said}"
        case {"ok": False, "error": error, "code": code}:
            text = f"CUDA error {code}: {error}"
        case {"ok": False, "error": error}:
            text = f"{error}; try: help"
        case {"mps": mps, "pid": process, "active_thread_percentage": threads, "memory": memory}:
            where = f"a client of MPS server {message['server']}" if mps else "a process outside MPS, without limits"
            text = f"pid {process} is {where}: {threads:g} % of the threads, {format_size(memory)}"
        case {"allocated": size}:
            text = f"{format_size(size)} of device memory allocated"
        case {"seconds": seconds}:
            text = f"the kernel took {seconds:.2f} s"
        case _:
            text = ", ".join(f"{name} {value}" for name, value in message.items() if name != "ok") or "ok"
    return text


class _Stopped(Exception):  # noqa: N818 - no error: it was asked to stop
    """A signal with `obey` has come."""


class _Signals:
    """The reactions to signals that commands have set."""

    def __init__(self) -> None:
        self._came = False
        self._busy = False
        # A signal that comes just before a wait begins would otherwise not end it, since Python handles it afterwards.
        self._wakes, sink = os.pipe()
        os.set_blocking(sink, False)
        signal.set_wakeup_fd(sink)

    def wait_for_input(self) -> None:
        """Wait until stdin is readable, or a signal comes that Python handles."""
        select.select([0, self._wakes], [], [])

    def obey(self, number: signal.Signals) -> None:
        """Exit when the signal comes and no kernel is in flight."""
        signal.signal(number, self._take)

    @staticmethod
    def catch(number: signal.Signals) -> None:
        """Exit at once when the signal comes."""
        signal.signal(number, lambda *_: os._exit(128 + number))

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True
        if not self._busy:
            raise _Stopped

    def compute(self, cuda: CudaProcess, work: float, *, first: bool = False) -> float:
        """Run a kernel to its end; print that it is in flight if it is the `first`.

        Raises FailedError, and _Stopped when a signal came meanwhile.
        """
        self._busy = True
        try:
            return cuda.compute(work, (lambda: _say({"ok": True})) if first else None)
        finally:
            self._busy = False
            if self._came:  # also where an error ended the kernel
                raise _Stopped


class _Input:
    """The lines of stdin."""

    def __init__(self, signals: _Signals) -> None:
        self._signals = signals
        self._text = b""

    @property
    def waits(self) -> bool:
        """Whether more input is waiting."""
        return bool(self._text or select.select([0], [], [], 0)[0])

    def lines(self) -> Iterator[str]:
        """Yield the lines until the end."""
        while True:
            while b"\n" in self._text:
                line, _, self._text = self._text.partition(b"\n")
                yield line.decode()
            if _is_on_a_terminal():
                sys.stdout.write(PROMPT)
                sys.stdout.flush()
            self._signals.wait_for_input()
            if not (more := os.read(0, 4096)):
                return
            self._text += more


def _failed(error: CudaError) -> dict[str, Any]:
    return {"ok": False, "error": error.symbol, "code": int(error)}


def _where(cuda: CudaProcess) -> dict[str, Any]:
    cuda.init()
    return {"pid": os.getpid(), "mps": cuda.server is not None, "server": cuda.server}


def _loop(cuda: CudaProcess, signals: _Signals, stdin: _Input, work: float) -> dict[str, Any]:
    kernels = 0
    while not kernels or not stdin.waits:
        signals.compute(cuda, work, first=not kernels)
        kernels += 1
    return {"kernels": kernels}


def _execute(cuda: CudaProcess, signals: _Signals, stdin: _Input, verb: str, arguments: list[str]) -> dict[str, Any]:  # noqa: C901, PLR0911, PLR0912 - one case for each verb
    """Execute one line and return its answer. Raises FailedError, and ValueError for an invalid line."""
    match verb, arguments:
        case "init", []:
            return _where(cuda)
        case "context", []:
            return described(cuda.context())
        case "alloc", [size]:
            cuda.alloc(parse_size(size))
            return {"allocated": cuda.allocated}
        case "framework", [fraction]:
            cuda.alloc(int(MEMORY * float(fraction)))
            return {"allocated": cuda.allocated}
        case "free", [] | [_]:
            cuda.free(parse_size(arguments[0]) if arguments else None)
            return {"allocated": cuda.allocated}
        case "compute" | "launch", [work]:
            return {"seconds": signals.compute(cuda, float(work), first=verb == "launch")}
        case "loop", [work]:
            return _loop(cuda, signals, stdin, float(work))
        case "help", []:
            return {"help": _HELP}
        case "destroy", [number]:
            cuda.destroy(int(number))
        case "reset", []:
            cuda.reset()
        case "setenv", [name, value]:
            os.environ[name] = value
        case "sync", []:
            cuda.sync()
        case "fault", []:
            cuda.fault()
        case "wedge", []:
            cuda.wedge()
        case "ignore", [name]:
            signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
        case "catch", [name]:
            signals.catch(signal.Signals[f"SIG{name}"])
        case "obey", [name]:
            signals.obey(signal.Signals[f"SIG{name}"])
        case _:
            raise ValueError(f"{verb!r} with {len(arguments)} arguments is nothing that a client does")
    return {}


def _serve(cuda: CudaProcess, signals: _Signals) -> int:
    """Execute stdin until its end; return the exit status. Raises _Stopped."""
    stdin = _Input(signals)
    for line in stdin.lines():
        verb, *arguments = line.split() or [""]
        if not verb and _is_on_a_terminal():
            continue
        if verb == "exit":
            return int(arguments[0]) if arguments else 0
        try:
            _say({"ok": True, **_execute(cuda, signals, stdin, verb, arguments)})
        except FailedError as failed:
            _say(_failed(failed.error))
        except (ValueError, KeyError, InvalidRequestError) as error:
            _say({"ok": False, "error": str(error)})
    return 0


def _become(user: str) -> None:
    uid, gid, *groups = (int(each) for each in user.split(":"))
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _be_canary(cuda: CudaProcess, options: Mapping[str, str]) -> int:
    """Be a canary, as `mpsd.system.mps.canary` is one, and return its exit status."""
    import ctypes  # noqa: PLC0415 - other clients do not need it

    if "--as" in options:
        _become(options["--as"])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(options["--alarm"]))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([0], [], [], 0)[0]:
        return 1  # its parent has ended already
    sys.stdout.write("begins\n")
    sys.stdout.flush()
    status = 0
    try:
        cuda.current()
        _say({"ok": True, "pid": os.getpid(), **cuda.attributes})
    except FailedError as failed:
        _say({**_failed(failed.error), **cuda.attributes})
        status = 1
    os.read(0, 1)
    cuda.leave()
    return status


def main() -> int:
    """Run a client and return its exit status."""
    cuda, signals = CudaProcess(), _Signals()
    if "--alarm" in sys.argv[1:]:
        return _be_canary(cuda, dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True)))
    try:
        if "--late" in sys.argv[1:]:
            _say({"ok": True, "pid": os.getpid()})
        else:
            where = _where(cuda)
            _say({"ok": True, **where, **described(cuda.current())})
    except FailedError as failed:
        _say(_failed(failed.error))
        return 1
    try:
        status = _serve(cuda, signals)
    except _Stopped:
        status = 0
    cuda.leave()
    return status


def run() -> NoReturn:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    launch.end(main())


if __name__ == "__main__":
    run()
