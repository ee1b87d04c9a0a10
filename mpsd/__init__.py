"""mpsd: the supervisor that makes NVIDIA MPS dependable on one GPU node.

Programs on the node use the names in `__all__`. Each is imported at its first use, so that `import mpsd` costs a
program nothing, and asyncio is there for those alone that name AsyncClient.
"""

import os
import sys

TYPE_CHECKING = False  # typing has it too, and takes longer to import than all of this
if TYPE_CHECKING:
    from mpsd import errors
    from mpsd.client.async_client import AsyncClient
    from mpsd.client.client import Client
    from mpsd.client.lease import Lease, Verification, WholeGpuWarning, current, lease
    from mpsd.client.processes.pool import Pool, process
    from mpsd.client.processes.program import Process, spawn
    from mpsd.core.errors import MpsdError

__version__ = "0.1.0"

__all__ = ["AsyncClient", "Client", "Lease", "MpsdError", "Pool", "Process", "Verification", "WholeGpuWarning"]
__all__ += ["current", "errors", "lease", "process", "spawn"]

_PLACES = {
    **dict.fromkeys(("lease", "Lease", "Verification", "WholeGpuWarning", "current"), "mpsd.client.lease"),
    **dict.fromkeys(("spawn", "Process"), "mpsd.client.processes.program"),
    **dict.fromkeys(("Pool", "process"), "mpsd.client.processes.pool"),
    "AsyncClient": "mpsd.client.async_client",
    "Client": "mpsd.client.client",
    "MpsdError": "mpsd.core.errors",
    "errors": "mpsd.errors",
}
"""The module of each public name."""

if not TYPE_CHECKING:  # a type checker takes the imports above, and finds a name that is misspelled

    def __getattr__(name: str) -> object:
        """Import a public name at its first use."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module  # noqa: PLC0415 - the front-end takes longer with it

        module = import_module(_PLACES[name])
        found = globals()[name] = module if name == "errors" else getattr(module, name)
        return found


def __dir__() -> list[str]:
    """Name what a program may use, before its first use too."""
    return sorted({*globals(), *__all__})


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
