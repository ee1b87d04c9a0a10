"""A real Chromium for tests, without a window, driven by the DevTools protocol over a pipe.

It needs no library and no driver: a command is JSON with an id, its answer has the same id, and an event has none. See
https://chromedevtools.github.io/devtools-protocol/. No other process can connect to a pipe, unlike a port.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any, Final, Self

from tests.harness import BROWSER, wait_until

PROGRAM: Final = "chromium"
"""The name of Debian's package, and of its program."""

_DEADLINE: Final = 30.0
"""Seconds for any answer, far more than an answer should take."""

_FREE: Final = 10
"""The lowest descriptor for the ends of the pipes, so that none of them is already 3 or 4."""

_FLAGS: Final = (
    "--headless=new",
    BROWSER,
    "--no-sandbox",  # Chromium has no sandbox as root or in a container
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-crash-reporter",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--enable-precise-memory-info",
    "--js-flags=--expose-gc",
    "--password-store=basic",
    "about:blank",
)

KEYS: Final = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowDown": 40}
"""Keys by name, with their codes."""


def missing() -> str | None:
    """Return the reason why no browser can run here, or None."""
    return None if shutil.which(PROGRAM) else "apt-get install chromium"


class Browser:
    """A Chromium with its own profile, which ends with its `with` block."""

    def __init__(self, profile: Path) -> None:
        program = shutil.which(PROGRAM)
        assert program is not None
        theirs_in, self._out = _pipe()
        self._in, theirs_out = _pipe()
        null = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, null, each) for each in (0, 1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4)]
        environment = {
            **os.environ,
            "HOME": str(profile),
            "XDG_CONFIG_HOME": str(profile),
            "XDG_CACHE_HOME": str(profile),
        }
        arguments = [program, f"--user-data-dir={profile}", *_FLAGS]
        self.pid = os.posix_spawn(program, arguments, environment, file_actions=actions, setsid=True)
        for each in (null, theirs_in, theirs_out):
            os.close(each)
        self._received = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self.call("Browser.getVersion")  # all of its processes run once it answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End Chromium and all of its processes."""
        os.close(self._out)
        with contextlib.suppress(OSError):
            while os.read(self._in, 65536):
                pass
        os.close(self._in)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        wait_until(lambda: not _has_group(self.pid), what="the browser's processes to be gone")

    def page(self, url: str = "about:blank", *, width: int = 1200, height: int = 900) -> "Page":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility", "Performance", "DOM"):
            page.call(f"{domain}.enable")
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        page.call("Emulation.setDeviceMetricsOverride", **screen)
        page.open(url)
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result. Raises AssertionError for an error response."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            command["sessionId"] = session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            if "method" in message:
                self._events.append(message)

    def events(self, session: str, method: str) -> list[dict[str, Any]]:
        """Return the parameters of all events of this kind in a tab so far."""
        self.call("Browser.getVersion")  # the answer follows every earlier event
        return [
            each["params"] for each in self._events if each.get("sessionId") == session and each["method"] == method
        ]

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + _DEADLINE
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0))
            assert ready, "the browser did not answer"
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser has ended"
            self._received += piece
        raw, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        return message


_STILL: Final = """(async () => {
    const element = %s, frame = () => new Promise(requestAnimationFrame);
    element.scrollIntoView({block: 'center'});
    for (let still = 0, before; still < 3; still++) {
        await frame();
        const {x, y, width, height} = element.getBoundingClientRect();
        if (before !== `${x} ${y}`) still = 0;
        before = `${x} ${y}`;
        var place = {x: x + width / 2, y: y + height / 2};
    }
    return place;
})()"""
"""The middle of an element, once it has not moved for three frames: elements above it may still grow."""


class Page:
    """A tab."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def events(self, method: str) -> list[dict[str, Any]]:
        return self._browser.events(self._session, method)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def reload(self) -> None:
        """Load the page again, and wait until the old one is gone."""
        self.do("window.isOld = true")
        self.call("Page.reload")
        self.wait("!window.isOld", "the page to load again")

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def prefer(self, scheme: str) -> None:
        """Set the preferred colours: `light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def do(self, script: str) -> Any:
        """Return the value of a JavaScript expression; for a promise, its result."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, what: str, *, deadline: float = 30.0) -> None:
        wait_until(
            lambda: self.do(f"!!({script})"), what=f"{what}; {script}", deadline=deadline, not_yet=(AssertionError,)
        )

    def press(self, key: str) -> None:
        text = {"Enter": "\r", " ": " "}.get(key, "")
        fields = {"key": key, "windowsVirtualKeyCode": KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **fields)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def click(self, script: str) -> None:
        place = self.do(_STILL % script)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def text(self, script: str) -> str:
        return str(self.do(f"({script}).innerText"))

    def heap(self) -> int:
        """Return the size of the JavaScript heap in bytes, after a garbage collection."""
        self.call("HeapProfiler.collectGarbage")
        return int(self.call("Runtime.getHeapUsage")["usedSize"])

    def counters(self) -> dict[str, int]:
        """Return the numbers of documents, nodes and listeners."""
        self.call("HeapProfiler.collectGarbage")
        return self.call("Memory.getDOMCounters")

    def accessible(self) -> list[dict[str, Any]]:
        """Return the accessibility tree: role, name and more of each element."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            {"role": each["role"]["value"], "name": each.get("name", {}).get("value", "")}
            for each in nodes
            if not each.get("ignored")
        ]

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def complaints(self) -> list[str]:
        """Return the errors and warnings of the browser about the page, including violations of its policy."""
        logged = [each["entry"] for each in self.events("Log.entryAdded")]
        thrown = [each["exceptionDetails"] for each in self.events("Runtime.exceptionThrown")]
        printed = [each for each in self.events("Runtime.consoleAPICalled") if each["type"] in {"error", "warning"}]
        return [
            *(f"{each['text']} {each.get('url', '')}" for each in logged if each["level"] in {"error", "warning"}),
            *(f"{each.get('exception', {}).get('description', each['text'])}" for each in thrown),
            *(f"{each['args']}" for each in printed),
        ]


def _pipe() -> tuple[int, int]:
    """Return the reading and the writing end of a pipe, both at high descriptors that no child inherits by default."""
    found = os.pipe()
    high = tuple(fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FREE) for each in found)
    for each in found:
        os.close(each)
    return high[0], high[1]


def _has_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
