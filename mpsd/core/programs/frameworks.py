"""Frameworks and the memory of a GPU: how a process shows that it runs one, what it takes at once, and what to set.

Under a lease, CUDA reports the whole GPU as the total, and what the lease has as free (measured: under a lease of 60
GiB, PyTorch sees 143 GB in all and 61 GB free). So a framework that takes a part of the total takes more than a lease
has, and one that takes a part of what is free does not. What each does is read in its own documentation and code, in
the version that its row names, and not measured under a lease.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from itertools import chain
from math import floor, log10
from typing import Final, NamedTuple

from mpsd.core.errors import InvalidRequestError
from mpsd.core.units import GIB, MIB, briefly, format_size


class Base(Enum):
    """Of what a framework takes a part."""

    TOTAL = auto()
    """Of the memory that CUDA reports as the GPU's total."""
    FREE = auto()
    """Of the memory that is free when the framework starts."""
    USED = auto()
    """Of the total, for all that is not free: that of the lease, and what the lease does not have."""


class Framework(NamedTuple):
    """A framework, with the words for the user's guide."""

    name: str
    takes: str
    """What it takes by default."""
    base: Base
    """Of what its setting is a part."""
    note: str
    """What a user has to know of its setting."""
    source: str
    version: str
    """Where its row was read, and in which version."""
    option: tuple[str, str] | None = None
    """The option that sets the part, and its value; `{}` stands for the part."""
    variable: tuple[str, str] | None = None
    """The variable that does so, likewise."""
    is_needed: bool = True
    """Whether it takes more than a lease has, or leaves itself too little, unless it is set."""
    is_applied: bool = False
    """Whether `mpsctl run --for` sets the variable: every version takes it or ignores it, and it replaces no other."""
    settings: tuple[str, ...] = ()
    """The options or variables that set the part that it takes, by their newest names first."""
    others: tuple[str, ...] = ()
    """Options and variables by which it takes no part of the total."""
    command: str = ""
    """Its program, and the Python module with that program."""
    title: str = ""
    """The beginning of the titles that its processes set, over their arguments and their environment."""
    library: str = ""
    """The directory from which its processes map a library."""
    part: float = 0.0
    """The part of the total for which it asks at once by default."""


class Advice(NamedTuple):
    """What to tell a framework under a lease."""

    framework: str
    """Its name, as it writes it."""
    fraction: float
    """The value of its setting."""
    option: tuple[str, str] | None
    """Its option and the value; None where it has no such option."""
    variable: tuple[str, str] | None
    """Its environment variable and the value; None where it has none."""
    note: str
    """Of what the fraction is a part, and what else to know."""
    source: str
    """Where that was read, in the framework's own documentation and code."""
    version: str
    """The version that it was read in. None of it is measured under a lease."""


class Demand(NamedTuple):
    """The memory for which a process asks at once."""

    part: float = 0.0
    """The part of the GPU's total memory."""
    size: int = 0
    """Bytes, instead of a part."""
    given: str = ""
    """The option or variable that says so; empty for a default."""
    unknown: str = ""
    """Why it is unknown."""


_POLICY: Final = "--xla_gpu_memory_fraction_policy"
_BYTES: Final = "--kv-cache-memory-bytes"

CONTEXT: Final = 23 * MIB
"""Bytes of a lease that a context takes before a framework looks: the least that was measured (T4, driver 535; on an
H200 with driver 580 it was 145 to 517 MiB)."""

_ROOM: Final = 0.12
"""The part of a lease that is left to what no setting counts: the context, CUDA's libraries, fragmentation."""

_ACTIVATIONS: Final = 6 * GIB
"""What SGLang is left for activations and graphs: 5 to 8 GB by its guide (hyperparameter_tuning.md)."""

_LEAST_STATIC, _MOST_STATIC = 0.5, 0.9

