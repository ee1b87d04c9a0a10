"""A pytest inside pytest, which tests the fixtures and hooks of tests/conftest.py themselves."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from tests.gate.source import ROOT
from tests.harness import LOOKS_FOR_PLANTED


def inner_pytest(folder: Path, text: str, *options: str, planted: str = "none", **environment: str) -> str:
    """Run these tests in a separate process, with this project's settings and fixtures; return the output.

    `planted` is the name of the file that they leave behind in a known place.
    """
    (folder / "test_inner.py").write_text(dedent(text), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-c", f"{ROOT}/pyproject.toml", "-p", "tests.conftest"]
    command += ["--numprocesses=0", "-pno:cacheprovider", f"--rootdir={folder}", f"--basetemp={folder}/base"]
    command += ["--color=no", *options, f"{folder}/test_inner.py"]
    variables = {**os.environ, LOOKS_FOR_PLANTED: planted, **environment}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
