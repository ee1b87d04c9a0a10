"""mpsd as a service of Debian 12."""

import pytest

from tests import systemd
from tests.systemd.serving import Serving

pytestmark = pytest.mark.machine


class TestDebian12(Serving):
    """On a machine of bookworm."""

    SUITE = systemd.SUITES["bookworm"]
