"""A healthy node as doctor sees it, and functions that change one thing about it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.configuration.document import parse
from mpsd.core.doctor.finding import (
    Answers,
    ClientSeen,
    ConfigurationSeen,
    FilesSeen,
    Finding,
    GpuSeen,
    GpusSeen,
    HostSeen,
    Left,
    Library,
    LoggedVersions,
    LogLine,
    NodeGpus,
    Observed,
    PipeDirectorySeen,
    ProcessSeen,
    ServiceSeen,
    SharedMemoryPlace,
    SocketSeen,
    Space,
    Verdict,
    examine,
)
from mpsd.core.doctor.table import CHECKS
from mpsd.core.gpus import Condition
from mpsd.core.model import Gpu, GpuUsage, Known, Unknown
from mpsd.core.settings import Settings
from mpsd.core.units import GIB

SETTINGS: Final = parse('[daemon]\ncompute_mode = "exclusive-process"\n')
DIRECTORY: Final = "/run/mpsd/mps/gpu0"
CONTROL: Final = "/usr/bin/nvidia-cuda-mps-control"
DRIVER: Final = "580.65.06"
DEVICE: Final = 25


def process(pid: int, part: str, **otherwise: Any) -> ProcessSeen:
    """Return a healthy process."""
    variables = {"CUDA_MPS_PIPE_DIRECTORY": DIRECTORY, "CUDA_MPS_LOG_DIRECTORY": "/var/log/mpsd/gpu0"}
    usual: dict[str, Any] = {
        "uid": 0,
        "parent": 100,
        "state": "S",
        "arguments": ("mpsd", "run") if part == "mpsd" else (CONTROL, "-f"),
        "executable": Known("/usr/bin/python3" if part == "mpsd" else CONTROL),
        "variables": Known({} if part == "mpsd" else variables),
        "shared_memory": Known(DEVICE),
    }
    return ProcessSeen(**{"pid": pid, "part": part, **usual, **otherwise})


MPSD: Final = process(100, "mpsd", parent=1)
DAEMON: Final = process(200, "control daemon")
SERVER: Final = process(300, "server", parent=200, uid=1000)
GPU: Final = Gpu(0, "GPU-aaaa", "NVIDIA H200", 140 * GIB, (9, 0), False, DRIVER)
USAGE: Final = GpuUsage(0, {}, ComputeMode.EXCLUSIVE_PROCESS)
CONDITION: Final = Condition(True, 0, False, False, False)


def pipe_directory(name: str, path: str, *entries: str, listening: bool = False) -> PipeDirectorySeen:
    """Return a pipe directory with this in it."""
    return PipeDirectorySeen(name, Path(path), Known(entries), listening)


ANSWERS: Final = Answers(
    "1.0", False, Known(SETTINGS), daemons=frozenset({DAEMON.pid}), servers=frozenset({SERVER.pid})
)

WELL: Final = Observed(
    settings=SETTINGS,
    configuration=ConfigurationSeen(Path("/etc/mpsd/mpsd.toml"), Known(SETTINGS)),
    service=ServiceSeen(
        version="1.0",
        socket=SocketSeen(Path("/run/mpsd/mpsd.sock"), "socket", 0o666, 0, listener=(MPSD.pid, 0)),
        answers=Known(ANSWERS),
        process=MPSD.pid,
        lock_holder=Known(MPSD.pid),
        units=Known(
            {
                "mpsd.service": {
                    "LoadState": "loaded",
                    "ActiveState": "active",
                    "SubState": "running",
                    "Result": "success",
                    "UnitFileState": "enabled",
                    "KillMode": "process",
                    "PrivateTmp": "no",
                    "RuntimeDirectory": "mpsd",
                    "RuntimeDirectoryPreserve": "yes",
                }
            }
        ),
    ),
    files=FilesSeen(
        space=(Space(Path("/run/mpsd"), 9 * GIB, 10**6),),
        own=(pipe_directory("gpu0", DIRECTORY, "control", "log", listening=True),),
        usual=(pipe_directory("/tmp/nvidia-mps", "/tmp/nvidia-mps"),),
        versions=Known((LoggedVersions("gpu0", Path("/var/log/mpsd/gpu0/control.log"), 13000, "580"),)),
    ),
    processes=Known((MPSD, DAEMON, SERVER)),
    gpus=GpusSeen(
        Known(NodeGpus(DRIVER, 13000, (GpuSeen(GPU, Known(USAGE), Known(CONDITION)),), {})),
        program=Path(CONTROL),
        server=Path("/usr/bin/nvidia-cuda-mps-server"),
        library=Library(Path("/usr/lib64/libcuda.so.1"), DRIVER),
        package=("nvidia-cuda-mps", f"{DRIVER}-1"),
        left=Left(Path("/var/lib/mpsd/compute-modes.json"), Known({})),
    ),
    host=HostSeen(
        uid=0,
        variables={},
        kernel="6.12.0-amd64",
        first_pid_namespace=True,
        shared_memory=Known(SharedMemoryPlace("tmpfs", 32 * GIB, 31 * GIB, 0o1777, False, DEVICE)),
        logs={"kernel": Known((LogLine(9.0, "usb 1-1: new device"),)), "audit": Known(())},
        devices={Path("/dev/nvidiactl"): 0o666, Path("/dev/nvidia-uvm"): 0o666},
    ),
    clients=Known(()),
)
"""A healthy node whose mpsd answers."""


def alone(observed: Observed = WELL) -> Observed:
    """Return the node without its mpsd."""
    silent = Unknown("there is no socket")
    gone: dict[str, Any] = {"answers": silent, "remedy": "start it", "lock_holder": Known(None), "process": None}
    return replace(observed, service=replace(observed.service, **gone))


def clients(*found: ClientSeen) -> Observed:
    """Return the node with these processes of leases."""
    return replace(WELL, clients=Known(found))


def client(pid: int = 500, **otherwise: Any) -> ClientSeen:
    """Return a healthy process of a lease of 8 GiB."""
    usual: dict[str, Any] = {
        "arguments": ("python", "train.py"),
        "variables": Known({"CUDA_VISIBLE_DEVICES": GPU.uuid}),
        "given": {"CUDA_VISIBLE_DEVICES": GPU.uuid},
    }
    return ClientSeen(pid, "lease-1", GPU.uuid, 8 * GIB, **{**usual, **otherwise})


def service(**otherwise: Any) -> Observed:
    """Return the node with a change in mpsd."""
    return replace(WELL, service=replace(WELL.service, **otherwise))


def files(**otherwise: Any) -> Observed:
    """Return the node with a change on its disk."""
    return replace(WELL, files=replace(WELL.files, **otherwise))


def host(**otherwise: Any) -> Observed:
    """Return the node with a change in the machine."""
    return replace(WELL, host=replace(WELL.host, **otherwise))


def answers(**otherwise: Any) -> Observed:
    """Return the node with a change in mpsd's answers."""
    return service(answers=Known(replace(ANSWERS, **otherwise)))


