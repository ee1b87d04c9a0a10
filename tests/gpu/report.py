"""The behaviour of MPS under mpsd on this machine's first GPU, in figures: `python -m tests.gpu.report [PART ...]`.

It prints a table for docs/gpu.md, and judges nothing: a failure is a figure too. Each part has its own node, since some
damage theirs. A result of a process that is no client of MPS says OUTSIDE MPS. The last rows are the lines of the logs
that mpsd does not know. It needs what the tests need, and a GPU without other users; with MPSD_GPU_SIMULATED=1 it runs
on a simulated one.
"""

import contextlib
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.daemon.helpers import GIB, MIB, is_running, kill, next_ready, undone
from tests.gpu import machine
from tests.gpu.machine import Client, leased, outside, unadmitted
from tests.gpu.table import Row, measured, parser_of, print_measured, said, selected
from tests.harness import wait_until
from tests.node import Node

PERCENTAGES: Final = (100, 75, 50, 25, 10, 1)
SECONDS: Final = 0.1 if machine.simulated() else 2.0
"""How long a rate is measured; that of a simulated GPU needs no long time."""

LEASED: Final = 2048
"""MiB of a lease whose context takes the more of it the more threads it has."""

SMALL: Final[Mapping[str, Any]] = {"threads": 25, "memory": "2GiB"}


def seen_by(node: Node, *clients: Client) -> str:
    """Wait until mpsd has attributed clients to their leases; return what to say before their results.

    That is nothing for clients of MPS.
    """
    for client in clients:
        assert client.hello["ok"], client.hello
    doubts = {doubt: None for client in clients if (doubt := machine.doubt_about(node, client))}
    for client in () if doubts else clients:
        wait_until(lambda: node.events("client_attributed", client=client.pid), what=f"client {client.pid} to be seen")  # noqa: B023 - it is called at once
    return "".join(doubts)


def server_of(node: Node, client: Client) -> int:
    """Wait until mpsd has attributed a client, and return its server; without one there is nothing to measure."""
    doubt = seen_by(node, client)
    assert not doubt, doubt
    server: int = node.daemons()["gpu0"]["servers"][0]["pid"]
    return server


def milliseconds(begin: float) -> str:
    return f"{(time.monotonic() - begin) * 1000:.0f} ms"


def told(node: Node, since: int) -> str:
    """Return the names of the warnings and errors in mpsd's log since it had so many lines."""
    names = [line["event"] for line in node.log()[since:] if line["level"] in {"warning", "error"}]
    return ", ".join(dict.fromkeys(names)) or "nothing"


def begun(node: Node, client: Client, seconds: float = 20.0) -> str:
    """Describe the beginning of a client; the refusal of its lease, and a hang, are figures, too."""
    try:
        answer = client.first(seconds)
    except AssertionError as error:
        return str(error)
    return f"{machine.doubt_about(node, client) if answer['ok'] else ''}{said(answer)}"


def whole_gpu(node: Node) -> Iterator[Row]:
    """Measure the rate of a lease by its percentage, relative to the whole GPU outside MPS."""
    with outside(node) as client:
        whole = client.do(f"busy {SECONDS}")
        place = {None: "unknown", False: "0", True: "1, so that it is INSIDE MPS"}[client.hello["mps"]]
        ran = f"{whole['multiprocessors']} multiprocessors ran it; its rate is 1; attribute 133 is {place}"
        yield "a process meant to be outside MPS, the whole GPU", ran
        client.end()
    for percentage in PERCENTAGES:
        with leased(node, threads=percentage, memory=f"{LEASED}MiB") as client:
            doubt = seen_by(node, client)
            work = client.do(f"busy {SECONDS}")
            ran = f"{work['multiprocessors']} multiprocessors ran it, CUDA tells of {client.hello['multiprocessors']}"
            ran += f"; {client.hello['free'] // MIB} of its {LEASED} MiB are free"
            yield f"a lease of {percentage} %", f"{doubt}{work['rate'] / whole['rate']:.3f}; {ran}"
            client.end()


