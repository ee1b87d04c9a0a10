"""The Debian package is of this version, and for the suites that are tested."""

import re

from mpsd import __version__
from tests.gate.source import ROOT
from tests.systemd import SUITES


def test_version() -> None:
    """The changelog of the package begins with the version of mpsd."""
    first = (ROOT / "debian" / "changelog").read_text(encoding="utf-8").splitlines()[0]
    assert first == f"mpsd ({__version__}-1) unstable; urgency=medium"


def test_suites() -> None:
    """Each suite that debian/build knows has the Python that it has there, and a machine in tests/systemd."""
    script = (ROOT / "debian" / "build").read_text(encoding="utf-8")
    known = dict(re.findall(r"^    (\w+)\) release=\d+ python=([\d.]+) ", script, re.MULTILINE))
    assert known == {suite.name: suite.python for suite in SUITES.values()}
