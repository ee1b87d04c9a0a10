"""Lint is a test: what the project says about style is what `pytest` finds, with the pinned ruff and no other."""

import subprocess
import sys

from tests.gate.source import ROOT


def test_lint() -> None:
    """Ruff finds nothing: every rule there is, less those that pyproject.toml argues away."""
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", "."],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_format() -> None:
    """Every file stands as the formatter would write it."""
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "."],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
