"""Fuzz a target, guided by coverage, and store interesting inputs: `python -m tests.fuzz TARGET [--seconds N]`.

A failing input is printed, and stored if it is short: the tests fail until it is fixed. Status 1: there was one; 2:
atheris is not installed.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.fuzz import kept
from tests.fuzz.targets import TARGETS

_LONGEST: Final = 8192
"""Bytes of an input: more than 4300 digits, from which on Python refuses to parse a number."""


def fuzz(target: str, seconds: int) -> int:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        engine, found, chosen = Path(folder) / "engine", Path(folder) / "found", Path(folder) / "chosen"
        engine.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.fuzz.engine "$0" {target} "$@"\n')
        engine.chmod(0o700)
        for each in (found, chosen):
            each.mkdir()
            for number, data in enumerate(kept.load(target)):
                (each / f"{number}").write_bytes(data)
        limits = [f"-max_len={_LONGEST}", "-timeout=10", f"-artifact_prefix={folder}/failed-"]
        went = subprocess.run([engine, f"-max_total_time={seconds}", *limits, found], check=False)
        # Stored inputs stay: a merge adds those that take another path.
        subprocess.run([engine, "-merge=1", *limits, chosen, found], check=False)
        failed = [path.read_bytes() for path in Path(folder).glob("failed-*")]
        kept.keep(target, [*(path.read_bytes() for path in chosen.iterdir()), *failed])
    for data in failed:
        print(f"{target} fails: {data!r}")
    print(f"{target}: {len(kept.load(target))} inputs are kept")
    return 1 if failed or went.returncode != 0 else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    asked = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed: pip install -e '.[test,fuzz]'")
        return 2
    return fuzz(asked.target, asked.seconds)


if __name__ == "__main__":
    sys.exit(main())
