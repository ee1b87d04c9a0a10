"""`mpsctl service uninstall --purge` removes what mpsd made, wherever the configuration says that it is."""

from pathlib import Path

import pytest

from mpsd.system.host.installation import Installation

OWN = (
    "accounts.db",
    "accounts.db-wal",
    "compute-modes.json",
    "doctor.log",
    "gpu0.intention.json",
    "gpu0/control.log",
    "gpu0/server.log",
    "history.db",
    "last-event",
)
OTHERS = ("accounts.set-aside-1", "gpu1/control.log.1", "gpux/control.log", "history.db.bak", "syslog")


def make(directory: Path, *names: str) -> None:
    """Make a directory that only its owner may write to, with these files."""
    directory.mkdir(mode=0o755)
    for name in names:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).touch()


def left(directory: Path) -> list[str]:
    """Return the files that are left, and the empty folders."""
    full = {each.parent for each in directory.rglob("*")}
    return sorted(str(each.relative_to(directory)) for each in directory.rglob("*") if each not in full)


@pytest.fixture
def said() -> list[str]:
    return []


def test_own_directory(tmp_path: Path, said: list[str]) -> None:
    """A directory with mpsd's files alone is removed; one that is not there needs no word."""
    directory = tmp_path / "state"
    make(directory, *OWN)
    Installation(said.append, dry=True).purge(directory)
    assert left(directory) == sorted(OWN)
    Installation(said.append).purge(directory)
    assert not directory.exists()
    assert said == [f"would remove {directory}", f"remove {directory}"]
    Installation(said.append).purge(directory)
    assert len(said) == 2


def test_files_of_others(tmp_path: Path, said: list[str]) -> None:
    """In any other directory, such as /var/log, all that mpsd did not make is kept, and named; no link is followed."""
    directory, elsewhere = tmp_path / "log", tmp_path / "elsewhere"
    make(elsewhere, "control.log")
    make(directory, *OWN, *OTHERS, "gpu1/control.log")
    (directory / "gpu2").symlink_to(elsewhere)
    Installation(said.append).purge(directory)
    assert left(directory) == sorted([*OTHERS, "gpu2"])
    assert left(elsewhere) == ["control.log"]
    assert said[0].startswith(f"{directory} has files that mpsd did not make, and is kept: ")
    assert f"remove {directory}/gpu1/control.log" in said


def test_directory_of_others(tmp_path: Path, said: list[str]) -> None:
    """mpsd never used a directory that others can write to."""
    directory = tmp_path / "log"
    make(directory, "last-event")
    directory.chmod(0o777)
    Installation(said.append).purge(directory)
    assert left(directory) == ["last-event"]
    assert said[0].startswith(f"{directory} is kept: ")
