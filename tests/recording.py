"""The recorded terminal of README.md: `python -m tests.recording` draws it into docs/pictures, in light and in dark.

A shell on a simulated node runs the commands of `_SCENE`, and the picture shows what they printed. The recording fails
unless both clients computed through the death of mpsd and through the foreign command, under the same leases. Only the
waiting times are shortened. Times, pids and ids differ from run to run, so no test compares pictures.
"""

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from struct import pack
from termios import TIOCSWINSZ
from typing import Final, Self
from xml.sax.saxutils import escape

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI, TerminalTheme
from rich.text import Text

from mpsd.simulator import client, control
from mpsd.simulator.devices import VARIABLE
from tests.harness import wait_until
from tests.node import Node, running

PICTURES: Final = Path(__file__).parent.parent / "docs" / "pictures"

COLUMNS: Final = 104
"""Columns of the terminal."""

_ROOT: Final = Path(__file__).parent.parent
_PROGRAM: Final = f"""\
import json, subprocess, sys
client = subprocess.Popen({client.program()!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
assert json.loads(client.stdout.readline())["mps"]
step = 0
while True:
    client.stdin.write("compute 0.01\\n")
    assert json.loads(client.stdout.readline())["ok"]
    step += 1
    print(sys.argv[1], "step", step, flush=True)
"""
"""A user's program: it computes on a simulated GPU, step by step, and fails if it is not a client of MPS."""

_TYPING: Final = 0.8
"""Seconds for which a command is shown before its output."""
_READING: Final = 0.35
"""Seconds for which a line of output is shown before the next command."""

_MARK: Final = b"\x1e"
"""What the terminal shows when a command has ended: a byte that no command prints."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the terminal, and when it appears."""

    text: str
    """The text, with the escape sequences of its colours."""
    at: float
    """Seconds since the beginning of the picture."""
    kind: str
    """`note`, `command` or `output`."""


