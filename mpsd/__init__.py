"""mpsd: the supervisor that makes NVIDIA MPS dependable on one GPU node."""

import os
import sys

__version__ = "0.1.0"


def find_own_libraries_first(python_path: str) -> None:
    """Search installed libraries before PYTHONPATH, which is the argument, and before the current directory.

    The caller's PYTHONPATH is for the caller's programs: mpsd must not import a module from there that has the name of
    one of its libraries.
    """
    import contextlib  # noqa: PLC0415 - the simulator's front-end imports this package, and takes half as long without it

    strange = {os.path.abspath(each) for each in python_path.split(os.pathsep) if each}  # noqa: PTH100 - as in cli
    with contextlib.suppress(FileNotFoundError):  # the current directory was removed
        strange.add(os.getcwd())  # noqa: PTH109 - likewise
    sys.path.sort(key=lambda each: not each or os.path.abspath(each) in strange)  # noqa: PTH100 - likewise


def keep_rich_out() -> None:
    """Make an import of rich fail: `mpsctl top` alone draws with it, and structlog imports it wherever it is installed.

    A service would start 0.2 s later for that, and have 6 MB more.
    """
    sys.modules["rich"] = None  # type: ignore[assignment]  # as the documentation of the import system has it
