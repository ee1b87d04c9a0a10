"""The number of calls of mpsd's own functions for a grant and its release: `python -m bench.calls [--verbose]`.

It runs a simulated node in this process, under a profile that only counts calls, and sends requests from a thread. The
count does not depend on the machine, so commits can be compared by it.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Final

WARM_UP: Final = 20
PAIRS: Final = 200

_HERE: Final = str(Path(__file__).parents[1] / "mpsd") + os.sep


class Counting:
    """A profile function that counts calls while it is on."""

    def __init__(self) -> None:
        self.calls = Counter[str]()
        self.on = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call of a function of mpsd."""
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(_HERE):
            self.calls[f"{code.co_filename.removeprefix(_HERE)}:{code.co_qualname}"] += 1


class Caller:
    """One connection to mpsd."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._answers = self._socket.makefile("rb")

    def ask(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        """Return the answer's JSON; an empty object if it has none."""
        head = f"{method} {path} HTTP/1.1\r\nHost: mpsd\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        length = 0
        while line := self._answers.readline().strip().lower():
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        answer: dict[str, Any] = json.loads(self._answers.read(length) or b"{}")
        return answer

    def pair(self) -> None:
        """Request a lease, and release it."""
        lease = self.ask("POST", "/v1/leases", b'{"threads": 1, "memory": "1MiB"}')
        self.ask("DELETE", f"/v1/leases/{lease['id']}")


def measure(root: Path, counting: Counting, *, verbose: bool) -> None:
    """Count for some pairs, print the result, and end mpsd, which has the main thread."""
    path = root / "run" / "mpsd.sock"
    while not path.exists():
        time.sleep(0.05)
    caller = Caller(path)
    while not caller.ask("GET", "/readyz")["ok"]:
        time.sleep(0.05)
    for _ in range(WARM_UP):
        caller.pair()
    counting.on = True
    for _ in range(PAIRS):
        caller.pair()
    counting.on = False
    print(f"a grant and its release take {counting.calls.total() / PAIRS:.0f} calls of mpsd's functions")
    if verbose:
        for name, count in counting.calls.most_common():
            print(f"{count / PAIRS:8.2f}  {name}")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run mpsd under the profile, and a caller beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="Print each function with its calls.")
    verbose = parser.parse_args().verbose
    root, counting = Path(tempfile.mkdtemp(prefix="mc-", dir="/tmp")), Counting()
    threading.Thread(target=measure, args=(root, counting), kwargs={"verbose": verbose}, daemon=True).start()
    from mpsd.__main__ import main as run_mpsd  # noqa: PLC0415 - what is imported before is not counted

    sys.argv = ["mpsd", "run", "--root", str(root), "--simulate", "2", "--stop-daemons-on-exit"]
    sys.stderr = (root / "mpsd.log").open("w")
    sys.setprofile(counting)
    try:
        run_mpsd()
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
