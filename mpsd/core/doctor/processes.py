"""Checks of the processes of MPS: their owners, their state and rights, and whether those with leases can use them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mpsd.core import mps_facts
from mpsd.core.doctor.finding import (
    AS_ROOT,
    ClientSeen,
    Finding,
    Observed,
    ProcessSeen,
    Verdict,
    check,
    fail,
    known,
    unknown,
    unread,
    warn,
)
from mpsd.core.doctor.parts import DAEMON, MPSD, SERVER, UNREAD
from mpsd.core.gpus import clients_max
from mpsd.core.holders import service_first
from mpsd.core.model import Unknown
from mpsd.core.mps.control_daemons import USUAL, Whose, described, whose
from mpsd.core.mps.daemon_flags import FOREGROUND
from mpsd.core.mps_facts import CLIENTS_VOLTA, MAX_CONNECTIONS, connections
from mpsd.core.programs import frameworks
from mpsd.core.programs.frameworks import Demand, Framework
from mpsd.core.units import MIB, format_size

_PROTOCOL_3: Final = re.compile(r"(?:^| )(?:-p|--protocol)[ =]?3(?: |$)")

_SIMULATED: Final = frozenset({"--simulate", "demo"})
"""Arguments of an mpsd that manages no real GPU."""


def living(seen: Observed) -> Iterator[ProcessSeen]:
    """Yield the processes that have not ended and are no look-alikes."""
    return (each for each in known(seen.processes) or () if each.state != "Z" and not each.lookalike)


def _unseen(seen: Observed) -> Iterator[Finding]:
    """Yield findings where the processes of MPS or their pipe directories are not all known."""
    yield from unread(seen.processes, AS_ROOT)
    if not seen.host.first_pid_namespace:
        yield unknown("not all processes of the machine are visible in this pid namespace", AS_ROOT)
    for each in living(seen):
        if each.part in {DAEMON, SERVER, UNREAD}:
            yield from unread(each.variables, subject=f"pid {each.pid}")


def _found(verdict: Verdict, each: ProcessSeen, because: str, remedy: str, subject: str | None = None) -> Finding:
    """Return a finding about a process, with its facts; the subject is the process itself where none is named."""
    evidence = {
        "pid": each.pid,
        "uid": each.uid,
        "parent": each.parent,
        "executable": known(each.executable),
        "arguments": list(each.arguments),
        "pipe_directory": each.pipe_directory,
    }
    return Finding(verdict, because, evidence, remedy, f"pid {each.pid}" if subject is None else subject)


def _quit(each: ProcessSeen, directory: str) -> str:
    inside = f"nsenter --target {each.pid} --mount " if each.apart else ""
    by_hand = f"echo quit | CUDA_MPS_PIPE_DIRECTORY={directory} {inside}{each.arguments[0]}"
    return f"when its clients have exited: {service_first(each.group)}{by_hand}"


def _control_daemons(seen: Observed, wanted: Whose) -> Iterator[tuple[ProcessSeen, str]]:
    """Yield the control daemons that are so, each with its pipe directory, as far as their environments are known."""
    answers = known(seen.service.answers)
    for each in living(seen):
        if each.part == DAEMON and not isinstance(each.variables, Unknown):
            directory = each.pipe_directory or ""
            is_ours = each.pid in answers.daemons if answers is not None else _looks_like_ours(seen, each)
            ours = {each.pid} if is_ours else set[int]()
            if whose(each.pid, directory, ours, seen.settings.paths.runtime_dir, apart=each.apart) is wanted:
                yield each, directory or USUAL[0]


def _reported(seen: Observed) -> frozenset[int]:
    """Return the pids of the control daemons and servers that mpsd reports as its own."""
    answers = known(seen.service.answers)
    return answers.daemons | answers.servers if answers is not None else frozenset()


def is_elsewhere(seen: Observed, each: ProcessSeen) -> bool:
    """Tell whether a process belongs to another mpsd than the one that answers, or to a control daemon elsewhere."""
    own = seen.service.process
    if each.part == MPSD:
        return own is not None and each.pid != own
    return each.apart and not {each.pid, each.parent} & _reported(seen)


def _looks_like_ours(seen: Observed, each: ProcessSeen) -> bool:
    """Tell whether mpsd would have started a control daemon in this form.

    Without an answer of mpsd, this decides, since the limits and settings of the daemon are unknown.
    """
    log_directory = (known(each.variables) or {}).get("CUDA_MPS_LOG_DIRECTORY")
    name = Path(each.pipe_directory or "").name
    return not each.apart and FOREGROUND in each.arguments and log_directory == str(seen.settings.paths.log_dir / name)


@check(
    "foreign-daemon",
    "only mpsd's own control daemons are on its pipe directories",
    "mpsd and the other control daemon compete for the directory; clients get the limits of the other.",
)
def _foreign(seen: Observed) -> Iterator[Finding]:
    yield from _unseen(seen)
    for each, directory in _control_daemons(seen, Whose.FOREIGN):
        because = f"{described(each.pid, each.uid, directory)} that mpsd did not start"
        because += ", and speaks protocol 3, which mpsd does not" if _speaks_3(each) else ""
        remedy = f"{_quit(each, directory)}; mpsctl reset {Path(directory).name}"
        yield _found(Verdict.FAIL, each, because, remedy, Path(directory).name)


def _speaks_3(each: ProcessSeen) -> bool:
    """Tell whether a control daemon was started for protocol 3.

    The variable takes precedence over the flag (NVIDIA, MPS v3).
    """
    by_flag = "3" if _PROTOCOL_3.search(" ".join(each.arguments)) else "2"
    return (known(each.variables) or {}).get("CUDA_MPS_PROTOCOL_VERSION", by_flag) == "3"


@check(
    "default-directory",
    f"no control daemon is on {USUAL[0]}, the directory that clients use by default",
    "Clients without their lease's environment run there, without mpsd's limits.",
)
def _usual(seen: Observed) -> Iterator[Finding]:
    yield from _unseen(seen)
    there = set()
    for each, directory in _control_daemons(seen, Whose.USUAL):
        there.add(directory)
        because = (
            f"{described(each.pid, each.uid, directory)}, the directory that clients use by default: such clients run"
            " on its GPUs with its limits, not with those of mpsd"
        )
        yield _found(Verdict.FAIL, each, because, _quit(each, directory), directory)
    for usual in seen.files.usual:
        path = str(usual.path)
        if path in there or known(usual.entries) == ():
            continue
        if usual.listening:
            yield fail(f"a process that is not visible here listens on {path}/control", AS_ROOT, path, path=path)
        elif isinstance(usual.entries, Unknown):
            yield unknown(usual.entries.reason, AS_ROOT, path)
        else:
            because = (
                f"{path} is left over from a control daemon that is gone; container runtimes mount it into every"
                " container with a GPU"
            )
            yield warn(because, f"rm -r {path}", path, path=path)


@check(
    "other-daemon",
    "no other control daemon shares the GPUs",
    "With two control daemons on a GPU in exclusive-process mode, the second cannot start a server.",
)
def _other(seen: Observed) -> Iterator[Finding]:
    yield from _unseen(seen)
    for each, directory in _control_daemons(seen, Whose.OTHER):
        devices = (known(each.variables) or {}).get("CUDA_VISIBLE_DEVICES", "")
        if devices and _sees_none(seen, devices):
            continue
        where = f"{directory} of another container" if each.apart else directory
        because = f"{described(each.pid, each.uid, where)} that sees"
        because += f" CUDA_VISIBLE_DEVICES={devices}" if devices else " all GPUs"
        because += ": its clients share GPUs with mpsd's clients, and mpsd does not count them"
        yield _found(Verdict.WARN, each, because, _quit(each, directory), directory)


def _sees_none(seen: Observed, devices: str) -> bool:
    """Tell whether a control daemon sees none of this node's GPUs, by their UUIDs or prefixes of them."""
    node = known(seen.gpus.node)
    if node is None:
        return False
    uuids = [each.gpu.uuid for each in node.gpus]
    wanted = [each.strip() for each in devices.split(",")]
    return all(each.startswith("GPU-") and not any(uuid.startswith(each) for uuid in uuids) for each in wanted)


