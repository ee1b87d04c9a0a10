"""Facts about MPS that NVIDIA does not document, measured on this machine's first GPU: `python -m tests.gpu.questions`.

NVIDIA's own control daemon answers, without mpsd, and no result is judged: each is a row of a table for docs/gpu.md.
The questions of which least is known come first; arguments select some by name. A question may leave MPS wedged, so
each has its own control daemon, which is ended by `quit -t` and then by force. With `--quick` all work takes a tenth of
the time: enough to try this program, not the GPU.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.daemon.helpers import GIB, MIB, is_running
from tests.gpu import machine
from tests.gpu.machine import PROGRAM, Client
from tests.gpu.report import Row, said
from tests.harness import remove_tree, wait_until

LATE: Final = (*PROGRAM, "--late")

OPEN: Final = ("100", "16384M")
PART: Final = ("30", "4096M")
CLOSED: Final = ("0.1", "1M")
"""Limits in the front-end's syntax: much of the GPU, a part of it, and the least that reads back."""

PACE: Final = 0.1 if "--quick" in sys.argv else 1.0
"""The factor for the durations written below."""

LONG: Final = 10.0
"""Seconds without an answer after which a client, or a front-end, counts as hanging."""

KERNEL: Final = 12.0 * PACE
"""Seconds of the one kernel in whose middle a client is ended. A call that waits for it may take as much longer."""

Limits = tuple[str, str]


