"""`python3 -m tests.cluster`: build Kubernetes if it is missing."""

import sys

from tests.cluster.building import kubernetes
from tests.real.apt import FetchError


def main() -> int:
    """Build it, print its path, and return 1 if it is still missing."""
    try:
        print(kubernetes(say=lambda what: print(what, flush=True)))
    except (FetchError, OSError) as error:
        print(f"Kubernetes  NOT BUILT: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
