"""The GPUs that Slurm names by their places. Pure.

SLURM_JOB_GPUS has the places of GPUs in the order of gres.conf's `File=` for the GRES gpu, which need not be the order
of /dev/nvidiaN, nor NVML's. Assumed, and checked by `mpsctl slurm check`: without such lines (AutoDetect) the order is
that of the minor numbers. Source: Slurm, gres.conf(5), and run on 22.05.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from mpsd.core.errors import InvalidRequestError
from mpsd.core.slurm.configuration import files, logical_lines, pairs

MINOR: Final = re.compile(r"nvidia([0-9]+)\Z")
_INFORMATION: Final = re.compile(r"^(GPU UUID|Device Minor)\s*:\s*(\S+)\s*$", re.MULTILINE)


def minors(text: str, node: str) -> list[int]:
    """Return the minor numbers of a node's GPUs in Slurm's order, by gres.conf; none where it names no files."""
    found: list[int] = []
    for line in logical_lines(text):
        values = pairs(line)
        if values.get("name", "").lower() != "gpu" or not is_for(node, values.get("nodename", "")):
            continue
        names = (MINOR.search(each) for each in files(values.get("file", "")))
        found += [int(each[1]) for each in names if each is not None]
    return found


def is_for(node: str, named: str) -> bool:
    """Tell whether a line of gres.conf with this `NodeName=` is for a node; an empty one is for all."""
    return not named or node in files(named)


def uuids_by_minor(information: Iterable[str]) -> dict[int, str]:
    """Return the UUIDs of GPUs by their minor numbers, by the driver's files /proc/driver/nvidia/gpus/*/information."""
    found = {}
    for text in information:
        values = {name: value for name, value in _INFORMATION.findall(text)}  # noqa: C416 - for mypy
        if values.get("Device Minor", "").isdecimal() and "GPU UUID" in values:
            found[int(values["Device Minor"])] = values["GPU UUID"]
    return found


def uuid_at(place: int, order: list[int], by_minor: Mapping[int, str]) -> str:
    """Return the UUID of the GPU at a place. Raises InvalidRequestError where there is none."""
    order = order or sorted(by_minor)
    if place >= len(order) or order[place] not in by_minor:
        raise InvalidRequestError(
            f"Slurm's GPU {place} is none that mpsd knows",
            hint="compare gres.conf with mpsd's GPUs: mpsctl slurm check",
            limit="gpus",
        )
    return by_minor[order[place]]
