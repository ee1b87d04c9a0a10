"""Nodes for doctor: like those of the daemon's tests."""

from tests.daemon.conftest import control, make_node  # noqa: F401 - fixtures
from tests.system.conftest import nvml, nvml_fork_server, nvml_library  # noqa: F401 - fixtures
