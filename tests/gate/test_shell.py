"""Shell scripts pass shellcheck."""

import subprocess
from pathlib import Path

from tests.gate.source import ROOT
from tests.tools import needed


def _is_script(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(64)
    return first.startswith(b"#!") and first.split()[0].rpartition(b"/")[2] in {b"sh", b"bash"}


def test_shell() -> None:
    """Shellcheck reports nothing about any of them."""
    listed = subprocess.run(
        [needed("git", "git"), "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    scripts = [str(path) for path in paths if path.is_file() and _is_script(path)]
    assert str(ROOT / ".ci" / "run") in scripts
    done = subprocess.run([needed("shellcheck", "shellcheck"), *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
