"""The settings of mpsd-kubernetes: a file, the environment and the command line."""

import pytest

from mpsd.core.capabilities import READER, Capability
from mpsd.core.errors import ConfigurationError
from mpsd.core.kubernetes.settings import Offer, Settings, check_capabilities, parse


def test_order() -> None:
    """The command line precedes the environment, and that precedes the file."""
    found = parse(
        'node = "file"\nslices = 4\nresources = "memory"',
        {"MPSD_KUBERNETES_NODE": "variable", "MPSD_KUBERNETES_SLICES": "8", "PATH": "x"},
        {"node": "option", "socket": None},
    )
    assert (found.node, found.slices, found.resources, found.socket) == (
        "option",
        8,
        Offer.MEMORY,
        Settings().socket,
    )


def test_defaults() -> None:
    """Without any input every setting has its default."""
    assert parse("", {}, {}) == Settings()


@pytest.mark.parametrize(
    ("document", "wrong"),
    [
        ("slice = 4", "no setting 'slice'"),
        ("slices = 0", "slices: 0 is not a whole number from 1"),
        ("slices = true", "slices: True is not"),
        ("slices = 513", "slices: 513 is not"),
        ('resources = "gpus"', "resources: 'gpus' is not one of slices"),
        ('slice_resource = "mps"', "slice_resource: 'mps' is not the name of an extended resource"),
        ('slice_resource = "kubernetes.io/x"', "slice_resource"),
        ('slice_resource = "nvidia.com/mps-core"', "two resources have the same name"),
        ("core_unit = 3", "core_unit: 3 % do not add up to 100 %"),
        ('memory_unit = "1KiB"', "memory_unit: '1KiB' is not a size in whole MiB"),
        ('socket = "mpsd.sock"', "socket: 'mpsd.sock' is not an absolute path"),
        ("claim_deadline = -1", "claim_deadline: -1 is not a duration"),
        ("uid = -1", "uid: -1 is not a whole number"),
        ("processes = 0", "processes: 0 is not"),
        ("x", "it is not TOML"),
    ],
)
def test_refused(document: str, wrong: str) -> None:
    """Each wrong value is named, with what it should be."""
    with pytest.raises(ConfigurationError) as refused:
        parse(document, {}, {})
    assert wrong in refused.value.detail


def test_near() -> None:
    """An unknown setting is refused with the nearest known one, in the environment too."""
    with pytest.raises(ConfigurationError) as refused:
        parse("", {"MPSD_KUBERNETES_SLICE": "4"}, {})
    assert refused.value.hint == "did you mean slices?"


def test_absent_and_any() -> None:
    """A setting that is absent by default can be set, and a number can be `any`."""
    found = parse('uid = 1000\nprocesses = "any"\nmemory_unit = "512MiB"', {}, {})
    assert (found.uid, found.processes, found.memory_unit) == (1000, None, 512)


@pytest.mark.parametrize("lacking", READER)
def test_capabilities(lacking: Capability) -> None:
    """Without either capability it starts only where it need not read whose program a container runs."""
    has = sum(1 << each for each in READER - {lacking})
    for settings in (Settings(), Settings(resources=Offer.DRA), Settings(hook="/usr/bin/mpsctl")):
        with pytest.raises(ConfigurationError, match=f"has no {lacking.name},"):
            check_capabilities(settings, has)
        check_capabilities(settings, has | 1 << lacking)
    check_capabilities(Settings(uid=1000), has)
    check_capabilities(Settings(resources=Offer.DRA, hook="/usr/bin/mpsctl"), 0)
