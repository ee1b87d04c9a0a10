"""Whose a control daemon is."""

from pathlib import Path
from typing import Final

import pytest

from mpsd.core.mps.control_daemons import OtherDaemon, Whose, whose

RUN: Final = Path("/run/mpsd")


@pytest.mark.parametrize(
    ("pid", "directory", "apart", "found"),
    [
        (7, "/run/mpsd/mps/gpu0", False, Whose.MPSD),
        (7, "/anywhere", False, Whose.MPSD),
        (8, "/run/mpsd/mps/gpu0", False, Whose.FOREIGN),
        (8, "/run/mpsd/mps/gpu0", True, Whose.OTHER),
        (8, "", False, Whose.USUAL),
        (8, "/tmp/nvidia-mps", False, Whose.USUAL),
        (8, "/tmp/mps_1000", False, Whose.OTHER),
    ],
)
def test_whose(pid: int, directory: str, found: Whose, *, apart: bool) -> None:
    """The process makes it mpsd's, and the directory tells the others apart."""
    assert whose(pid, directory, {7}, RUN, apart=apart) is found


@pytest.mark.parametrize(
    ("lease", "starter", "words"),
    [
        ("", 0, "pid 8 (uid 1000) is a control daemon on /x"),
        ("l1", 0, "pid 8 (uid 1000) is a control daemon on /x, which a process that has ended of lease l1 started"),
        ("l1", 5, "pid 8 (uid 1000) is a control daemon on /x, which process 5 of lease l1 started"),
    ],
)
def test_words(lease: str, starter: int, words: str) -> None:
    """The sentence names its origin as far as that is known."""
    assert str(OtherDaemon(8, 1000, "/x", frozenset(), lease, starter)) == words
