"""Facts about MPS that NVIDIA does not document, measured on the first GPU: `python -m tests.gpu.questions [PART ...]`.

NVIDIA's own control daemon answers, without mpsd, and no result is judged: each is a row of a table for docs/gpu.md. A
result of a process that is no client of MPS says OUTSIDE MPS: its limits mean nothing. The questions of which least is
known come first, and what may leave MPS wedged comes last; each question has its own control daemon, which is ended by
`quit -t` and then by force. Signals in mid-kernel, which may leave more than that, are asked with `--kills` alone, or
by name.

With `--quick` all work takes a tenth of the time: enough to try this program, not the GPU. So it does with
MPSD_GPU_SIMULATED=1, where the simulator's control daemon answers.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from mpsd.simulator.devices import VARIABLE, Device
from tests.daemon.helpers import GIB, MIB, is_running
from tests.gpu import machine
from tests.gpu.bare import LONG, BareDaemon
from tests.gpu.machine import PROGRAM, Client
from tests.gpu.table import Row, measured, parser_of, print_measured, said, selected
from tests.harness import wait_until

LATE: Final = (*PROGRAM, "--late")

OPEN: Final = ("100", "16384M")
PART: Final = ("30", "4096M")
CLOSED: Final = ("0.1", "1M")
"""Limits in the front-end's syntax: much of the GPU, a part of it, and the least that reads back."""

PACE: Final = 0.1 if "--quick" in sys.argv or machine.simulated() else 1.0
"""The factor for the durations written below."""

SHORT: Final = 3.0
"""Seconds without an answer after which one that is expected to hang counts as hanging."""

KERNEL: Final = 12.0 * PACE
"""Seconds of the one kernel in whose middle a client is ended. A call that waits for it may take as much longer."""

Limits = tuple[str, str]

_UUID: Final = "GPU-00000000-0000-4000-8000-000000000000"
"""The UUID of the simulated GPU."""


class Mps(BareDaemon):
    """One of NVIDIA's own control daemons for the first GPU, in a private directory; or the simulator's."""

    def __init__(self, root: Path) -> None:
        """Prepare it, with a simulated GPU of its own where GPUs are simulated."""
        devices = {VARIABLE: str(root / "gpus")} if machine.simulated() else {}
        for directory in devices.values():
            Device(Path(directory), _UUID).create()
        super().__init__(root, devices=devices)

    def asked(self, text: str) -> str:
        """Return the answer as a result: that of a front-end that hangs is one, too."""
        try:
            return repr(self.ask(text, SHORT))
        except subprocess.TimeoutExpired:
            return f"no answer within {SHORT:g} s"

    def set(self, limits: Limits) -> str:
        """Set the limits of the next client to at most these, and return what was read back: of a busy server nothing.

        First the daemon's own limits, then those of each server.
        """
        threads, memory = limits
        setters = {"active_thread_percentage": threads, "device_pinned_mem_limit 0": memory}
        places = ["default_", *(f"{server} " for server in self.servers)]
        lines, questions = list[str](), list[str]()
        for place in places:
            for setter, value in setters.items():
                name, *device = setter.split()
                words = [f"default_{name}"] if place == "default_" else [name, place.strip()]
                lines.append(f"set_{' '.join([*words, *device, value])}")
                questions.append(f"get_{' '.join([*words, *device])}")
        self.ask("\n".join(lines))
        return " ".join(self.ask("\n".join(questions)).split()) or "nothing"

    def client(self, **variables: str) -> Client:
        """Start a client that initialises CUDA on command."""
        return Client(LATE, {**machine.ENVIRONMENT, **self.variables, **variables})

    def listed(self) -> list[int]:
        lists = [self.ask(f"get_client_list {server}").split() for server in self.servers]
        return [int(each) for clients in lists for each in clients if each.isdigit()]

    def doubt(self, client: Client) -> str:
        """Return what to say before a result of this client (see machine.doubt)."""
        return machine.doubt(client.pid in self.listed(), do(client, "info").get("mps"))

    def connected(self, *clients: Client) -> str:
        """Have clients make a context and work for a moment, and return what to say before their results."""
        for client in clients:
            answer = do(client, "init", "create", f"busy {0.2 * PACE}")
            assert answer["ok"], answer
        return max(self.doubt(client) for client in clients)

    def begun(self, client: Client, *lines: str) -> str:
        """Have a client carry out this, and describe the resulting context, or the error."""
        answer = do(client, *lines)
        return self.context(client) if answer["ok"] else said(answer)

    def context(self, client: Client) -> str:
        """Describe the current context: multiprocessors, by CUDA and by measurement, and memory."""
        info, work = do(client, "info"), do(client, f"busy {0.3 * PACE}")
        held = do(client, "alloc-until-refused", seconds=60)
        do(client, "free")
        if not (info["ok"] and work["ok"] and held["ok"]):
            return said(next(each for each in (info, work, held) if not each["ok"]))
        free, total = info["free"] / GIB, info["total"] / GIB
        ran = f"{work['multiprocessors']} multiprocessors ran (CUDA says {info['multiprocessors']})"
        memory = f"{held['held'] // MIB} MiB, then {held['refused']} (CUDA says {free:.1f} of {total:.1f} GiB free)"
        return f"{self.doubt(client)}{ran}; {memory}"


