"""The life of `mpsctl web`: it prints a link, serves until a signal, and ends with the process that started it."""

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Collection, Iterator
from html import escape
from pathlib import Path
from typing import Final

import click

from mpsd.cli.command import note
from mpsd.cli.terminal import raised_signals
from mpsd.cli.web.server import LOOPBACK, Server
from mpsd.client import Client
from mpsd.core.errors import ConfigurationError

_LOOK: Final = 500
"""Milliseconds between two checks that the process that started it still runs."""

_FAREWELL: Final = 1.0
"""Seconds to send open pages the notice that the server ends."""


def run(api: Client, port: int, users: Collection[int], *, opens: bool) -> None:
    """Serve the page until a signal, or the end of its terminal or its parent. Raises ConfigurationError."""
    parent = os.getppid()  # read first, since the parent may end as soon as it has read the link
    try:
        server = Server(api, port, users, lambda: note("a browser opened the page; its link is void now"))
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {LOOPBACK}, port {port}: {error.strerror}",
            hint="choose another --port, or none for one that is free",
        ) from error
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
    with raised_signals(), contextlib.ExitStack() as stack:
        stack.callback(_end, server)
        click.echo(server.link())
        if sys.stdin.isatty():
            note("a link opens the page once; Enter prints another, Ctrl-C ends the page")
        if opens:
            stack.enter_context(_opened(server.link()))
        note(f"the page ends: {_wait(server, parent)}")


def _end(server: Server) -> None:
    server.end()
    end = time.monotonic() + _FAREWELL
    while threading.active_count() > 1 and time.monotonic() < end:
        time.sleep(0.02)


def _wait(server: Server, parent: int) -> str:
    """Wait until the parent or the terminal is gone, and return the reason; each line of input prints another link."""
    poll = select.poll()
    has_terminal = sys.stdin.isatty()
    poll.register(sys.stdout.fileno(), 0)
    if has_terminal:
        poll.register(sys.stdin.fileno(), select.POLLIN)
    while os.getppid() == parent:
        for descriptor, state in poll.poll(_LOOK):
            if state & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
                return "its terminal, or the reader of its output, is gone"
            if descriptor == sys.stdin.fileno() and not os.read(descriptor, 4096):
                return "its input ended"
            click.echo(server.link())
    return "the process that started it is gone"


@contextlib.contextmanager
def _opened(link: str) -> Iterator[None]:
    """Open a private file that leads to the link in a browser, since every user can read a browser's arguments."""
    import tempfile
    import webbrowser

    with tempfile.TemporaryDirectory(prefix="mpsctl-", dir=os.environ.get("XDG_RUNTIME_DIR")) as directory:  # mode 0700
        path = Path(directory) / "open.html"
        path.touch(mode=0o600)
        path.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(link)}">\n')
        if not webbrowser.open(path.as_uri()):
            note("there is no browser here: open the link elsewhere, through ssh -L")
        yield
