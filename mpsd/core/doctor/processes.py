"""Checks of the processes of MPS: their owners, their state, and their rights."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from mpsd.core.doctor.finding import AS_ROOT, Check, Finding, Verdict, unknown
from mpsd.core.doctor.observed import Observed, ProcessSeen
from mpsd.core.model import Known, Unknown
from mpsd.core.mps.daemon_flags import FOREGROUND

DAEMON: Final = "control daemon"
SERVER: Final = "server"
FRONT_END: Final = "front-end"
"""The parts in MPS that a process can have."""

MPSD: Final = "mpsd"

USUAL: Final = ("/tmp/nvidia-mps", "/run/nvidia-mps")  # noqa: S108 - where clients look
"""The default pipe directories where CUDA_MPS_PIPE_DIRECTORY is not set; only root from R615 on uses the second, with
protocol 3 (NVIDIA's documentation)."""

_PROTOCOL_3: Final = re.compile(r"(?:^| )(?:-p|--protocol)[ =]?3(?: |$)")

_SIMULATED: Final = frozenset({"--simulate", "demo"})
"""Arguments of an mpsd that manages no real GPU."""


def _all(seen: Observed) -> tuple[ProcessSeen, ...]:
    return seen.processes.value if isinstance(seen.processes, Known) else ()


def living(seen: Observed) -> Iterator[ProcessSeen]:
    """Yield the processes that have not ended and are no look-alikes."""
    return (each for each in _all(seen) if each.state != "Z" and not each.lookalike)


def hidden(seen: Observed) -> Iterator[Finding]:
    """Yield a finding where processes could not be inspected."""
    if isinstance(seen.processes, Unknown):
        yield unknown(seen.processes.reason, AS_ROOT)


def _unseen(seen: Observed) -> Iterator[Finding]:
    """Yield findings where the processes of MPS or their pipe directories are not all known."""
    yield from hidden(seen)
    if not seen.host.first_pid_namespace:
        yield unknown("not all processes of the machine are visible in this pid namespace", AS_ROOT)
    for each in living(seen):
        if each.part in {DAEMON, SERVER} and isinstance(each.variables, Unknown):
            yield unknown(each.variables.reason, subject=f"pid {each.pid}")


def unreadable_processes(seen: Observed, processes: Iterable[ProcessSeen]) -> Finding:
    """Return a finding that the caller's rights do not suffice to inspect these processes."""
    pids = [each.pid for each in processes]
    because = f"uid {seen.host.uid} has no permission to inspect pid {', '.join(map(str, pids))}"
    return Finding(Verdict.UNKNOWN, because, {"pids": pids}, AS_ROOT)


def _report_of(each: ProcessSeen) -> dict[str, object]:
    executable = each.executable.value if isinstance(each.executable, Known) else None
    return {
        "pid": each.pid,
        "uid": each.uid,
        "parent": each.parent,
        "executable": executable,
        "arguments": list(each.arguments),
        "pipe_directory": each.pipe_directory,
    }


def _quit(each: ProcessSeen, directory: str) -> str:
    inside = f"nsenter --target {each.pid} --mount " if each.apart else ""
    return f"when its clients have exited: echo quit | CUDA_MPS_PIPE_DIRECTORY={directory} {inside}{each.arguments[0]}"


def _own(seen: Observed) -> Path:
    return seen.settings.paths.runtime_dir / "mps"


def _is_own(seen: Observed, each: ProcessSeen) -> bool:
    directory = each.pipe_directory
    return directory is not None and Path(directory).parent == _own(seen) and not each.apart


def _reported(seen: Observed) -> frozenset[int]:
    """Return the pids of the control daemons and servers that mpsd reports as its own."""
    answers = seen.service.answers
    return answers.value.daemons | answers.value.servers if isinstance(answers, Known) else frozenset()


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
    if not isinstance(each.variables, Known) or FOREGROUND not in each.arguments:
        return False
    name = Path(each.pipe_directory or "").name
    return each.variables.value.get("CUDA_MPS_LOG_DIRECTORY") == str(seen.settings.paths.log_dir / name)


def _foreign(seen: Observed) -> Iterator[Finding]:
    yield from _unseen(seen)
    answers = seen.service.answers
    known = answers.value.daemons if isinstance(answers, Known) else None
    for each in living(seen):
        if each.part != DAEMON or not _is_own(seen, each):
            continue
        if each.pid in known if known is not None else _looks_like_ours(seen, each):
            continue
        directory = each.pipe_directory or ""
        because = f"pid {each.pid} (uid {each.uid}) is a control daemon on {directory} that mpsd did not start"
        because += ", and speaks protocol 3, which mpsd does not" if _speaks_3(each) else ""
        remedy = f"{_quit(each, directory)}; mpsctl reset {Path(directory).name}"
        yield Finding(Verdict.FAIL, because, _report_of(each), remedy, Path(directory).name)


def _speaks_3(each: ProcessSeen) -> bool:
    """Tell whether a control daemon was started for protocol 3.

    The variable takes precedence over the flag (NVIDIA, MPS v3).
    """
    variables = each.variables.value if isinstance(each.variables, Known) else {}
    flags = " ".join(each.arguments)
    return variables.get("CUDA_MPS_PROTOCOL_VERSION", "3" if _PROTOCOL_3.search(flags) else "2") == "3"


def _usual(seen: Observed) -> Iterator[Finding]:
    yield from _unseen(seen)
    there = set()
    for each in living(seen):
        directory = each.pipe_directory or USUAL[0]
        if each.part != DAEMON or isinstance(each.variables, Unknown) or directory not in USUAL:
            continue
        there.add(directory)
        because = (
            f"pid {each.pid} (uid {each.uid}) is a control daemon on {directory}, the directory that clients use by"
        )
        because += " default: such clients run on its GPUs with its limits, not with those of mpsd"
        yield Finding(Verdict.FAIL, because, _report_of(each), _quit(each, directory), directory)
    for usual in seen.files.usual:
        if str(usual.path) in there or (isinstance(usual.entries, Known) and not usual.entries.value):
            continue
        evidence = {"path": str(usual.path)}
        if usual.listening:
            because = f"a process that is not visible here listens on {usual.path}/control"
            yield Finding(Verdict.FAIL, because, evidence, AS_ROOT, str(usual.path))
        elif isinstance(usual.entries, Unknown):
            yield unknown(usual.entries.reason, AS_ROOT, subject=str(usual.path))
        else:
            because = (
                f"{usual.path} is left over from a control daemon that is gone; container runtimes mount it into every"
            )
            because += " container with a GPU"
            yield Finding(Verdict.WARN, because, evidence, f"rm -r {usual.path}", str(usual.path))


def _other(seen: Observed) -> Iterator[Finding]:
    yield from _unseen(seen)
    for each in living(seen):
        directory = each.pipe_directory
        if each.part != DAEMON or directory is None or directory in USUAL:
            continue
        if _is_own(seen, each) or each.pid in _reported(seen):
            continue
        devices = each.variables.value.get("CUDA_VISIBLE_DEVICES", "") if isinstance(each.variables, Known) else ""
        if devices and _sees_none(seen, devices):
            continue
        where = f"{directory} of another container" if each.apart else directory
        because = f"pid {each.pid} (uid {each.uid}) is a control daemon on {where} that sees"
        because += f" CUDA_VISIBLE_DEVICES={devices}" if devices else " all GPUs"
        because += ": its clients share GPUs with mpsd's clients, and mpsd does not count them"
        yield Finding(Verdict.WARN, because, _report_of(each), _quit(each, directory), directory)


def _sees_none(seen: Observed, devices: str) -> bool:
    """Tell whether a control daemon sees none of this node's GPUs, by their UUIDs or prefixes of them."""
    if isinstance(seen.gpus.node, Unknown):
        return False
    uuids = [each.gpu.uuid for each in seen.gpus.node.value.gpus]
    wanted = [each.strip() for each in devices.split(",")]
    return all(each.startswith("GPU-") and not any(uuid.startswith(each) for uuid in uuids) for each in wanted)


def _other_mpsd(seen: Observed) -> Iterator[Finding]:
    yield from hidden(seen)
    own = seen.service.process
    for each in living(seen):
        if each.part != MPSD or each.pid == own or _SIMULATED & set(each.arguments):
            continue
        because = f"pid {each.pid} (uid {each.uid}) is another mpsd: both would grant leases on the same GPUs"
        remedy = "run only one mpsd per node"
        if own is None:
            because = f"pid {each.pid} (uid {each.uid}) is an mpsd, but not the one that was queried"
            remedy = f"query that one: its arguments give its --root or --config: {' '.join(each.arguments)}"
        yield Finding(Verdict.WARN, because, _report_of(each), remedy, f"pid {each.pid}")


def _orphans(seen: Observed) -> Iterator[Finding]:
    yield from _unseen(seen)
    there, reported = tuple(living(seen)), _reported(seen)
    # A simulated control daemon does not look like NVIDIA's: only mpsd reports it as one.
    parents = {each.pid for each in there if each.part == DAEMON} | reported
    for each in there:
        if each.part == SERVER and each.parent not in parents and each.pid not in reported:
            because = f"server {each.pid} (uid {each.uid}) is an orphan: its control daemon is dead, and nothing"
            because += " limits it any more"
            remedy = f"when its clients have exited: kill {each.pid}"
            yield Finding(Verdict.FAIL, because, _report_of(each), remedy, f"pid {each.pid}")


def _stopped(seen: Observed) -> Iterator[Finding]:
    yield from hidden(seen)
    answers = seen.service.answers
    reported = answers.value.servers if isinstance(answers, Known) else frozenset()
    for each in living(seen):
        if each.pid in reported:
            continue  # mpsd says what it means for the clients: check node
        if each.state in {"T", "t"}:
            because = f"pid {each.pid} ({each.part}) is stopped (state {each.state}), and does not answer"
            remedy = (
                f"kill -CONT {each.pid}"
                if each.state == "T"
                else f"detach its tracer: grep Tracer /proc/{each.pid}/status"
            )
            yield Finding(Verdict.FAIL, because, _report_of(each), remedy, f"pid {each.pid}")
        elif each.state == "D":
            because = f"pid {each.pid} ({each.part}) is blocked in the kernel (state D), where signals do not reach it"
            yield Finding(
                Verdict.WARN,
                because,
                _report_of(each),
                "if this persists: dmesg | grep -i -e nvrm -e xid",
                f"pid {each.pid}",
            )


def _program(seen: Observed) -> Iterator[Finding]:
    yield from hidden(seen)
    for each in living(seen):
        if each.part in {DAEMON, SERVER, MPSD} and isinstance(each.executable, Known):
            path = each.executable.value
            if not path.endswith(" (deleted)"):
                continue
            because = (
                f"pid {each.pid} ({each.part}) runs {path.removesuffix(' (deleted)')}, which was replaced on disk since"
            )
            remedy = "systemctl restart mpsd" if each.part == MPSD else "mpsctl restart, which waits for its clients"
            yield Finding(Verdict.WARN, because, _report_of(each), remedy, f"pid {each.pid}")


def _lookalikes(seen: Observed) -> Iterator[Finding]:
    yield from hidden(seen)
    for each in _all(seen):
        if not each.lookalike or each.state == "Z":
            continue
        because = f"pid {each.pid} (uid {each.uid}) calls itself a {each.part}, and nothing else says that it is one"
        remedy = f"no remedy is needed; to identify it: ls -l /proc/{each.pid}/exe"
        yield Finding(Verdict.NOTE, because, _report_of(each), remedy, f"pid {each.pid}")


CHECKS: Final = (
    Check(
        "foreign-daemon",
        "only mpsd's own control daemons are on its pipe directories",
        "mpsd and the other control daemon compete for the directory; clients get the limits of the other.",
        _foreign,
    ),
    Check(
        "default-directory",
        f"no control daemon is on {USUAL[0]}, the directory that clients use by default",
        "Clients without their lease's environment run there, without mpsd's limits.",
        _usual,
    ),
    Check(
        "other-daemon",
        "no other control daemon shares the GPUs",
        "With two control daemons on a GPU in exclusive-process mode, the second cannot start a server.",
        _other,
    ),
    Check(
        "other-mpsd",
        "only one mpsd runs on this node",
        "Each mpsd grants the capacity that the other has already granted.",
        _other_mpsd,
    ),
    Check(
        "orphans",
        "every server has its control daemon",
        "An orphan holds its part of the GPU, no new control daemon knows it, and nothing limits it.",
        _orphans,
    ),
    Check(
        "look-alikes",
        "no process of another user only looks like one of MPS",
        "None: mpsd and these checks trust no names. The user of such a process may be mistaken, or hostile.",
        _lookalikes,
    ),
    Check("stopped", "no process of MPS is stopped or stuck", "Front-ends and clients hang.", _stopped),
    Check(
        "replaced-program",
        "every running program is the installed version",
        "After an upgrade, old control daemons run with new libraries: clients fail to connect.",
        _program,
    ),
)
"""In the order of the report."""
