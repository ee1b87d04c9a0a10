"""The live table shows mpsd's answers, changes with them, and releases and drains after a confirmation."""

import asyncio
import os
import pty
import subprocess
import sys
from collections.abc import Awaitable, Callable
from fcntl import ioctl
from pathlib import Path
from struct import pack
from termios import TIOCSWINSZ

from textual.pilot import Pilot
from textual.widgets import DataTable

from mpsd.cli.top.app import Lines, Top
from mpsd.client import Api
from tests.cli.answering import answering, http
from tests.cli.conftest import run_mpsctl
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import leased

PATIENCE = 20.0


def run(node: Node, steps: Callable[[Pilot[None]], Awaitable[None]], size: tuple[int, int] = (110, 30)) -> None:
    """Carry out these steps in the live table of a node."""

    async def inside() -> None:
        with Api(str(node.socket)) as api:
            async with Top(api, 0.1).run_test(size=size) as pilot:
                await steps(pilot)

    asyncio.run(inside())


def text(pilot: Pilot[None], name: str) -> str:
    return str(pilot.app.query_one(f"#{name}", Lines).render())


def rows(pilot: Pilot[None]) -> list[list[str]]:
    table = pilot.app.query_one(DataTable)
    return [[str(cell) for cell in table.get_row_at(number)] for number in range(table.row_count)]


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Let the table run until a condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await pilot.pause(0.02)


def names(pilot: Pilot[None]) -> list[str]:
    """Return the last column."""
    return [row[-1] for row in rows(pilot)]


def test_follows_the_node(node: Node) -> None:
    """A lease has a row as soon as it is granted, until it is released; the GPU shows the granted sums."""

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "ready" in text(pilot, "gpus"))
        assert rows(pilot) == []
        granted = await asyncio.to_thread(node.lease, threads=20, memory="4GiB", gpu="0", name="training")
        await until(pilot, lambda: names(pilot) == ["training"])
        (row,) = rows(pilot)
        assert [row[2], row[3], row[5], row[6]] == ["0", "20%", "4GiB", granted["id"]]
        # GPUs and leases are two answers: the lease may have been granted between them.
        await until(pilot, lambda: "██░░░░░░░░ 20%" in text(pilot, "gpus"))
        await asyncio.to_thread(node.request, "DELETE", f"/v1/leases/{granted['id']}")
        await until(pilot, lambda: rows(pilot) == [])

    run(node, steps)


def test_client(make_node: Callable[..., Node]) -> None:
    """A client has a row with its lease, and with the memory that it holds."""
    node = make_node(control=None, durations={"mpsd.daemon.gpu.gpus._INTERVAL": 1.0}).start()
    with leased(node, "--threads", "20", "--memory", "4GiB") as client:
        assert client.alloc("1GiB")["ok"]

        async def steps(pilot: Pilot[None]) -> None:
            await until(pilot, lambda: [row[0] for row in rows(pilot)] == [str(client.pid)])
            await until(pilot, lambda: rows(pilot)[0][4].startswith("1"))
            assert rows(pilot)[0][6] == node.leases()[0]["id"]
            assert text(pilot, "rule").startswith("1 client, 1 row")

        run(node, steps)


def test_filter_and_sort(node: Node) -> None:
    """The filter keeps the rows that contain its text, as it is typed; the sort key changes the order."""
    for name, threads in (("first", 10), ("second", 30)):
        node.request("POST", "/v1/leases", {"threads": threads, "memory": "1GiB", "gpu": "0", "name": name})

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: len(rows(pilot)) == 2)
        await pilot.press("slash", *"sec")
        await until(pilot, lambda: names(pilot) == ["second"])
        await pilot.press("escape")
        await until(pilot, lambda: len(rows(pilot)) == 2)
        await pilot.press("s")
        await until(pilot, lambda: names(pilot) == ["second", "first"])
        assert "by threads" in text(pilot, "rule")

    run(node, steps)


def test_release(node: Node) -> None:
    """A lease is released after the confirmation, and not before."""
    node.lease(gpu="0", name="training")

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: names(pilot) == ["training"])
        await pilot.press("r", "n")
        await pilot.press("r")
        assert len((await asyncio.to_thread(node.get, "/v1/leases")).json["leases"]) == 1
        await pilot.press("y")
        await until(pilot, lambda: rows(pilot) == [])

    run(node, steps)
    assert node.leases() == []


