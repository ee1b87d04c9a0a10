"""Frameworks and the memory of a GPU: how a process shows that it runs one, what it takes at once, and what to set.

Under a lease, CUDA reports the whole GPU as the total, and what the lease has as free (measured: under a lease of 60
GiB, PyTorch sees 143 GB in all and 61 GB free). So a framework that takes a part of the total takes more than a lease
has, and one that takes a part of what is free does not. What each does is documented, and not measured under a lease.
The sources are its own documentation and code, as of November 2026:

- JAX: docs/gpu_memory_allocation.rst, jaxlib/xla_client.py, and XLA's pjrt/gpu. JAX refuses the old and the new name of
  the variable together.
- TensorFlow: SingleVirtualDeviceMemoryLimit in core/common_runtime/gpu/gpu_device.cc.
- vLLM: vllm/config/cache.py, and request_memory in vllm/v1/worker/utils.py. It does not start if less is free than the
  part that it is to use, up to 0.27 also where --kv-cache-memory-bytes sizes its cache (pull request 39852).
- SGLang: mem_fraction_static in srt/server_args.py, and kv_cache_configurator.py: the part is one of what is free at
  the start, and its default is what the GPU's total leaves beside the activations.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple


class Framework(NamedTuple):
    """A framework, with the words for the user's guide."""

    name: str
    takes: str
    """What it takes by default."""
    advice: str
    """What to set under a lease; `{}` stands for the part of the GPU's memory that the lease has, with some room."""
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

JAX: Final = Framework(
    "JAX",
    takes="75 % of the total",
    advice="XLA_CLIENT_MEM_FRACTION={}",
    settings=("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
    others=("XLA_PYTHON_CLIENT_PREALLOCATE=false", "XLA_PYTHON_CLIENT_ALLOCATOR=platform"),
    library="jaxlib",
    part=0.75,
)
VLLM: Final = Framework(
    "vLLM",
    takes="90 % of the total; newer versions 92 %",
    advice="--gpu-memory-utilization {}",
    settings=("--gpu-memory-utilization",),
    others=(_BYTES,),
    command="vllm",
    title="VLLM::",
    part=0.9,
)
SGLANG: Final = Framework(
    "SGLang",
    takes="a part of what is free, which it computes from the total",
    advice="--mem-fraction-static 0.7",
    settings=("--mem-fraction-static",),
    command="sglang",
    title="sglang::",
    part=0.85,
)
TABLE: Final = (
    Framework("PyTorch", takes="what it needs, as it needs it", advice=""),
    JAX,
    Framework(
        "TensorFlow",
        takes="what is free",
        advice="",
        others=("TF_FORCE_GPU_ALLOW_GROWTH=true",),
        library="tensorflow",
    ),
    VLLM,
    SGLANG,
)
LIBRARIES: Final = tuple(each.library for each in TABLE if each.library)

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
    options = _options(arguments, (*framework.others, *framework.settings))
    name = next(iter(options), "")
    if name == _BYTES:
        return _size(options[name])
    if name:  # a part of what is free cannot be too large
        return Demand(given=name) if framework is SGLANG else _part(name, options[name])
    if any(each.partition("=")[0] == "--config" for each in arguments):
        return Demand(unknown="what it was told to take may stand in the file of its --config")
    return Demand(framework.part)


def setting(framework: Framework, part: float, given: str = "") -> str:
    """Return what to set under a lease that has this part of the GPU's memory: one option or variable.

    It is the one that was given, which is wrong, or else the newest.
    """
    value = f"{max(part * 0.88, 0.001):.2g}"
    if given == _POLICY:
        return f"{_POLICY}={value} in XLA_FLAGS"
    advice = framework.advice.format(value)
    if given in framework.settings:
        return advice.replace(framework.settings[0], given)
    return f"{advice} instead of {given}" if given else advice


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
