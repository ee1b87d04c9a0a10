"""The settings of `mpsd-kubernetes`: one table, read from a flat TOML file and from the environment."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from mpsd.core import setting_parsers as parsers
from mpsd.core.capabilities import READER
from mpsd.core.configuration.document import decode, render, section_of
from mpsd.core.errors import ConfigurationError
from mpsd.core.model import Visible
from mpsd.core.quantities import PinnedDeviceMemLimit
from mpsd.core.settings import LogFormat, row, rows_of
from mpsd.core.units import MIB, format_size, parse_duration, parse_size

DOMAIN: Final = "mpsd.internal"
"""The domain of all names in a cluster. The top level `internal` is reserved for private use (ICANN, 2024)."""

PREFIX: Final = "MPSD_KUBERNETES_"
"""The prefix of each setting's environment variable."""

MOST_DEVICES: Final = 512
"""Maximum devices of one kind on one GPU: the label of a lease has space for this many, at four per digit."""

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


class When(StrEnum):
    """When something is done; `auto` has a rule for each setting."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def _domain(value: object) -> str:
    text = parsers.text(value)
    if len(text) > _LONGEST_DRIVER or not _DRIVER.fullmatch(text):
        raise ValueError(f"it is not a DNS name of at most {_LONGEST_DRIVER} characters, in lower case")
    return text


def _resource(value: object) -> str:
    text = parsers.text(value)
    if not _RESOURCE.fullmatch(text) or text.startswith("kubernetes.io/"):
        raise ValueError("it is not the name of an extended resource, such as example.com/share")
    return text


def _unit(value: object) -> PinnedDeviceMemLimit:
    size = parse_size(value) if isinstance(value, str | int) else 0
    if not size or size % MIB:
        raise ValueError("it is not a size in whole MiB, such as 1GiB")
    return PinnedDeviceMemLimit(size // MIB)


def _hook(value: object) -> Path | When:
    return next((each for each in (When.AUTO, When.NEVER) if value == each), None) or parsers.path(value)


_BY_ITSELF: Final[Path | When] = When.AUTO


def _seconds(value: object) -> float:
    return parse_duration(value) if isinstance(value, str) else parsers.seconds(value)


parse_uid: Final = parsers.whole(0, 2**32 - 2)


def parse_processes(value: object) -> int | str:
    """Accept a number of client processes, or `any`."""
    return "any" if value == "any" else parsers.whole(1, 1000)(value)


def _numbers_of_processes(value: object) -> tuple[int | str, ...]:
    """Accept one such value, or several in a list; the environment has them with commas."""
    each = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    found = tuple(parse_processes(int(item) if isinstance(item, str) and item.isdecimal() else item) for item in each)
    if not found or len({*found}) < len(found):
        raise ValueError("it is not a list of different numbers")
    return found


_ONE_PROCESS: Final[tuple[int | str, ...]] = (1,)


@dataclass(frozen=True, slots=True)
class Settings:
    socket: Path = row(Path("/run/mpsd/mpsd.sock"), parsers.path, "mpsd's socket.")
    kubelet_dir: Path = row(Path("/var/lib/kubelet"), parsers.path, "kubelet's root directory (`--root-dir`).")
    node: str = row("", parsers.text, "Name of the Node object of this node.")
    resources: Offer = row(
        Offer.SLICES,
        parsers.choice(Offer),
        "Resources of the node: `slices` (threads and memory in one number), `memory` (with threads in proportion), or"
        " `threads-and-memory` (two resources, of one GPU of the node); or `dra` (`--dra`): shares by Dynamic"
        " Resource Allocation.",
    )
    slice_resource: str = row("nvidia.com/gpu.mps-slice", _resource, "Resource name of the slices.")
    slices: int = row(
        100,
        parsers.whole(1, MOST_DEVICES),
        "Number of slices per GPU. With `dra`, a request without an amount gets one.",
    )
    core_resource: str = row("nvidia.com/mps-core", _resource, "Resource name of the threads.")
    core_unit: int = row(
        1, parsers.whole(1, 100), "Size of one unit of the threads resource, in percent of the GPU's threads."
    )
    memory_resource: str = row("nvidia.com/mps-memory", _resource, "Resource name of the memory.")
    memory_unit: PinnedDeviceMemLimit = row(
        PinnedDeviceMemLimit(1024), _unit, "Size of one unit of the memory resource, in whole MiB."
    )
    uid: int | None = row(
        None,
        parse_uid,
        "Uid of all containers with a GPU, which gets access to their leases before they start. Absent: the user of"
        " each container, as the hook finds it, or without the hook the running program; until then, root.",
    )
    processes: tuple[int | str, ...] = row(
        _ONE_PROCESS,
        _numbers_of_processes,
        "Maximum number of client processes of a container, or `any`: as `processes` of a lease. Each number after the"
        " first has a resource of its own: with `[1, 4]`, `nvidia.com/gpu.mps-slice` is for 1 process, and"
        " `nvidia.com/gpu.mps-slice.processes-4` for 4, which have a quarter of the share each.",
    )
    visible: Visible = row(
        Visible.UUID,
        parsers.choice(Visible),
        "What `CUDA_VISIBLE_DEVICES` of a container has: the UUID of its GPU (`uuid`), or 0 (`index`), for programs"
        " that read a number. With `index`, no container starts on a node that is not closed (`visible` of a lease).",
    )
    claim_deadline: float = row(
        300.0,
        _seconds,
        "Seconds until a claim ends that this program no longer renews, for example because it has ended.",
    )
    wait: float = row(
        10.0, _seconds, "Seconds for which a container waits until an earlier pod has released its devices."
    )
    orphan_grace: float = row(20.0, _seconds, "Seconds until a claim is released if kubelet lists it for no container.")
    unreachable_grace: float = row(
        15.0, _seconds, "Seconds without an answer from mpsd after which its devices are reported as unhealthy."
    )
    gpu_devices: GpuDevices = row(
        GpuDevices.ENVIRONMENT,
        parsers.choice(GpuDevices),
        "How a container gets its GPU's device files: `environment` (NVIDIA_VISIBLE_DEVICES, for NVIDIA's runtime),"
        " `cdi-field` (kubelet 1.28 and newer), `cdi-annotation` (older), or `none`.",
    )
    cdi_device: str = row(
        "nvidia.com/gpu={uuid}",
        parsers.text,
        "Name of a GPU's CDI device, as NVIDIA's toolkit has it; `{uuid}` is its UUID.",
    )
    shared_memory: When = row(
        When.AUTO,
        parsers.choice(When),
        "Whether a container gets the machine's /dev/shm: `auto` (for drivers before 580), `always` or `never`.",
    )
    domain: str = row(
        DOMAIN,
        _domain,
        "Domain of the names in the cluster: of the driver (`dra`), of its parameters, and of the node's labels and"
        " annotation. Only a fork of mpsd changes it.",
    )
    thread_step: int = row(1, parsers.whole(1, 50), "Step of requests for threads, in percent (`dra`).")
    memory_step: PinnedDeviceMemLimit = row(
        PinnedDeviceMemLimit(256), _unit, "Step of requests for memory, in whole MiB (`dra`)."
    )
    cdi_dir: Path = row(
        Path("/var/run/cdi"), parsers.path, "Directory that the container runtime reads CDI devices from."
    )
    hook: Path | When = row(
        _BY_ITSELF,
        _hook,
        "How the container runtime starts mpsctl on the node, which opens a lease to its container's user before the"
        " container starts: `auto` (out of this program's own image or installation), the path of an installed mpsctl,"
        " or `never`: this program opens it for root, and for another user once the container runs.",
    )
    api_server: str | None = row(
        None, parsers.text, "The API server, as https://HOST:PORT. Absent: the one that kubelet names to each pod."
    )
    service_account: Path = row(
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        parsers.path,
        "Directory with `token` and `ca.crt` for the API server.",
    )
    report: When = row(
        When.AUTO,
        parsers.choice(When),
        "Whether the node's labels and annotation are written: `auto` (where `node` and the API server are known),"
        " `always`, or `never`.",
    )
    pod_events: When = row(When.AUTO, parsers.choice(When), "Whether events about pods are written: as `report`.")
    report_interval: float = row(
        30.0,
        _seconds,
        "Minimum seconds from one write of the labels and the annotation to the next; where changes last, ten times as"
        " long.",
    )
    cgroup_root: Path = row(Path("/"), parsers.path, "kubelet's `cgroupRoot`, where it has one.")
    webhook_port: int = row(9443, parsers.whole(1, 65535), "TCP port of the webhook (`--webhook`).")
    webhook_certificate: Path = row(
        Path("/run/mpsd-webhook"), parsers.path, "Directory with `tls.crt` and `tls.key` of the webhook (`--webhook`)."
    )
    log_format: LogFormat = row(
        LogFormat.AUTO, parsers.choice(LogFormat), "`json`, `text`, or `auto`: text on a terminal, and JSON elsewhere."
    )

    @property
    def most_devices(self) -> int:
        """Maximum devices of one resource on one GPU. Those of each of `processes` have a range of this length."""
        return MOST_DEVICES // len(self.processes)


def parse(document: str, environment: Mapping[str, str], options: Mapping[str, str | None]) -> Settings:
    """Return the settings. The command line overrides the environment, and the environment overrides the TOML document.

    Raises ConfigurationError.
    """
    given = decode(document)
    texts = {row.name for row in rows_of("", Settings) if isinstance(row.default, str)}
    for variable, value in environment.items():
        if variable.startswith(PREFIX) and variable != f"{PREFIX}CONFIG":
            name = variable.removeprefix(PREFIX).lower()
            is_number = name not in texts and value.isascii() and value.isdecimal()
            given[name] = int(value) if is_number else value
    given |= {name: value for name, value in options.items() if value is not None}
    settings = section_of("", Settings, given, "docs/kubernetes/kubernetes.toml")
    _check(settings)
    return settings


def summary(settings: Settings) -> str:
    """Return what a node offers, as a comment, and each setting that is not the default one, as TOML."""
    values = [(row, getattr(settings, row.name)) for row in rows_of("", Settings)]
    changed = [f"{row.name} = {render(row, value)}" for row, value in values if value != row.default]
    several = [] if settings.resources is Offer.DRA else [f".processes-{each}" for each in settings.processes[1:]]
    also = [f"# Also for several processes, by names that end in {', '.join(several)}"] if several else []
    return "\n".join([f"# A node offers {_offers(settings)}", *also, *changed])


def _offers(settings: Settings) -> str:
    memory = format_size(settings.memory_unit.mebibytes * MIB)
    match settings.resources:
        case Offer.SLICES:
            each = f"each is {100 / settings.slices:.3g} % of its memory, with threads in proportion"
            return f"{settings.slices} of {settings.slice_resource} for each GPU: {each}"
        case Offer.MEMORY:
            return f"{settings.memory_resource}: each is {memory} of a GPU, with threads in proportion"
        case Offer.THREADS_AND_MEMORY:
            threads = f"{settings.core_resource} ({settings.core_unit} % of its threads)"
            return f"of one GPU {threads} and {settings.memory_resource} ({memory})"
        case Offer.DRA:
            step = format_size(settings.memory_step.mebibytes * MIB)
            return f"devices of {settings.domain}, in steps of {settings.thread_step} % of the threads and {step}"


def check_capabilities(settings: Settings, effective: int) -> None:
    """Check that this program, with these capabilities as a bit mask, can learn the users of containers.

    A container of an unknown user would run outside MPS, without limits. Raises ConfigurationError.
    """
    lacking = sorted(each.name for each in READER if not effective & 1 << each)
    has_hook = settings.resources is Offer.DRA and isinstance(settings.hook, Path)
    if lacking and settings.uid is None and not has_hook:
        raise ConfigurationError(
            f"mpsd-kubernetes has no {' and no '.join(lacking)}, and so cannot read as which user a container's program"
            " runs: one that is not root's would run outside MPS",
            hint="add it to the capabilities of its container, as in its manifest; or set `uid`, if all containers with"
            " a GPU run as one user",
        )


def _check(settings: Settings) -> None:
    if not settings.node and (settings.resources is Offer.DRA or When.ALWAYS in {settings.report, settings.pod_events}):
        raise ConfigurationError(
            "node: what is written to the API server needs the node's name",
            hint=f"give it with --node, or {PREFIX}NODE from the field spec.nodeName",
            limit="node",
        )
    if settings.slices > settings.most_devices:
        raise ConfigurationError(
            f"slices: {len(settings.processes)} resources, one for each of `processes`, have at most"
            f" {settings.most_devices} slices each",
            hint="take fewer slices, or fewer numbers of processes",
            limit="slices",
        )
    names = [settings.slice_resource, settings.core_resource, settings.memory_resource]
    if len({*names}) < len(names):
        raise ConfigurationError("two resources have the same name", hint="give each a name of its own")
    if 100 % settings.core_unit:
        raise ConfigurationError(
            f"core_unit: {settings.core_unit} % do not add up to 100 %", hint="take a divisor of 100", limit="core_unit"
        )
