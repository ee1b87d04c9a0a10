"""What each walk of docs/internals/architecture.md costs in calls: `python -m bench.calls`.

mpsd runs on a simulated node, under a profiler that counts each call of one of its own functions. A row has the
number of calls, of the modules and of the rooms that the calls are in, and of hops: calls into another module than the
call before. A row includes the calls that mpsd makes by itself meanwhile; the last row has only those.

`--modules` lists the modules of each walk in the order of their first call. Nothing is bounded.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import mpsd.__main__
from bench.callers import Caller, body, release, request
from mpsd.simulator.client import program

_SOURCE: Final = str(Path(__file__).parent.parent / "mpsd") + "/"
_COUNTS: Final = "MPSD_BENCH_COUNTS"
"""The variable that makes this program a counted mpsd, with the file for its counts."""
_MEANWHILE: Final = 1.0
"""Seconds that each walk is counted for, so that what follows the answer is counted too."""
_STATUS: Final = b"GET /v1/status HTTP/1.1\r\nHost: mpsd\r\n\r\n"


def counted(file: Path) -> None:
    """Be mpsd, and write the counts since the last time to the file at each SIGUSR2."""
    modules: list[str] = []
    calls = hops = 0
    last = ""

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls, hops, last
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(_SOURCE):
            return
        module = name.removeprefix(_SOURCE)
        calls += 1
        hops += module != last
        last = module
        if module not in modules:
            modules.append(module)

    def write(_number: int, _frame: FrameType | None) -> None:
        nonlocal calls, hops
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps({"calls": calls, "hops": hops, "modules": modules}))
        fresh.rename(file)
        calls = hops = 0
        modules.clear()

    signal.signal(signal.SIGUSR2, write)
    sys.setprofile(note)
    mpsd.__main__.main()


class Counted:
    """A counted mpsd with one simulated GPU."""

    def __init__(self, root: Path) -> None:
        """Start it, and wait until its control daemon is ready."""
        self._file = root / "counts"
        self._log = root / "mpsd.log"
        self.socket = root / "run" / "mpsd.sock"
        command = [sys.executable, "-m", "bench.calls", "run", "--root", str(root), "--simulate", "1"]
        environment = {**os.environ, _COUNTS: str(self._file)}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stderr=log, stdin=subprocess.DEVNULL)
        self.daemon = self.await_ready()

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request."""
        return Caller(self.socket).ask(request)

    def await_ready(self, other_than: int | None = None) -> int:
        """Wait until the log says that the control daemon is ready, and another process than this; return its pid."""
        while True:
            for line in self._log.read_bytes().splitlines():
                fact = json.loads(line)
                if fact["event"] == "daemon_state" and fact["state"] == "ready" and fact["pid"] != other_than:
                    return int(fact["pid"])
            time.sleep(0.01)

    def take(self) -> dict[str, Any]:
        """Return the counts since the last time."""
        self._file.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR2)
        while not self._file.exists():
            time.sleep(0.001)
        counts: dict[str, Any] = json.loads(self._file.read_text())
        return counts

    def close(self) -> None:
        """End mpsd, and its control daemon with its server."""
        self.process.terminate()
        self.process.wait()
        os.kill(self.daemon, signal.SIGKILL)


def walks(node: Counted) -> dict[str, Callable[[], None]]:
    """Return the walks by name, in the order in which each is possible."""
    leases: list[bytes] = []
    wanted = request(threads=25, memory="1GiB")

    def lease() -> None:
        leases.append(node.ask(wanted))

    def end() -> None:
        node.ask(release(leases.pop()))

    def status() -> None:
        node.ask(_STATUS)

    def client() -> None:
        variables = json.loads(body(leases[-1]))["env"]
        with subprocess.Popen([*program()], env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=-1) as it:
            assert it.stdout is not None
            it.stdout.readline()
            time.sleep(_MEANWHILE)

    def death() -> None:
        os.kill(node.daemon, signal.SIGKILL)
        node.daemon = node.await_ready(other_than=node.daemon)

    return {
        "the first lease: the limits have to be opened": lease,
        "another lease: they are open": lease,
        "the end of a lease": end,
        "a client, from its start to its end": client,
        "mpsctl status": status,
        "the death of a control daemon, until the next is ready": death,
        f"{_MEANWHILE:g} s of nothing else": lambda: None,
    }


def main() -> None:
    """Print a row for each walk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", action="store_true", help="list the modules of each walk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mb-") as directory, contextlib.closing(Counted(Path(directory))) as node:
        print("  calls  modules  rooms  hops")
        for name, walk in walks(node).items():
            time.sleep(_MEANWHILE)
            node.take()
            walk()
            time.sleep(_MEANWHILE)
            counts = node.take()
            rooms = {each.rpartition("/")[0] for each in counts["modules"]}
            print(f"{counts['calls']:7} {len(counts['modules']):8} {len(rooms):6} {counts['hops']:5}  {name}")
            if options.modules:
                print("".join(f"{'':31}{each}\n" for each in counts["modules"]), end="")


if __name__ == "__main__":
    if _COUNTS in os.environ:
        counted(Path(os.environ[_COUNTS]))
    else:
        main()