class Mps:
    """One of NVIDIA's own control daemons for the first GPU, in a private directory."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.variables = {"CUDA_MPS_PIPE_DIRECTORY": str(root), "CUDA_VISIBLE_DEVICES": "0"}
        self._environment = {**os.environ, **self.variables, "CUDA_MPS_LOG_DIRECTORY": str(root)}
        self._log = (root / "out").open("wb")
        self._socket = root / "control"

    def __enter__(self) -> Self:
        """Start it."""
        self._process = subprocess.Popen(
            [machine.control(), "-f"],
            env=self._environment,
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
        )
        wait_until(self._socket.exists, what="the control daemon to listen")
        wait_until(
            lambda: "100" in self.ask("get_default_active_thread_percentage"), what="the control daemon to answer"
        )
        return self

    def ask(self, text: str, seconds: float = LONG) -> str:
        """Send a command by NVIDIA's front-end, and return the answer. Raises TimeoutExpired after so many seconds."""
        done = subprocess.run(
            [machine.control()],
            env=self._environment,
            input=f"{text}\n",
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return done.stdout.strip()

    @property
    def servers(self) -> list[int]:
        """The pids of its servers."""
        return [int(each) for each in self.ask("get_server_list").split() if each.isdigit()]

    def set(self, limits: Limits) -> None:
        """Set the limits of the next client to at most these."""
        threads, memory = limits
        lines = [f"set_default_active_thread_percentage {threads}", f"set_default_device_pinned_mem_limit 0 {memory}"]
        for server in self.servers:
            lines.append(f"set_active_thread_percentage {server} {threads}")
            lines.append(f"set_device_pinned_mem_limit {server} 0 {memory}")
        self.ask("\n".join(lines))

    def client(self, **variables: str) -> Client:
        """Start a client that initialises CUDA on command."""
        return Client(LATE, {**machine.ENVIRONMENT, **self.variables, **variables})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it and its servers: as NVIDIA specifies, and by force where that fails."""
        servers: list[int] = []
        with contextlib.suppress(subprocess.TimeoutExpired):
            servers = self.servers
            self.ask("quit -t 5")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LONG)
        self._process.kill()
        self._process.wait()
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
        self._log.close()
        wait_until(lambda: not any(is_running(each) for each in servers), what="the servers to be gone", deadline=LONG)


def do(client: Client, *lines: str, seconds: float = LONG) -> dict[str, Any]:
    """Have a client carry out this, and return its last answer, or the first error; a hang is an answer, too."""
    answer: dict[str, Any] = {"ok": True}
    for line in lines:
        client.tell(line)
        try:
            answer = client.answer(seconds)
        except AssertionError as error:
            return {"ok": False, "error": str(error), "call": line}
        if not answer["ok"]:
            return answer
    return answer


def context(client: Client) -> str:
    """Describe the current context: multiprocessors, by CUDA and by measurement, and memory."""
    info, work = do(client, "info"), do(client, "busy 0.3")
    held = do(client, "alloc-until-refused", seconds=60)
    do(client, "free")
    if not (info["ok"] and work["ok"] and held["ok"]):
        return said(next(each for each in (info, work, held) if not each["ok"]))
    free, total = info["free"] / GIB, info["total"] / GIB
    ran = f"{work['multiprocessors']} multiprocessors ran (CUDA says {info['multiprocessors']})"
    return f"{ran}; {held['held'] // MIB} MiB, then {held['refused']} (CUDA says {free:.1f} of {total:.1f} GiB free)"


def begun(client: Client, *lines: str) -> str:
    """Have a client carry out this, and describe the resulting context, or the error."""
    answer = do(client, *lines)
    return context(client) if answer["ok"] else said(answer)


# -- when limits bind -------------------------------------------------------------------------------------------------


def binding(mps: Mps) -> Iterator[Row]:
    """Measure whether limits bind a client at connection or at context creation: closed, open and changed limits."""
    mps.set(OPEN)
    with mps.client() as client:
        yield "opened: a client that makes its context at once", begun(client, "init", "create")
    changes = [
        ("opened, then closed", OPEN, CLOSED),
        ("closed, then opened", CLOSED, OPEN),
        ("opened, then part", OPEN, PART),
    ]
    for what, before, after in changes:
        mps.set(before)
        with mps.client() as client:
            answer = do(client, "init")
            time.sleep(5 * PACE)
            mps.set(after)
            first = begun(client, "create") if answer["ok"] else said(answer)
            yield f"{what}: cuInit before, the context 5 s later", first


def contexts(mps: Mps) -> Iterator[Row]:
    """Measure whether a second context, or a primary context after a reset, has the limits of its creation."""
    mps.set(OPEN)
    with mps.client() as client:
        yield "opened: the first context", begun(client, "init", "create")
        mps.set(PART)
        yield "part, since then: the same context", context(client)
        yield "part: a second context of the process", begun(client, "create")
        yield "and the first again", begun(client, "destroy")
    mps.set(OPEN)
    with mps.client() as client:
        yield "opened: the primary context", begun(client, "init", "primary")
        mps.set(PART)
        yield "part, since then: it is reset", begun(client, "reset")


def successors(mps: Mps) -> Iterator[Row]:
    """Measure the limits of a successor that connects at once after its predecessor, while they change."""
    mps.set(PART)
    with mps.client() as client:
        do(client, "init", "create", "busy 0.2")
        mps.set(CLOSED)
        client.end()
        begin = time.monotonic()
        mps.set(PART)
        yield "limits of a server changed by the front-end in", f"{(time.monotonic() - begin) * 1000:.1f} ms"
    with mps.client() as client:
        yield "part: a successor that connects at once", begun(client, "init", "create")


def least(mps: Mps) -> Iterator[Row]:
    """Measure what can run with 0.1 % and 1 MiB, and with each alone."""
    for what, limits in (("0.1 % and 1 MiB", CLOSED), ("0.1 %", ("0.1", "16384M")), ("1 MiB", ("100", "1M"))):
        mps.set(limits)
        with mps.client() as client:
            yield f"{what}: a context", begun(client, "init", "create")


def variables(mps: Mps) -> Iterator[Row]:
    """Measure the effect of a client's own variables: lower, higher, and a memory limit for an invisible GPU."""
    mps.set(PART)
    threads, memory = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    cases = {
        "its own 10 % and 1 GiB": {threads: "10", memory: "0=1G"},
        "its own 100 % and 12 GiB": {threads: "100", memory: "0=12G"},
        "its own 1 GiB, and one for GPU 1, which it cannot see": {memory: "0=1G,1=1G"},
        "one for GPU 7 alone": {memory: "7=1G"},
    }
    for what, own in cases.items():
        with mps.client(**own) as client:
            yield f"part: a client with {what}", begun(client, "init", "create")


# -- how clients end --------------------------------------------------------------------------------------------------


def launched(*clients: Client) -> None:
    """Have clients make a context and work for a moment, and the last one launch the kernel in whose middle it ends."""
    for client in clients:
        begin = do(client, "init", "create", "busy 0.2")
        assert begin["ok"], begin
    answer = do(clients[-1], f"launch {KERNEL}")
    assert answer["ok"], answer
    for client in clients[:-1]:
        client.tell(f"busy {6 * PACE}")
    time.sleep(2 * PACE)


def answered(client: Client, seconds: float = LONG) -> str:
    """Describe the next answer of a client; a hang, or its end, is an answer, too."""
    try:
        return said(client.answer(seconds))
    except AssertionError as error:
        return str(error)


def where(client: Client) -> str:
    """Tell whether a client is in its kernel."""
    return "after its kernel" if client.has_answered else "in mid-kernel"


def ending(mps: Mps, number: signal.Signals) -> Iterator[Row]:
    """Measure the effect of a client's end in mid-kernel on another client of the same server."""
    with mps.client() as neighbour, mps.client() as victim:
        launched(neighbour, victim)
        what = f"{number.name} of a client {where(victim)}"
        victim.kill(number)
        yield f"{what}: its neighbour, in its work", answered(neighbour, LONG + 6 * PACE)
        yield f"{what}: its neighbour, a moment later", said(do(neighbour, "busy 0.2"))
        yield f"{what}: one that comes then", after(mps)


def terminating(mps: Mps) -> Iterator[Row]:
    """Measure the answer of `terminate_client`, its time, and its effect on the client and its neighbour."""
    with mps.client() as neighbour, mps.client() as victim:
        launched(neighbour, victim)
        what = f"terminate_client of a client {where(victim)}"
        begin = time.monotonic()
        answer = mps.ask(f"terminate_client {mps.servers[0]} {victim.pid}", seconds=KERNEL + LONG)
        took = time.monotonic() - begin
        yield what, f"{answer!r} after {took:.2f} s, of a kernel of {KERNEL:g} s"
        yield f"{what}: the client, in its kernel", answered(victim, KERNEL + LONG)
        yield f"{what}: its neighbour, in its work", answered(neighbour)
        victim.kill(signal.SIGKILL)
        yield f"{what}: its neighbour, once the client was killed", said(do(neighbour, "busy 0.2"))
        yield f"{what}: one that comes then", after(mps)


def wedge(mps: Mps, number: signal.Signals) -> Iterator[Row]:
    """Measure whether a client killed in mid-kernel, alone on its server, leaves a server that serves no client."""
    with mps.client() as client:
        launched(client)
        what = f"{number.name} of a client {where(client)}, alone"
        client.kill(number)
    time.sleep(PACE)
    servers = mps.servers
    states = [mps.ask(f"get_server_status {each}") for each in servers]
    listed = [mps.ask(f"get_client_list {each}") or "nobody" for each in servers]
    yield f"{what}: its server", f"{states}, and lists {listed}"
    yield f"{what}: one that comes then", after(mps)


def after(mps: Mps) -> str:
    """Describe the result of a client that starts now; it may wait for the end of a kernel."""
    with mps.client() as client:
        begin = time.monotonic()
        answer = do(client, "init", "create", "busy 0.2", seconds=KERNEL + LONG)
        took = time.monotonic() - begin
        if answer["ok"]:
            client.end()
        return f"{said(answer)}, after {took:.1f} s"


QUESTIONS: Final[dict[str, Callable[[Mps], Iterator[Row]]]] = {
    "binding": binding,
    "contexts": contexts,
    "ending-by-SIGTERM": partial(ending, number=signal.SIGTERM),
    "ending-by-SIGKILL": partial(ending, number=signal.SIGKILL),
    "terminating": terminating,
    "wedge-by-SIGTERM": partial(wedge, number=signal.SIGTERM),
    "wedge-by-SIGKILL": partial(wedge, number=signal.SIGKILL),
    "successors": successors,
    "variables": variables,
    "least": least,
}
"""By name; where the time runs out, the last ones are lost."""


def answers(root: Path, names: Sequence[str]) -> Iterator[Row]:
    """Answer each of these questions with its own control daemon; one that cannot be completed says why."""
    for name in names:
        try:
            with Mps(root / name) as mps:
                yield from QUESTIONS[name](mps)
        except (AssertionError, OSError, IndexError, subprocess.TimeoutExpired) as error:
            yield f"{name}: could not be asked to its end", " ".join(str(error).split())


def main() -> int:
    """Print the table, row by row as it is measured."""
    names = [each for each in sys.argv[1:] if each != "--quick"] or [*QUESTIONS]
    if unknown := [each for each in names if each not in QUESTIONS]:
        print(f"no question {unknown[0]}: there are {', '.join(QUESTIONS)}", file=sys.stderr)
        return 2
    if (missing := machine.missing()) is not None:
        print(f"nothing to ask: {missing}", file=sys.stderr)
        return 1
    root = Path(tempfile.mkdtemp(prefix="mq-", dir="/tmp"))
    try:
        print("| what | answer |\n|---|---|")
        for what, answer in answers(root, names):
            print(f"| {what} | {answer} |", flush=True)
    finally:
        remove_tree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
