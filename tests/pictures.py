"""The screens of mpsctl, and its page: `python -m tests.pictures` draws them into docs/pictures, in light and in dark.

A simulated node runs a small scene: clients, an idle lease, a waiting request, a control daemon that dies. Times and
pids differ from run to run, so no test compares pictures.
"""

import asyncio
import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI, TerminalTheme
from rich.text import Text

from mpsd.cli.top.app import Top
from mpsd.client import Client
from tests.browser import Browser
from tests.daemon.helpers import kill, next_ready
from tests.harness import wait_until
from tests.node import Node, running
from tests.simulated_clients import leased
from tests.terminals import Terminal

PICTURES: Final = Path(__file__).parent.parent / "docs" / "pictures"

WIDTH: Final = 100
"""Columns of the terminal."""

THEMES: Final = {"light": DEFAULT_TERMINAL_THEME, "dark": MONOKAI}

_FONT: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""The font that rich would fetch from a server; the reader's own monospace font replaces it."""


@contextlib.contextmanager
def scene(root: Path) -> Iterator[Node]:
    """Run the node, and the events on it."""
    with (
        contextlib.contextmanager(running)(root=root) as node,
        leased(node, "--threads", "50", "--memory", "40GiB", "--gpu", "0", "--name", "training") as training,
        leased(node, "--threads", "20", "--memory", "16GiB", "--gpu", "1", "--name", "inference") as inference,
    ):
        training.alloc("31GiB")
        inference.alloc("9GiB")
        node.lease(threads=25, memory="20GiB", gpu="1", name="notebook")
        request = ("run", "--threads", "60", "--memory", "8GiB", "--gpu", "0", "--name", "sweep", "--wait", "1h")
        program = node.mpsctl_command(*request, "--", "true")
        with subprocess.Popen(program, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as waiting:
            wait_until(lambda: node.get("/v1/status").json["waiting"] == 1, what="the request to wait")
            yield node
            waiting.terminate()


def draw_output(node: Node, *command: str) -> None:
    with Terminal.running(node.mpsctl_command(*command), os.environ, columns=WIDTH, lines=50) as terminal:
        terminal.wait_for_the_end()
    text = terminal.raw.replace("\r\n", "\n")
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
    async def inside(theme: str) -> str:
        with Client(str(node.socket)) as api:
            app = Top(api, 0.2)
            async with app.run_test(size=(WIDTH, 16)) as pilot:
                app.ansi_color, app.theme = False, theme
                await pilot.pause(2.0)
                return app.export_screenshot(title="mpsctl top")

    for mode, theme in (("light", "textual-light"), ("dark", "textual-dark")):
        write(f"top-{mode}", asyncio.run(inside(theme)))


def draw_web(node: Node, profile: Path) -> None:
    """Draw the upper part of the page, in both themes."""
    with subprocess.Popen(
        node.mpsctl_command("web"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as web:
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
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mt-") as directory, scene(Path(directory)) as node:
        wait_until(
            lambda: any(each["memory_held"] for each in node.get("/v1/clients").json["clients"]),
            what="NVML's next reading",
            deadline=30,
        )
        draw_web(node, Path(directory) / "chromium")
        draw_top(node)
        draw_output(node, "leases")
        before = node.daemons()["gpu1"]["pid"]
        kill(before)
        next_ready(node, "gpu1", before)
        for command in (("status",), ("explain", "gpu1"), ("events", "-n", "12")):
            draw_output(node, *command)


if __name__ == "__main__":
    main()
