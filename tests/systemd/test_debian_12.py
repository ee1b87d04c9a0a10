"""mpsd as a service of Debian 12."""

import pytest

from tests import systemd
from tests.systemd.serving import ServerHealth

pytestmark = pytest.mark.machine


class TestDebian12(ServerHealth):
    SUITE = systemd.SUITES["bookworm"]