def memory(node: Node) -> Iterator[Row]:
    """Measure how much a client can allocate with a lease, and without one."""
    with leased(node, threads=50, memory="4GiB") as client:
        doubt = seen_by(node, client)
        free, total = client.hello["free"] / GIB, client.hello["total"] / GIB
        held = client.do("alloc-until-refused")
        yield "a lease of 4 GiB allocates", f"{doubt}{held['held'] // MIB} MiB, then {held['refused']}"
        yield "and cuMemGetInfo tells it", f"{doubt}{free:.1f} GiB free of {total:.1f} GiB"
        client.end()
    wait_until(lambda: node.daemons()["gpu0"]["limits"]["active_thread_percentage"] == 0.1, what="closing", deadline=30)
    with unadmitted(node) as client:
        got = said(client.do("alloc 64MiB")) if client.hello["ok"] else said(client.hello)
        doubt = machine.doubt_about(node, client) if client.hello["ok"] else ""
        yield "a client without a lease gets", f"{doubt}{got}"


def side_by_side(node: Node) -> Iterator[Row]:
    """Measure two concurrent leases of half a GPU, relative to one of them alone."""
    with leased(node, threads=50, memory="2GiB") as one, leased(node, threads=50, memory="2GiB") as other:
        doubt = seen_by(node, one, other)
        alone = one.busy(SECONDS)
        for client in (one, other):
            client.tell(f"busy {SECONDS}")
        rates = [f"{client.answer()['rate'] / alone:.2f}" for client in (one, other)]
        yield "two leases of 50 % at once, each against one of them alone", f"{doubt}{' and '.join(rates)}"
        for client in (one, other):
            client.end()


def strict(node: Node) -> Iterator[Row]:
    """Measure how long three leases that are requested at once take to attach, one after the other."""
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(leased(node, "--wait", "30", **SMALL)) for _ in range(3)]
        began = [begun(node, client) for client in clients]
        yield "three leases at once under attach = strict, begun after", f"{milliseconds(begin)}: {', '.join(began)}"


def drift(node: Node) -> Iterator[Row]:
    """Measure how long a stranger's percentage lasts while a client works."""
    with leased(node, threads=50, memory="2GiB") as client:
        doubt = seen_by(node, client)
        client.begin()
        node.ask("gpu0", "set_default_active_thread_percentage 77")
        begin = time.monotonic()
        undone(node, "gpu0", "active_thread_percentage", server=None)
        yield "a stranger's percentage, put back under load after", f"{doubt}{milliseconds(begin)}"
        yield "and the client", f"{doubt}{said(client.finish())}"
        client.end()


def canary(node: Node) -> Iterator[Row]:
    """Measure whether mpsd's own canary gets a context, also beside a client that works."""
    with leased(node, **SMALL) as client:
        doubt = seen_by(node, client)
        for what in ("verify --canary says", "verify --canary beside a client that works says"):
            begin = time.monotonic()
            answer = node.mpsctl("verify", "--canary", "gpu0")
            said_so = f"{answer.stdout or answer.stderr} (status {answer.returncode}, {milliseconds(begin)})"
            yield what, f"{doubt}{said_so}"
            client.begin()
        yield "and the client", f"{doubt}{said(client.finish())}"
        client.end()


def namespaces(node: Node) -> Iterator[Row]:
    """Measure whether mpsd sees a client in a pid namespace of its own."""
    within = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    with leased(node, "--name", "spaced", within=within, **SMALL) as client:
        answer = client.first(20)
        doubt = machine.doubt_about(node, client, machine.child(client)) if answer["ok"] else ""
        yield "a client in its own pid namespace", f"{doubt}{said(answer)}"
        with contextlib.suppress(AssertionError):
            wait_until(lambda: node.get("/v1/clients").json["clients"], what="it to be seen", deadline=3)
        yield "verify says", node.mpsctl("verify", "spaced").stdout


