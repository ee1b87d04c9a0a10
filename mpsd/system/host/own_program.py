"""mpsctl of this installation as a program of another mount namespace starts it, also out of a container's image.

A container runtime starts hooks on the machine, where an mpsd that is only in a container is not installed. But the
files of that container are a file system that is mounted in the runtime's view, too, for as long as the container
lives, and under a path that no other container gets. The dynamic loader in it can start the interpreter in it, with
libraries from there alone, so that nothing has to be copied to the machine, and nothing of the machine is used: neither
its Python nor its shell. A path by /proc/PID/root would be shorter. It must not be used: a process with the pid of
an ended mpsd-kubernetes would choose what the runtime starts as root.
"""

import os
import re
import sys
from pathlib import Path
from typing import Final

from mpsd.core.containers.cdi import Program
from mpsd.core.errors import ConfigurationError
from mpsd.system.processes import namespaces

_MODULE: Final = ("-m", "mpsd.cli.main")
_LOADER: Final = re.compile(r"ld[-.][^/]*\.so[^/]*")
"""The dynamic loaders of glibc and musl. Both take `--library-path`. Source: ld.so(8), musl's ldso/dynlink.c."""

_LIBRARY: Final = re.compile(r"lib[^/]*\.so[^/]*")


def own_root() -> namespaces.Place:
    """Return the directory of a file system that is the root of this process."""
    found = namespaces.place(namespaces.own_mounts(), Path("/"))
    if found is None:
        raise ConfigurationError("the table of this process's mounts has no root", hint="mount /proc")
    return found


def command(root: Path) -> Program:
    """Return mpsctl where the root of this process is at this path. Raises ConfigurationError."""
    if root == Path("/"):
        return Program([sys.executable, "-I", *_MODULE])
    interpreter = Path(sys.executable).resolve()
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    mapped = {Path(each) for each in re.findall(r" (/.+)$", maps, re.MULTILINE)}
    loader = next((each for each in sorted(mapped) if _LOADER.fullmatch(each.name)), None)
    if loader is None:
        raise ConfigurationError(f"{interpreter} has no dynamic loader", hint="use mpsd's own image")
    libraries = sorted({f"{root}{each.parent}" for each in mapped if _LIBRARY.fullmatch(each.name)})

    def there(path: object) -> str:
        return f"{root}{path}"

    packages = ":".join(there(each) for each in sys.path if each.startswith("/"))
    return Program(
        [there(loader), "--library-path", ":".join(libraries), there(interpreter), "-s", "-P", *_MODULE],
        {"PYTHONHOME": there(sys.base_prefix), "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"},
    )
