"""mpsd as a service of Debian 13."""

import pytest

from tests import systemd
from tests.systemd.serving import ServerHealth

pytestmark = pytest.mark.machine


class TestDebian13(ServerHealth):
    SUITE = systemd.SUITES["trixie"]