def report(verdict: str, because: str, subject: str = "gpu0") -> Observed:
    """Return the node with a sentence of mpsd about it."""
    return answers(reports=(Finding(Verdict(verdict), because, {}, "what to do", subject),))


def unit(**otherwise: str) -> Observed:
    """Return the node with a change in mpsd's unit."""
    assert isinstance(WELL.service.units, Known)
    return service(units=Known({"mpsd.service": {**WELL.service.units.value["mpsd.service"], **otherwise}}))


def processes(*more: ProcessSeen) -> Observed:
    """Return the node with these processes added, or in place of those with the same pids."""
    there = {each.pid: each for each in (MPSD, DAEMON, SERVER, *more)}
    return replace(WELL, processes=Known(tuple(there.values())))


def gpu(
    *, usage: GpuUsage | None = None, condition: Condition | None = None, driver: str = DRIVER, **otherwise: Any
) -> Observed:
    """Return the node with a change in its GPU."""
    seen = GpuSeen(
        replace(GPU, driver_version=driver, **otherwise), Known(usage or USAGE), Known(condition or CONDITION)
    )
    return replace(WELL, gpus=replace(WELL.gpus, node=Known(NodeGpus(driver, 13000, (seen,), {}))))


def settings(text: str, observed: Observed = WELL) -> Observed:
    """Return a node with other settings, which its mpsd has as well."""
    new: Settings = parse(text)
    return replace(
        observed,
        settings=new,
        configuration=replace(observed.configuration, settings=Known(new)),
        service=replace(observed.service, answers=Known(replace(ANSWERS, settings=Known(new)))),
    )


def look(check: str, observed: Observed) -> list[Finding]:
    """Run one check on a node."""
    return [each.finding for each in examine([CHECKS[check]], observed)]


def logged(text: str, age: float = 5.0, log: str = "kernel") -> Observed:
    """Return the node with a log that has this line, written so many seconds ago."""
    lines = Known((LogLine(age + 9, "systemd[1]: Reached target"), LogLine(age, text)))
    return host(logs={**WELL.host.logs, log: lines})
