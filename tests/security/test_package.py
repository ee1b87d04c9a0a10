"""The Debian package's scripts, beside sockets of strangers that the kernel lists like those of a control daemon."""

import re
import socket
import subprocess
from pathlib import Path
from typing import Final

import pytest

_DEBIAN: Final = Path(__file__).parents[2] / "debian"

_FUNCTION: Final = re.compile(r"^listens\(\) \{\n.*?^\}\n", re.MULTILINE | re.DOTALL)


def listens(script: str, pipe_directories: Path) -> bool:
    """Call the script's own function that tells whether a control daemon listens below this directory."""
    found = _FUNCTION.search((_DEBIAN / script).read_text())
    assert found is not None
    text = found[0].replace("/run/mpsd/mps", str(pipe_directories))
    return subprocess.run(["sh", "-ec", f"{text}if listens; then exit 0; else exit 3; fi"], check=False).returncode == 0


@pytest.mark.parametrize("script", ["mpsd.prerm", "mpsd.postrm"])
def test_listens(short_tmp: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A stranger's socket whose path merely ends like a control daemon's does not count; a control daemon's does."""
    mps = short_tmp / "mps"
    assert not listens(script, mps)
    monkeypatch.chdir(short_tmp)
    stranger = Path(f"a {mps}/gpu0/control")
    stranger.parent.mkdir(parents=True)
    (mps / "gpu0").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as theirs, socket.socket(socket.AF_UNIX) as ours:
        theirs.bind(str(stranger))
        theirs.listen()
        assert not listens(script, mps)
        ours.bind(str(mps / "gpu0/control"))
        assert listens(script, mps)
        theirs.close()
        ours.close()
        # The closed socket leaves a file without a listener.
        assert not listens(script, mps)
