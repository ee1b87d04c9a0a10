"""Starts a module of the simulator as a program, by this file's path: `launch.py client`, wherever mpsd is installed.

The interpreter ignores the environment and site-packages: the program needs neither, and starts in half the time
without them.
"""

import gc
import os
import sys
from typing import NoReturn


def program(module: str) -> tuple[str, ...]:
    """Return the command line that starts this module of mpsd.simulator."""
    return (sys.executable, "-I", "-S", os.path.abspath(__file__), module)  # noqa: PTH100 - pathlib is too slow here


def end(status: int) -> NoReturn:
    """End this program, without the interpreter's own end, which takes a tenth of a short program's time."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.path.insert(0, __file__.rpartition("/mpsd/")[0])
    gc.disable()  # nothing of what is imported is garbage
    # Not runpy: its own imports take a tenth of a start.
    module = __import__(f"mpsd.simulator.{sys.argv[1]}", fromlist=["run"])
    gc.enable()
    module.run()
