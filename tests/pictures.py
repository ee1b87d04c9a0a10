"""The screens of mpsctl, and its page: `python -m tests.pictures` draws them into docs/pictures, in light and in dark.

A simulated node runs a small scene: clients, an idle lease, a waiting request, a control daemon that dies. Times and
pids differ from run to run, so no test compares pictures.
"""

import asyncio
import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fcntl import ioctl
from io import StringIO
from pathlib import Path
from struct import pack
from termios import TIOCSWINSZ
from typing import Any, Final

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI, TerminalTheme
from rich.text import Text

from mpsd.cli.top.app import Top
from mpsd.client import Api
from tests.browser import Browser
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import leased

PICTURES: Final = Path(__file__).parent.parent / "docs" / "pictures"

WIDTH: Final = 100
"""Columns of the terminal."""

THEMES: Final = {"light": DEFAULT_TERMINAL_THEME, "dark": MONOKAI}

_FONT: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""The font that rich would fetch from a server; the reader's own monospace font replaces it."""


@contextlib.contextmanager
def scene(root: Path) -> Iterator[Node]:
    """Run the node, and the events on it."""
    node = Node(root=root, simulate=2, control=None)
    try:
        node.start()
        with (
            leased(node, "--threads", "50", "--memory", "40GiB", "--gpu", "0", "--name", "training") as training,
            leased(node, "--threads", "20", "--memory", "16GiB", "--gpu", "1", "--name", "inference") as inference,
        ):
            training.alloc("31GiB")
            inference.alloc("9GiB")
            node.request("POST", "/v1/leases", {"threads": 25, "memory": "20GiB", "gpu": "1", "name": "notebook"})
            request = ("run", "--threads", "60", "--memory", "8GiB", "--gpu", "0", "--name", "sweep", "--wait", "1h")
            program = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket), *request, "--", "true"]
            with subprocess.Popen(program, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as waiting:
                wait_until(lambda: node.get("/v1/status").json["waiting"] == 1, what="the request to wait")
                yield node
                waiting.terminate()
    finally:
        node.clean_up()


def kill_daemon(node: Node) -> None:
    """Have the control daemon of GPU 1 die, and wait for the next one."""
    before = node.daemons()["gpu1"]["pid"]
    os.kill(before, signal.SIGKILL)
    wait_until(
        lambda: node.daemons()["gpu1"]["pid"] not in {None, before} and node.daemons()["gpu1"]["state"] == "ready",
        what="the next control daemon",
    )


def _clients(node: Node) -> list[dict[str, Any]]:
    clients: list[dict[str, Any]] = node.get("/v1/clients").json["clients"]
    return clients


def on_terminal(node: Node, *arguments: str) -> str:
    """Return the terminal output of mpsctl, with its colours."""
    own, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, pack("HHHH", 50, WIDTH, 0, 0))
    program = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket), *arguments]
    with subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs) as mpsctl:
        os.close(theirs)
        said = bytearray()
        with contextlib.suppress(OSError):  # the other end of the terminal is closed
            while piece := os.read(own, 65536):
                said += piece
        mpsctl.wait()
    os.close(own)
    return said.decode().replace("\r\n", "\n")


def draw_output(node: Node, *command: str) -> None:
    """Draw the output of a command, in both themes."""
    text = on_terminal(node, *command)
    for theme, colours in THEMES.items():
        write(f"{command[0]}-{theme}", _svg(text, f"$ mpsctl {' '.join(command)}", colours))


def _svg(text: str, title: str, colours: TerminalTheme) -> str:
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True, legacy_windows=False)
    console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=False)
    return console.export_svg(title=title, theme=colours)


def write(name: str, svg: str) -> None:
    """Write a picture that fetches nothing."""
    (PICTURES / f"{name}.svg").write_text(_FONT.sub("", svg).replace("Fira Code", "ui-monospace"), encoding="utf-8")


def draw_top(node: Node) -> None:
    """Draw the live table, in both themes."""

    async def inside(theme: str) -> str:
        with Api(str(node.socket)) as api:
            app = Top(api, 0.2)
            async with app.run_test(size=(WIDTH, 16)) as pilot:
                app.ansi_color, app.theme = False, theme
                await pilot.pause(2.0)
                return app.export_screenshot(title="mpsctl top")

    for mode, theme in (("light", "textual-light"), ("dark", "textual-dark")):
        write(f"top-{mode}", asyncio.run(inside(theme)))


def draw_web(node: Node, profile: Path) -> None:
    """Draw the upper part of the page, in both themes."""
    command = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket), "web"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as web:
        assert web.stdout is not None
        link = web.stdout.readline().strip()
        with Browser(profile) as browser:
            page = browser.page(link, width=1000, height=760)
            page.wait("document.querySelectorAll('#event-list li').length > 3", "the events")
            page.do("document.getElementById('host').textContent = 'node7'")
            for theme in THEMES:
                page.prefer(theme)
                (PICTURES / f"web-{theme}.png").write_bytes(page.picture())
        web.terminate()


def main() -> None:
    """Draw all of them."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mt-") as directory, scene(Path(directory)) as node:
        wait_until(lambda: any(each["memory_held"] for each in _clients(node)), what="NVML's next reading", deadline=30)
        draw_web(node, Path(directory) / "chromium")
        draw_top(node)
        draw_output(node, "leases")
        kill_daemon(node)
        for command in (("status",), ("explain", "gpu1"), ("events", "-n", "12")):
            draw_output(node, *command)


if __name__ == "__main__":
    main()
