"""The package on Debian 12."""

import filecmp
from pathlib import Path

import pytest

from tests import systemd
from tests.systemd.package_life import PackageLife
from tests.systemd.packages import Packages, build

pytestmark = pytest.mark.machine


@pytest.mark.timeout(300)
class TestDebian12(PackageLife):
    """Systemd 252, and Python 3.11."""

    SUITE = systemd.SUITES["bookworm"]

    def test_the_same_bytes(self, packages: Packages, tmp_path: Path) -> None:
        """Built again, elsewhere and later, it is the same file."""
        assert filecmp.cmp(packages.first, build(self.SUITE.name, tmp_path), shallow=False)
