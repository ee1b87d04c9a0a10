"""The GPUs, the driver and the control program, and the record of compute modes that mpsd must restore."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.doctor.finding import GpuSeen, GpusSeen, Left, Library, NodeGpus
from mpsd.core.errors import ConfigurationError, GpuError
from mpsd.core.model import Known, Reading, Unknown
from mpsd.core.settings import Settings
from mpsd.system.files import rundir
from mpsd.system.files.encoding import DamagedError
from mpsd.system.gpus import driver, saved_compute_modes
from mpsd.system.gpus.driver import Driver
from mpsd.system.gpus.gpu import NvmlGpus
from mpsd.system.gpus.saved_compute_modes import SavedComputeModes
from mpsd.system.mps import control_flags
from mpsd.system.mps.control_pipe import ControlProgram

_DPKG: Final = Path("/var/lib/dpkg")

_LIBRARIES: Final = tuple(
    Path("/usr", place)
    for place in ("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib64", "lib", "local/nvidia/lib64")
)
"""The directories where distributions, NVIDIA's installer, and container runtimes put the driver's libraries."""


def find(settings: Settings, control: str | None = None) -> Driver | None:
    """Find the driver as mpsd would; `control` is the value of mpsd's --control."""
    try:
        return driver.find(control or settings.daemon.control, settings.daemon.driver_root)
    except ConfigurationError:
        return None


async def look(settings: Settings, control: str | None, *, simulated: bool) -> GpusSeen:
    """Inspect all of it; an absent driver is a finding, not an error."""
    there = find(settings, control)
    node: Reading[NodeGpus] = Unknown("the GPUs are simulated")
    many_users: Reading[bool] = Unknown("there is no control program that could be asked")
    remedy = ""
    if not simulated:
        try:
            node = Known(await _node(there))
        except GpuError as error:
            node, remedy = Unknown(error.detail), error.hint
            if there is None and (root := settings.daemon.driver_root) is not None:
                remedy = f"correct daemon.driver_root, which is {root} and has no complete driver: mpsd check"
    if there is not None:
        many_users = await control_flags.knows_many_users(ControlProgram((str(there.control),), there.directories))
    return GpusSeen(
        node,
        remedy,
        simulated=simulated,
        program=there.control if there else None,
        server=there.server if there else None,
        library=library(there.libraries if there else None),
        package=package_of(there.control) if there else None,
        left=left(settings),
        many_users=many_users,
    )


async def _node(there: Driver | None) -> NodeGpus:
    """Read the GPUs through NVML. Raises GpuError."""
    source = NvmlGpus(there.nvml if there else None)
    try:
        inventory = await source.inventory()
        version, cuda = await source.versions()
        gpus = [GpuSeen(each, await source.usage(each), await source.condition(each)) for each in inventory.gpus]
    finally:
        source.close()
    unreadable = {index: unknown.reason for index, unknown in inventory.unknown.items()}
    return NodeGpus(version, cuda, tuple(gpus), unreadable)


def library(root: Path | None, places: Sequence[Path] = _LIBRARIES) -> Library | None:
    """Find CUDA's library in the driver's own root, or where drivers are installed.

    The target of its link has the version. Only the loader's standard directories are searched, since LD_LIBRARY_PATH
    belongs to the calling user alone.
    """
    for place in places if root is None else (root,):
        link = place / "libcuda.so.1"
        version = link.resolve().name.removeprefix("libcuda.so.")
        if link.exists() and version != "1":
            return Library(link, version)
    return None


def left(settings: Settings) -> Left:
    """Read the record of the compute modes that mpsd must restore."""
    modes = SavedComputeModes(rundir.saved_compute_modes(settings))
    aside = saved_compute_modes.aside(modes.path)
    damaged, is_there = False, False
    with contextlib.suppress(OSError):  # the record in the same directory cannot be read either, and that is reported
        is_there = aside.exists()
    found: Reading[Mapping[str, ComputeMode]]
    try:
        modes.load()
        found = Known(modes.by_gpu)
    except DamagedError as error:
        found, damaged = Unknown(str(error)), True
    except OSError as error:
        found = Unknown(f"cannot be read: {error.strerror}")
    return Left(modes.path, found, damaged=damaged, aside=aside if is_there else None)


def package_of(program: Path, dpkg: Path = _DPKG) -> tuple[str, str] | None:
    """Return the Debian package that contains a program, and its version; None where dpkg has none."""
    names = {str(program), str(program.resolve())}
    names |= {name.removeprefix("/usr") for name in names}
    for listing in sorted(dpkg.glob("info/*nvidia*.list")):
        with contextlib.suppress(OSError):
            if names.isdisjoint(listing.read_text(encoding="utf-8", errors="replace").splitlines()):
                continue
            package = listing.stem.partition(":")[0]
            version = _version(package, (dpkg / "status").read_text(encoding="utf-8", errors="replace"))
            if version:
                return package, version
    return None


def _version(package: str, status: str) -> str:
    for paragraph in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if fields.get("Package") == package:
            return fields.get("Version", "")
    return ""
