"""`python3 -m tests.slurm`: make the missing root file systems with newer versions of Slurm."""

import sys

from tests import systemd
from tests.slurm.building import SUITES, root_file_system

if __name__ == "__main__":
    sys.exit(systemd.make_all(root_file_system, SUITES))