TABLE: Final = (
    Framework(
        "PyTorch",
        takes="what it needs, as it needs it",
        base=Base.TOTAL,
        note="a bound of its caching allocator; the lease's own limit holds without it. Versions that do not know the"
        " key refuse it, and PYTORCH_ALLOC_CONF replaces PYTORCH_CUDA_ALLOC_CONF, so mpsctl does not set it",
        source="c10/cuda/CUDAAllocatorConfig.h and pull request 161035; torch.cuda.set_per_process_memory_fraction",
        version="2.13.0",
        variable=("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:{}"),
        is_needed=False,
    ),
    Framework(
        "JAX",
        takes="75 % of the total",
        base=Base.TOTAL,
        note="it refuses the new and the old name of the variable together, and versions before the new name ignore it",
        source="docs/gpu_memory_allocation.rst, jaxlib/xla_client.py, and XLA's pjrt/gpu",
        version="0.11.1",
        variable=("XLA_CLIENT_MEM_FRACTION", "{}"),
        is_applied=True,
        settings=("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
        others=("XLA_PYTHON_CLIENT_PREALLOCATE=false", "XLA_PYTHON_CLIENT_ALLOCATOR=platform"),
        library="jaxlib",
        part=0.75,
    ),
    Framework(
        "TensorFlow",
        takes="what is free",
        base=Base.TOTAL,
        note="the fraction is for per_process_gpu_memory_fraction in its GPUOptions, a part of the total; by default it"
        " takes what is free at once, and with the variable what it needs",
        source="SingleVirtualDeviceMemoryLimit in core/common_runtime/gpu/gpu_device.cc",
        version="November 2026",
        variable=("TF_FORCE_GPU_ALLOW_GROWTH", "true"),
        is_needed=False,
        is_applied=True,
        library="tensorflow",
    ),
    Framework(
        "vLLM",
        takes="90 % of the total; newer versions 92 %",
        base=Base.TOTAL,
        # Up to 0.27 it compares that also where --kv-cache-memory-bytes sizes its cache (pull request 39852).
        note="it does not start if less is free than this part of the total",
        source="vllm/config/cache.py, and request_memory in vllm/v1/worker/utils.py",
        version="0.33.0",
        option=("--gpu-memory-utilization", "{}"),
        settings=("--gpu-memory-utilization",),
        others=(_BYTES,),
        command="vllm",
        title="VLLM::",
        part=0.9,
    ),
    Framework(
        "SGLang",
        takes="a part of what is free, which it computes from the total",
        base=Base.FREE,
        note="a part of what is free, for the model and its cache; the rest is for activations, for which it needs less"
        " with a smaller --chunked-prefill-size",
        source="srt/arg_groups/memory_hook.py, _profile_available_bytes in srt/mem_cache/kv_cache_configurator.py, and"
        " docs/advanced_features/hyperparameter_tuning.md",
        version="0.5.23",
        option=("--mem-fraction-static", "{}"),
        settings=("--mem-fraction-static",),
        command="sglang",
        title="sglang::",
        part=0.85,
    ),
    Framework(
        "Triton",
        takes="what its models need, and a pool of 64 MB",
        base=Base.USED,
        note="it refuses a further model where more of the total is not free, which includes what the lease does not"
        " have; what a model itself takes is up to its backend and its instance_group",
        source="src/command_line_parser.cc, and VerifyModelLoadGpuFraction in core's src/backend_model_instance.cc",
        version="2.73.0dev",
        option=("--model-load-gpu-limit", "0:{}"),
        is_needed=False,
        others=("--cuda-memory-pool-byte-size",),
    ),
)
_, JAX, _, VLLM, SGLANG, _ = TABLE
LIBRARIES: Final = tuple(each.library for each in TABLE if each.library)
NAMES: Final = tuple(each.name.lower() for each in TABLE)
"""The names by which `advice` knows them."""

_AT_ONCE: Final = frozenset({"default", "bfc", "cuda_async"})
"""The allocators of JAX that take memory at once."""

_START: Final = re.compile(r"[0-9]*\.?[0-9]+(?:e-?[0-9]+)?")
"""The part that JAX takes at first; a limit for its growth may follow: 0.5-0.8, 0.5+."""

_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgtKMGT]?)")
_SHORTEST: Final = len("--mem")
"""An option may be abbreviated; a program that runs has understood it."""


# -- which one a process runs ------------------------------------------------------------------------------------------


def of(arguments: Sequence[str], libraries: Collection[str]) -> Framework | None:
    """Return the framework that a process runs, by its arguments or title, and by the libraries that it has mapped."""
    named = (each for each in TABLE if runs(each, arguments) or _has_title(each, arguments))
    loaded = (each for each in TABLE if each.library in libraries)
    return next(chain(named, loaded), None)


