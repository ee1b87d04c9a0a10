"""Fixtures for `mpsctl web`: the server in front of a node, and a browser."""

import http.client
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.browser import Browser, Page
from tests.cli.conftest import AS_USER, start_mpsctl
from tests.harness import remove_tree
from tests.node import Answer, Node

HOST: Final = "127.0.0.1"

ANNOUNCED: Final = "[...document.getElementById('announcement').children].map(each => each.textContent)"
"""The latest announcements of the page to a screen reader."""


class Web:
    """A `mpsctl web`, and requests to it from a program that knows its protocol."""

    def __init__(self, socket: Path | str, *arguments: str, uid: int | None = None, **options: Any) -> None:
        """Start `mpsctl web`, by default as the user of the tests."""
        if uid is not None:
            options["env"] = {**os.environ, "MPSD_TEST_UID": f"{uid}"}
            options["before"] = ("-c", AS_USER)
        self.process: subprocess.Popen[str] = start_mpsctl(socket, "web", *arguments, **options)
        assert self.process.stdout is not None
        self.link = self.process.stdout.readline().strip()
        assert self.link.startswith(f"http://{HOST}:"), self.process.communicate()
        self.address, _, self.token = self.link.partition("#token=")
        self.port = int(self.address.rstrip("/").rpartition(":")[2])
        self._session: str | None = None

    @property
    def origin(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def session(self) -> str:
        """A session, opened with the link."""
        if self._session is None:
            answer = self.send("POST", "/page/session", {"token": self.token}, headers={"Origin": self.origin})
            assert answer.status == 200, answer
            self._session = str(answer.json["session"])
        return self._session

    def forget(self) -> None:
        """Forget the session, so that the next use of `session` opens another with the current token."""
        self._session = None

    def send(
        self, method: str, path: str, body: object = None, *, headers: Mapping[str, str | None] | None = None
    ) -> Answer:
        """Send one request without a session; a header whose value is None is omitted."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        said = {"Host": f"{HOST}:{self.port}", "Content-Type": "application/json" if raw is not None else None}
        connection = http.client.HTTPConnection(HOST, self.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in {**said, **(headers or {})}.items():
                if value is not None:
                    connection.putheader(name, value)
            if raw is not None and "Content-Length" not in (headers or {}):
                connection.putheader("Content-Length", str(len(raw)))
            connection.endheaders(raw)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def ask(
        self, method: str, path: str, body: object = None, *, headers: Mapping[str, str | None] | None = None
    ) -> Answer:
        """Send one request as the page does, with a session."""
        own = {"Authorization": f"Bearer {self.session}", "Origin": self.origin if method != "GET" else None}
        return self.send(method, path, body, headers={**own, **(headers or {})})

    def clean_up(self) -> None:
        """End `mpsctl web` if it still runs, and close its pipes."""
        self.process.kill()
        self.process.wait(timeout=30)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """End `mpsctl web`, and return its exit status and its stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, said = self.process.communicate(timeout=30)
        return self.process.returncode, said


@pytest.fixture(scope="module")
def shared_web(shared_node: Node) -> Iterator[Web]:
    """Start a `mpsctl web` that all tests of a module share."""
    web = Web(shared_node.socket)
    yield web
    web.end()


@pytest.fixture
def make_web() -> Iterator[Callable[..., Web]]:
    """Return a function that starts a `mpsctl web`, for tests that end it."""
    made: list[Web] = []

    def make(socket: Path | str, *arguments: str, **options: Any) -> Web:
        made.append(Web(socket, *arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.clean_up()


@pytest.fixture(scope="module")
def browser(private_root: Path) -> Iterator[Browser]:
    """Start a browser that all tests of a module share."""
    profile = private_root / "chromium"
    with Browser(profile) as started:
        yield started
    remove_tree(profile)


@pytest.fixture
def open_page(make_web: Callable[..., Web], browser: Browser) -> Iterator[Callable[..., Page]]:
    """Return a function that opens the page of a node in a new tab, and waits until the page shows the node."""
    opened: list[Page] = []

    def open_(node: Node, *, width: int = 1200) -> Page:
        page = browser.page(make_web(node.socket).link, width=width)
        opened.append(page)
        page.wait("!document.getElementById('overview').hidden", "the page to show the node")
        return page

    yield open_
    for each in opened:
        each.close()
