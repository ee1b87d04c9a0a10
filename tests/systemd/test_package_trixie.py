"""The package on Debian 13."""

import pytest

from tests import systemd
from tests.systemd.package_life import PackageLife

pytestmark = pytest.mark.machine


@pytest.mark.timeout(300)
class TestDebian13(PackageLife):
    """Systemd 257, and Python 3.13."""

    SUITE = systemd.SUITES["trixie"]