def hides_arguments(arguments: Sequence[str]) -> bool:
    """Tell whether a process has written the title of a framework over its arguments."""
    return any(_has_title(each, arguments) for each in TABLE)


def _has_title(framework: Framework, arguments: Sequence[str]) -> bool:
    return bool(framework.title) and "".join(arguments[:1]).startswith(framework.title)


def runs(framework: Framework, arguments: Sequence[str]) -> bool:
    """Tell whether these are the arguments of a framework's program."""
    return bool(framework.command) and _command(arguments) == framework.command


def _command(arguments: Sequence[str]) -> str:
    """Return the program that a process runs, without its directory; of a module of Python, the package."""
    words = [*arguments]
    name = words.pop(0).rpartition("/")[2] if words else ""
    if not name.startswith("python"):
        return name
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option.startswith("-m"):
            return (option[2:] or "".join(words[:1])).partition(".")[0]
        if option in {"-W", "-X"}:
            del words[:1]
    return words[0].rpartition("/")[2] if words else ""


# -- what it takes, and what to set ------------------------------------------------------------------------------------


def demand(framework: Framework, arguments: Sequence[str], variables: Mapping[str, str]) -> Demand:
    """Return the memory for which a process asks at once, by the arguments of its command and its own variables."""
    if not framework.command:
        return _of_jax(variables) if framework is JAX else Demand()
    if not runs(framework, arguments):
        return Demand(unknown="no arguments show what it was told to take, since it has set a title")
    return _of_options(framework, arguments)


def _of_options(framework: Framework, arguments: Sequence[str]) -> Demand:
    """Return the memory for which a framework asks at once, by the arguments of its command."""
    options = _options(arguments, (*framework.others, *framework.settings))
    name = next(iter(options), "")
    if name == _BYTES:
        return _size(options[name])
    if name:  # a part of what is free cannot be too large
        return Demand(given=name) if framework is SGLANG else _part(name, options[name])
    if any(each.partition("=")[0] == "--config" for each in arguments):
        return Demand(unknown="what it was told to take may stand in the file of its --config")
    return Demand(framework.part)


def advice(framework: str, memory: int, total: int) -> Advice:
    """Return what to tell a framework in a process that may have so many bytes of a GPU with so many in total.

    Raises InvalidRequestError for a name that is not in the table, in whatever case, and for sizes below one byte.
    """
    found = named(framework)
    if memory < 1 or total < 1:
        raise InvalidRequestError(
            f"there is no advice for {memory} bytes of a GPU with {total}", hint="give both sizes in bytes, above 0"
        )
    value = _value(found.base, memory, total)
    option, variable = (pair and (pair[0], pair[1].format(value)) for pair in (found.option, found.variable))
    return Advice(found.name, float(value), option, variable, found.note, found.source, found.version)


def named(name: str) -> Framework:
    """Return the framework of this name. Raises InvalidRequestError, with the nearest name."""
    known = dict(zip(NAMES, TABLE, strict=True))
    found = known.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), NAMES, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise InvalidRequestError(
            f"there is no advice for {briefly(name)}", hint=f"{meant}There is some for {', '.join(NAMES)}"
        )
    return found


def _value(base: Base, memory: int, total: int) -> str:
    """Return the part to set, rounded down, so that some of the lease is left."""
    part = min(memory / total, 1.0)
    match base:
        case Base.TOTAL:
            least = max(part * (1 - _ROOM), 0.001)
            return _down(least, 1 - floor(log10(least)))
        case Base.FREE:
            return _down(min(max(1 - _ACTIVATIONS / memory, _LEAST_STATIC), _MOST_STATIC), 2)
        case Base.USED:
            return _down(1 - part * _ROOM, 4)


def _down(value: float, digits: int) -> str:
    """Return a number with so many digits after the point at most, rounded down."""
    return f"{floor(round(value * 10**digits, 6)) / 10**digits:g}"


def setting(framework: Framework, memory: int, total: int, given: str = "") -> str:
    """Return what to set under a lease with so much of the GPU's memory: one option or variable; empty if none.

    It is the one that was given, which is wrong, or else the newest.
    """
    if not framework.is_needed:
        return ""
    found = advice(framework.name, memory, total)
    if given == _POLICY:
        return f"{_POLICY}={found.fraction:g} in XLA_FLAGS"
    newest = " ".join(found.option) if found.option is not None else "=".join(found.variable or ())
    if given in framework.settings:
        return newest.replace(framework.settings[0], given)
    return f"{newest} instead of {given}" if given else newest