def do(client: Client, *lines: str, seconds: float = LONG) -> dict[str, Any]:
    """Have a client carry out this, and return its last answer, or the first error; a hang is an answer, too."""
    answer: dict[str, Any] = {"ok": True}
    for line in lines:
        try:
            client.tell(line)
            answer = client.answer(seconds)
        except (AssertionError, BrokenPipeError) as error:
            return {"ok": False, "error": str(error), "call": line}
        if not answer["ok"]:
            return answer
    return answer


# -- when limits bind -------------------------------------------------------------------------------------------------


def binding(mps: Mps) -> Iterator[Row]:
    """Measure whether limits bind a client at connection or at context creation: closed, open and changed limits."""
    mps.set(OPEN)
    with mps.client() as client:
        yield "opened: a client that makes its context at once", mps.begun(client, "init", "create")
    limits = {"opened": OPEN, "closed": CLOSED, "part": PART}
    for what in ("opened, then closed", "closed, then opened", "opened, then part"):
        before, after = (limits[each] for each in what.split(", then "))
        mps.set(before)
        with mps.client() as client:
            answer = do(client, "init")
            time.sleep(5 * PACE)
            mps.set(after)
            first = mps.begun(client, "create") if answer["ok"] else said(answer)
            yield f"{what}: cuInit before, the context 5 s later", first


def contexts(mps: Mps) -> Iterator[Row]:
    """Measure whether a second context, or a primary context after a reset, has the limits of its creation."""
    mps.set(OPEN)
    with mps.client() as client:
        yield "opened: the first context", mps.begun(client, "init", "create")
        mps.set(PART)
        yield "part, since then: the same context", mps.context(client)
        yield "part: a second context of the process", mps.begun(client, "create")
        yield "and the first again", mps.begun(client, "destroy")
    mps.set(OPEN)
    with mps.client() as client:
        yield "opened: the primary context", mps.begun(client, "init", "primary")
        mps.set(PART)
        yield "part, since then: it is reset", mps.begun(client, "reset")


def successors(mps: Mps) -> Iterator[Row]:
    """Measure the limits of a successor that connects at once after its predecessor, while they change."""
    mps.set(PART)
    with mps.client() as client:
        doubt = mps.connected(client)
        mps.set(CLOSED)
        client.end()
        since = time.monotonic()
        held = mps.set(PART)
        took = f"{(time.monotonic() - since) * 1000:.1f} ms"
        yield "limits of a daemon and its server changed by the front-end in", f"{doubt}{took}; read back: {held}"
    with mps.client() as client:
        yield "part: a successor that connects at once", mps.begun(client, "init", "create")


def least(mps: Mps) -> Iterator[Row]:
    """Measure what can run with 0.1 % and 1 MiB, and with each alone."""
    for what, limits in (("0.1 % and 1 MiB", CLOSED), ("0.1 %", ("0.1", "16384M")), ("1 MiB", ("100", "1M"))):
        held = mps.set(limits)
        with mps.client() as client:
            yield f"{what}: a context", f"{mps.begun(client, 'init', 'create')}; read back before: {held}"
            states = [mps.ask(f"get_server_status {each}") for each in mps.servers]
            yield f"{what}: the server's state", ", ".join(states) or "there is no server"


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
            yield f"part: a client with {what}", mps.begun(client, "init", "create")


# -- what a client may be --------------------------------------------------------------------------------------------


def fork(mps: Mps) -> Iterator[Row]:
    """Measure whether a child that a client forks has CUDA, and whether its parent still has it."""
    with mps.client() as client:
        doubt = "" if not do(client, "init", "create")["ok"] else mps.doubt(client)
        answer = do(client, "fork")
        child = answer["child"] if answer["ok"] else said(answer)
        yield "a forked child: cuInit, and a new context", f"{doubt}{child}"
        yield "and its parent", f"{doubt}{said(do(client, f'busy {0.2 * PACE}'))}"


