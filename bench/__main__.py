"""`python -m bench --control PROGRAM` measures docs/internals/figures.md; it exits with 1 when a bound is missed."""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from bench import admission, job, log, metrics, supervision, systemd
from bench.side_by_side import Figure, Result

_BENCHES: Final[dict[str, Callable[[str, Path], Iterator[Result | Figure]]]] = {
    "a": supervision.settings_through_the_pipe,
    "b": supervision.recovery,
    "c": supervision.status,
    "d": supervision.idle,
    "e": admission.one_caller,
    "f": admission.held,
    "g": log.drift,
    "h": supervision.returning,
    "i": systemd.service,
    "j": metrics.scrape,
    "k": job.start,
}


def main() -> int:
    """Measure everything, print it, and return whether every bound holds."""
    letters = ", ".join(f"{letter}: {bench.__name__.replace('_', ' ')}" for letter, bench in _BENCHES.items())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", default=shutil.which("nvidia-cuda-mps-control"), help="NVIDIA's control program")
    parser.add_argument("--only", default="".join(_BENCHES), metavar="LETTERS", help=f"just these ({letters})")
    options = parser.parse_args()
    if options.control is None:
        parser.error("name NVIDIA's control program with --control (tests/real/fetch prints where it put some)")
    if unknown := set(options.only) - set(_BENCHES):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise mpsd would be compiled at each start, unlike a user's
    met = True
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        for letter in options.only:
            for result in _BENCHES[letter](options.control, Path(directory) / letter):
                print(f"({letter}) {result}", flush=True)
                met = met and result.met
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