def exceeds(demand: Demand, memory: int, total: int) -> int:
    """Return the bytes that a process asks for if that is more than it may have beside its context; 0 otherwise."""
    takes = demand.size or int(demand.part * total)
    return takes if takes > memory - CONTEXT else 0


class Applied(NamedTuple):
    """What `mpsctl run --for` does for a program that runs a framework."""

    variables: dict[str, str]
    """The variables to set."""
    note: str
    """What the user is told; empty where all is as it should be."""


def applied(name: str, memory: int, total: int, command: Sequence[str], variables: Mapping[str, str]) -> Applied:
    """Return what to set for a program with these arguments and variables, and what its user is told.

    1. What the user has set stays. It is told if it asks for more than `memory`.
    2. A variable that every version takes is set.
    3. An option that is missing is told: arguments are the user's own.

    Raises InvalidRequestError for an unknown name.
    """
    framework, found = named(name), advice(name, memory, total)
    read = f"{framework.name} {framework.version}, not measured"
    demand = _of_jax(variables) if framework is JAX else _of_options(framework, command)
    if demand.given and (takes := exceeds(demand, memory, total)):
        sizes = f"{format_size(takes // MIB * MIB)}, of the {format_size(memory)} that each process has"
        return Applied(
            {}, f"{demand.given} takes {sizes}: use {setting(framework, memory, total, demand.given)} ({read})"
        )
    given = {*framework.settings, *(pair[0] for pair in (found.variable,) if pair)}
    if demand.given or any(variables.get(each) for each in given) or _POLICY in variables.get("XLA_FLAGS", ""):
        return Applied({}, "")
    if found.variable is not None and framework.is_applied:
        return Applied(dict([found.variable]), f"{'='.join(found.variable)} is set ({read})")
    option = " ".join(found.option or ())
    if framework.is_needed:
        return Applied({}, f"add {option} to the command: {found.note} ({read})")
    fitting = f"; where you want a limit of its own, {option} fits: {found.note}" if option else ""
    return Applied({}, f"{framework.name} needs no setting{fitting} ({read})")


def _of_jax(variables: Mapping[str, str]) -> Demand:
    """Return what JAX takes at its first operation.

    It takes none on other devices, without pre-allocation, and where managed memory is used, which no lease limits.
    """
    platforms = variables.get("JAX_PLATFORMS", "").split(",")
    if (
        not {"", "cuda", "gpu"} & {*platforms}
        or variables.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") in {"false", "False", "0"}
        or (variables.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() or "default") not in _AT_ONCE
        or variables.get("TF_FORCE_UNIFIED_MEMORY", "").lower() in {"1", "true"}
    ):
        return Demand()
    given = {**variables, **_options(variables.get("XLA_FLAGS", "").split(), (_POLICY,))}
    name = next((each for each in (_POLICY, *JAX.settings) if given.get(each)), "")
    return _part(name, given[name]) if name else Demand(JAX.part)


def _options(arguments: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return those of these options that were given, in this order, with their last values."""
    found = dict[str, str]()
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        given, equals, value = argument.partition("=")
        for name in names:
            if len(given) >= _SHORTEST and name.replace("_", "-").startswith(given.replace("_", "-")):
                found[name] = value if equals else following
    return {name: found[name] for name in names if name in found}


def _part(name: str, value: str) -> Demand:
    start = _START.match(value)
    return _not_read(name, value) if start is None else Demand(float(start[0]), given=name)


def _not_read(name: str, value: str) -> Demand:
    return Demand(given=name, unknown=f"the value of {name} cannot be read: {value[:40]!r}")


def _size(value: str) -> Demand:
    """Return a size in vLLM's notation: small letters are decimal, and capital ones binary."""
    size = _SIZE.fullmatch(value)
    if size is None:
        return _not_read(_BYTES, value)
    number, unit = size.groups()
    power = "kmgt".index(unit.lower()) + 1 if unit else 0
    return Demand(size=int(float(number) * (1000 if unit.islower() else 1024) ** power), given=_BYTES)