@check(
    "other-mpsd", "only one mpsd runs on this node", "Each mpsd grants the capacity that the other has already granted."
)
def _other_mpsd(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen.processes, AS_ROOT)
    own = seen.service.process
    for each in living(seen):
        if each.part != MPSD or each.pid == own or _SIMULATED & set(each.arguments):
            continue
        because = f"pid {each.pid} (uid {each.uid}) is another mpsd: both would grant leases on the same GPUs"
        remedy = "run only one mpsd per node"
        if own is None:
            because = f"pid {each.pid} (uid {each.uid}) is an mpsd, but not the one that was queried"
            remedy = f"query that one: its arguments give its --root or --config: {' '.join(each.arguments)}"
        yield _found(Verdict.WARN, each, because, remedy)


@check(
    "orphans",
    "every server has its control daemon",
    "An orphan holds its part of the GPU, no new control daemon knows it, and nothing limits it.",
)
def _orphans(seen: Observed) -> Iterator[Finding]:
    yield from _unseen(seen)
    reported = _reported(seen)
    # A simulated control daemon does not look like NVIDIA's: only mpsd reports it as one.
    parents = {each.pid for each in living(seen) if each.part == DAEMON} | reported
    for each in living(seen):
        if each.part == SERVER and not each.is_served and each.parent not in parents and each.pid not in reported:
            because = (
                f"server {each.pid} (uid {each.uid}) is an orphan: its control daemon is dead, and nothing"
                " limits it any more"
            )
            yield _found(Verdict.FAIL, each, because, f"when its clients have exited: kill {each.pid}")


