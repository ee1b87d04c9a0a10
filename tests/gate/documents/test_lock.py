"""requirements.lock, from which the service and its container are installed, agrees with pyproject.toml."""

import re
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import pytest

from tests.gate.source import ROOT

LOCK: Final = (ROOT / "requirements.lock").read_text(encoding="utf-8")
KUBERNETES: Final = (ROOT / "container" / "kubernetes.lock").read_text(encoding="utf-8")
"""The image's additional lock: the extra `kubernetes`."""

COMMAND: Final = (
    "uv pip compile --universal --python-version 3.11 --generate-hashes --output-file requirements.lock pyproject.toml"
)
"""The command that generates it: for every platform and every Python of mpsd, not only those of this machine."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One library of the lock."""

    version: str
    hashes: tuple[str, ...]
    wanted_by: frozenset[str]


def pins(lock: str = LOCK) -> dict[str, Pin]:
    starts = [match.start() for match in re.finditer(r"^[^\s#]", lock, re.MULTILINE)]
    entries = [lock[start:end] for start, end in pairwise([*starts, len(lock)])]
    found = {}
    for entry in entries:
        head = re.match(r"([a-z0-9-]+)==([0-9][0-9.]*)(?: ; [^\\\n]+)? \\\n", entry)
        assert head is not None, f"not a library of one version with its hashes: {entry.splitlines()[0]}"
        hashes = tuple(re.findall(r"--hash=(\S+)", entry))
        wanted_by = entry.rpartition("# via")[2].replace(" (pyproject.toml)", "")
        found[head[1]] = Pin(head[2], hashes, frozenset(re.findall(r"[a-z0-9-]+", wanted_by)))
    return found


def dependencies(extra: str | None = None) -> dict[str, str]:
    """Return the libraries that pyproject.toml names, for an extra or for all, each with its accepted versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    split = (re.fullmatch(r"([\w-]+)(.*)", line) for line in lines)
    return {match[1]: match[2] for match in split if match is not None}


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.parametrize(("extra", "lock"), [(None, LOCK), ("kubernetes", KUBERNETES)])
def test_every_dependency_is_pinned(extra: str | None, lock: str) -> None:
    """Each library that pyproject.toml names is in the lock, in a version that pyproject.toml accepts."""
    pinned = pins(lock)
    for name, versions in dependencies(extra).items():
        assert name in pinned, f"the lock lacks {name}: {COMMAND}"
        for bound in versions.split(","):
            match = re.fullmatch(r"(>=|<)([0-9.]+)", bound)
            assert match is not None, f"this test has to learn what {bound} means"
            at_least = number(pinned[name].version) >= number(match[2])
            assert at_least == (match[1] == ">="), f"the lock has {name} {pinned[name].version}, not {bound}: {COMMAND}"


def test_nothing_else_is() -> None:
    """Every other entry is a dependency of one of those: unneeded libraries are not installed."""
    pinned = pins()
    reached, before = set(dependencies()), set[str]()
    while reached != before:
        before = set(reached)
        reached |= {name for name, pin in pinned.items() if pin.wanted_by & reached}
    assert reached == pinned.keys()
    directly = {name for name, pin in pinned.items() if "mpsd" in pin.wanted_by}
    assert directly == dependencies().keys()


def test_each_file_is_known() -> None:
    """Each library has the SHA-256 of its files: its wheels, and their sources."""
    assert not pins().keys() & pins(KUBERNETES).keys()
    for name, pin in {**pins(), **pins(KUBERNETES)}.items():
        assert len(pin.hashes) >= 2, name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in pin.hashes), name


def test_how_it_is_renewed() -> None:
    """docs/internals/lock-file.md has the command that generated the lock, without an index or a machine's path."""
    assert LOCK.splitlines()[1] == f"#    {COMMAND}"
    assert COMMAND in (ROOT / "docs/internals/lock-file.md").read_text(encoding="utf-8")
    assert not re.search(r"://|^ *(?:-i|-f|--(?!hash))|(?<!\w)/\w", LOCK.replace(COMMAND, ""), re.MULTILINE)