def connections(mps: Mps) -> Iterator[Row]:
    """Measure how many clients fit, by CUDA_DEVICE_MAX_CONNECTIONS."""
    for value, most in (("", 50), ("8", 20), ("32", 8)):
        own = {"CUDA_DEVICE_MAX_CONNECTIONS": value} if value else {}
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(mps.client(**own)) for _ in range(max(3, int(most * PACE)))]
            fit, refusal = 0, "no refusal"
            for client in clients:
                answer = do(client, "init", "create")
                if not answer["ok"]:
                    refusal = said(answer)
                    break
                fit += 1
            doubt = mps.doubt(clients[0])
            what = f"CUDA_DEVICE_MAX_CONNECTIONS={value or 'unset'}: clients that fit"
            yield what, f"{doubt}{fit} of {len(clients)}, then {refusal}"


# -- how clients end --------------------------------------------------------------------------------------------------


def launched(mps: Mps, *clients: Client) -> str:
    """Have clients make a context and work, and the last one launch the kernel in whose middle it ends.

    Return what to say before their results.
    """
    doubt = mps.connected(*clients)
    for client in clients[:-1]:
        client.begin()
    answer = do(clients[-1], f"launch {KERNEL}")
    assert answer["ok"], answer
    time.sleep(2 * PACE)
    return doubt


def finished(client: Client) -> str:
    """Describe the end of a client's work; a hang, or its end, is an answer, too."""
    try:
        return said(client.finish())
    except (AssertionError, BrokenPipeError) as error:
        return str(error)


def answered(client: Client, seconds: float = LONG) -> str:
    """Describe the next answer of a client; a hang, or its end, is an answer, too."""
    try:
        return said(client.answer(seconds))
    except AssertionError as error:
        return str(error)


def where(client: Client) -> str:
    return "after its kernel" if client.has_answered else "in mid-kernel"


def terminating(mps: Mps) -> Iterator[Row]:
    """Measure the answer of `terminate_client`, its time, and its effect on the client and its neighbour."""
    with mps.client() as neighbour, mps.client() as victim:
        doubt = launched(mps, neighbour, victim)
        what = f"terminate_client of a client {where(victim)}"
        yield what, f"{doubt}{terminated(mps, victim)}, of a kernel of {KERNEL:g} s"
        yield f"{what}: the client, in its kernel", f"{doubt}{answered(victim, KERNEL + LONG)}"
        victim.kill(signal.SIGKILL)
        yield f"{what}: its neighbour, in its work, once the client was killed", f"{doubt}{finished(neighbour)}"
        yield f"{what}: one that comes then", after(mps)


def terminating_idle(mps: Mps) -> Iterator[Row]:
    """Measure the effect of `terminate_client` on a client that does nothing."""
    with mps.client() as client:
        what, doubt = "terminate_client of an idle client", mps.connected(client)
        yield what, f"{doubt}{terminated(mps, client)}"
        yield f"{what}: its next call", f"{doubt}{said(do(client, 'sync'))}"
        yield f"{what}: one that comes then", after(mps)


def terminated(mps: Mps, client: Client) -> str:
    """End the contexts of a client, and return the answer."""
    servers = mps.servers
    begin = time.monotonic()
    # Without a server there is none to ask; the answer to a command that names none is a result, too.
    answer = mps.ask(f"terminate_client {servers[0] if servers else 0} {client.pid}", seconds=KERNEL + LONG)
    return f"{answer!r} after {time.monotonic() - begin:.2f} s"


def after(mps: Mps) -> str:
    """Describe the result of a client that starts now; it may wait for the end of a kernel."""
    with mps.client() as client:
        begin = time.monotonic()
        answer = do(client, "init", "create", f"busy {0.2 * PACE}", seconds=KERNEL + LONG)
        took = time.monotonic() - begin
        doubt = mps.doubt(client) if answer["ok"] else ""
        if answer["ok"]:
            client.end()
        return f"{doubt}{said(answer)}, after {took:.1f} s"


# -- how daemons and servers fail --------------------------------------------------------------------------------------


def death(mps: Mps) -> Iterator[Row]:
    """Measure the effect of a control daemon's death on its server, its client, and the next daemon."""
    with mps.client() as client:
        doubt, servers = mps.connected(client), mps.servers
        client.begin()
        mps.process.kill()
        mps.process.wait()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not any(map(is_running, servers)), what="its end", deadline=SHORT)
        left = [each for each in servers if is_running(each)]
        yield "SIGKILL of a control daemon: its servers", f"{doubt}{'still there' if left else 'gone'}"
        yield "SIGKILL of a control daemon: its client, in its work", f"{doubt}{finished(client)}"
        yield "SIGKILL of a control daemon: its next context", f"{doubt}{said(do(client, 'create'))}"
        with mps:
            yield "the next daemon in the same directory: a client", after(mps)
        for each in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


