"""The configuration of a profile: whole, commented, and of the size of the machine."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Final

import pytest

from mpsd.core.configuration.document import parse
from mpsd.core.configuration.profiles import Machine, Profile, remarks, settings_of, text_of
from mpsd.core.model import Gpu
from mpsd.core.settings import OnExpiry, Users, WantedComputeMode
from mpsd.core.units import GIB, MIB

_H100: Final = Gpu(0, "GPU-0a", "NVIDIA H100 80GB HBM3", 81559 * MIB, (9, 0), mig=False, driver_version="580.159.04")
_SMALL: Final = replace(_H100, name="NVIDIA GeForce RTX 2060", memory_total=6144 * MIB, compute_capability=(7, 5))
_PASCAL: Final = replace(_H100, name="NVIDIA GeForce GTX 1080", memory_total=8 * GIB, compute_capability=(6, 1))
_TINY: Final = replace(_PASCAL, name="NVIDIA GeForce 940M", memory_total=2 * GIB, compute_capability=(5, 0))
_MIG: Final = replace(_H100, mig=True)

_NODES: Final = {
    "no-gpu": (),
    "one": (_H100,),
    "one-small": (_SMALL,),
    "two": (_H100, _H100),
    "three": (_H100, _H100, _SMALL),
    "eight": (_H100,) * 8,
    "pascal": (_PASCAL,),
    "mixed": (_H100, _PASCAL),
    "tiny": (_TINY,),
    "mig": (_MIG,),
    "mig-beside": (_MIG, _H100),
}
_DRIVERS: Final = {"470.256.02": False, "535.261.03": False, "550.163.01": False, "555.58.02": True, "580.159.04": True}


def _machines() -> Iterator[Machine]:
    for gpus, (version, many_users), group in product(_NODES.values(), _DRIVERS.items(), ("sudo", "")):
        yield Machine(tuple(replace(each, driver_version=version) for each in gpus), many_users, group)
    yield Machine()


MACHINES: Final = tuple(_machines())

every_profile: Final = pytest.mark.parametrize("profile", Profile)


def _machine(gpus: str, driver: str = "580.159.04") -> Machine:
    return Machine(
        tuple(replace(each, driver_version=driver) for each in _NODES[gpus]), _DRIVERS[driver], administrators="wheel"
    )


@every_profile
@pytest.mark.parametrize("group", ["", "gpu users"])
def test_every_file_is_read_back(profile: Profile, group: str) -> None:
    """On every machine, the file parses to exactly the settings of the profile."""
    for machine in MACHINES:
        text = text_of(profile, machine, group)
        assert parse(text) == settings_of(profile, machine, group)
        assert max(map(len, text.splitlines())) <= 120


@every_profile
def test_every_setting_has_a_reason(profile: Profile) -> None:
    """Each setting follows a comment of its own, and the file states all that a profile decides."""
    lines = text_of(profile, _machine("two")).splitlines()
    settings = [at for at, line in enumerate(lines) if re.match(r"\w+ = ", line)]
    assert all(lines[at - 1].startswith("# ") for at in settings)
    stated = {lines[at].split(" = ")[0] for at in settings}
    wanted = {"open", "users", "compute_mode", "unadmitted", "on_violation", "admins"}
    quota = {"threads", "memory", "ttl", "gpu_count"}
    wanted |= {Profile.WORKSTATION: {"memory_reserve"}, Profile.SLURM: {"observers"}}.get(profile, quota)
    assert wanted <= stated


def test_what_the_profiles_are_for() -> None:
    """Who shares a GPU, whether it is closed, and who has a quota."""
    found = {profile: settings_of(profile, _machine("two")) for profile in Profile}
    users = {profile: settings.daemon.users for profile, settings in found.items()}
    assert users == {
        Profile.SHARED_SERVER: Users.AUTO,
        Profile.ONE_USER: Users.ONE,
        Profile.WORKSTATION: Users.AUTO,
        Profile.SLURM: Users.AUTO,
    }
    closed = {p for p, settings in found.items() if settings.daemon.compute_mode is WantedComputeMode.EXCLUSIVE_PROCESS}
    assert closed == {Profile.SHARED_SERVER, Profile.ONE_USER, Profile.SLURM}
    assert {p for p, settings in found.items() if settings.quota} == closed - {Profile.SLURM}
    assert all(settings.roles.admins == ("%wheel",) and settings.api.open for settings in found.values())
    who = {profile: (settings.roles.users, settings.roles.observers) for profile, settings in found.items()}
    assert who.pop(Profile.SLURM) == ((), ("*",))  # Slurm does not count the leases that users take out
    assert {*who.values()} == {(("*",), ())}


@pytest.mark.parametrize("gpus", ["one", "one-small", "two", "three", "eight", "mig-beside"])
def test_a_quota_leaves_room(gpus: str) -> None:
    """On a shared server, two users with all that they may have fit, and either may have a lease that is worth it."""
    machine = _machine(gpus)
    quota = settings_of(Profile.SHARED_SERVER, machine).quota["*"]
    assert quota.threads is not None
    assert quota.memory is not None
    assert quota.gpu_count is not None
    assert 2 * quota.threads <= 100 * len(machine.shared)
    assert 2 * quota.memory <= sum(each.memory_total for each in machine.shared)
    assert 2 * quota.gpu_count <= max(len(machine.shared), 2)
    assert quota.threads >= 50


def test_a_driver_for_one_user_at_a_time() -> None:
    """The shared server says so and its consequence, in the file too; a lease there gives its GPU back."""
    several, alone = _machine("two"), _machine("two", "550.163.01")
    assert remarks(Profile.SHARED_SERVER, several) == ()
    (remark,) = remarks(Profile.SHARED_SERVER, alone)
    assert "driver 550.163.01" in remark
    assert "2 GPUs serve 2 users at the same time" in remark
    text = text_of(Profile.SHARED_SERVER, alone)
    assert remark in re.sub(r"\n# ", " ", text)
    assert settings_of(Profile.SHARED_SERVER, alone).daemon.users is Users.AUTO  # another driver needs no other file
    for profile, machine in ((Profile.SHARED_SERVER, alone), (Profile.ONE_USER, several)):
        settings = settings_of(profile, machine)
        assert settings.enforcement.on_expiry is OnExpiry.TERMINATE
        assert settings.admission.smallest_share.tenths >= 100
    shared = settings_of(Profile.SHARED_SERVER, several)
    assert shared.enforcement.on_expiry is OnExpiry.LEAVE


def test_gpus_before_volta() -> None:
    """A newer driver serves one user at a time there, and so does mpsd."""
    assert _machine("one").serves_many is True
    assert _machine("pascal").serves_many is False
    assert _machine("mixed").serves_many is False
    assert Machine((_MIG,), many_users=True).serves_many is True  # mpsd shares no part of it
    (remark,) = remarks(Profile.SHARED_SERVER, _machine("mixed"))
    assert "older than Volta" in remark


def test_what_is_not_known() -> None:
    """Without a driver, or a GPU that can be shared, it says what it could not fit."""
    assert len(remarks(Profile.SHARED_SERVER, Machine())) == 2
    assert len(remarks(Profile.ONE_USER, Machine())) == 1
    assert remarks(Profile.WORKSTATION, _machine("mig")) != ()
    assert settings_of(Profile.SHARED_SERVER, Machine()).quota["*"].memory is None


def test_names_of_others() -> None:
    """The name of a GPU is no line of the file, and a group's name no more than text."""
    odd = replace(_H100, name='x"\n[daemon]\nusers = "many"\x1b[2J')
    machine = Machine((odd,), many_users=True, administrators='a"\n')
    text = text_of(Profile.ONE_USER, machine, 'b"]\n\x7f')
    assert parse(text) == settings_of(Profile.ONE_USER, machine, 'b"]\n\x7f')
    assert "\x1b" not in text
