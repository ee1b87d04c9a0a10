"""A simulated client whose title the real setproctitle sets: `python titled_client.py WHEN TITLE CLIENT...`.

It becomes the CLIENT, late if that is. WHEN is

- `first`: before it does anything else
- `later`: when SIGUSR1 comes
- `fork`: before it forks the client, which has the title of its parent
- `child`: only in the client that it forks, as the engine of vLLM does
"""

import os
import signal
import sys
from pathlib import Path
from typing import Final

from setproctitle import setproctitle

TITLED: Final = (sys.executable, "-I", str(Path(__file__).absolute()))
"""The command, to which WHEN and TITLE belong."""


def main() -> None:
    when, title, *command = sys.argv[1:]
    if when in {"first", "fork"}:
        setproctitle(title)
    if when in {"fork", "child"} and os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.stdin.close()
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
    if when == "child":
        setproctitle(title)
    if when == "later":
        signal.signal(signal.SIGUSR1, lambda *_: setproctitle(title))
    sys.path.insert(0, str(Path(__file__).absolute().parent.parent))
    from mpsd.simulator import client  # noqa: PLC0415 - found by this path

    sys.argv = ["client", *(each for each in command if each == "--late")]
    client.run()


if __name__ == "__main__":
    main()
