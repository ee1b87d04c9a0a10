"""`python3 -m tests.slurm`: make the root file system with a newer Slurm, if it is missing."""

import sys

from tests.real.apt import FetchError
from tests.slurm.building import SUITE, root_file_system


def main() -> int:
    """Make it, print its path, and return 1 if it is still missing."""
    try:
        print(f"{SUITE}  {root_file_system()}")
    except (FetchError, OSError) as error:
        print(f"{SUITE}  NOT MADE: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
