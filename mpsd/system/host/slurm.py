"""Slurm on this machine: its configuration files, and the programs that tell its version."""

import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from mpsd.core.errors import ConfigurationError
from mpsd.core.slurm import configuration, gres
from mpsd.core.slurm.check import HEALTH, HOOKS, SCRIPTS
from mpsd.core.slurm.configuration import Configuration
from mpsd.system.files import atomic_file, path_safety
from mpsd.system.host import slurm_files
from mpsd.system.processes import foreground, process

PLACES: Final = (Path("/etc/slurm"), Path("/etc/slurm-llnl"), Path("/run/slurm/conf"))
"""Where slurm.conf is: the last one is that of a node which got it from slurmctld ("configless")."""

_LARGEST: Final = 2**20
"""Bytes of a script that are read."""

_PROGRAMS: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/opt/slurm/sbin:/opt/slurm/bin"


def folder(given: Path | None = None) -> Path:
    """Return the directory of slurm.conf: of `given`, its own. Raises ConfigurationError where there is none."""
    places = PLACES if given is None else (given.parent if given.name == "slurm.conf" else given,)
    for each in places:
        if (each / "slurm.conf").exists():
            return each
    raise ConfigurationError(
        f"there is no slurm.conf in {' or '.join(str(each) for each in places)}",
        hint="name it: --config PATH",
    )


def read(place: Path) -> Configuration:
    """Return the configuration in a directory. Raises ConfigurationError for a file that cannot be read."""
    return configuration.parse(*(slurm_files.text(str(place / each)) for each in _FILES))


_FILES: Final = ("slurm.conf", "gres.conf", "cgroup.conf")


def scripts(found: Configuration, place: Path, hooks: Path) -> dict[str, str]:
    """Return the texts of the scripts that each value of a configuration names, by that value.

    It may be a pattern, and relative to the directory of slurm.conf. A link to a hook of ours has the path of that.
    """
    values = {value for name in SCRIPTS for value in found.all(name)} | {found.cgroup.get("alloweddevicesfile", "")}
    paths = {each: sorted(Path("/").glob(str(place.absolute() / each)[1:])) for each in values if each}
    return {each: "\n".join(_text(path, hooks) for path in found) for each, found in paths.items()}


def missing(hooks: Path) -> tuple[str, ...]:
    """Return our hooks that are not there, or cannot be run."""
    return tuple(each for each in (*HOOKS.values(), HEALTH) if not os.access(hooks / each, os.X_OK))


def is_current(place: Path) -> bool:
    """Tell whether the mpsd.lua in a directory is the one of this version; where there is none, none is old."""
    found = _text(place / "mpsd.lua", Path("/"))
    return found in {"", script()}


def _text(path: Path, hooks: Path) -> str:
    try:
        if path.is_symlink() and path.readlink().parent == hooks:
            return str(path.readlink())
        if path.parent == hooks or not stat.S_ISREG(path.stat().st_mode):
            return ""
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_LARGEST)
    except OSError:
        return ""


def is_scripted(place: Path) -> bool | None:
    """Tell whether job_submit.lua in this directory calls mpsd's script; None where there is none."""
    path = place / "job_submit.lua"
    text = _text(path, Path("/"))
    return "mpsd.submit" in text and "mpsd.modify" in text if path.exists() else None


def program(name: str) -> str | None:
    """Return the path of a program of Slurm's; None where it is not here."""
    return shutil.which(name, path=_PROGRAMS)


def version() -> str:
    """Return Slurm's version, such as 22.05.8; empty where no program of Slurm's is here."""
    for name in ("slurmd", "slurmctld", "scontrol"):
        found = program(name)
        if found is not None:
            _, said = foreground.output([found, "-V"], process.environment({}), quiet=True)
            return said.split(" ")[-1]
    return ""


def minors() -> dict[str, int]:
    """Return the numbers of the GPUs' device files, by UUID; empty where the driver does not tell."""
    texts = (each.read_text(errors="replace") for each in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return {uuid: minor for minor, uuid in gres.uuids_by_minor(texts).items()}


def script() -> str:
    """Return mpsd.lua of this version."""
    return (Path(__file__).parents[2] / "slurm" / "mpsd.lua").read_text(encoding="utf-8")


_HOOK: Final = """\
#!{python} -I
import sys

from mpsd.slurm.__main__ import main

sys.exit(main(["{name}"]))
"""
"""A hook: TaskProlog runs in a user's environment, whose PYTHONHOME and PYTHONPATH would break or replace ours (-I)."""


HOOK_PROGRAMS: Final = (Path(sys.executable), Path(sys.executable).resolve(), Path(__file__))
"""What a hook runs: the interpreter, and mpsd's modules."""

_OF_PACKAGES: Final = Path(__file__).parents[:4]
"""The directories of mpsd's modules, up to the one that Python is told of, which it lists."""


def check_open(path: Path) -> None:
    """Refuse a file that users cannot read: TaskProlog is run by them. Raises ConfigurationError and OSError."""
    for each in (path, *path.parents):
        mode = each.stat().st_mode
        wanted = stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
        if each in _OF_PACKAGES:
            wanted |= stat.S_IROTH
        if mode & wanted != wanted:
            raise ConfigurationError(
                f"{each} is closed to users, who run {path} in TaskProlog: each job with a share would fail",
                hint=f"install mpsd and its Python where users can read them, as in /opt/mpsd; or: chmod o+rx {each}",
            )


def put(texts: Mapping[Path, str], kept: Mapping[Path, str], *, hooks: Path) -> Iterator[str]:
    """Write the files, of `kept` only those that are not there, and the hooks; yield what was done.

    Raises OSError, and ConfigurationError where other users could replace the program that the hooks are.
    """
    for each in HOOK_PROGRAMS:  # slurmd runs them as root
        path_safety.check_path(each)
    wanted = {
        hooks / name: (_HOOK.format(python=sys.executable, name=name), 0o755) for name in (*HOOKS.values(), HEALTH)
    }
    wanted |= {path: (text, 0o644) for path, text in texts.items()}
    wanted |= {path: (text, 0o644) for path, text in kept.items() if not path.exists()}
    for path, (text, mode) in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or atomic_file.read(path) != text.encode():
            atomic_file.write(path, text.encode(), mode=mode)
            yield f"write {path}"
