"""The settings of `mpsd-kubernetes`: one table, read from a flat TOML file and from the environment."""

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Final, TypeVar, cast

from mpsd.core.capabilities import READER
from mpsd.core.errors import ConfigurationError, MpsdError
from mpsd.core.settings import LogFormat
from mpsd.core.units import MIB, parse_duration, parse_size

T = TypeVar("T")

PREFIX: Final = "MPSD_KUBERNETES_"
"""The prefix of each setting's environment variable."""

MOST_DEVICES: Final = 512
"""Maximum devices of one resource on one GPU: the label of a lease has space for this many, at four per digit."""

_RESOURCE: Final = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)*[a-z0-9-]+/[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
"""An extended resource: a domain and a name. Source: Kubernetes, "Manage Resources for Containers"."""


_DRIVER: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
_LONGEST_DRIVER: Final = 63
"""Maximum characters of a driver's name. Source: resource.k8s.io/v1."""


class Offer(StrEnum):
    """The resources that a node offers."""

    SLICES = "slices"
    """One resource: threads and memory in one number."""
    MEMORY = "memory"
    """One resource: memory, which includes threads in proportion."""
    THREADS_AND_MEMORY = "threads-and-memory"
    """Two resources, which a container requests together."""
    DRA = "dra"
    """None: the node offers shares of devices through Dynamic Resource Allocation instead."""


class GpuDevices(StrEnum):
    """How a container gets the device files and the driver of its GPU."""

    ENVIRONMENT = "environment"
    CDI_FIELD = "cdi-field"
    CDI_ANNOTATION = "cdi-annotation"
    NONE = "none"


class SharedMemory(StrEnum):
    """Whether a container gets the machine's /dev/shm."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Report(StrEnum):
    """Whether the node's labels and its annotation are written."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(value, "a text")
    return value


def _path(value: object) -> str:
    text = _text(value)
    if not text.startswith("/"):
        raise _wrong(value, "an absolute path")
    return text


def _optional_path(value: object) -> str:
    return _path(value) if value != "" else ""


def _driver(value: object) -> str:
    text = _text(value)
    if len(text) > _LONGEST_DRIVER or not _DRIVER.fullmatch(text):
        raise _wrong(value, f"a DNS name of at most {_LONGEST_DRIVER} characters, in lower case")
    return text


def _resource(value: object) -> str:
    text = _text(value)
    if not _RESOURCE.fullmatch(text) or text.startswith("kubernetes.io/"):
        raise _wrong(value, "the name of an extended resource, such as example.com/share")
    return text


def _number(least: int, most: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        number = int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            raise _wrong(value, f"a whole number from {least} to {most}")
        return number

    return parse


def _unit(value: object) -> int:
    size = parse_size(value) if isinstance(value, str | int) else 0
    if not size or size % MIB:
        raise _wrong(value, "a size in whole MiB, such as 1GiB")
    return size // MIB


def _seconds(value: object) -> float:
    return parse_duration(value) if isinstance(value, str | int | float) else parse_duration("")


def _optional_uid(value: object) -> int | None:
    return _number(0, 2**32 - 2)(value)


def _processes(value: object) -> int | None:
    return None if value == "any" else _number(1, 1000)(value)


def _choice(kind: type[T]) -> Callable[[object], T]:
    def parse(value: object) -> T:
        choices = [str(each) for each in cast("type[StrEnum]", kind)]
        if value not in choices:
            raise _wrong(value, f"one of {', '.join(choices)}")
        return cast("Callable[[object], T]", kind)(value)

    return parse


def _wrong(value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(f"{value!r} is not {wanted}", hint="correct it")


_ONE_PROCESS: Final[int | None] = 1


def row(default: T, parse: Callable[[object], T], text: str, shown: str = "") -> T:
    """Declare a setting: its default, its parser and its help; `shown` is the default as documents show it."""
    return field(default=default, metadata={"parse": parse, "text": text, "shown": shown})


@dataclass(frozen=True, slots=True)
class Settings:
    socket: str = row("/run/mpsd/mpsd.sock", _path, "mpsd's socket.")
    kubelet_dir: str = row("/var/lib/kubelet", _path, "kubelet's root directory (`--root-dir`).")
    node: str = row("", _text, "Name of the Node object of this node.")
    resources: Offer = row(
        Offer.SLICES,
        _choice(Offer),
        "Resources of the node: `slices` (threads and memory in one number), `memory` (with threads in proportion), or"
        " `threads-and-memory` (two resources; on a node with one GPU only); or `dra` (`--dra`): shares by Dynamic"
        " Resource Allocation.",
    )
    slice_resource: str = row("nvidia.com/mps-slice", _resource, "Resource name of the slices.")
    slices: int = row(100, _number(1, MOST_DEVICES), "Number of slices per GPU.")
    core_resource: str = row("nvidia.com/mps-core", _resource, "Resource name of the threads.")
    core_unit: int = row(
        1, _number(1, 100), "Size of one unit of the threads resource, in percent of the GPU's threads."
    )
    memory_resource: str = row("nvidia.com/mps-memory", _resource, "Resource name of the memory.")
    memory_unit: int = row(1024, _unit, "Size of one unit of the memory resource, in whole MiB.", '"1GiB"')
    uid: int | None = row(
        None,
        _optional_uid,
        "Uid of all containers with a GPU, which gets access to their leases before they start. Absent: root, and the"
        " uid of each container's program once it runs.",
        "absent",
    )
    processes: int | None = row(
        _ONE_PROCESS,
        _processes,
        "Maximum number of client processes of a container, or `any`: as `processes` of a lease.",
    )
    claim_deadline: float = row(
        300.0,
        _seconds,
        "Seconds until a claim ends that this program no longer renews, for example because it has ended.",
    )
    wait: float = row(
        10.0, _seconds, "Seconds for which a container waits until an earlier pod has released its devices."
    )
    orphan_grace: float = row(
        20.0,
        _seconds,
        "Seconds until a claim is released if kubelet lists it for no container.",
    )
    unreachable_grace: float = row(
        15.0,
        _seconds,
        "Seconds without an answer from mpsd after which its devices are reported as unhealthy.",
    )
    gpu_devices: GpuDevices = row(
        GpuDevices.ENVIRONMENT,
        _choice(GpuDevices),
        "How a container gets its GPU's device files: `environment` (NVIDIA_VISIBLE_DEVICES, for NVIDIA's runtime),"
        " `cdi-field` (kubelet 1.28 and newer), `cdi-annotation` (older), or `none`.",
    )
    cdi_device: str = row(
        "nvidia.com/gpu={uuid}",
        _text,
        "Name of a GPU's CDI device, as NVIDIA's toolkit has it; `{uuid}` is its UUID.",
    )
    shared_memory: SharedMemory = row(
        SharedMemory.AUTO,
        _choice(SharedMemory),
        "Whether a container gets the machine's /dev/shm: `auto` (for drivers before 580), `always` or `never`.",
    )
    driver: str = row("mpsd", _driver, "Name of the driver, in device classes and claims (`dra`).")
    thread_step: int = row(1, _number(1, 50), "Step of requests for threads, in percent (`dra`).")
    memory_step: int = row(256, _unit, "Step of requests for memory, in whole MiB (`dra`).", '"256MiB"')
    cdi_dir: str = row("/var/run/cdi", _path, "Directory that the container runtime reads CDI devices from (`dra`).")
    hook: str = row(
        "",
        _optional_path,
        "Path of mpsctl for the container runtime on the node. It opens a lease to its container before the container"
        " starts (`dra`). Absent: this program opens it for root, and for another user once the container runs.",
        "absent",
    )
    api_server: str = row(
        "", _text, "The API server, as https://HOST:PORT. Absent: the one that kubelet names to each pod.", "absent"
    )
    service_account: str = row(
        "",
        _optional_path,
        "Directory with `token` and `ca.crt` for the API server.",
        '"/var/run/secrets/kubernetes.io/serviceaccount"',
    )
    report: Report = row(
        Report.AUTO,
        _choice(Report),
        "Whether the node's labels and annotation are written: `auto` (where `node` and the API server are known),"
        " `always`, or `never`.",
    )
    report_interval: float = row(
        30.0, _seconds, "Minimum seconds from one write of the labels and the annotation to the next."
    )
    cgroup_root: str = row("/", _path, "kubelet's `cgroupRoot`, where it has one.")
    log_format: LogFormat = row(
        LogFormat.AUTO, _choice(LogFormat), "`json`, `text`, or `auto`: text on a terminal, and JSON elsewhere."
    )


def parse(document: str, environment: Mapping[str, str], options: Mapping[str, str | None]) -> Settings:
    """Return the settings. The command line overrides the environment, and the environment overrides the TOML document.

    Raises ConfigurationError.
    """
    try:
        given: dict[str, object] = dict(tomllib.loads(document))
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"it is not TOML: {error}", hint="correct it") from None
    known = {each.name: each for each in fields(Settings)}
    for name, value in environment.items():
        if name.startswith(PREFIX) and name != f"{PREFIX}CONFIG":
            given[name.removeprefix(PREFIX).lower()] = value
    given |= {name: value for name, value in options.items() if value is not None}
    found: dict[str, object] = {}
    for name, wanted in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else "the settings are in docs/kubernetes.md"
            raise ConfigurationError(f"there is no setting {name!r}", hint=hint, limit=name)
        try:
            found[name] = known[name].metadata["parse"](wanted)
        except MpsdError as error:
            raise ConfigurationError(f"{name}: {error.detail}", hint=error.hint, limit=name) from None
    settings = cast("Callable[..., Settings]", Settings)(**found)
    _check(settings)
    return settings


def check_capabilities(settings: Settings, effective: int) -> None:
    """Check that this program, with these capabilities as a bit mask, can learn the users of containers.

    A container of an unknown user would run outside MPS, without limits. Raises ConfigurationError.
    """
    lacking = sorted(each.name for each in READER if not effective & 1 << each)
    has_hook = settings.resources is Offer.DRA and bool(settings.hook)
    if lacking and settings.uid is None and not has_hook:
        raise ConfigurationError(
            f"mpsd-kubernetes has no {' and no '.join(lacking)}, and so cannot read as which user a container's program"
            " runs: one that is not root's would run outside MPS",
            hint="add it to the capabilities of its container, as in its manifest; or set `uid`, if all containers with"
            " a GPU run as one user",
        )


def _check(settings: Settings) -> None:
    if not settings.node and (settings.resources is Offer.DRA or settings.report is Report.ALWAYS):
        raise ConfigurationError(
            "node: what is written to the API server needs the node's name",
            hint=f"give it with --node, or {PREFIX}NODE from the field spec.nodeName",
            limit="node",
        )
    names = [settings.slice_resource, settings.core_resource, settings.memory_resource]
    if len({*names}) < len(names):
        raise ConfigurationError("two resources have the same name", hint="give each a name of its own")
    if 100 % settings.core_unit:
        raise ConfigurationError(
            f"core_unit: {settings.core_unit} % do not add up to 100 %", hint="take a divisor of 100", limit="core_unit"
        )
