"""Starts a module of the simulator as a program, by this file's path: `launch.py client`, wherever mpsd is installed.

The interpreter ignores the environment and site-packages: the program needs neither, and starts in half the time
without them.
"""

import os
import runpy
import sys


def program(module: str) -> tuple[str, ...]:
    """Return the command line that starts this module of mpsd.simulator."""
    return (sys.executable, "-I", "-S", os.path.abspath(__file__), module)  # noqa: PTH100 - pathlib is too slow here


if __name__ == "__main__":
    sys.path.insert(0, __file__.rpartition("/mpsd/")[0])
    runpy.run_module(f"mpsd.simulator.{sys.argv[1]}", run_name="__main__")
