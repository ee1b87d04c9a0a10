"""The Debian package has this version, and knows no process by its name."""

import re
from typing import Final

from mpsd import __version__
from tests.gate.source import ROOT

BY_NAME: Final = re.compile(r"\b(pgrep|pkill|pidof|killall)\b")
"""Programs that find a process by its name, which any user can choose."""


def test_no_process_is_known_by_its_name() -> None:
    """No installed script or unit finds processes by name: any user's can have NVIDIA's names."""
    files = [path for folder in ("debian", "systemd", "container") for path in (ROOT / folder).rglob("*")]
    assert len(files) > 20
    found = {path: BY_NAME.findall(path.read_text(encoding="utf-8")) for path in files if path.is_file()}
    assert {path: names for path, names in found.items() if names} == {}


def test_version() -> None:
    """The changelog of the package begins with the version of mpsd."""
    first = (ROOT / "debian" / "changelog").read_text(encoding="utf-8").splitlines()[0]
    assert first == f"mpsd ({__version__}-1) unstable; urgency=medium"
