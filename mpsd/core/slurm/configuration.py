"""Slurm's configuration files as values: slurm.conf, gres.conf and cgroup.conf. Pure.

Source: the manual pages slurm.conf(5), gres.conf(5) and cgroup.conf(5) of Slurm.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Line: TypeAlias = Mapping[str, str]
"""The values of one line, by their names in lower case."""

_PAIR: Final = re.compile(r"(\w[\w.]*)\s*\+?=\s*(\"[^\"]*\"|\S*)")
_INCLUDE: Final = re.compile(r"include\s+(\S+)\s*", re.IGNORECASE)
_RANGES: Final = re.compile(r"([^\[]*)\[([^\]]*)\](.*)")
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_MOST: Final = 2**16
"""Maximum names of one range, as in Slurm's own lists of hosts."""
_ITEM: Final = re.compile(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*")
"""An item of a list with commas, in which brackets may have some of their own."""
_NUMBER: Final = re.compile(r"([0-9]+)([KMGTP]?)", re.IGNORECASE)
_FACTORS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}


def logical_lines(text: str) -> Iterator[str]:
    """Yield the lines of a file without comments, those that a backslash continues as one."""
    whole = ""
    for line in text.splitlines():
        bare = re.sub(r"(?<!\\)#.*", "", line).rstrip()
        if bare.endswith("\\"):
            whole += bare[:-1] + " "
            continue
        if whole := (whole + bare).strip():
            yield whole
        whole = ""
    if whole.strip():
        yield whole.strip()


def included(line: str) -> str | None:
    """Return the path that a line includes; None for any other line."""
    match = _INCLUDE.fullmatch(line)
    return None if match is None else match[1]


def pairs(line: str) -> Line:
    """Return the values of a line; of a name that stands twice, the last one."""
    return {name.lower(): value.strip('"') for name, value in _PAIR.findall(line)}


def count(text: str) -> int:
    """Return a count such as `100` or `8G`; 0 for anything else."""
    match = _NUMBER.fullmatch(text)
    return 0 if match is None else int(match[1]) * _FACTORS[match[2].lower()]


def resources(text: str) -> dict[str, int]:
    """Return the counts of a list such as `gpu:tesla:2,mps:200`, by name, summed over types."""
    found: dict[str, int] = {}
    for item in filter(None, text.split(",")):
        name, *rest = re.sub(r"\(.*?\)", "", item).split(":")
        rest = [each for each in rest if each != "no_consume"]
        found[name] = found.get(name, 0) + (count(rest[-1]) if rest and count(rest[-1]) else 1 if not rest else 0)
    return found


def files(pattern: str) -> list[str]:
    """Return the paths of a `File=`, in Slurm's order: `/dev/nvidia[0-2,5]` names four. Names of nodes are alike."""
    found: list[str] = []
    for each in _ITEM.findall(pattern):
        match = _RANGES.fullmatch(each)
        if match is None:
            found.append(each)
            continue
        ends = files(match[3]) or [""]
        for part in filter(None, map(_RANGE.fullmatch, match[2].split(","))):
            first, last = part[1], part[2] or part[1]
            width = len(first) if first.startswith("0") else 0
            numbers = range(int(first), int(last) + 1)[:_MOST]
            found += [f"{match[1]}{number:0{width}d}{end}" for number in numbers for end in ends]
    return found


@dataclass(frozen=True, slots=True)
class Gres:
    """A line of gres.conf."""

    name: str
    files: tuple[str, ...] = ()
    count: int = 0
    flags: frozenset[str] = frozenset()
    nodes: str = ""
    """The nodes that it is for, as written; empty: all."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The configuration of a cluster, as one machine has it."""

    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """slurm.conf but its nodes and partitions, with each value of a name that stands twice."""
    nodes: tuple[Line, ...] = ()
    partitions: tuple[Line, ...] = ()
    gres: tuple[Gres, ...] = ()
    cgroup: Line = field(default_factory=dict)

    def value(self, name: str, default: str = "") -> str:
        """Return the last value of a name, which is the one that Slurm takes for most of them."""
        return self.all(name)[-1] if self.all(name) else default

    def all(self, name: str) -> tuple[str, ...]:
        """Return the values of a name that may stand several times."""
        return self.values.get(name.lower(), ())

    def words(self, name: str) -> list[str]:
        """Return the words of a list with commas, in lower case."""
        return [each.strip().lower() for each in self.value(name).split(",") if each.strip()]

    def number(self, name: str, default: int) -> int:
        """Return a whole number of seconds; the default where none is given, and 65535 for `INFINITE`."""
        text = self.value(name)
        return int(text) if text.isdecimal() else 65535 if text.lower() == "infinite" else default

    def of_gres(self, *names: str) -> list[Gres]:
        return [each for each in self.gres if each.name in names]


def parse(slurm: str, gres: str = "", cgroup: str = "") -> Configuration:
    """Return the configuration of these files, in whose place included files stand already."""
    values: dict[str, tuple[str, ...]] = {}
    nodes, partitions = [], []
    for line in logical_lines(slurm):
        found = pairs(line)
        if "nodename" in found:
            nodes.append(found)
        elif "partitionname" in found:
            partitions.append(found)
        else:
            values |= {name: (*values.get(name, ()), value) for name, value in found.items()}
    groups: dict[str, str] = {}
    for line in logical_lines(cgroup):
        groups |= pairs(line)
    return Configuration(values, (*nodes,), (*partitions,), (*_gres(gres),), groups)


def _gres(text: str) -> Iterator[Gres]:
    for line in logical_lines(text):
        found = pairs(line)
        paths = [*files(found.get("file", "")), *files(found.get("multiplefiles", ""))]
        yield Gres(
            name=found.get("name", "").lower(),
            files=(*paths,),
            count=count(found.get("count", "")),
            flags=frozenset(found.get("flags", "").lower().split(",")) - {""},
            nodes=found.get("nodename", ""),
        )