@check("stopped", "no process of MPS is stopped or stuck", "Front-ends and clients hang.")
def _stopped(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen.processes, AS_ROOT)
    answers = known(seen.service.answers)
    for each in living(seen):
        if answers is not None and each.pid in answers.servers:
            continue  # mpsd says what it means for the clients: check node
        if each.state in {"T", "t"}:
            because = f"pid {each.pid} ({each.part}) is stopped (state {each.state}), and does not answer"
            traced = f"detach its tracer: grep Tracer /proc/{each.pid}/status"
            yield _found(Verdict.FAIL, each, because, f"kill -CONT {each.pid}" if each.state == "T" else traced)
        elif each.state == "D":
            because = f"pid {each.pid} ({each.part}) is blocked in the kernel (state D), where signals do not reach it"
            yield _found(Verdict.WARN, each, because, "if this persists: dmesg | grep -i -e nvrm -e xid")


@check(
    "replaced-program",
    "every running program is the installed version",
    "After an upgrade, old control daemons run with new libraries: clients may fail to connect.",
)
def _program(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen.processes, AS_ROOT)
    for each in living(seen):
        path = known(each.executable) or ""
        if each.part in {DAEMON, SERVER, MPSD} and path.endswith(" (deleted)"):
            path = path.removesuffix(" (deleted)")
            because = f"pid {each.pid} ({each.part}) runs {path}, which was replaced on disk since"
            remedy = "systemctl restart mpsd" if each.part == MPSD else "mpsctl restart, which waits for its clients"
            yield _found(Verdict.WARN, each, because, remedy)


@check(
    "look-alikes",
    "no process of another user only looks like one of MPS",
    "None: mpsd and these checks trust no names. The user of such a process may be mistaken, or hostile.",
)
def _lookalikes(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen.processes, AS_ROOT)
    for each in known(seen.processes) or ():
        if each.lookalike and each.state != "Z":
            because = (
                f"pid {each.pid} (uid {each.uid}) calls itself a {each.part}, and nothing else says that it is one"
            )
            remedy = f"no remedy is needed; to identify it: ls -l /proc/{each.pid}/exe"
            yield _found(Verdict.NOTE, each, because, remedy)


CHECKS: Final = (_foreign, _usual, _other, _other_mpsd, _orphans, _lookalikes, _stopped, _program)
"""In the order of the report."""


# -- clients -----------------------------------------------------------------------------------------------------------

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def _unreadable(seen: Observed) -> Iterator[Finding]:
    """Yield a finding where leases could not be inspected, and for each process whose environment cannot be read."""
    yield from unread(seen.clients)
    for each in known(seen.clients) or ():
        yield from unread(each.variables, subject=f"pid {each.pid}")


