"""Checks of the processes that have leases: whether each gets its share and can use it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mpsd.core.doctor.finding import Finding, check, fail, unread, warn
from mpsd.core.doctor.observed import ClientSeen, Observed, known
from mpsd.core.units import MIB, format_size

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework that takes a part of the GPU's total memory at once, regardless of a pinned limit."""

    name: str
    part: float
    """The part that it takes by default. Source: its own documentation."""
    option: str
    """The argument or variable that changes the part."""


_BY_ARGUMENT: Final = {
    "vllm": Framework("vLLM", 0.9, "--gpu-memory-utilization"),
    "sglang": Framework("SGLang", 0.85, "--mem-fraction-static"),
}
_BY_LIBRARY: Final = {
    "jaxlib": Framework("JAX", 0.75, "XLA_PYTHON_CLIENT_MEM_FRACTION"),
    "tensorflow": Framework("TensorFlow", 1.0, "TF_FORCE_GPU_ALLOW_GROWTH"),
}
LIBRARIES: Final = frozenset(_BY_LIBRARY)

_OTHERWISE: Final = {"JAX": "XLA_PYTHON_CLIENT_PREALLOCATE"}
"""A second variable that turns the immediate allocation off."""


def _unreadable(seen: Observed) -> Iterator[Finding]:
    """Yield a finding where leases could not be inspected, and for each process whose environment cannot be read."""
    yield from unread(seen.clients)
    for each in known(seen.clients) or ():
        yield from unread(each.variables, subject=f"pid {each.pid}")


@check(
    "gpu-numbers",
    f"the processes of leases name their GPU by UUID in {VISIBLE}",
    "A process finds no GPU, or another one.",
)
def _ordinals(seen: Observed) -> Iterator[Finding]:
    yield from _unreadable(seen)
    for each in known(seen.clients) or ():
        value = (known(each.variables) or {}).get(VISIBLE, "")
        first = value.split(",")[0].strip()
        if not first.isdecimal():
            continue
        because = f"process {each.pid} of lease {each.lease} was started with {VISIBLE}={value[:40]}: "
        remedy = (
            f"have it use the UUID that its lease has, {VISIBLE}={each.gpu}; Ray, Slurm and torchrun write numbers:"
            " set it in the program's own start (for Ray: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1)"
        )
        evidence = {"pid": each.pid, VISIBLE: value}
        if int(first[:9]):
            because += "under MPS it sees one GPU, number 0, and so none"
            yield fail(because, remedy, f"pid {each.pid}", **evidence)
        else:
            because += "outside MPS, number 0 may be another GPU than that of its lease"
            yield warn(because, remedy, f"pid {each.pid}", **evidence)


@check(
    "framework-memory",
    "no framework takes more memory by itself than its lease has",
    "The program runs out of memory when it starts.",
)
def _framework(seen: Observed) -> Iterator[Finding]:
    yield from _unreadable(seen)
    node = known(seen.gpus.node)
    totals = {each.gpu.uuid: each.gpu.memory_total for each in node.gpus} if node is not None else {}
    for each in known(seen.clients) or ():
        found, total = _framework_of(each), totals.get(each.gpu)
        if found is None or total is None or found.part * total <= each.granted:
            continue
        takes, has = format_size(int(found.part * total) // MIB * MIB), format_size(each.granted)
        because = (
            f"process {each.pid} runs {found.name}, which takes {found.part:.0%} of the GPU's total memory at once"
            f" ({takes}) where it is not configured otherwise, and lease {each.lease} has {has}: it runs out of memory"
        )
        fraction = max(each.granted / total * 0.9, 0.001)
        value = "true" if found.name == "TensorFlow" else f"{fraction:.2g}"
        remedy = f"start it with {found.option}{'=' if found.option.isupper() else ' '}{value}"
        yield warn(because, remedy, f"pid {each.pid}", pid=each.pid, total=total, granted=each.granted)


def _framework_of(each: ClientSeen) -> Framework | None:
    """Return the framework that a process runs with its default part; None where it is configured, or runs none."""
    for word, framework in _BY_ARGUMENT.items():
        if any(word in argument.rpartition("/")[2].split(".") for argument in each.arguments[:4]):
            is_configured = any(argument.startswith(framework.option) for argument in each.arguments)
            return None if is_configured else framework
    variables = known(each.variables)
    for library, framework in _BY_LIBRARY.items():
        if library in each.frameworks and variables is not None:
            names = {framework.option, _OTHERWISE.get(framework.name)}
            return framework if names.isdisjoint(variables) else None
    return None


CHECKS: Final = (_ordinals, _framework)
"""In the order of the report."""
