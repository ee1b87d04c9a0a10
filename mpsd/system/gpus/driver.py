"""The location of NVIDIA's driver: on the machine itself or, in a container, in a mount.

The driver's programs and libraries must match the kernel modules and are never part of an image. The container toolkit
and CDI put them among a container's own files; the GPU operator has them in a separate root.
"""

import ctypes
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mpsd.core.errors import ConfigurationError

_ROOTS: Final = (Path("/run/nvidia/driver"), Path("/driver-root"), Path("/usr/local/nvidia"))
"""The GPU operator's driver container, as a host path; the mount that its plugins use; GKE's driver installer."""

_PROGRAMS: Final = ("usr/bin", "usr/sbin", "bin", "sbin", "opt/bin")
_LIBRARIES: Final = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib",
    "lib",
)
"""Where a root has the libraries, which depends on the distribution; Talos and NixOS have them in the last two, where
others may have those of 32 bits."""

_OF_THE_DRIVER: Final = ("libcuda.so*", "libnvidia-*.so*")
_SERVER: Final = "nvidia-cuda-mps-server"
_NVML: Final = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True)
class Driver:
    """The parts of the driver that were found."""

    control: Path
    server: Path | None
    """None where it is neither beside the control program nor in the driver's root or PATH."""
    libraries: Path | None
    """The directory of its libraries where the loader does not search it, such as one in a separate root."""

    @property
    def nvml(self) -> Path | None:
        """The path of NVML's library where the loader does not find it."""
        return None if self.libraries is None else self.libraries / _NVML

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories of the driver's programs, for PATH: the control program finds the server there (measured)."""
        programs = (self.control, self.server) if self.server is not None else (self.control,)
        return tuple(dict.fromkeys(str(each.parent) for each in programs))

    def facts(self) -> dict[str, str]:
        """Return where each part was found, for the log."""
        return {
            "program": str(self.control),
            "server": str(self.server or f"not found: {_SERVER}"),
            "nvml": str(self.nvml or f"{_NVML}, found by the dynamic loader"),
        }


def find(control: str, root: Path | None = None, roots: Sequence[Path] = _ROOTS, *, here: Path = Path("/")) -> Driver:
    """Find the driver: only under `root` if given, otherwise in PATH and then in the first known root that has it.

    A `control` that is a path names that program wherever it is. Raises ConfigurationError.
    """
    if root is None or os.sep in control:
        found = shutil.which(control)
        if found is not None:
            program = Path(found).absolute()
            return Driver(program, _server(program, root), _of_root(root) if root is not None else _unambiguous(here))
    if os.sep not in control:
        for each in roots if root is None else (root,):
            there = _program(each, control)
            if there is not None:
                return Driver(there, _server(there, each), _of_root(each))
    if os.sep in control:
        raise ConfigurationError(
            f"there is no executable control program {control!r}",
            hint="name another program with --control or daemon.control; or try --simulate 2",
            limit="daemon.control",
        )
    looked = f"under {root}" if root is not None else f"in PATH, {', '.join(map(str, roots))}"
    raise ConfigurationError(
        f"there is no executable control program {control!r} {looked}",
        hint="install NVIDIA's driver with MPS; in a container, mount it (NVIDIA's runtime with the driver"
        " capability utility,compute, or the host's /run/nvidia/driver); name the program with --control,"
        " daemon.control or daemon.driver_root; or try --simulate 2",
        limit="daemon.control" if root is None else "daemon.driver_root",
    )


def _program(root: Path, name: str) -> Path | None:
    found = (root / place / name for place in _PROGRAMS)
    return next((each for each in found if os.access(each, os.X_OK)), None)


def _libraries(root: Path) -> Path | None:
    return next((root / place for place in _LIBRARIES if (root / place / _NVML).exists()), None)


def _of_root(root: Path) -> Path | None:
    """Return the directory of the libraries of a separate root; None where only the loader finds them.

    Raises ConfigurationError where neither does.
    """
    found = _libraries(root)
    if found is None and not _is_loadable():
        raise ConfigurationError(
            f"the driver in {root} has no {_NVML}: it is not in {', '.join(_LIBRARIES)} of that directory",
            hint="name the directory that has one of these, with the driver's libraries in it: daemon.driver_root",
            limit="daemon.driver_root",
        )
    return found


def _unambiguous(here: Path) -> Path | None:
    """Return the directory of this system's libraries where the loader does not find them there.

    CDI puts them where the host has them, and the host may be another distribution.
    """
    return None if _is_loadable() else _libraries(here)


def _is_loadable() -> bool:
    """Tell whether the loader finds the driver's libraries by itself."""
    try:
        ctypes.CDLL(_NVML)
    except OSError:
        return False
    return True


def _server(control: Path, root: Path | None) -> Path | None:
    beside = control.with_name(_SERVER)
    if os.access(beside, os.X_OK):
        return beside
    if root is not None:
        return _program(root, _SERVER)
    found = shutil.which(_SERVER)
    return Path(found).absolute() if found is not None else None


def link(driver: Driver, directory: Path) -> None:
    """Fill `directory` with links to the driver's libraries, where those are in a separate root.

    The loader must take these libraries from there, but not the C library beside them, which belongs to another system.
    Correct links stay as they are, since a running control daemon may start a server now. Raises ConfigurationError.
    """
    if driver.libraries is None:
        return
    wanted = {each.name: each for pattern in _OF_THE_DRIVER for each in driver.libraries.glob(pattern)}
    try:
        directory.mkdir(mode=0o755, exist_ok=True)
        for link in directory.iterdir():
            if wanted.get(link.name) == link.readlink():
                del wanted[link.name]
            else:
                link.unlink()
        for name, library in wanted.items():
            (directory / name).symlink_to(library)
    except OSError as error:
        raise ConfigurationError(
            f"cannot link the driver's libraries into {directory}: {error.strerror}",
            hint="check the permissions and the contents of that directory",
            limit="daemon.driver_root",
        ) from error
