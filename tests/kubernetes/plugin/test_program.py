"""The start and the end of mpsd-kubernetes as a program."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("library", ["grpc", "google"])
def test_without_its_extra(library: str) -> None:
    """If a library of the extra is missing, the program says what to install, without a traceback."""
    script = (
        f"import sys; sys.modules[{library!r}] = None;"  # its import then fails as if it were not installed
        "from mpsd.kubernetes.__main__ import main; sys.argv = ['mpsd-kubernetes']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (78, "")
    first, second = done.stderr.splitlines()
    assert first.startswith(f"mpsd-kubernetes: the library {library}")
    assert "pip install '.[kubernetes]'" in second


def check(path: Path, document: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Check a configuration as a container without rights would."""
    path.write_text(document)
    command = [sys.executable, "-m", "mpsd.kubernetes", "--check", "--config", str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_check(tmp_path: Path) -> None:
    """A valid configuration is summed up; for another one the status and the words are those of a start."""
    done = check(tmp_path / "kubernetes.toml", "slices = 8\nuid = 1000")
    assert (done.returncode, done.stderr) == (0, "")
    offers, *changed = done.stdout.splitlines()
    assert "offers 8 of nvidia.com/gpu.mps-slice for each GPU: each is 12.5 %" in offers
    assert changed == ["slices = 8", "uid = 1000"]
    assert "mpsd.internal" in check(tmp_path / "kubernetes.toml", "", "--dra", "--node", "a").stdout
    wrong = check(tmp_path / "kubernetes.toml", "slice = 8")
    assert (wrong.returncode, wrong.stdout) == (78, "")
    assert "unknown setting 'slice'" in wrong.stderr
    assert "hint: did you mean 'slices'?" in wrong.stderr


def test_binary_configuration(tmp_path: Path) -> None:
    """A configuration that is not text is refused, with the invalid byte."""
    config = tmp_path / "kubernetes.toml"
    config.write_bytes(b"offer = \xff")
    command = [sys.executable, "-m", "mpsd.kubernetes", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (78, "")
    assert f"{config} is not text in UTF-8: byte 9 is 0xff" in done.stderr
