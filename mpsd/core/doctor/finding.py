"""What a check is, and what it can come to."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from mpsd.core.doctor.observed import Observed

AS_ROOT: Final = "run it as root, on the host"
"""What to do about what could not be looked at: it takes rights, or a container keeps it from who asks."""


class Verdict(StrEnum):
    """What a check came to."""

    OK = "ok"
    WARN = "warn"
    """It works, and somebody will be surprised."""
    FAIL = "fail"
    """Something does not work, or a limit can be got round."""
    NOTE = "note"
    """Nothing is wrong, and somebody may want to know."""
    UNKNOWN = "unknown"
    """It could not be looked at. That is never taken for well, and is no failure either."""


class Means(StrEnum):
    """What `--fix` can do, none of which a running client notices."""

    REMOVE = "remove"
    """Remove files that no process of MPS has, under the lock that keeps an mpsd from starting meanwhile."""
    REMOVE_SHARED_MEMORY = "remove shared memory"
    """Remove what servers that are gone left in /dev/shm."""
    GIVE_BACK = "give back"
    """Give a GPU the compute mode back that mpsd found on it, under that lock."""
    OPEN = "open"
    """Let other uids traverse a directory of mpsd's own."""


@dataclass(frozen=True, slots=True)
class Mend:
    """What `--fix` would do about a finding."""

    means: Means
    targets: tuple[str, ...]
    """Paths, or the UUIDs of GPUs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check came to for one thing that it looked at."""

    verdict: Verdict
    because: str
    evidence: Mapping[str, object] = field(default_factory=dict)
    """The exact values, as JSON has them: paths, pids, modes."""
    remedy: str | None = None
    subject: str = ""
    """Which of several things of a kind it is about: gpu0, GPU 0, a path."""
    mend: Mend | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is looked at: the name that it keeps, what is right, and how it is seen."""

    id: str
    right: str
    """What is so where all is well, in a line."""
    why: str
    """What happens to people where it is not."""
    look: Callable[[Observed], Iterable[Finding]]
    """Yields what is not well, or not known; nothing where all is well, or where there is nothing to look at."""
    mends: str = ""
    """What `--fix` does about it."""


def unknown(because: str, remedy: str | None = None, *, subject: str = "") -> Finding:
    """Return that something could not be looked at."""
    return Finding(Verdict.UNKNOWN, because, {}, remedy, subject)


@dataclass(frozen=True, slots=True)
class Result:
    """A finding with the check that it belongs to."""

    check: Check
    finding: Finding


def examine(checks: Iterable[Check], observed: Observed) -> list[Result]:
    """Put what was observed to each check; one that finds nothing to say is ok."""
    results: list[Result] = []
    for check in checks:
        found = list(check.look(observed)) or [Finding(Verdict.OK, check.right)]
        results += [Result(check, finding) for finding in found]
    return results