def test_drain(make_node: Callable[..., Node]) -> None:
    """A control daemon is drained after the confirmation; the table shows its state."""
    node = make_node().start()
    node.wait_for_state("gpu0", "ready")
    node.lease(gpu="0", name="training")

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: names(pilot) == ["training"])
        await pilot.press("d", "y")
        await until(pilot, lambda: "draining" in text(pilot, "gpus"))

    run(node, steps)


def test_mpsd_gone_and_back(make_node: Callable[..., Node]) -> None:
    """Without mpsd the last answer stays, marked as old; a new mpsd is found again."""
    node = make_node().start()
    node.wait_for_state("gpu0", "ready")

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "ready" in text(pilot, "gpus"))
        await asyncio.to_thread(node.end)
        await until(pilot, lambda: "what follows is old" in text(pilot, "node"))
        assert "ready" in text(pilot, "gpus")
        await asyncio.to_thread(node.start)
        await until(pilot, lambda: "old" not in text(pilot, "node"))

    run(node, steps)


def test_narrow(node: Node) -> None:
    """On 80 columns no row is wider than the screen: columns shrink, the command stays."""
    node.lease(gpu="0", name="training")

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: names(pilot) == ["training"])
        headings = [str(each.label) for each in pilot.app.query_one(DataTable).ordered_columns]
        assert headings[-1] == "COMMAND"
        assert "HOLDER" not in headings
        assert pilot.app.query_one(DataTable).virtual_size.width <= 80

    run(node, steps, (80, 24))


def test_hostile_text(short_tmp: Path) -> None:
    """Names that others chose are shown as text: neither control sequences nor Textual's markup have an effect."""
    hostile = "\x1b[2J[bold]x[/bold]\x07"
    gpu = {
        "uuid": "GPU-0",
        "index": 0,
        "health": "ok",
        "memory_total": 2**34,
        "threads_total": 100.0,
        "threads_granted": 0.0,
        "clients": 0,
    }
    gpu |= {"memory_granted": 0, "memory_held": None, "clients_unleased": 1, "clients_max": 48, "refused": None}
    daemon = {"gpu": "GPU-0", "name": "gpu0", "state": "ready"}
    client = {"pid": 7, "uid": 0, "daemon": "gpu0", "lease": None, "memory_held": None}
    client |= {"verdict": "ok"}
    status = http({"headline": hostile, "gpus": [gpu], "daemons": [daemon]})
    round_of_answers = (status, http({"clients": [{**client, "name": hostile}]}), http({"leases": []}))

    async def steps() -> None:
        with Api(str(short_tmp / "mpsd.sock")) as api:
            async with Top(api, 600.0).run_test(size=(110, 30)) as pilot:
                await until(pilot, lambda: len(rows(pilot)) == 1)
                for found in (names(pilot)[0], text(pilot, "node")):
                    assert "[bold]x[/bold]" in found
                    assert found.isprintable()

    with answering(short_tmp / "mpsd.sock", *round_of_answers):
        asyncio.run(steps())


def test_another_version(short_tmp: Path) -> None:
    """An answer that lacks a field is reported as one of another version, and does not end the program."""
    incomplete = (http({"headline": "healthy", "gpus": []}), http({"clients": []}), http({"leases": []}))

    async def steps() -> None:
        with Api(str(short_tmp / "mpsd.sock")) as api:
            async with Top(api, 600.0).run_test(size=(110, 30)) as pilot:
                await until(pilot, lambda: "different versions" in text(pilot, "node"))

    with answering(short_tmp / "mpsd.sock", *incomplete):
        asyncio.run(steps())


def test_terminal(node: Node) -> None:
    """On a terminal of 80x24 it draws itself and ends with q; without a terminal it names the alternative."""
    own, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, pack("HHHH", 24, 80, 0, 0))
    program = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket), "top"]
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as top:
        os.close(theirs)
        drawn = bytearray()

        def shows(what: bytes) -> bool:
            drawn.extend(os.read(own, 65536))
            return what in drawn

        wait_until(lambda: shows(b"ready"), what="the table")
        os.write(own, b"q")
        while True:
            try:
                if not os.read(own, 65536):
                    break
            except OSError:  # the other end of the terminal is closed
                break
        assert top.wait(timeout=PATIENCE) == 0
    os.close(own)
    done = run_mpsctl(node.socket, "top")
    assert done.returncode == 2
    assert "top needs a terminal; for a program: mpsctl clients -o json" in done.stderr
