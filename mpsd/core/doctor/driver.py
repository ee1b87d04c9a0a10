"""Checks of NVIDIA's driver and its programs: whether they exist, match, and support what mpsd needs."""

from collections.abc import Iterator
from typing import Final

from mpsd.core.doctor.finding import Finding, Verdict, check, fail, unknown, unread
from mpsd.core.doctor.observed import NodeGpus, Observed, known
from mpsd.core.gpus import driver_branch
from mpsd.core.model import Unknown
from mpsd.core.mps.daemon_flags import MANY_USERS
from mpsd.core.settings import Users


@check("driver", "NVIDIA's driver answers, and every GPU can be read", "mpsd does not start, or does not use that GPU.")
def _driver(seen: Observed) -> Iterator[Finding]:
    if seen.gpus.simulated:
        yield unknown("the GPUs are simulated")
    elif isinstance(seen.gpus.node, Unknown):
        yield fail(seen.gpus.node.reason, seen.gpus.remedy or "see nvidia-smi")
    else:
        for index, because in seen.gpus.node.value.unreadable.items():
            remedy = f"nvidia-smi -i {index} -q; dmesg | grep -i -e nvrm -e xid"
            yield fail(f"it cannot be read: {because}", remedy, f"GPU {index}", index=index)


@check(
    "control-program",
    "NVIDIA's control and server programs are installed",
    "No control daemon can start, or no server.",
)
def _program(seen: Observed) -> Iterator[Finding]:
    if seen.files.apart:
        yield unknown(
            "mpsd is in another container than mpsctl, and looks for the program there",
            "run mpsctl doctor where mpsd runs",
        )
    elif seen.gpus.simulated:
        return
    elif seen.gpus.program is None:
        name = seen.settings.daemon.control
        remedy = "install the driver package that contains it (nvidia-cuda-mps, nvidia-compute-utils), or set"
        remedy += " daemon.control; in a container, mount it (NVIDIA's runtime, capabilities utility,compute)"
        yield fail(f"there is no executable program {name!r}", remedy, control=name)
    elif seen.gpus.server is None:
        because = f"there is no nvidia-cuda-mps-server in PATH, beside {seen.gpus.program} or in its root"
        remedy = "install the same version of it, or put it beside the control program"
        yield fail(because, remedy, program=str(seen.gpus.program))


@check(
    "versions",
    "the control program, CUDA's library and the driver have the same version",
    "Servers exit with status 1; clients fail with 805, or with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803).",
)
def _versions(seen: Observed) -> Iterator[Finding]:
    yield from unread(seen.gpus.node)
    node = known(seen.gpus.node)
    if node is None:
        return
    found = [*_of_package(seen, node), *_of_logs(seen, node), *_of_library(seen, node)]
    yield from (each for each in found if each.verdict is not Verdict.OK)
    if not found:
        yield unknown("no package, log or library gives a version to compare with the driver's")


def _of_package(seen: Observed, node: NodeGpus) -> Iterator[Finding]:
    """Compare the driver with the package that contains the control program."""
    package, version = seen.gpus.package or ("", "")
    upstream = version.rpartition(":")[2].partition("-")[0]
    branch = driver_branch(upstream)
    if branch is None:
        return
    because = f"{seen.gpus.program} belongs to {package} {version}, but the driver is {node.driver}"
    remedy = f"install the version of {package} that matches the driver, then mpsctl restart"
    evidence = {"package": package, "version": version, "driver": node.driver}
    if branch != driver_branch(node.driver):
        verdict = Verdict.FAIL
    else:
        verdict = Verdict.OK if upstream == node.driver else Verdict.WARN
    yield Finding(verdict, because, evidence, remedy)


def _of_logs(seen: Observed, node: NodeGpus) -> Iterator[Finding]:
    """Compare the driver with the versions in the logs of control daemons and servers (R580 on)."""
    for each in known(seen.files.versions) or ():
        branch = driver_branch(each.driver or "")
        if branch is not None:
            because = f"its last server ran with driver {each.driver}, but the driver is now {node.driver}"
            evidence: dict[str, object] = {"log": str(each.log), "server": each.driver, "driver": node.driver}
            verdict = Verdict.OK if branch == driver_branch(node.driver) else Verdict.WARN
            yield Finding(verdict, because, evidence, "mpsctl restart, which waits for its clients", each.name)
        if each.cuda is not None and node.cuda is not None:
            because = f"the control program is for CUDA {_cuda(each.cuda)}, but the driver for CUDA {_cuda(node.cuda)}"
            evidence = {"log": str(each.log), "control": each.cuda, "driver": node.cuda}
            verdict = Verdict.OK if each.cuda == node.cuda else Verdict.FAIL
            remedy = "install the same version of both, then mpsctl restart"
            yield Finding(verdict, because, evidence, remedy, each.name)


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _of_library(seen: Observed, node: NodeGpus) -> Iterator[Finding]:
    """Compare the driver with CUDA's library, which servers load."""
    library = seen.gpus.library
    if library is not None:
        because = f"{library.path} has version {library.version}, but the kernel driver has {node.driver}"
        evidence = {"path": str(library.path), "version": library.version, "driver": node.driver}
        remedy = "after an upgrade, reboot or reload the driver's kernel module; a container needs the host's libraries"
        verdict = Verdict.OK if library.version == node.driver else Verdict.FAIL
        yield Finding(verdict, because, evidence, remedy)


@check(
    "many-users",
    'the control program knows what daemon.users = "many" needs',
    "The control daemon does not start, or serves one uid at a time.",
)
def _many_users(seen: Observed) -> Iterator[Finding]:
    if seen.settings.daemon.users is Users.MANY:
        yield from unread(seen.gpus.many_users, 'make it answer, or set daemon.users = "one"')
        if known(seen.gpus.many_users) is False:
            because = f'daemon.users = "many" needs {MANY_USERS}, which {seen.gpus.program} does not know'
            yield fail(because, 'set daemon.users = "one"', program=str(seen.gpus.program))


CHECKS: Final = (_driver, _program, _versions, _many_users)
"""In the order of the report."""