class Shell:
    """A shell on the node, whose commands and their output are recorded."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        """Start it, in this directory."""
        self.lines: list[Line] = []
        self._time = 0.5
        self._own, theirs = pty.openpty()
        ioctl(theirs, TIOCSWINSZ, pack("HHHH", 50, COLUMNS, 0, 0))
        self._bash = subprocess.Popen(
            ["bash", "--norc"], cwd=directory, env=environment, start_new_session=True,
            stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, text=True, bufsize=1,
        )  # fmt: skip
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.communicate()
        os.close(self._own)

    def note(self, text: str) -> None:
        self._show(f"# {text}", "note", _TYPING)

    def run(self, command: str) -> list[str]:
        """Run a command, show it with its output, and return the lines of the output."""
        self._show(command, "command", _TYPING)
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"{command}\nprintf '\\036'\n")
        printed = self._printed()
        for line in printed:
            self._show(line, "output", 0.05)
        self._time += _READING * min(len(printed), 5)
        return [Text.from_ansi(line).plain for line in printed]

    def _printed(self) -> list[str]:
        """Return the lines up to the mark: the kernel hands on what was written to a terminal when it gets to it."""
        said = bytearray()
        while not said.endswith(_MARK):
            said += os.read(self._own, 65536)
        return said.removesuffix(_MARK).decode().replace("\r\n", "\n").splitlines()

    def _show(self, text: str, kind: str, seconds: float) -> None:
        self.lines.append(Line(text, self._time, kind))
        self._time += seconds


def _write_program(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@contextlib.contextmanager
def _node(directory: Path) -> Iterator[tuple[Node, dict[str, str]]]:
    """Run a simulated node, and yield the environment of a shell in which its programs are commands."""
    programs = directory / "bin"
    programs.mkdir()
    for name, command in {
        "mpsd": (sys.executable, "-m", "mpsd"),
        "mpsctl": (sys.executable, "-m", "mpsd.cli.main"),
        "nvidia-cuda-mps-control": control.program(),
    }.items():
        _write_program(programs / name, f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    _write_program(programs / "compute", f"#!{sys.executable}\n{_PROGRAM}")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "MPSD_"))}
    root = directory / "node"
    root.mkdir()
    with contextlib.contextmanager(running)(root=root) as node:
        yield (
            node,
            {
                **inherited,
                "PATH": f"{programs}:{os.environ['PATH']}",
                "PYTHONPATH": f"{_ROOT}",
                "TERM": "xterm-256color",
                "MPSD_SOCKET": f"{node.socket}",
                "CUDA_MPS_PIPE_DIRECTORY": f"{node.pipe_directory('gpu0')}",  # the address of a stranger's command
                VARIABLE: f"{root / 'run' / 'simulated'}",
            },
        )


def _steps(directory: Path) -> dict[str, int]:
    logs = {path.stem: path.read_text(encoding="utf-8") for path in directory.glob("*.log")}
    return {name: text.count("\n") for name, text in logs.items()}


def _more_steps(directory: Path, since: dict[str, int]) -> Callable[[], bool]:
    """Return a condition: every client has done ten more steps."""
    return lambda: all(done >= since.get(name, 0) + 10 for name, done in _steps(directory).items())


def record(directory: Path) -> list[Line]:
    """Run the scene on a simulated node below a directory, and return the lines of the terminal."""
    with _node(directory) as (node, environment), Shell(directory, environment) as shell:

        def holders() -> dict[str, int]:
            return {each["id"]: each["owner"]["pid"] for each in node.get("/v1/leases").json["leases"]}

        def are_enforced() -> bool:
            return [each["verdict"] for each in node.get("/v1/clients").json["clients"]] == ["ok"] * 2

        shell.note("Two programs share GPU 0. Each runs under a lease, which MPS enforces.")
        shell.run("mpsctl run --fraction 0.5 --gpu 0 --name train -- compute train >train.log &")
        wait_until(lambda: len(holders()) == 1, what="the first lease")
        shell.run("mpsctl run --fraction 0.25 --gpu 0 --name serve -- compute serve >serve.log &")
        wait_until(lambda: len(_steps(directory)) == 2 and _more_steps(directory, {})(), what="both clients to compute")
        wait_until(are_enforced, what="mpsd to see both clients and their limits")
        shell.run("mpsctl leases")
        before = holders()

        shell.note("mpsd dies. The clients do not notice, and the next mpsd adopts everything.")
        killed = node.pid
        shell.run(f"kill -9 {killed}  # mpsd")
        node.ended()
        steps = _steps(directory)
        shell.run("mpsctl status 2>&1 | head -n 1")
        wait_until(_more_steps(directory, steps), what="both clients to compute without mpsd")
        shell.run("tail -qn 1 train.log serve.log")
        shell.run("mpsd run --root node --simulate 2 2>>node/mpsd.stderr &")
        wait_until(lambda: node.get("/readyz").status == 200, what="mpsd to be back", deadline=20, not_yet=(OSError,))
        shell.run("mpsctl leases")
        assert holders() == before

        shell.note("A stranger changes a limit behind mpsd's back. mpsd sets it again, and reports the command.")
        command = "set_default_active_thread_percentage 90"
        shell.run(f"echo {command} | nvidia-cuda-mps-control")
        if f"Cmd:{command}\n" not in node.control_log("gpu0").read_text():  # mpsd's own question had the one seat
            node.ask("gpu0", command)
        wait_until(lambda: node.events("limit_drift_ended"), what="mpsd to undo the command")
        events = shell.run("mpsctl events -k 'limit_drift*'")
        folded = " ".join(line.strip() for line in events)  # it may be folded
        assert command in folded, events
        assert "set it back" in folded, events

        shell.note("Both clients computed all the time.")
        steps = _steps(directory)
        wait_until(_more_steps(directory, steps), what="both clients to compute on")
        shell.run("tail -qn 1 train.log serve.log")
        assert holders() == before
        return shell.lines


# -- the picture -------------------------------------------------------------------------------------------------------

_WIDTH: Final = 8.4
"""The width of a character in pixels, at a font size of 14."""
_HEIGHT: Final = 20
"""The height of a line in pixels."""
_CONSOLE: Final = Console(width=COLUMNS, force_terminal=True, legacy_windows=False)

_STYLE: Final = """\
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }
.bold { font-weight: bold }
.note { fill: #5b7fb5 }
.prompt { fill: #4f9a5b }
@keyframes wait { from, to { opacity: 0 } }
@media (prefers-reduced-motion: no-preference) { g { animation: wait } }"""
"""A line is hidden until its time and shown from then on; a viewer without animations shows all lines."""


def draw(lines: list[Line], colours: TerminalTheme) -> str:
    """Return the picture of a terminal in which one line appears after the other, as SVG."""
    out: list[str] = []
    y = 6
    for line in lines:
        y += _HEIGHT + (_HEIGHT // 2 if line.kind == "note" else 0)
        out.append(f'<g style="animation-duration:{line.at:.1f}s">{"".join(_drawn(line, y, colours))}</g>')
    width, height = round(COLUMNS * _WIDTH + 30), y + 18
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    frame = f'x="1" y="1" width="{width - 2}" height="{height - 2}" rx="8" stroke="#8888"'
    back = f'<rect {frame} fill="{colours.background_color.hex}"/>'
    return "\n".join([svg, f"<style>\n{_STYLE}\n</style>", back, *out, "</svg>\n"])


def _drawn(line: Line, y: int, colours: TerminalTheme) -> Iterator[str]:
    """Yield the pieces of a line, each of one colour, and each as wide as its letters are in a terminal."""
    column = 0
    if line.kind == "command":
        yield _piece("$", 0, y, 'class="prompt"')
        column = 2
    for segment in Text.from_ansi(line.text).render(_CONSOLE):
        style, length = segment.style, len(segment.text)
        if segment.text.strip():
            look = f'fill="{colours.foreground_color.hex}"'
            if line.kind == "note":
                look = 'class="note"'
            elif style is not None and style.color is not None:
                look = f'fill="{style.color.get_truecolor(colours).hex}"'
            elif line.kind == "command" or (style is not None and style.bold):
                look += ' class="bold"'
            yield _piece(segment.text, column, y, look)
        column += length


def _piece(text: str, column: int, y: int, look: str) -> str:
    place = f'x="{15 + column * _WIDTH:.1f}" y="{y}" textLength="{len(text) * _WIDTH:.1f}"'
    return f'<text {place} {look} xml:space="preserve">{escape(text)}</text>'


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mpsd-") as directory:
        lines = record(Path(directory))
    for name, colours in {"light": DEFAULT_TERMINAL_THEME, "dark": MONOKAI}.items():
        (PICTURES / f"recording-{name}.svg").write_text(draw(lines, colours), encoding="utf-8")


if __name__ == "__main__":
    main()
