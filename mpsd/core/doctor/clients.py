"""Checks of the processes that have leases: whether each gets its share and can use it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mpsd.core.doctor.finding import Check, Finding, Verdict, unknown
from mpsd.core.doctor.observed import ClientSeen, Observed
from mpsd.core.model import Known, Unknown
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


def _there(seen: Observed) -> Iterator[ClientSeen]:
    if isinstance(seen.clients, Known):
        yield from seen.clients.value


def _unread(seen: Observed) -> Iterator[Finding]:
    """Yield a finding where leases or processes could not be inspected."""
    if isinstance(seen.clients, Unknown):
        yield unknown(seen.clients.reason)


def _unreadable(seen: Observed) -> Iterator[Finding]:
    """Yield the same, and a finding for each process whose environment cannot be read."""
    yield from _unread(seen)
    for each in _there(seen):
        if isinstance(each.variables, Unknown):
            yield unknown(each.variables.reason, subject=f"pid {each.pid}")


def _ordinals(seen: Observed) -> Iterator[Finding]:
    yield from _unreadable(seen)
    for each in _there(seen):
        value = each.variables.value.get(VISIBLE) if isinstance(each.variables, Known) else None
        first = (value or "").split(",")[0].strip()
        if value is None or not first.isdecimal():
            continue
        because = f"process {each.pid} of lease {each.lease} was started with {VISIBLE}={value[:40]}: "
        if int(first[:9]):
            because += "under MPS it sees one GPU, number 0, and so none"
            verdict = Verdict.FAIL
        else:
            because += "outside MPS, number 0 may be another GPU than that of its lease"
            verdict = Verdict.WARN
        remedy = (
            f"have it use the UUID that its lease has, {VISIBLE}={each.gpu}; Ray, Slurm and torchrun write numbers:"
            " set it in the program's own start (for Ray: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1)"
        )
        yield Finding(verdict, because, {"pid": each.pid, VISIBLE: value}, remedy, f"pid {each.pid}")


def _framework(seen: Observed) -> Iterator[Finding]:
    yield from _unreadable(seen)
    totals = (
        {each.gpu.uuid: each.gpu.memory_total for each in seen.gpus.node.value.gpus}
        if isinstance(seen.gpus.node, Known)
        else {}
    )
    for each in _there(seen):
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
        evidence = {"pid": each.pid, "total": total, "granted": each.granted}
        yield Finding(Verdict.WARN, because, evidence, remedy, f"pid {each.pid}")


def _framework_of(each: ClientSeen) -> Framework | None:
    """Return the framework that a process runs with its default part; None where it is configured, or runs none."""
    for word, framework in _BY_ARGUMENT.items():
        if any(word in argument.rpartition("/")[2].split(".") for argument in each.arguments[:4]):
            is_configured = any(argument.startswith(framework.option) for argument in each.arguments)
            return None if is_configured else framework
    for library, framework in _BY_LIBRARY.items():
        if library in each.frameworks and isinstance(each.variables, Known):
            names = {framework.option, _OTHERWISE.get(framework.name)}
            return framework if names.isdisjoint(each.variables.value) else None
    return None


CHECKS: Final = (
    Check(
        "gpu-numbers",
        f"the processes of leases name their GPU by UUID in {VISIBLE}",
        "A process finds no GPU, or another one.",
        _ordinals,
    ),
    Check(
        "framework-memory",
        "no framework takes more memory by itself than its lease has",
        "The program runs out of memory when it starts.",
        _framework,
    ),
)
"""In the order of the report."""
