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
    assert "pip install 'mpsd[kubernetes]'" in second


def test_binary_configuration(tmp_path: Path) -> None:
    """A configuration that is not text is refused, with the invalid byte."""
    config = tmp_path / "kubernetes.toml"
    config.write_bytes(b"offer = \xff")
    command = [sys.executable, "-m", "mpsd.kubernetes", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (78, "")
    assert f"{config} is not text in UTF-8: byte 9 is 0xff" in done.stderr