def users(node: Node) -> Iterator[Row]:
    """Measure two users at once, under daemon.users = "many", which takes a driver with -multiuser-server."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(leased(node, "--user", f"{uid}:{uid}", **SMALL)) for uid in machine.USERS]
        began = [begun(node, client) for client in clients]
        yield "two users at once under daemon.users = many", " and ".join(began)
        owners = [Path(f"/proc/{each['pid']}").stat().st_uid for each in node.daemons()["gpu0"]["servers"]]
        yield "the uids of their servers", f"{owners}"


LIAR: Final = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "7=1G"}
"""A limit for a GPU that the client does not see: MPS then drops every memory limit (measured on 580)."""


def liar(node: Node) -> Iterator[Row]:
    """Measure what mpsd does about a client that escapes its memory limit, where it may end it."""
    since = len(node.log())
    with leased(node, **SMALL) as honest, leased(node, variables=LIAR, **SMALL) as client:
        doubt = seen_by(node, honest, client)
        honest.begin()
        begin = time.monotonic()
        yield "a liar about its memory limit of 2 GiB is told of", f"{doubt}{client.hello['free'] / GIB:.1f} GiB free"
        yield "and allocates 4 GiB", said(client.do("alloc 4GiB"))
        wait_until(lambda: node.events("violation"), what="mpsd to name it")
        yield "mpsd names it", f"{node.events('violation')[0]['kind']}, {milliseconds(begin)} later"
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not is_running(client.pid), what="its end", deadline=20)
        yield "and ends it", f"{'not' if is_running(client.pid) else 'it is gone'} after {milliseconds(begin)}"
        yield "its honest neighbour", said(honest.finish())
        yield "mpsd tells", told(node, since)
        honest.end()


def ends(node: Node) -> Iterator[Row]:
    """Measure the end of a client in mid-kernel by mpsd, which asks the server first, beside a neighbour."""
    seconds = 1.0 if machine.simulated() else 6.0
    with leased(node, "--name", "ended", **SMALL) as client, leased(node, **SMALL) as neighbour:
        doubt = seen_by(node, client, neighbour)
        neighbour.begin()
        client.do(f"launch {seconds}")
        begin = time.monotonic()
        answer = node.mpsctl("release", "ended", "--end-clients")
        what = "release --end-clients of a client in mid-kernel"
        yield what, f"{doubt}status {answer.returncode} after {milliseconds(begin)}, of a kernel of {seconds:g} s"
        yield "its neighbour", said(neighbour.finish())
        neighbour.end()


def stopped(node: Node) -> Iterator[Row]:
    """Measure what mpsd says of a server that is stopped, and whether others are served again without it."""
    since = len(node.log())
    with leased(node, **SMALL) as client:
        server = server_of(node, client)
        kill(server, signal.SIGSTOP)
        try:
            with leased(node, "--wait", "3", **SMALL) as new:
                yield "SIGSTOP of a server: one that comes then", begun(node, new, 8)
            reasons = [each["because"] for each in node.get("/v1/status").json["reasons"]]
            yield "and status says", "; ".join(reasons) or "nothing"
            client.kill()
            begin = time.monotonic()
            with leased(node, "--wait", "15", **SMALL) as new:
                yield (
                    "once its client is gone: one that comes then",
                    f"{begun(node, new, 20)}, {milliseconds(begin)} later",
                )
        finally:
            with contextlib.suppress(ProcessLookupError):
                kill(server, signal.SIGCONT)
    begin = time.monotonic()
    with leased(node, "--wait", "15", **SMALL) as new:
        yield "after SIGCONT: one that comes then", f"{begun(node, new, 20)}, {milliseconds(begin)} later"
    yield "mpsd tells", told(node, since)


def fault(node: Node) -> Iterator[Row]:
    """Measure which clients a fault hits, when mpsd tells of it, and how long the GPU takes to recover."""
    since = len(node.log())
    with leased(node, **SMALL) as guilty, leased(node, **SMALL) as other:
        doubt = seen_by(node, guilty, other)
        other.begin()
        answer, begin = guilty.do("fault"), time.monotonic()
        with leased(node, **SMALL) as early:
            yield "a client that asks for a lease at once after a fault", begun(node, early)
        yield "the fault, to who caused it", f"{doubt}{said(answer)}"
        yield "to another client of the GPU, in its work", f"{doubt}{said(other.finish())}"
        with contextlib.suppress(AssertionError):
            wait_until(lambda: node.events("leases_faulted"), what="the fault to be told", deadline=5)
        when = "is told" if node.events("leases_faulted") else "is not told"
        yield f"leases_faulted {when} after at most", milliseconds(begin)
        for client in (guilty, other):
            client.end()
    begin = time.monotonic()
    wait_until(lambda: node.get("/readyz").status == 200, what="the node to be ready", deadline=30)
    yield "ready after both are gone", milliseconds(begin)
    with leased(node, "--wait", "10", **SMALL) as new:
        yield "one that comes then", begun(node, new)
    yield "mpsd tells", told(node, since)


def death(node: Node) -> Iterator[Row]:
    """Measure the effect of a control daemon's death on its server and its client, and the time to the next one."""
    since = len(node.log())
    with leased(node, **SMALL) as client:
        server, before = server_of(node, client), node.daemons()["gpu0"]["pid"]
        client.begin()
        begin = time.monotonic()
        kill(before)
        next_ready(node, "gpu0", before)
        yield "SIGKILL of the control daemon under load, to the next ready", milliseconds(begin)
        with leased(node, "--wait", "10", **SMALL) as new:
            yield "a new client then", f"{begun(node, new)}, {milliseconds(begin)} after the death"
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not is_running(server), what="its end", deadline=5)
        yield "its server", f"{'still there' if is_running(server) else 'gone'} after at most {milliseconds(begin)}"
        yield "its client, in its work", said(client.finish())
        yield "and when it makes a new context", said(client.do("create"))
        client.end()
    yield "mpsd tells", told(node, since)