@check(
    "gpu-numbers",
    f"the processes of leases name their GPU in {VISIBLE} as their leases do",
    "A process finds no GPU, or another one.",
)
def _ordinals(seen: Observed) -> Iterator[Finding]:
    yield from _unreadable(seen)
    for each in known(seen.clients) or ():
        value = (known(each.variables) or {}).get(VISIBLE, "")
        first, given = value.split(",")[0].strip(), each.given.get(VISIBLE)
        if not first.isdecimal() or value == given:
            continue
        because = f"process {each.pid} of lease {each.lease} was started with {VISIBLE}={value[:40]}: "
        remedy = (
            f"have it use what its lease has, {VISIBLE}={given}; Ray, Slurm and torchrun write numbers:"
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
    "connections",
    f"the processes of leases have no more connections ({MAX_CONNECTIONS}) than their leases",
    "Fewer clients fit on the GPU: further contexts may get OUT_OF_MEMORY (2), although memory is free.",
)
def _connections(seen: Observed) -> Iterator[Finding]:
    yield from _unreadable(seen)
    node = known(seen.gpus.node)
    most = {each.gpu.uuid: clients_max(each.gpu) for each in node.gpus} if node is not None else {}
    for each in known(seen.clients) or ():
        places = most.get(each.gpu, CLIENTS_VOLTA)
        value = connections((known(each.variables) or {}).get(MAX_CONNECTIONS, ""))
        takes = mps_facts.places(value, places)
        if takes <= mps_facts.places(connections(each.given.get(MAX_CONNECTIONS, "")), places):
            continue
        because = (
            f"process {each.pid} of lease {each.lease} was started with {MAX_CONNECTIONS}={value}, so that it takes"
            f" {takes} of the {places} client places of its GPU; where no place is left, a context may get"
            " OUT_OF_MEMORY (2), although memory is free"
        )
        remedy = f"request it, so that its places are counted: --connections {value}; or unset {MAX_CONNECTIONS}"
        yield warn(because, remedy, f"pid {each.pid}", pid=each.pid, connections=value, places=takes)


@check(
    "framework-memory",
    "no framework takes more memory by itself than its lease has",
    "The program does not start, or leaves no memory for CUDA's libraries.",
)
def _framework(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen.clients)
    node = known(seen.gpus.node)
    totals = {each.gpu.uuid: each.gpu.memory_total for each in node.gpus} if node is not None else {}
    judged = set[object]()
    for each in known(seen.clients) or ():
        framework = frameworks.of(each.arguments, each.frameworks)
        if framework is None or framework.library:  # only its variables tell
            yield from unread(each.variables, subject=f"pid {each.pid}")
        if framework is None:
            continue
        command = next((one for one in (each.arguments, *each.ancestors) if frameworks.runs(framework, one)), None)
        program = (each.lease, each.gpu, command or each.pid)
        if program in judged or (framework.library and isinstance(each.variables, Unknown)):
            continue
        judged.add(program)
        demand = frameworks.demand(framework, command or (), known(each.variables) or {})
        yield from _beyond_lease(each, framework, demand, totals.get(each.gpu))


def _beyond_lease(each: ClientSeen, framework: Framework, demand: Demand, total: int | None) -> Iterator[Finding]:
    """Yield a finding where a framework asks for more than its lease has, or where that is unknown."""
    subject, runs = f"pid {each.pid}", f"process {each.pid} runs {framework.name}"
    if demand.unknown:
        yield unknown(f"{runs}, and {demand.unknown}", None, subject)
    elif total is None and (demand.part or demand.size):
        yield unknown(
            f"{runs}, which sizes itself by the total memory of its GPU, and that is unknown", AS_ROOT, subject
        )
    elif total is not None and (takes := frameworks.exceeds(demand, each.granted, total)):
        size, whole, has = map(format_size, (takes // MIB * MIB, total, each.granted))
        how = f"by {demand.given}" if demand.given else "where it is not configured otherwise"
        share = f"{demand.part:.0%} of the GPU's total memory at once" if demand.part else "memory"
        because = f"{runs}, which takes {share} {how} ({size}), and a process of {each.lease} may have {has}"
        if framework is frameworks.SGLANG:
            because = f"{runs}, which leaves for its work what it computes from the {whole} of the GPU, and a"
            because += f" process of {each.lease} may have {has}"
        remedy = f"start it with {frameworks.setting(framework, each.granted, total, demand.given)}"
        yield warn(because, remedy, subject, pid=each.pid, total=total, granted=each.granted)


CLIENT_CHECKS: Final = (_ordinals, _connections, _framework)
"""In the order of the report."""
