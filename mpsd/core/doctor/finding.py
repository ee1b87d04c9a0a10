"""Checks, and their findings."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from mpsd.core.doctor.observed import Observed, T, known
from mpsd.core.model import Reading, Unknown

AS_ROOT: Final = "run it as root, on the host"
"""The remedy for something that could not be inspected: the caller lacks the rights, or is in a container."""


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    """It works, but in a way that may surprise users."""
    FAIL = "fail"
    """Something does not work, or a limit can be bypassed."""
    NOTE = "note"
    """Nothing is wrong; the fact may be of interest."""
    UNKNOWN = "unknown"
    """It could not be inspected. This counts neither as well nor as a failure."""


class Means(StrEnum):
    """The kinds of fixes of `--fix`, none of which affects a running client."""

    REMOVE = "remove"
    """Remove files that no process of MPS uses, under the lock that keeps an mpsd from starting meanwhile."""
    GIVE_BACK = "give back"
    """Restore the compute mode that mpsd found on a GPU, under that lock."""


@dataclass(frozen=True, slots=True)
class Mend:
    """The fix that `--fix` would apply for a finding."""

    means: Means
    targets: tuple[str, ...]
    """Paths, or the UUIDs of GPUs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check for one of the things that it inspects."""

    verdict: Verdict
    because: str
    evidence: Mapping[str, object] = field(default_factory=dict)
    """The exact values in JSON types: paths, pids, modes."""
    remedy: str | None = None
    subject: str = ""
    """The one of several things of a kind that the finding is about: gpu0, GPU 0, a path."""
    mend: Mend | None = None


Look: TypeAlias = Callable[[Observed], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its permanent name, the right state, and the function that inspects it."""

    id: str
    right: str
    """The right state, in a line."""
    why: str
    """The consequence for users where the state is wrong."""
    look: Look
    """Yields what is wrong or unknown; nothing where all is well, or where there is nothing to inspect."""
    mends: str = ""
    """The effect of `--fix`."""
    unwatched: bool = False
    """Whether a running mpsd watches this itself, so that the check is for a node without one."""


# -- the forms in which checks are written -----------------------------------------------------------------------------


def check(id: str, right: str, why: str, mends: str = "", *, unwatched: bool = False) -> Callable[[Look], Check]:  # noqa: A002
    """Make a check of the function that follows; the arguments are the fields of `Check`."""

    def of(look: Look) -> Check:
        return Check(id, right, why, look, mends, unwatched)

    return of


def warn(because: str, remedy: str | None = None, subject: str = "", **evidence: object) -> Finding:
    return Finding(Verdict.WARN, because, evidence, remedy, subject)


def fail(because: str, remedy: str | None = None, subject: str = "", **evidence: object) -> Finding:
    return Finding(Verdict.FAIL, because, evidence, remedy, subject)


def unknown(because: str, remedy: str | None = None, subject: str = "", **evidence: object) -> Finding:
    """Return a finding that something could not be inspected."""
    return Finding(Verdict.UNKNOWN, because, evidence, remedy, subject)


def unread(reading: Reading[T], remedy: str | None = None, subject: str = "") -> Iterator[Finding]:
    """Yield a finding where a reading failed, with its reason."""
    if isinstance(reading, Unknown):
        yield unknown(reading.reason, remedy, subject)


# -- running them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    check: Check
    finding: Finding


def examine(checks: Iterable[Check], observed: Observed) -> list[Result]:
    """Run every check on the observations; a check without findings is ok."""
    results: list[Result] = []
    for each in checks:
        if each.unwatched and known(observed.service.answers) is not None:
            found = [Finding(Verdict.OK, "mpsd watches this itself, and reports it in check node")]
        else:
            found = list(each.look(observed)) or [Finding(Verdict.OK, each.right)]
        results += [Result(each, finding) for finding in found]
    return results
