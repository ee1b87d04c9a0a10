"""No program that mpsd starts inherits mpsd's protection from the kernel's out-of-memory killer."""

import subprocess
import sys
from typing import Final

import pytest

from tests.disks import as_root
from tests.tools import lacking

PROGRAM: Final = """
import os, signal, subprocess, sys
from pathlib import Path
from mpsd.system.processes import process
score, shown = Path(f"/proc/{os.getpid()}/oom_score_adj"), sys.argv[1]
score.write_text("300")
Path(sys.argv[2]).write_text(shown)
if subprocess.run(["mount", "--bind", sys.argv[2], score], check=False).returncode:
    sys.exit(77)
child = process.spawn(["sleep", "inf"], env=process.environment({}))
print(Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip())
child.signal(signal.SIGKILL)
"""
"""Starts a program whose inherited score is 300.

The score that the parent reads is mounted over its file: not every root may have one below 0."""


@as_root
@pytest.mark.parametrize(("parent", "child"), [("-500", "0"), ("-1000", "0"), ("0", "300"), ("999", "300")])
def test_score(tmp_path: object, parent: str, child: str) -> None:
    """A program of a protected mpsd has the usual score; that of any other mpsd has what it inherits."""
    command = ["unshare", "--mount", sys.executable, "-c", PROGRAM, parent, f"{tmp_path}/score"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode == 77:
        lacking("mounting is not allowed here")
    assert (done.returncode, done.stdout) == (0, f"{child}\n"), done.stderr