STRICT: Final = '[enforcement]\nattach = "strict"\n'
MANY: Final = '[daemon]\nusers = "many"\n'
ENDS_LIARS: Final = '[enforcement]\non_violation = "terminate"\ngrace = 1.0\n[violations]\nmemory = "terminate"\n'

PARTS: Final[Mapping[str, tuple[str, Callable[[Node], Iterator[Row]]]]] = {
    "threads": ("", whole_gpu),
    "memory": ("", memory),
    "side-by-side": ("", side_by_side),
    "strict": (STRICT, strict),
    "drift": ("", drift),
    "canary": ("", canary),
    "namespaces": ("", namespaces),
    "users": (MANY, users),
    "liar": (ENDS_LIARS, liar),
    "ends": ("", ends),
    "death": ("", death),
    "fault": ("", fault),
    "stopped": ("", stopped),
}
"""By name: the configuration of its node, and what is measured on it. The parts that may damage a GPU come last."""


def report(root: Path, names: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of these parts, each with its own node, and the lines of the logs that mpsd does not know."""
    unknown = Counter[str]()

    def on_its_node(name: str) -> Iterator[Row]:
        config, part = PARTS[name]
        (root / name).mkdir()
        with machine.running(root / name, config) as node:
            if name == names[0]:
                yield "GPU, driver", f"{machine.first_gpu(node)['name']}, {node.daemons()['gpu0']['version']}"
            try:
                yield from part(node)
            finally:
                unknown.update(unknown_lines(node))

    for name in names:
        yield from measured(name, on_its_node(name))
    if not unknown:
        yield "lines of the logs that mpsd does not know", "none"
    for line, count in unknown.most_common():
        yield "a line of the logs that mpsd does not know", f"{count} times: {line}"


def unknown_lines(node: Node) -> Iterator[str]:
    """Yield the latest lines of the first GPU's logs that mpsd does not know, without their numbers."""
    for line in node.daemons()["gpu0"]["latest_unknown_lines"]:
        yield re.sub(r"-?\d+", "N", re.sub(r"^\[[^\]]*\] ", "", line))


def main() -> int:
    names = selected(parser_of(__doc__, PARTS).parse_args(), PARTS, PARTS)
    return print_measured("figure", lambda root: report(root, names))


if __name__ == "__main__":
    sys.exit(main())
