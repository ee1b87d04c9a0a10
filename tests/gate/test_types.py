"""Types are a test: mpsd, its tests and its benchmarks, strictly, in one run."""

import subprocess
import sys

import pytest

from tests.gate.source import ROOT

pytestmark = pytest.mark.thorough


@pytest.mark.timeout(300)  # a first run, without a cache, reads the types of every library
@pytest.mark.thorough
def test_types() -> None:
    """Mypy reports nothing, with the settings of pyproject.toml."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
