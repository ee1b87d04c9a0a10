"""`python3 -m tests.systemd`: make the missing root file systems, in parallel."""

import sys
from concurrent.futures import ThreadPoolExecutor

from tests import systemd
from tests.real.apt import FetchError
from tests.systemd.building import root_file_system


def main() -> int:
    """Make them, print their paths, and return 1 if one is still missing."""
    status = 0
    with ThreadPoolExecutor(len(systemd.SUITES)) as pool:
        for suite, future in [(each, pool.submit(root_file_system, each)) for each in systemd.SUITES.values()]:
            try:
                print(f"{suite.name}  {future.result()}")
            except (FetchError, OSError) as error:
                print(f"{suite.name}  NOT MADE: {error}", file=sys.stderr)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
