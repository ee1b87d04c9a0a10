"""`python3 -m tests.systemd`: make the missing root file systems."""

import sys

from tests import systemd
from tests.systemd.building import root_file_system

if __name__ == "__main__":
    sys.exit(systemd.make_all(lambda name: root_file_system(systemd.SUITES[name]), systemd.SUITES))
