"""The live table shows mpsd's answers, faults first, changes with them, and acts after a confirmation."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from textual.pilot import Pilot

from mpsd.cli.top.app import Lines, Rows, Top
from mpsd.client import Client
from tests.cli.answering import answering, http
from tests.cli.conftest import run_mpsctl
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, gpus, leased, variables
from tests.terminals import Terminal

PATIENCE: Final = 20.0
OFTEN: Final = {"mpsd.daemon.gpu.gpus._INTERVAL": 1.0}
"""The GPUs are read each second."""


def run(node: Node, steps: Callable[[Pilot[None]], Awaitable[None]], size: tuple[int, int] = (110, 30)) -> None:
    """Carry out these steps in the live table of a node."""

    async def inside() -> None:
        with Client(str(node.socket)) as api:
            async with Top(api, 0.1).run_test(size=size) as pilot:
                await steps(pilot)

    asyncio.run(inside())


def text(pilot: Pilot[None], name: str) -> str:
    return str(pilot.app.screen_stack[0].query_one(f"#{name}", Lines).render())


def rows(pilot: Pilot[None], name: str = "rows") -> list[dict[str, str]]:
    """Return the rows of a table, each by its headings."""
    table = pilot.app.screen_stack[0].query_one(f"#{name}", Rows)
    headings = [str(each.label) for each in table.ordered_columns]
    cells = ([str(cell) for cell in table.get_row_at(number)] for number in range(table.row_count))
    return [dict(zip(headings, each, strict=True)) for each in cells]


def names(pilot: Pilot[None]) -> list[str]:
    return [row["NAME"] for row in rows(pilot)]


def states(pilot: Pilot[None]) -> list[str]:
    """Return the states of the GPUs."""
    return [row["STATE"] for row in rows(pilot, "gpus")]


def on_top(pilot: Pilot[None]) -> str:
    """Return the text of the dialog, or of the page, on top of the screen."""
    assert len(pilot.app.screen_stack) == 2
    return " ".join(str(pilot.app.screen.query_one("Static").render()).split())


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Let the table run until a condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await pilot.pause(0.02)


# -- what it shows -----------------------------------------------------------------------------------------------------


def test_follows_the_node(node: Node) -> None:
    """A lease has a row as soon as it is granted, until it is released; the GPU shows the granted sums."""

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: states(pilot) == ["ok", "ok"])
        assert rows(pilot) == []
        granted = await asyncio.to_thread(node.lease, threads=20, memory="4GiB", gpu="0", name="training")
        await until(pilot, lambda: names(pilot) == ["training"])
        (row,) = rows(pilot)
        assert (row["GPU"], row["THREADS"], row["GRANTED"], row["LEASE"]) == ("0", "20%", "4GiB", granted["id"])
        # GPUs and leases are two answers: the lease may have been granted between them.
        await until(pilot, lambda: rows(pilot, "gpus")[0]["THREADS"] == "20%")
        await asyncio.to_thread(node.request, "DELETE", f"/v1/leases/{granted['id']}")
        await until(pilot, lambda: rows(pilot) == [])

    run(node, steps)


def test_client(make_node: Callable[..., Node]) -> None:
    """A client has a row with its lease and the memory that it holds, above idle leases; its GPU shows what it does."""
    node = make_node(control=None, durations=OFTEN).start()
    node.lease(threads=10, memory="1GiB", name="idle")
    with leased(node, "--threads", "20", "--memory", "4GiB", "--gpu", "1", "--name", "works") as client:
        assert client.alloc("1GiB")["ok"]

        async def steps(pilot: Pilot[None]) -> None:
            await until(pilot, lambda: names(pilot) == ["works", "idle"])
            await until(pilot, lambda: rows(pilot)[0]["HELD"].startswith("1"))
            assert rows(pilot)[0]["PID"] == str(client.pid)
            assert rows(pilot)[1]["STATE"] == "idle"
            await until(pilot, lambda: rows(pilot, "gpus")[1]["UTIL"] == "75%")  # the server is a process, too
            gpu = rows(pilot, "gpus")[1]
            assert (gpu["TEMP"], gpu["POWER"]) == ("60°C", "525W")
            await until(pilot, lambda: text(pilot, "rule") == "1 client, 2 leases; by held")

        run(node, steps)


@pytest.mark.timeout(120)
def test_emergency(make_node: Callable[..., Node]) -> None:
    """On a terminal of 80x24, without a key: each fault, its GPU, who holds memory, and how much there is besides."""
    node = make_node(simulate=8, control=None, durations=OFTEN).start()
    with contextlib.ExitStack() as stack:
        for number in range(4):
            request = ("--threads", "30", "--memory", "20GiB", "--gpu", str(number), "--name", f"training-{number}")
            client = stack.enter_context(leased(node, *request))
            assert client.alloc(f"{number + 1}GiB")["ok"]
        for number in range(23):
            node.lease(threads=5, memory="1GiB", gpu=str(number % 8), name=f"idle-{number}")
        for number in (3, 6):
            gpus(node)[number].lose()
        for number in (2, 7):
            gpus(node)[number].report(79)
        wait_until(lambda: len(node.get("/v1/status").json["reasons"]) == 4, what="the faults")
        with top(node) as terminal:
            terminal.wait_for_screen(shows_the_emergency)
            terminal.type("q")
            assert terminal.wait_for_the_end() == 0


def shows_the_emergency(screen: list[str]) -> bool:
    """Tell whether a screen of 80x24 has all of it, in its place."""
    headline, faults, gpu_rows, rule, clients, keys = (
        screen[0], screen[1:6], screen[7:15], screen[15], [line.split() for line in screen[17:21]], screen[23]
    )  # fmt: skip
    bad = {2: "faulty", 3: "unknown", 6: "unknown", 7: "faulty"}
    return (
        headline.startswith("NOT HEALTHY: 4 faults, 1 warning")
        and sorted(line[:6] for line in faults) == ["GPU 2 ", "GPU 3 ", "GPU 6 ", "GPU 7 ", "a prog"]
        and [line.split()[:2] for line in gpu_rows] == [[str(each), bad.get(each, "ok")] for each in range(8)]
        and rule == "4 clients, 27 leases, rows 1-6 of 27; by held"
        # What is held on a lost GPU is unknown, and comes first; then comes the largest.
        and [row[2:4] for row in clients] == [["3", "unknown"], ["2", "3GiB"], ["1", "2GiB"], ["0", "1GiB"]]
        and [row[7:8] for row in clients] == [[f"training-{each}"] for each in (3, 2, 1, 0)]
        and "? Keys" in keys
        and "q Quit" in keys
    )


def test_more_faults_than_lines(make_node: Callable[..., Node]) -> None:
    """Faults and GPUs that a small screen has no room for are counted; `f` shows each fault with its remedy."""
    node = make_node(simulate=8, control=None, durations=OFTEN).start()
    for gpu in gpus(node)[2:]:
        gpu.report(79)

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "6 faults, 1 warning" in text(pilot, "headline"))
        await until(pilot, lambda: "5 more (4 faults, 1 warning): f shows all" in text(pilot, "faults"))
        assert states(pilot) == ["faulty"] * 6 + ["ok"] * 2
        assert text(pilot, "gpu-rule").startswith("3 of 8 GPUs, those with a fault first")
        await pilot.press("f")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 2)
        assert all(f"mpsctl reset gpu{number}" in on_top(pilot) for number in range(2, 8))
        await pilot.press("escape")
        await pilot.resize_terminal(140, 40)
        await until(pilot, lambda: text(pilot, "faults").count("->") == 7)
        assert states(pilot) == ["ok"] * 2 + ["faulty"] * 6

    run(node, steps, (80, 16))


def test_without_a_lease(make_node: Callable[..., Node]) -> None:
    """A client without a lease is above all others, however little it holds, and can be ended."""
    node = make_node(control=None, config='[enforcement]\nunadmitted = "defaults"\n', durations=OFTEN).start()
    with (
        leased(node, "--threads", "20", "--memory", "4GiB", "--gpu", "1", "--name", "works") as client,
        SimulatedClient(variables(node, "gpu0")) as rogue,
    ):
        client.alloc("1GiB")

        async def steps(pilot: Pilot[None]) -> None:
            await until(pilot, lambda: [row["PID"] for row in rows(pilot)] == [str(rogue.pid), str(client.pid)])
            assert rows(pilot)[0]["STATE"] == "no lease"
            await pilot.press("r")
            assert len(pilot.app.screen_stack) == 1
            await pilot.press("k")
            await until(pilot, lambda: len(pilot.app.screen_stack) == 2)
            said = on_top(pilot)
            assert said.startswith(f"End process {rogue.pid} (")
            assert "on GPU 0, without a lease?" in said
            await pilot.press("y")
            await until(pilot, lambda: [row["PID"] for row in rows(pilot)] == [str(client.pid)])

        run(node, steps)


def test_filter_and_sort(node: Node) -> None:
    """The filter keeps the rows that contain its text, as it is typed; the sort keys change the order."""
    for name, threads in (("first", 10), ("second", 30)):
        node.request("POST", "/v1/leases", {"threads": threads, "memory": "1GiB", "gpu": "0", "name": name})

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: len(rows(pilot)) == 2)
        await pilot.press("slash", *"sec")
        await until(pilot, lambda: names(pilot) == ["second"])
        await until(pilot, lambda: "1 row with sec" in text(pilot, "rule"))
        await pilot.press("escape")
        await until(pilot, lambda: len(rows(pilot)) == 2)
        await pilot.press("s", "greater_than_sign")
        await until(pilot, lambda: names(pilot) == ["second", "first"])
        await until(pilot, lambda: text(pilot, "rule").endswith("by threads"))
        await pilot.press("I")
        await until(pilot, lambda: names(pilot) == ["first", "second"])
        await until(pilot, lambda: text(pilot, "rule").endswith("by threads, reversed"))
        await pilot.press("M")
        await until(pilot, lambda: text(pilot, "rule").endswith("by held, reversed"))

    run(node, steps)


def test_waiting(node: Node) -> None:
    """A request that waits has the last row, with its place, and is counted."""
    node.lease(threads=60, memory="1GiB", gpu="0", name="runs")
    command = node.mpsctl_command(
        "run", "--threads", "60", "--memory", "1GiB", "--gpu", "0", "--wait", "1h", "--", "true"
    )
    with Terminal.running(command, os.environ):

        async def steps(pilot: Pilot[None]) -> None:
            await until(pilot, lambda: [row["STATE"] for row in rows(pilot)] == ["idle", "place 1"])
            await until(pilot, lambda: text(pilot, "rule").startswith("0 clients, 2 leases (1 waiting)"))
            await pilot.press("down", "enter")
            await until(pilot, lambda: len(pilot.app.screen_stack) == 2)
            assert "waits for threads: " in on_top(pilot)

        run(node, steps)


def test_narrow(node: Node) -> None:
    """On 80 columns no row is wider than the screen: a long name is cut, and columns go."""
    node.lease(gpu="0", name="a-name-that-is-longer-than-most-others")

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: len(rows(pilot)) == 1)
        (row,) = rows(pilot)
        assert row["NAME"].startswith("a-name-that-is-lon")
        assert row["NAME"].endswith("…")
        assert "HOLDER" not in row
        assert pilot.app.query_one("#rows", Rows).virtual_size.width <= 80
        await pilot.press("enter")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 2)
        assert "name: a-name-that-is-longer-than-most-others" in on_top(pilot)

    run(node, steps, (80, 24))


def test_keys(node: Node) -> None:
    """`?` shows every key."""

    async def steps(pilot: Pilot[None]) -> None:
        await pilot.press("question_mark")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 2)
        said = on_top(pilot).split()
        bound = [each for binding in Top.BINDINGS for each in binding.key.split(",")]  # type: ignore[union-attr]
        signs = {"question_mark": "?", "slash": "/", "greater_than_sign": ">", "less_than_sign": "<", "escape": "Esc"}
        shown = {signs.get(each, each) for each in bound if each not in {"h", "f1", "f4", "f6", "f9", "f10", "ctrl+c"}}
        assert shown - {"?"} <= {*said, "Esc"}

    run(node, steps)


@pytest.mark.parametrize(
    ("before", "shown"), [("", "ok"), ("?", "─ Keys"), ("\td", "(y) yes")], ids=["table", "keys", "question"]
)
def test_interrupt(node: Node, before: str, shown: str) -> None:
    """Ctrl-C ends it, also under a dialog, and answers no question."""
    with top(node) as terminal:
        terminal.wait_for_screen(lambda lines: any("ok" in each for each in lines))
        terminal.type(before)
        terminal.wait_for_screen(lambda lines: any(shown in each for each in lines))
        terminal.type("\x03")
        assert terminal.wait_for_the_end() == 0
    assert {each["state"] for each in node.daemons().values()} == {"ready"}


# -- what it does ------------------------------------------------------------------------------------------------------


def test_release(node: Node) -> None:
    """A lease is released after the confirmation, which names it and its user, and not before."""
    lease = node.lease(gpu="0", threads=20, memory="4GiB", name="training")

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: names(pilot) == ["training"])
        await pilot.press("r")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 2)
        user = rows(pilot)[0]["USER"]
        assert f"Release {lease['id']} (training) of {user}: 20% and 4GiB on GPU 0?" in on_top(pilot)
        await pilot.press("n", "r")
        assert len((await asyncio.to_thread(node.get, "/v1/leases")).json["leases"]) == 1
        await pilot.press("y")
        await until(pilot, lambda: rows(pilot) == [])

    run(node, steps)
    assert node.leases() == []


def test_operate(make_node: Callable[..., Node]) -> None:
    """A control daemon is drained and resumed, by a row or by its GPU, after the confirmation."""
    node = make_node().start()
    node.wait_for_state("gpu1", "ready")
    node.lease(gpu="0", name="training")

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: names(pilot) == ["training"])
        await pilot.press("d", "y")
        await until(pilot, lambda: states(pilot) == ["draining", "ok"])
        await pilot.press("tab", "down", "d")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 2)
        assert on_top(pilot).startswith("Drain gpu1, with 0 leases and 0 clients?")
        await pilot.press("n")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 1)
        await pilot.press("up", "u")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 2)
        assert on_top(pilot).startswith("Resume gpu0, with 1 lease")
        await pilot.press("y")
        await until(pilot, lambda: states(pilot) == ["ok", "ok"])

    run(node, steps)


def test_reset(make_node: Callable[..., Node]) -> None:
    """A faulty GPU is chosen with Tab; its row in full has the reason, and `x` resets it."""
    node = make_node(control=None, durations=OFTEN).start()
    gpus(node)[1].report(79)

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: states(pilot) == ["ok", "faulty"])
        await pilot.press("tab", "down", "enter")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 2)
        assert "faulty: at " in on_top(pilot)
        await pilot.press("escape", "x", "y")
        await until(pilot, lambda: states(pilot) == ["ok", "ok"])

    run(node, steps)


# -- without mpsd ------------------------------------------------------------------------------------------------------


def test_mpsd_gone_and_back(make_node: Callable[..., Node]) -> None:
    """Without mpsd the last picture stays, with its time and age; a new mpsd is found again."""
    node = make_node().start()
    node.wait_for_state("gpu0", "ready")

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: states(pilot) == ["ok", "ok"])
        seen = text(pilot, "headline").split()[-1]
        await asyncio.to_thread(node.end)
        await until(pilot, lambda: "OLD: what follows is of " in text(pilot, "headline"))
        assert text(pilot, "headline").split("of ")[1][:8] >= seen
        await until(pilot, lambda: "there is no socket" in text(pilot, "headline"))
        assert states(pilot) == ["ok", "ok"]
        await until(pilot, lambda: "2s ago" in text(pilot, "headline"))
        await asyncio.to_thread(node.start)
        await until(pilot, lambda: "OLD" not in text(pilot, "headline"))

    run(node, steps)


def test_mpsd_hangs(make_node: Callable[..., Node]) -> None:
    """A picture is called old, too, while an answer is only late."""
    node = make_node().start()

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: text(pilot, "headline") != "")
        os.kill(node.pid, signal.SIGSTOP)
        try:
            await until(pilot, lambda: "ago; mpsd does not answer" in text(pilot, "headline"))
        finally:
            os.kill(node.pid, signal.SIGCONT)
        await until(pilot, lambda: "OLD" not in text(pilot, "headline"))

    run(node, steps)


def test_hostile_text(short_tmp: Path) -> None:
    """Names that others chose are shown as text: neither control sequences nor Textual's markup have an effect."""
    hostile = "\x1b[2J[bold]x[/bold]\x07"
    gpu = {"uuid": "GPU-0", "index": 0, "name": hostile, "health": "ok", "because": hostile, "hint": None}
    gpu |= {"memory_total": 2**34, "threads_granted": 0.0, "clients": 0, "utilization": None, "temperature": None}
    gpu |= {"memory_granted": 0, "memory_held": None, "clients_unleased": 1, "clients_max": 48, "refused": None}
    gpu |= {"power": None, "power_limit": None, "obstacle": None, "impaired": None}
    daemon = {"gpu": "GPU-0", "name": "gpu0", "state": "ready", "because": "", "hint": None, "wedged": False}
    daemon |= {"operation": None}
    client = {"pid": 7, "uid": 0, "daemon": "gpu0", "lease": None, "memory_held": None, "verdict": "violation"}
    client |= {"because": hostile, "hint": hostile, "name": hostile}
    reason = {"because": hostile, "hint": hostile}
    status = {"healthy": False, "reasons": [reason], "warnings": [], "violations": [], "daemons": [daemon]}
    others = {"leases": 2, "waiting": 0, "threads_granted": 5.0, "memory_granted": 2**30}
    no_clients = {"clients": 0, "memory_held": 0}
    answers = (status, {"gpus": [gpu]}, {"clients": [client], "others": no_clients}, {"leases": [], "others": others})

    async def steps() -> None:
        with Client(str(short_tmp / "mpsd.sock")) as api:
            async with Top(api, 600.0).run_test(size=(110, 30)) as pilot:
                await until(pilot, lambda: len(rows(pilot)) == 1)
                found = [names(pilot)[0], *text(pilot, "faults").split("\n")]
                for key in ("f", "enter", "k"):
                    await pilot.press(key)
                    found.append(on_top(pilot))
                    await pilot.press("escape")
                for each in found:
                    assert "[bold]x[/bold]" in each
                    assert each.isprintable()
                await until(pilot, lambda: "2 leases of other users, of 5% and 1GiB" in text(pilot, "rule"))

    with answering(short_tmp / "mpsd.sock", *map(http, answers)):
        asyncio.run(steps())


def test_another_version(short_tmp: Path) -> None:
    """An answer that lacks a field is reported as one of another version, and does not end the program."""
    incomplete: tuple[dict[str, object], ...] = ({"healthy": True}, {"gpus": []}, {"clients": []}, {"leases": []})

    async def steps() -> None:
        with Client(str(short_tmp / "mpsd.sock")) as api:
            async with Top(api, 600.0).run_test(size=(110, 30)) as pilot:
                await until(pilot, lambda: "different versions" in text(pilot, "headline"))

    with answering(short_tmp / "mpsd.sock", *map(http, incomplete)):
        asyncio.run(steps())


@contextlib.contextmanager
def top(node: Node) -> Iterator[Terminal]:
    program = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket), "top"]
    with Terminal.running(program, os.environ) as terminal:
        yield terminal


def test_without_a_terminal(node: Node) -> None:
    """Without a terminal it names the alternative."""
    done = run_mpsctl(node.socket, "top")
    assert done.returncode == 2
    assert "for a program: mpsctl clients -o json" in done.stderr
