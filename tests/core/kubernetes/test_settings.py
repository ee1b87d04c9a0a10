"""The settings of mpsd-kubernetes: a file, the environment and the command line."""

from pathlib import Path

import pytest

from mpsd.core.capabilities import READER, Capability
from mpsd.core.errors import ConfigurationError
from mpsd.core.kubernetes.settings import Offer, Settings, check_capabilities, parse, summary
from mpsd.core.quantities import PinnedDeviceMemLimit


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
        ("slice = 4", "unknown setting 'slice'"),
        ("slices = 0", "slices = 0: it is not a whole number from 1"),
        ("slices = true", "slices = True: it is not"),
        ("slices = 513", "slices = 513: it is not"),
        ('resources = "gpus"', "resources = 'gpus': it is not one of \"slices\""),
        ('slice_resource = "mps"', "slice_resource = 'mps': it is not the name of an extended resource"),
        ('slice_resource = "kubernetes.io/x"', "slice_resource"),
        ('slice_resource = "nvidia.com/mps-core"', "two resources have the same name"),
        ("core_unit = 3", "core_unit: 3 % do not add up to 100 %"),
        ('memory_unit = "1KiB"', "memory_unit = '1KiB': it is not a size in whole MiB"),
        ('socket = "mpsd.sock"', "socket = 'mpsd.sock': it is not an absolute path"),
        ("claim_deadline = -1", "claim_deadline = -1: -1 is not a duration"),
        ("uid = -1", "uid = -1: it is not a whole number"),
        ("processes = 0", "processes = 0: it is not"),
        ("processes = []", "processes = []: it is not a list of different numbers"),
        ("processes = [1, 1]", "it is not a list of different numbers"),
        ("processes = [1, 2]\nslices = 257", "slices: 2 resources, one for each of `processes`, have at most 256"),
        ("x", "the configuration is not TOML"),
        ("slices = " + "[" * 10_000, "the configuration is not TOML"),
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
    assert refused.value.hint == "did you mean 'slices'?"


def test_absent_and_any() -> None:
    """A setting that is absent by default can be set, and a number can be `any`."""
    found = parse('uid = 1000\nprocesses = "any"\nmemory_unit = "512MiB"', {}, {})
    assert (found.uid, found.processes, found.memory_unit) == (1000, ("any",), PinnedDeviceMemLimit(512))


def test_numbers_of_processes() -> None:
    """Several numbers of processes are a list, and in the environment a text; their resources share the devices."""
    assert parse("processes = 4", {}, {}).processes == (4,)
    assert parse('processes = [1, 4, "any"]', {}, {}).processes == (1, 4, "any")
    for text, numbers in (("4", (4,)), ("1,4,any", (1, 4, "any"))):
        assert parse("", {"MPSD_KUBERNETES_PROCESSES": text}, {}).processes == numbers
    assert (Settings().most_devices, parse("processes = [1, 4]", {}, {}).most_devices) == (512, 256)


@pytest.mark.parametrize("lacking", READER)
def test_capabilities(lacking: Capability) -> None:
    """Without either capability it starts only where it need not read whose program a container runs."""
    has = sum(1 << each for each in READER - {lacking})
    for settings in (Settings(), Settings(resources=Offer.DRA), Settings(hook=Path("/usr/bin/mpsctl"))):
        with pytest.raises(ConfigurationError, match=f"has no {lacking.name},"):
            check_capabilities(settings, has)
        check_capabilities(settings, has | 1 << lacking)
    check_capabilities(Settings(uid=1000), has)
    check_capabilities(Settings(resources=Offer.DRA, hook=Path("/usr/bin/mpsctl")), 0)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("", "100 of nvidia.com/gpu.mps-slice for each GPU: each is 1 % of its memory, with threads in proportion"),
        (
            'resources = "memory"\nmemory_resource = "aliyun.com/gpu-mem"',
            "aliyun.com/gpu-mem: each is 1GiB of a GPU, with threads in proportion",
        ),
        (
            'resources = "threads-and-memory"\ncore_unit = 5',
            "of one GPU nvidia.com/mps-core (5 % of its threads) and nvidia.com/mps-memory (1GiB)",
        ),
        (
            'node = "a"\nresources = "dra"\nthread_step = 5',
            "devices of mpsd.internal, in steps of 5 % of the threads and 256MiB",
        ),
    ],
)
def test_summary(document: str, says: str) -> None:
    """It says what is offered, and repeats what was set."""
    offers, *changed = summary(parse(document, {}, {})).splitlines()
    assert offers == f"# A node offers {says}"
    assert changed == document.splitlines()


def test_summary_of_several_processes() -> None:
    """It names the resources for several processes."""
    assert summary(parse("processes = [1, 4]", {}, {})).splitlines()[1].endswith(" .processes-4")