def faults(mps: Mps) -> Iterator[Row]:
    """Measure which clients a fatal fault hits, what the server says, and until when others are refused."""
    with mps.client() as guilty, mps.client() as victim:
        doubt, servers = mps.connected(guilty, victim), mps.servers
        victim.begin()
        yield "a fatal fault: who caused it", f"{doubt}{said(do(guilty, 'fault'))}"
        yield "a fatal fault: another client, in its work", f"{doubt}{finished(victim)}"
        states = [mps.asked(f"get_server_status {each}") for each in servers]
        yield "a fatal fault: the server says", f"{states}, and lists {mps.listed()}"
        yield "a fatal fault: one that comes then", after(mps)
        guilty.end()
        yield "a fatal fault: one that comes when only who caused it is gone", after(mps)
        victim.end()
    yield "a fatal fault: one that comes when both are gone", after(mps)


def stopped(mps: Mps) -> Iterator[Row]:
    """Measure the effect of SIGSTOP to a server, which its own user can send."""
    with mps.client() as client, mps.client() as new:
        doubt, servers = mps.connected(client), mps.servers
        for each in servers:
            os.kill(each, signal.SIGSTOP)
        try:
            for question in ("get_server_list", *(f"get_server_status {each}" for each in servers)):
                yield f"a stopped server: {question.split()[0]}", f"{doubt}{mps.asked(question)}"
            came = do(new, "init", seconds=SHORT)
            yield "a stopped server: one that comes then", f"{doubt}{said(came)}"
        finally:
            for each in servers:
                os.kill(each, signal.SIGCONT)
        yield "after SIGCONT: its client", f"{doubt}{said(do(client, f'busy {0.2 * PACE}'))}"
        yield "after SIGCONT: one that came meanwhile", "was served already" if came["ok"] else answered(new)
    yield "after SIGCONT: one that comes then", after(mps)


# -- signals in mid-kernel --------------------------------------------------------------------------------------------


def ending(mps: Mps, number: signal.Signals) -> Iterator[Row]:
    """Measure the effect of a client's end in mid-kernel on another client of the same server."""
    with mps.client() as neighbour, mps.client() as victim:
        doubt = launched(mps, neighbour, victim)
        what = f"{number.name} of a client {where(victim)}"
        victim.kill(number)
        time.sleep(PACE)
        yield f"{what}: its neighbour, in its work", f"{doubt}{finished(neighbour)}"
        yield f"{what}: its neighbour, a moment later", f"{doubt}{said(do(neighbour, f'busy {0.2 * PACE}'))}"
        yield f"{what}: one that comes then", after(mps)
    yield f"{what}: one that comes when its neighbour is gone", after(mps)


def wedge(mps: Mps, number: signal.Signals) -> Iterator[Row]:
    """Measure whether a client killed in mid-kernel, alone on its server, leaves a server that serves no client."""
    with mps.client() as client:
        doubt = launched(mps, client)
        what = f"{number.name} of a client {where(client)}, alone"
        client.kill(number)
    time.sleep(PACE)
    states = [mps.asked(f"get_server_status {each}") for each in mps.servers]
    yield f"{what}: its server", f"{doubt}{states}, and lists {mps.listed()}"
    first = after(mps)
    yield f"{what}: one that comes then", first
    if "did not answer" not in first:  # a server that is wedged stays so
        yield f"{what}: and the one after that", after(mps)


Question = Callable[[Mps], Iterator[Row]]

QUESTIONS: Final[Mapping[str, Question]] = {
    "least": least,
    "binding": binding,
    "contexts": contexts,
    "successors": successors,
    "variables": variables,
    "fork": fork,
    "connections": connections,
    "terminating": terminating,
    "terminating-idle": terminating_idle,
    "death": death,
    "faults": faults,
    "stopped": stopped,
}
KILLS: Final[Mapping[str, Question]] = {
    "ending-by-SIGTERM": partial(ending, number=signal.SIGTERM),
    "ending-by-SIGKILL": partial(ending, number=signal.SIGKILL),
    "wedge-by-SIGTERM": partial(wedge, number=signal.SIGTERM),
    "wedge-by-SIGKILL": partial(wedge, number=signal.SIGKILL),
}
EVERY: Final = {**QUESTIONS, **KILLS}
"""By name; where the time runs out, the last ones are lost."""


def answers(root: Path, names: Sequence[str]) -> Iterator[Row]:
    """Answer each of these questions with its own control daemon."""

    def answer(name: str) -> Iterator[Row]:
        with Mps(root / name) as mps:
            yield from EVERY[name](mps)

    for name in names:
        yield from measured(name, answer(name))


def main() -> int:
    parser = parser_of(__doc__, EVERY)
    parser.add_argument("--kills", action="store_true", help="signals in mid-kernel, and nothing else")
    parser.add_argument("--quick", action="store_true", help="work for a tenth of the time")
    given = parser.parse_args()
    names = selected(given, EVERY, KILLS if given.kills else QUESTIONS)
    return print_measured("answer", lambda root: answers(root, names))


if __name__ == "__main__":
    sys.exit(main())
