"""The package on Debian 13."""

import filecmp
from pathlib import Path

import pytest

from tests import systemd
from tests.systemd.packages.package_life import PackageLife
from tests.systemd.packages.packages import Packages, build

pytestmark = pytest.mark.machine


@pytest.mark.timeout(300)
class TestDebian13(PackageLife):
    """Systemd 257, and Python 3.13."""

    SUITE = systemd.SUITES["trixie"]

    def test_the_same_bytes(self, packages: Packages, tmp_path: Path) -> None:
        """A build elsewhere and later gives the same file."""
        assert filecmp.cmp(packages.first, build(self.SUITE.name, tmp_path), shallow=False)
