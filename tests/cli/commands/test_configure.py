"""`mpsctl service configure` and `mpsd check --explain` on a machine with each of NVIDIA's control programs.

The GPUs are those of a fake NVML; the groups are those of this machine.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.configuration.document import parse
from mpsd.core.configuration.profiles import Profile
from mpsd.core.settings import Users
from mpsd.core.units import GIB
from mpsd.system.host.installation import Installation
from tests.cli.conftest import ROOT, run_mpsctl
from tests.daemon.helpers import branches
from tests.real import RealDaemon
from tests.system.conftest import nvml, nvml_library  # noqa: F401 - fixtures
from tests.system.fake_nvml import FakeNvml

every_driver = pytest.mark.parametrize("real", branches())
every_profile = pytest.mark.parametrize("profile", Profile)

_GROUP: Final = "users"
"""A group that every Linux has."""


@pytest.fixture
def environment(nvml: FakeNvml, real: RealDaemon) -> dict[str, str]:  # noqa: F811 - the fixture
    """Return an environment in which NVML knows two GPUs, and the control program is that of a driver."""
    gpus = [f"gpu GPU-{each} 9.0 0 {80 * GIB} 0 0 NVIDIA H100" for each in ("0a", "0b")]
    nvml.show(f"driver {real.branch}.1", *gpus)
    return {**os.environ, **nvml.variables, "PATH": f"{real.control.parent}:{os.environ['PATH']}"}


def _configure(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_mpsctl(None, "service", "configure", *arguments, "--dry-run", env=environment)


def _check(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mpsd", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment, cwd=ROOT)


@every_driver
@every_profile
def test_every_file_passes(profile: Profile, real: RealDaemon, environment: dict[str, str], short_tmp: Path) -> None:
    """mpsd accepts the file with this driver, and the shared server says what the driver cannot do."""
    path = short_tmp / "mpsd.toml"
    made = _configure(environment, profile, "--group", _GROUP)
    assert made.returncode == 0, made.stderr
    path.write_text(made.stdout)
    settings = parse(made.stdout)
    roles = settings.roles
    taken, read = ((), (f"%{_GROUP}",)) if profile is Profile.SLURM else ((f"%{_GROUP}",), ())
    assert (roles.users, roles.observers) == (taken, read)
    if profile in {Profile.SHARED_SERVER, Profile.ONE_USER}:
        assert settings.quota["*"].memory == 80 * GIB
    limited = profile in {Profile.SHARED_SERVER, Profile.SLURM} and real.branch < 555
    assert ("One user at a time" in made.stderr) is limited
    assert ("# One user at a time: with" in made.stdout) is limited

    checked = _check(environment, "--config", str(path))
    assert checked.returncode == 0, checked.stderr
    explained = _check(environment, "--config", str(path), "--explain")
    assert explained.returncode == 0, explained.stderr
    said = dict(line.split(":", 1) for line in explained.stdout.splitlines())
    assert len(said) == 10
    alone = settings.daemon.users is Users.ONE or real.branch < 555
    assert ("one at a time" in said["users"]) is alone


def test_unknown_group() -> None:
    """A group that is not there is refused; mpsd would admit nobody."""
    refused = run_mpsctl(None, "service", "configure", "shared-server", "--group", "no-such-group", "--dry-run")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "there is no group no-such-group" in refused.stderr


def test_explained_refusal(short_tmp: Path) -> None:
    """A configuration that is refused is not explained."""
    path = short_tmp / "mpsd.toml"
    path.write_text("[daemon]\nuser = 1\n")
    refused = _check(dict(os.environ), "--config", str(path), "--explain")
    assert (refused.returncode, refused.stdout) == (78, "")


def test_a_file_is_never_overwritten(short_tmp: Path) -> None:
    """A new one is beside it, and the command that uses it is said; the same one again changes nothing."""
    said: list[str] = []
    usual = short_tmp / "etc" / "mpsd.toml"
    new = usual.with_name("mpsd.toml.new")
    Installation(said.append).configure("# one\n", usual)
    assert (usual.read_text(), said) == ("# one\n", [f"write {usual}"])
    Installation(said.append).configure("# one\n", usual)
    assert said.pop() == f"{usual} is up to date"
    Installation(said.append, dry=True).configure("# two\n", usual)
    assert not new.exists()
    Installation(said.append).configure("# two\n", usual)
    assert (usual.read_text(), new.read_text()) == ("# one\n", "# two\n")
    assert f"mv {new} {usual} && mpsd check" in said[-1]
    usual.unlink()
    usual.symlink_to("not-mounted-yet")
    Installation(said.append).configure("# three\n", usual)
    assert (str(usual.readlink()), new.read_text()) == ("not-mounted-yet", "# three\n")
