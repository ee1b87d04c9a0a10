"""The behaviour of MPS on this machine's first GPU, in figures: `python -m tests.gpu.report`, a table for docs/gpu.md.

It judges nothing: a failure is a figure too. It needs what the tests need, and a GPU without other users.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.daemon.helpers import GIB, MIB, is_running, kill, next_ready, undone
from tests.gpu import machine
from tests.gpu.machine import Client, leased, outside, unadmitted
from tests.harness import remove_tree, wait_until
from tests.node import Node

PERCENTAGES: Final = (100, 75, 50, 25, 10, 1)
SECONDS: Final = 2.0

Row = tuple[str, str]
"""The measurement, and its result."""


def said(answer: dict[str, Any]) -> str:
    """Put an answer into words: `works`, or the error and the failed call."""
    return "works" if answer["ok"] else f"{answer['error']} from {answer['call']}"


def seen_by(node: Node, client: Client) -> None:
    """Wait until mpsd has attributed a client to its lease."""
    assert client.hello["ok"], client.hello
    wait_until(lambda: node.events("client_attributed", client=client.pid), what=f"client {client.pid} to be seen")


def threads(node: Node) -> Iterator[Row]:
    """Measure the rate of a lease by its percentage, relative to the whole GPU outside MPS."""
    with outside(node) as client:
        whole = client.do(f"busy {SECONDS}")
        yield "outside MPS, the whole GPU", f"{whole['multiprocessors']} multiprocessors ran it; its rate is 1"
        client.end()
    for percentage in PERCENTAGES:
        with leased(node, threads=percentage, memory="2GiB") as client:
            told, work = client.hello["multiprocessors"], client.do(f"busy {SECONDS}")
            ran = f"{work['multiprocessors']} multiprocessors ran it, CUDA tells of {told}"
            yield f"a lease of {percentage} %", f"{work['rate'] / whole['rate']:.3f}; {ran}"
            client.end()


def memory(node: Node) -> Iterator[Row]:
    """Measure how much a client can allocate with a lease, and without one."""
    with leased(node, threads=50, memory="4GiB") as client:
        free, total = client.hello["free"] / GIB, client.hello["total"] / GIB
        held = client.do("alloc-until-refused")
        yield "a lease of 4 GiB allocates", f"{held['held'] // MIB} MiB, then {held['refused']}"
        yield "and cuMemGetInfo tells it", f"{free:.1f} GiB free of {total:.1f} GiB"
        client.end()
    wait_until(lambda: node.daemons()["gpu0"]["limits"]["active_thread_percentage"] == 0.1, what="closing", deadline=90)
    with unadmitted(node) as client:
        yield "a client without a lease gets", said(client.do("alloc 64MiB") if client.hello["ok"] else client.hello)


def side_by_side(node: Node) -> Iterator[Row]:
    """Measure two concurrent leases of half a GPU, relative to one of them alone."""
    with leased(node, threads=50, memory="2GiB") as one, leased(node, threads=50, memory="2GiB") as other:
        alone = one.busy(SECONDS)
        for client in (one, other):
            seen_by(node, client)
            client.tell(f"busy {SECONDS}")
        rates = [f"{client.answer()['rate'] / alone:.2f}" for client in (one, other)]
        yield "two leases of 50 % at once, each against one of them alone", " and ".join(rates)
        for client in (one, other):
            client.end()


def drift(node: Node) -> Iterator[Row]:
    """Measure how long a stranger's percentage lasts while a client works."""
    with leased(node, threads=50, memory="2GiB") as client:
        seen_by(node, client)
        client.tell("busy 8")
        node.ask("gpu0", "set_default_active_thread_percentage 77")
        begin = time.monotonic()
        undone(node, "gpu0", "active_thread_percentage", server=None)
        yield "a stranger's percentage, put back under load after", f"{(time.monotonic() - begin) * 1000:.0f} ms"
        yield "and the client", said(client.answer())
        client.end()


def fault(node: Node) -> Iterator[Row]:
    """Measure which clients a fault hits, and how long the GPU takes to recover."""
    with leased(node, threads=25, memory="2GiB") as guilty, leased(node, threads=25, memory="2GiB") as other:
        for client in (guilty, other):
            seen_by(node, client)
        yield "a fault, to who caused it", said(guilty.do("fault"))
        yield "to another client of the GPU", said(other.do("busy 0.5"))
        for client in (guilty, other):
            client.end()
    begin = time.monotonic()
    wait_until(lambda: node.get("/readyz").status == 200, what="the node to be ready", deadline=60)
    yield "ready after both are gone", f"{(time.monotonic() - begin) * 1000:.0f} ms"


def death(node: Node) -> Iterator[Row]:
    """Measure the effect of a control daemon's death on a client, and the time until there is a new one."""
    with leased(node, threads=25, memory="2GiB") as client:
        seen_by(node, client)
        before = node.daemons()["gpu0"]["pid"]
        server = node.daemons()["gpu0"]["servers"][0]["pid"]
        client.tell("busy 4")
        begin = time.monotonic()
        kill(before)
        next_ready(node, "gpu0", before)
        yield (
            "SIGKILL of the control daemon under load, to the next ready",
            f"{(time.monotonic() - begin) * 1000:.0f} ms",
        )
        yield "its client, in its work", said(client.answer())
        yield "and when it allocates afterwards", said(client.do("alloc 64MiB"))
        client.end()
    begin = time.monotonic()
    wait_until(lambda: not is_running(server) or time.monotonic() - begin > 10, what="10 s", deadline=20)
    yield "the orphaned server, 10 s after its client", "still there" if is_running(server) else "gone"


def measured(root: Path) -> Iterator[Row]:
    """Start a node for each measurement, since some damage theirs, and yield all rows."""
    for number, part in enumerate((threads, memory, side_by_side, drift, fault, death)):
        place = root / f"{number}"
        place.mkdir()
        with machine.running(place) as node:
            if part is threads:
                gpu, daemon = machine.first_gpu(node), node.daemons()["gpu0"]
                yield "GPU, driver", f"{gpu['name']}, {daemon['version']}"
            yield from part(node)


def main() -> int:
    """Print the table, row by row as it is measured."""
    missing = machine.missing()
    if missing is not None:
        print(f"nothing to report: {missing}", file=sys.stderr)
        return 1
    root = Path(tempfile.mkdtemp(prefix="mg-", dir="/tmp"))
    root.chmod(0o711)
    try:
        print("| what | figure |\n|---|---|")
        for what, figure in measured(root):
            print(f"| {what} | {figure} |", flush=True)
    finally:
        remove_tree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
