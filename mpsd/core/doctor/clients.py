"""Checks of the processes that have leases: whether each gets its share and can use it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mpsd.core.doctor.finding import AS_ROOT, Check, Finding, Verdict, unknown
from mpsd.core.doctor.observed import Observed
from mpsd.core.doctor.observed_clients import ClientSeen
from mpsd.core.model import Known, Unknown, ViolationKind
from mpsd.core.units import MIB, format_size

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

_HOST_MEMORY: Final = 50 * MIB
"""Approximate bytes of the node's own memory that a context takes (NVIDIA, fractions of a GPU in Dynamo)."""


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


def _violations(seen: Observed, kind: ViolationKind) -> Iterator[Finding]:
    answers = seen.service.answers
    if isinstance(answers, Unknown):
        yield unknown(answers.reason)
        return
    for each in answers.value.violations:
        if each.kind == kind:
            yield Finding(Verdict.WARN, each.because, {"pid": each.pid}, each.hint, f"pid {each.pid}")


def _short(seen: Observed) -> Iterator[Finding]:
    yield from _violations(seen, ViolationKind.SHORT)


def _trap(seen: Observed) -> Iterator[Finding]:
    yield from _violations(seen, ViolationKind.LIMITS)


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


def _host_memory(seen: Observed) -> Iterator[Finding]:
    yield from _unread(seen)
    closed = [each.pid for each in _there(seen) if isinstance(each.group, Unknown)]
    if closed:
        yield unknown(f"the memory control group of pid {', '.join(map(str, closed))} cannot be read", AS_ROOT)
    known = [(each, each.group.value) for each in _there(seen) if isinstance(each.group, Known)]
    groups = {group.path: (group, each) for each, group in known if group is not None}
    for group, one in groups.values():
        inside = [each for each, its in known if its is not None and its.path == group.path]
        needed = _HOST_MEMORY * len(inside)
        left = group.limit - group.used
        if group.limit >= needed and (left >= _HOST_MEMORY or all(each.client for each in inside)):
            continue
        limit, free = (format_size(max(number, 0) // MIB * MIB) for number in (group.limit, left))
        because = (
            f"{group.path} limits {len(inside)} processes with leases, such as pid {one.pid}, to"
            f" {limit} of host memory, of which {free} are free: each context takes about"
            f" {format_size(_HOST_MEMORY)}, and CUDA says out of memory without it"
        )
        verdict = Verdict.FAIL if group.limit < needed else Verdict.WARN
        evidence = {"group": group.path, "limit": group.limit, "used": group.used, "processes": len(inside)}
        remedy = "raise the memory limit of that control group, container or unit (memory.max, MemoryMax=)"
        yield Finding(verdict, because, evidence, remedy, group.path)


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
        "short-client",
        "every client attached while its lease's part was open",
        "The client has less than its lease, for as long as it lives.",
        _short,
    ),
    Check(
        "invisible-gpu",
        "no client's memory limit names a GPU that it does not see",
        "MPS drops every memory limit of such a client, the server's too.",
        _trap,
    ),
    Check(
        "gpu-numbers",
        f"the processes of leases name their GPU by UUID in {VISIBLE}",
        "A process finds no GPU, or another one.",
        _ordinals,
    ),
    Check(
        "host-memory",
        "the control groups of clients have room for CUDA's host memory",
        "CUDA fails with an out-of-memory error, although the GPU has memory.",
        _host_memory,
    ),
    Check(
        "framework-memory",
        "no framework takes more memory by itself than its lease has",
        "The program runs out of memory when it starts.",
        _framework,
    ),
)
"""In the order of the report."""
