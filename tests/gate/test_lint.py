"""Lint is a test: `pytest` finds the violations of the project's style, with the pinned ruff and no other."""

import subprocess
import sys

from tests.gate.source import ROOT


def test_lint() -> None:
    """Ruff reports nothing: with all rules but those that pyproject.toml excludes with a reason."""
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", "."],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_format() -> None:
    """Every file is formatted."""
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "."],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
