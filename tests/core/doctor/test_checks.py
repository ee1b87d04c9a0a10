"""Each check of doctor: ok on a healthy node, and its verdict on one that is not, with evidence and remedy."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.configuration.document import parse
from mpsd.core.doctor.finding import Means, Verdict, examine
from mpsd.core.doctor.observed import (
    ConfigurationSeen,
    DaemonAnswer,
    DeviceNode,
    Left,
    Library,
    NodeGpus,
    Observed,
    ServersSeen,
    SharedMemoryPlace,
    SharedMemorySeen,
    SocketSeen,
    Tasks,
)
from mpsd.core.doctor.observed_clients import ClientSeen, MemoryGroup, ViolationAnswer
from mpsd.core.doctor.observed_records import ListenerSeen
from mpsd.core.doctor.table import CHECKS, FAMILIES
from mpsd.core.gpus import Condition
from mpsd.core.health import Kind
from mpsd.core.model import GpuProcess, GpuUsage, Known, Reading, Unknown
from mpsd.core.units import GIB, MIB
from tests.core.doctor.seen import (
    DAEMON,
    DEVICE,
    DIRECTORY,
    GPU,
    MPSD,
    SERVER,
    USAGE,
    WELL,
    answers,
    client,
    clients,
    daemon_answer,
    directory,
    files,
    gpu,
    host,
    look,
    pipe_directory,
    process,
    processes,
    reason,
    records,
    said,
    service,
    settings,
    store,
    textfile,
    unit,
)

LOST: Final[Any] = {
    "answers": Unknown("there is no socket"),
    "lock_holder": Known(77),
    "socket": SocketSeen(Path("/run/mpsd/mpsd.sock"), None),
}
MANY: Final = '[daemon]\nusers = "many"\n'
VLLM: Final = ("python", "/opt/bin/vllm", "serve", "some-model")


def node() -> NodeGpus:
    """Return NVML's report about a healthy node."""
    assert isinstance(WELL.gpus.node, Known)
    return WELL.gpus.node.value


def numbered(value: str) -> Known[dict[str, str]]:
    """Return an environment that names GPUs by number."""
    return Known({"CUDA_VISIBLE_DEVICES": value})


def jax(variables: dict[str, str]) -> ClientSeen:
    """Return a process that runs JAX with these variables."""
    return client(frameworks=frozenset({"jaxlib"}), variables=Known(variables))


def grouped(limit: int, used: int, *, pids: Sequence[int] = (500,), **otherwise: Any) -> list[ClientSeen]:
    """Return processes in a control group that limits their memory."""
    group = Known(MemoryGroup("/sys/fs/cgroup/x", limit, used))
    return [client(pid, group=group, **otherwise) for pid in pids]


SILENT: Final[Any] = {"answers": Unknown("there is no socket"), "lock_holder": Known(None)}
SOCKET: Final = WELL.service.socket
LEFT: Final = Path("/var/lib/mpsd/compute-modes.json")
AVC: Final = 'audit: type=1400 avc:  denied  { connectto } for  pid=7 comm="nvidia-cuda-mps" path="/run/mpsd/mps/gpu0"'
AUDITED: Final = f"type=AVC msg=audit(1732190000.123:7): {AVC}"
PROFILE: Final = 'audit: type=1400 apparmor="DENIED" operation="open" profile="x" name="/dev/nvidia0" comm="python"'
OOM: Final = "Memory cgroup out of memory: Killed process 7 (nvidia-cuda-mps) total-vm:9kB"
XID: Final = "NVRM: Xid (PCI:0000:3b:00): {}, pid=7, name=python"


def at(observed: Observed, **otherwise: Any) -> Observed:
    """Return a node with a change in its mpsd."""
    return replace(observed, service=replace(observed.service, **otherwise))


def shm(**otherwise: Any) -> Observed:
    """Return a node with another /dev/shm, and a driver that needs it."""
    assert isinstance(WELL.host.shared_memory, Known)
    return older(host(shared_memory=Known(replace(WELL.host.shared_memory.value, **otherwise))))


def older(observed: Observed) -> Observed:
    """Return a node with a driver whose servers share memory through /dev/shm."""
    return replace(observed, gpus=gpu(driver="550.163.01").gpus)


def used(*pids: int, mps: bool, mode: ComputeMode = ComputeMode.DEFAULT) -> GpuUsage:
    """Return a reading in which these processes use the GPU."""
    return GpuUsage(0, {pid: GpuProcess(Known(MIB), mps=mps) for pid in pids}, mode)


def left(found: Any, **otherwise: Any) -> Observed:
    """Return a node without mpsd and with this record of compute modes."""
    seen = at(gpu(usage=replace(USAGE, compute_mode=otherwise.pop("mode", USAGE.compute_mode))), **SILENT)
    return replace(seen, gpus=replace(seen.gpus, left=Left(LEFT, found, **otherwise)))


def gpus(**otherwise: Any) -> Observed:
    """Return a node with another driver, or another control program."""
    return replace(WELL, gpus=replace(WELL.gpus, **otherwise))


def runtime(**otherwise: Any) -> Observed:
    """Return a node with another runtime directory."""
    return files(directories=(directory("paths.runtime_dir", "/run/mpsd", **otherwise),))


def long_path() -> Observed:
    """Return a node whose sockets' paths are too long."""
    return settings(f'[paths]\nruntime_dir = "/run/{"x" * 80}"\n')


FOREIGN: Final = process(201, "control daemon", uid=1000)
THIRD_PROTOCOL: Final = replace(FOREIGN, arguments=(*FOREIGN.arguments, "-p", "3"))
UNKNOWING: Final = DaemonAnswer("gpu0", "ready", 200, "/run/x", (), 2, "new words")
DEFAULT: Final = process(202, "control daemon", variables=Known({}))
OTHER: Final = process(
    203, "control daemon", variables=Known({"CUDA_MPS_PIPE_DIRECTORY": "/x", "CUDA_VISIBLE_DEVICES": "GPU-aa"})
)
OTHER_NODE: Final = process(
    203, "control daemon", variables=Known({"CUDA_MPS_PIPE_DIRECTORY": "/x", "CUDA_VISIBLE_DEVICES": "GPU-bb"})
)
APART: Final = process(205, "control daemon", apart=True, pid_namespace=Known("pid:[7]"), shared_memory=Known(7))
HIDDEN: Final = process(204, "control daemon", uid=7, variables=Unknown("/proc/204/environ cannot be read by uid 1"))

CASES: Final[tuple[tuple[str, Observed, str, str], ...]] = (
    ("mpsd", service(**SILENT), "fail", "there is no socket"),
    (
        "mpsd",
        service(answers=Unknown("no answer"), lock_holder=Known(77)),
        "fail",
        "pid 77 holds the lock of /run/mpsd",
    ),
    ("mpsd", service(**LOST), "fail", "pid 77 holds the lock of /run/mpsd: it is running, but its socket was removed"),
    ("socket", service(socket=SocketSeen(SOCKET.path, None)), "fail", "/run/mpsd/mpsd.sock does not exist"),
    ("socket", service(socket=replace(SOCKET, kind="file")), "fail", "is a file"),
    ("socket", service(socket=replace(SOCKET, refused="Permission denied")), "fail", "mode 0666, uid 0"),
    ("socket", service(socket=replace(SOCKET, closed=Path("/run"))), "fail", "uid 0 may not traverse /run"),
    ("socket", service(socket=replace(SOCKET, listener=(9, 1000))), "warn", "pid 9 of uid 1000"),
    ("socket", service(socket=replace(SOCKET, listener=(9, 1000), untrusted=True)), "fail", "pid 9 of uid 1000"),
    ("version", answers(version="0.9"), "warn", "mpsd has version 0.9, but mpsctl has 1.0"),
    ("version", service(**SILENT), "unknown", "does not answer"),
    (
        "configuration",
        replace(WELL, configuration=ConfigurationSeen(Path("/x"), Unknown("/x is not TOML"), "mend it")),
        "fail",
        "/x is not TOML",
    ),
    ("reload", service(in_force=Known(parse("[api]\nevents = 5\n"))), "warn", "daemon.compute_mode, api.events"),
    ("reload", service(in_force=Unknown("no answer")), "unknown", "no answer"),
    ("unit", unit(LoadState="masked"), "fail", "masked"),
    ("unit", unit(LoadState="bad-setting"), "fail", "bad-setting"),
    ("unit", unit(ActiveState="failed", Result="start-limit-hit"), "fail", "too many starts"),
    ("unit", unit(ActiveState="failed", Result="exit-code"), "fail", "exit-code"),
    (
        "unit",
        unit(SubState="auto-restart", Result="watchdog", NRestarts="3"),
        "fail",
        "(watchdog), and systemd has restarted it 3 times",
    ),
    ("unit", at(unit(ActiveState="inactive"), **SILENT), "warn", "inactive"),
    ("unit", unit(UnitFileState="disabled"), "warn", "not started at boot"),
    ("unit", service(units=Unknown("systemd does not run")), "unknown", "systemd does not run"),
    ("unit-settings", unit(KillMode="control-group"), "fail", "KillMode=control-group"),
    ("unit-settings", unit(PrivateTmp="yes"), "fail", "PrivateTmp=yes"),
    ("unit-settings", unit(RuntimeDirectoryPreserve="no"), "fail", "RuntimeDirectoryPreserve=no"),
    ("unit-settings", unit(PrivateIPC="yes"), "fail", "not share /dev/shm"),
    ("tasks", service(tasks=Known(Tasks(Path("/g"), 2000, 2048))), "warn", "/g has 2000 of at most 2048"),
    ("tasks", service(tasks=Known(Tasks(Path("/g"), 2048, 2048))), "fail", "/g has 2048 of at most 2048"),
    ("tasks", service(tasks=Unknown("not seen")), "unknown", "not seen"),
    ("node", answers(healthy=False, because="the disk is full"), "fail", "the disk is full"),
    ("gpu-health", reason(Kind.GPU, "GPU 0 is faulty: Xid 79"), "fail", "GPU 0 is faulty: Xid 79"),
    ("gpu-health", reason(Kind.GPU_UNKNOWN, "GPU 0 is unknown: x"), "fail", "GPU 0 is unknown: x"),
    ("gpu-health", reason(Kind.GPU_UNSUPPORTED, "GPU 0 is unsupported: MIG"), "warn", "unsupported: MIG"),
    ("gpu-health", reason(Kind.GPU_NOT_RESTORED, "GPU 0 needs attention: x"), "fail", "needs attention"),
    ("daemon", reason(Kind.DAEMON, "gpu0 is failed: too many deaths"), "fail", "gpu0 is failed: too many"),
    ("daemon", reason(Kind.SERVER_STOPPED, "gpu0: server 42 was found stopped"), "fail", "gpu0: server 42 was found"),
    ("daemon", reason(Kind.OPERATION, "gpu0 is stopping: a restart"), "fail", "gpu0 is stopping: a restart"),
    ("daemon", reason(Kind.HOLD, "gpu0 is held: by uid 0"), "warn", "gpu0 is held: by uid 0"),
    ("violations", answers(violations=(ViolationAnswer("user", 12, "it runs as uid 7", "x"),)), "warn", "as uid 7"),
    ("wedge", reason(Kind.WEDGED, "gpu0 is wedged: its server serves no client"), "fail", "gpu0 is wedged: its server"),
    ("wedge", at(WELL, **SILENT), "unknown", "mpsd does not answer"),
    ("log-lines", answers(daemons=(UNKNOWING,)), "warn", "gpu0 have 2 lines that mpsd does not know: 'new words'"),
    ("log-lines", at(WELL, **SILENT), "unknown", "mpsd does not answer"),
    ("limits", reason(Kind.DRIFT, "gpu0: x is 5 % instead of 6 %"), "fail", "gpu0: x is 5 % instead of 6 %"),
    ("pipe-path", long_path(), "fail", "113 bytes, and the maximum for a socket path is 106"),
    ("traverse", files(closed=Path("/run/mpsd")), "fail", "other uids may not traverse /run/mpsd"),
    ("traverse", files(closed=Path("/root"), private=True), "warn", "other uids may not traverse /root"),
    ("directories", runtime(strange=("it belongs to uid 7", "chown")), "fail", "belongs to uid 7"),
    ("file-system", runtime(read_only=True), "fail", "read-only"),
    ("file-system", replace(runtime(read_only=True), host=host(uid=1000).host), "unknown", "read-only for mpsctl"),
    ("file-system", files(apart=(Path("/run/mpsd"),)), "unknown", "a different directory for mpsd"),
    ("file-system", runtime(file_system="nfs4"), "fail", "on nfs4"),
    ("file-system", runtime(keeps_acls=False), "fail", "does not support POSIX ACLs"),
    ("disk", runtime(free=0), "fail", "0B are left"),
    ("disk", runtime(free=MIB), "warn", "1MiB are left"),
    ("disk", runtime(free_files=3), "warn", "3 files are left"),
    ("disk", runtime(free=None), "unknown", "cannot be read"),
    ("damaged", files(damaged=(Path("/var/lib/mpsd/history.set-aside-1"),)), "warn", "history.set-aside-1"),
    ("leftovers", files(own=(pipe_directory("gpu7", "/run/mpsd/mps/gpu7", "control"),)), "warn", "gpu7 has control"),
    (
        "leftovers",
        replace(files(own=(pipe_directory("gpu7", "/x", "control"),)), processes=Unknown("no /proc")),
        "unknown",
        "not all processes",
    ),
    ("leftovers", at(WELL, answers=Unknown("no answer")), "unknown", "pid 100 holds mpsd's lock"),
    (
        "shared-memory",
        files(shared_memory=(SharedMemorySeen("cuda.shm.0.1f4.1", 0, 500, MIB),)),
        "warn",
        "cuda.shm.0.1f4.1",
    ),
    (
        "server-start",
        files(servers=Known((ServersSeen("gpu0", 6, "no device", log=Path("/l")),))),
        "fail",
        "'no device'",
    ),
    ("server-start", files(servers=Unknown("/var/log/mpsd cannot be read")), "unknown", "cannot be read"),
    (
        "waiting-uids",
        files(servers=Known((ServersSeen("gpu0", 0, "", waiting=((7, 1001),)),))),
        "warn",
        "pid 7 (uid 1001) is blocked",
    ),
    ("waiting-uids", files(servers=Unknown("closed")), "unknown", "closed"),
    ("clock", files(ahead=(Path("/run/mpsd/leases.db"), 3600.0)), "warn", "3600 s in the future"),
    ("foreign-daemon", processes(FOREIGN), "fail", "pid 201 (uid 1000) is a control daemon on /run/mpsd/mps/gpu0"),
    ("foreign-daemon", processes(THIRD_PROTOCOL), "fail", "speaks protocol 3, which mpsd does not"),
    ("foreign-daemon", processes(HIDDEN), "unknown", "/proc/204/environ cannot be read by uid 1"),
    ("foreign-daemon", replace(WELL, processes=Unknown("no /proc")), "unknown", "no /proc"),
    ("foreign-daemon", host(first_pid_namespace=False), "unknown", "pid namespace"),
    ("default-directory", processes(DEFAULT), "fail", "pid 202 (uid 0) is a control daemon on /tmp/nvidia-mps"),
    (
        "default-directory",
        files(usual=(pipe_directory("x", "/tmp/nvidia-mps", "control", listening=True),)),
        "fail",
        "a process that is not visible here listens",
    ),
    ("default-directory", files(usual=(pipe_directory("x", "/tmp/nvidia-mps", "log"),)), "warn", "is left over from"),
    ("other-daemon", processes(OTHER), "warn", "pid 203 (uid 0) is a control daemon on /x"),
    ("other-daemon", processes(APART), "warn", "pid 205 (uid 0) is a control daemon on /run/mpsd/mps/gpu0 of another"),
    ("other-mpsd", processes(process(101, "mpsd", parent=1)), "warn", "pid 101 (uid 0) is another mpsd"),
    ("other-mpsd", at(WELL, process=None), "warn", "not the one that was queried"),
    ("orphans", processes(process(301, "server", parent=1)), "fail", "server 301 (uid 0) is an orphan"),
    ("orphans", daemon_answer(orphans=(302,)), "fail", "server 302 is an orphan"),
    (
        "front-end",
        processes(process(400, "front-end", age=99.0)),
        "fail",
        "pid 400 (uid 0) has kept the front-end of /run",
    ),
    ("look-alikes", processes(replace(FOREIGN, lookalike=True)), "note", "pid 201 (uid 1000) calls itself a control"),
    ("stopped", processes(replace(DAEMON, state="T")), "fail", "pid 200 (control daemon) is stopped"),
    ("stopped", processes(replace(SERVER, state="D")), "warn", "is blocked in the kernel"),
    ("zombies", processes(process(500, "process of MPS", state="Z", parent=9)), "warn", "pid 9 does not wait"),
    ("nofile", processes(replace(DAEMON, open_files=Known(1024))), "warn", "may open 1024 files"),
    (
        "nofile",
        processes(replace(DAEMON, open_files=Unknown("no"))),
        "unknown",
        "uid 0 has no permission to inspect pid 200",
    ),
    (
        "replaced-program",
        processes(replace(DAEMON, executable=Known("/x (deleted)"))),
        "warn",
        "/x, which was replaced",
    ),
    ("capabilities", service(lacking=(("CAP_KILL", "nobody can be ended"),)), "fail", "lacks CAP_KILL: nobody can be"),
    ("user-namespace", service(few_uids=Known(value=True)), "fail", "65534"),
    ("user-namespace", service(few_uids=Unknown("no")), "unknown", "no"),
    ("capabilities", service(process=replace(MPSD, uid=7)), "warn", "runs as uid 7"),
    ("capabilities", service(process=None), "unknown", "no mpsd"),
    ("pid-namespace", host(first_pid_namespace=False), "fail", "mpsd (pid 100) is not in the host's"),
    ("pid-namespace", at(host(first_pid_namespace=False), process=None), "warn", "does not see that of mpsd"),
    ("pid-namespace", processes(replace(DAEMON, pid_namespace=Known("pid:[7]"))), "fail", "pid 200"),
    ("pid-namespace", processes(replace(DAEMON, pid_namespace=Unknown("no"))), "unknown", "inspect pid 200"),
    ("shm-shared", older(processes(replace(SERVER, shared_memory=Known(7)))), "warn", "pid 300 (server) has another"),
    ("shm-shared", processes(replace(SERVER, shared_memory=Known(7))), "unknown", "from driver 580 on"),
    ("shm-shared", processes(replace(SERVER, shared_memory=Unknown("no"))), "unknown", "inspect pid 300"),
    ("shm-shared", at(host(first_pid_namespace=False), process=None), "unknown", "not visible in this pid"),
    ("driver", gpus(node=Unknown("the kernel driver is not loaded"), remedy="modprobe"), "fail", "not loaded"),
    ("driver", gpus(node=Unknown("x"), simulated=True), "unknown", "simulated"),
    ("control-program", gpus(server=None), "fail", "no nvidia-cuda-mps-server"),
    ("control-program", gpus(program=None), "fail", "no executable program 'nvidia-cuda-mps-control'"),
    ("control-program", files(apart=(Path("/run/mpsd"),)), "unknown", "mpsd is in another container"),
    ("versions", gpus(package=("nvidia-cuda-mps", "535.261.03-1")), "fail", "535.261.03-1, but the driver is 580"),
    ("versions", gpus(package=("nvidia-cuda-mps", "580.1.2-1")), "warn", "580.1.2-1"),
    ("versions", files(servers=Known((ServersSeen("gpu0", 0, "", 12080),))), "fail", "for CUDA 12.8"),
    ("versions", files(servers=Known((ServersSeen("gpu0", 0, "", None, "575"),))), "warn", "ran with driver 575"),
    ("versions", replace(gpus(package=None), files=replace(WELL.files, servers=Known(()))), "unknown", "neither"),
    (
        "cuda-library",
        gpus(library=Library(Path("/x/libcuda.so.1"), "570.1")),
        "fail",
        "/x/libcuda.so.1 has version 570.1",
    ),
    ("cuda-library", gpus(library=None), "unknown", "libcuda.so.1"),
    ("memory-limit", gpu(driver="470.256.02"), "warn", "driver 470.256.02 has no pinned"),
    (
        "memory-limit",
        settings('[limits]\npinned_device_mem_limit = "1GiB"\n', gpu(driver="470.256.02")),
        "fail",
        "is set",
    ),
    ("memory-limit", gpu(driver="510.47.03"), "unknown", "was not tested"),
    ("many-users", settings(MANY, gpus(many_users=Known(value=False))), "fail", "-multiuser-server, which /"),
    ("many-users", settings(MANY, gpus(many_users=Unknown("it ignores flags"))), "unknown", "it ignores flags"),
    ("integrated", gpu(name="NVIDIA GB10"), "warn", "shares its memory with the node: NVML reports no memory"),
    ("integrated", gpu(name="Orin (nvgpu)"), "warn", "no compute mode, and its MPS no terminate_client"),
    (
        "integrated",
        gpus(node=Known(replace(node(), unreadable={1: "NVML: Not Supported"}))),
        "fail",
        "NVML does not report what mpsd needs",
    ),
    (
        "short-client",
        answers(violations=(ViolationAnswer("short", 7, "process 7 has only", "x"),)),
        "warn",
        "process 7",
    ),
    ("short-client", at(WELL, **SILENT), "unknown", "there is no socket"),
    ("invisible-gpu", answers(violations=(ViolationAnswer("limits", 7, "process 7 was", "x"),)), "warn", "process 7"),
    ("gpu-numbers", clients(client(variables=numbered("3"))), "fail", "CUDA_VISIBLE_DEVICES=3: under MPS it sees one"),
    ("gpu-numbers", clients(client(variables=numbered("0,1"))), "warn", "outside MPS, number 0 may be another GPU"),
    ("gpu-numbers", clients(client(variables=Unknown("/proc/500/environ"))), "unknown", "/proc/500/environ"),
    ("gpu-numbers", replace(WELL, clients=Unknown("no leases")), "unknown", "no leases"),
    ("host-memory", clients(*grouped(90 * MIB, 0, pids=(500, 501))), "fail", "limits 2 processes with leases"),
    ("host-memory", clients(*grouped(GIB, GIB - MIB, client=False)), "warn", "of which 1MiB are free"),
    ("host-memory", clients(client(group=Unknown("no"))), "unknown", "memory control group of pid 500"),
    (
        "framework-memory",
        clients(client(arguments=VLLM)),
        "warn",
        "runs vLLM, which takes 90% of the GPU's total memory",
    ),
    ("framework-memory", clients(client(frameworks=frozenset({"jaxlib"}))), "warn", "runs JAX, which takes 75%"),
    ("architecture", gpu(compute_capability=(6, 1)), "fail", "older than Volta"),
    ("architecture", gpu(compute_capability=(3, 0)), "warn", "MPS needs 3.5"),
    ("mig", gpu(mig=True), "warn", "MIG mode is on"),
    ("compute-mode", gpu(usage=replace(USAGE, compute_mode=ComputeMode.PROHIBITED)), "fail", "prohibited"),
    ("compute-mode", at(WELL, **SILENT), "warn", "was not set by mpsd"),
    ("compute-mode", gpu(usage=replace(USAGE, compute_mode=ComputeMode.EXCLUSIVE_THREAD)), "warn", "no longer"),
    ("compute-mode", settings("", gpu(usage=used(mps=True))), "warn", "bypasses MPS runs on it"),
    (
        "compute-mode-left",
        left(Known({GPU.uuid: ComputeMode.DEFAULT})),
        "fail",
        "left its compute mode at exclusive-process",
    ),
    (
        "compute-mode-left",
        left(Known({"GPU-bbbb": ComputeMode.DEFAULT})),
        "fail",
        "mpsd changed the compute mode of GPU-bbbb",
    ),
    ("compute-mode-left", left(Unknown("no JSON"), damaged=True), "fail", "no JSON"),
    ("compute-mode-left", left(Unknown("cannot be read")), "unknown", "cannot be read"),
    ("compute-mode-left", left(Known({}), aside=Path("/m.damaged")), "warn", "/m.damaged"),
    ("compute-mode-left", at(WELL, answers=Unknown("no answer")), "unknown", "pid 100 holds mpsd's lock"),
    ("persistence", gpu(condition=Condition(persistence=False)), "warn", "persistence mode is off"),
    ("ecc", gpu(condition=Condition(uncorrected=3)), "fail", "3 uncorrected ECC errors"),
    ("ecc", gpu(condition=Condition(remapping_failed=True)), "fail", "no spare row is left"),
    ("ecc", gpu(condition=Condition(retirement_pending=True)), "fail", "need a reset"),
    ("clients", gpu(usage=used(*range(1, 49), mps=True)), "fail", "48 of at most 48 clients"),
    ("clients", gpu(usage=used(*range(1, 45), mps=True)), "warn", "44 of at most 48 clients"),
    ("outside", gpu(usage=used(7, 300, mps=False)), "warn", "pid 7 uses it outside MPS"),
    ("outside", gpu(usage=used(7, mps=False, mode=ComputeMode.EXCLUSIVE_PROCESS)), "fail", "no server can start"),
    ("environment", host(variables={"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}), "warn", "is the default directory"),
    ("environment", host(variables={"CUDA_MPS_PIPE_DIRECTORY": "/x"}), "warn", "is not one of mpsd's"),
    ("environment", host(variables={"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G,1=4G"}), "warn", "several GPUs"),
    ("environment", host(variables={"CUDA_MPS_PROTOCOL_VERSION": "3"}), "warn", "another protocol"),
    ("shm", older(host(shared_memory=Unknown("/dev/shm: No such file"))), "fail", "No such file"),
    ("shm", host(shared_memory=Unknown("/dev/shm: No such file")), "unknown", "from driver 580 on"),
    ("shm", shm(read_only=True), "fail", "read-only"),
    ("shm", shm(mode=0o755), "fail", "0755"),
    ("shm", shm(bytes=64 * MIB), "warn", "64MiB"),
    ("shm", shm(free=MIB), "warn", "1MiB are left"),
    (
        "device-nodes",
        host(devices=(DeviceNode(Path("/dev/nvidia-uvm"), None),)),
        "fail",
        "/dev/nvidia-uvm does not exist",
    ),
    ("device-nodes", host(devices=(DeviceNode(Path("/dev/nvidia0"), 0o660),)), "warn", "0660"),
    ("selinux", host(kernel_log=said(AVC)), "fail", "connectto"),
    ("selinux", host(kernel_log=Unknown("/dev/kmsg cannot be read")), "unknown", "/dev/kmsg"),
    ("selinux", host(audit_log=said(AUDITED)), "fail", "5 s ago: type=AVC"),
    ("selinux", host(kernel_log=said(AVC, 9999.0)), "warn", "9999 s ago"),
    ("selinux", host(audit_log=Unknown("/var/log/audit/audit.log is root's")), "unknown", "audit.log"),
    ("xid", host(kernel_log=said(XID.format(79), 7200.0)), "warn", "7200 s ago"),
    ("apparmor", host(kernel_log=said(PROFILE)), "fail", "DENIED"),
    ("xid", host(kernel_log=said(XID.format(79))), "fail", "0000:3b:00 reported Xid 79"),
    ("xid", host(kernel_log=said(XID.format(31))), "warn", "GPU memory page fault"),
    ("oom", host(kernel_log=said(OOM)), "fail", "nvidia-cuda-mps"),
    ("sandbox", host(kernel_log=said("Starting gVisor...")), "fail", "gVisor"),
    ("history-store", store(owner=1000), "fail", "belongs to uid 1000, and mpsd runs as uid 0"),
    ("history-store", store(mode=0o644), "warn", "has mode 0644"),
    ("history-store", store(kind="symbolic link"), "fail", "is a symbolic link"),
    ("history-store", store(kind=None), "fail", "does not exist, although mpsd runs"),
    ("history-store", store(is_sqlite=Known(value=False)), "fail", "does not begin as a file of SQLite"),
    ("history-store", store(is_sqlite=Unknown("it cannot be read")), "unknown", "it cannot be read"),
    ("history-store", records(store=Unknown("another directory")), "unknown", "another directory"),
    ("history-samples", records(trouble=Known("the disk is full")), "fail", "cannot store samples of the history: the"),
    ("history-samples", store(age=200.0), "fail", "was stored 200 s ago"),
    ("history-samples", records(trouble=Unknown("mpsd does not answer")), "unknown", "mpsd does not answer"),
    ("history-size", store(bytes=200 * MIB), "warn", "takes 200MiB, and history.size is 64MiB"),
    ("metrics-listener", records(listener=Known(ListenerSeen("[::1]:9", "refused"))), "fail", "from [::1]:9: refused"),
    ("metrics-listener", records(listener=Unknown("another network")), "unknown", "another network"),
    ("metrics-textfile", textfile(unfit="it is not a directory"), "fail", "/var/lib/x: it is not a directory"),
    ("metrics-textfile", textfile(timer="inactive"), "warn", "mpsd-textfile.timer is inactive"),
    ("metrics-textfile", textfile(timer=""), "warn", "mpsd-textfile.timer is not installed"),
    ("metrics-textfile", textfile(age=None), "fail", "does not exist"),
    ("metrics-textfile", textfile(age=400.0), "fail", "was written 400 s ago"),
    ("metrics-textfile", records(textfile=Unknown("no systemd")), "unknown", "no systemd"),
    ("kernel", host(kernel="4.18.0-553"), "fail", "4.18.0-553"),
    ("kernel", host(kernel="5.14.0", first_pid_namespace=False), "warn", "SO_PEERPIDFD"),
    ("kernel", host(kernel="strange"), "unknown", "strange"),
)
"""Check, node, verdict, and the reason."""

FINE: Final[tuple[tuple[str, Observed], ...]] = (
    ("orphans", replace(WELL, processes=Known((MPSD, SERVER)))),  # by mpsd's answer its parent is a control daemon
    (
        "orphans",  # its control daemon died just now, and it is about to end
        replace(daemon_answer(dying=(301,)), processes=processes(process(301, "server", parent=1)).processes),
    ),
    ("foreign-daemon", processes(APART)),
    ("pid-namespace", processes(APART)),
    ("shm-shared", processes(APART, process(101, "mpsd", shared_memory=Known(7)))),
    ("other-daemon", processes(replace(DAEMON, apart=True))),
    ("other-mpsd", processes(process(101, "mpsd", arguments=("mpsd", "run", "--simulate", "2")))),
    ("compute-mode", left(Known({GPU.uuid: ComputeMode.DEFAULT}))),
    ("tasks", service(tasks=Known(Tasks(Path("/g"), 9, 32768)))),
    ("device-nodes", gpus(simulated=True)),
    ("other-daemon", processes(OTHER_NODE)),
    ("memory-limit", gpu(driver="535.261.03")),
    ("many-users", settings(MANY, gpus(many_users=Known(value=True)))),
    ("short-client", answers(violations=(ViolationAnswer("memory", 7, "process 7 holds", "x"),))),
    ("gpu-numbers", clients(client(variables=Known({})))),
    ("host-memory", clients(*grouped(GIB, GIB - MIB))),
    ("host-memory", clients(*grouped(GIB, 0, pids=(500, 501)))),
    ("framework-memory", clients(client(arguments=(*VLLM, "--gpu-memory-utilization=0.05")))),
    ("framework-memory", clients(jax({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".05"}))),
    ("framework-memory", clients(jax({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}))),
    ("file-system", settings('[enforcement]\nunadmitted = "defaults"\n', runtime(keeps_acls=False))),
    ("leftovers", files(own=(pipe_directory("gpu7", DIRECTORY, "control"),))),
    ("leftovers", files(own=(pipe_directory("gpu7", "/x", "control", listening=True),))),
    ("shared-memory", files(shared_memory=(SharedMemorySeen("cuda.shm.0.12c.1", 0, SERVER.pid, MIB),))),
    ("unit-settings", unit(RuntimeDirectoryPreserve="no", RuntimeDirectory="")),
    ("front-end", processes(process(400, "front-end", age=1.0))),
    ("environment", host(variables={"CUDA_MPS_PIPE_DIRECTORY": f"{DIRECTORY}/"})),
    ("environment", host(variables={"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G"})),
    ("selinux", host(selinux="permissive", kernel_log=said(AVC))),
    ("selinux", host(selinux=None, kernel_log=Unknown("no"))),
    ("selinux", host(kernel_log=said(AVC.replace("nvidia-cuda-mps", "bash").replace("mpsd", "x")))),
    ("compute-mode", settings("", gpu())),
    ("architecture", gpu(compute_capability=(7, 0))),
    ("outside", gpu(usage=used(7, mps=True))),
    ("foreign-daemon", at(WELL, **SILENT)),
    ("clock", files(ahead=(Path("/run/mpsd/x"), 2.0))),
    ("history-store", at(store(kind=None), **SILENT)),
    ("history-store", at(store(owner=1000, directory_owner=1000), process=process(100, "mpsd", uid=1000))),
    ("history-store", replace(store(is_sqlite=Unknown("it is private")), host=replace(WELL.host, uid=1000))),
    ("history-samples", store(age=-5.0)),
    ("history-size", store(bytes=140 * MIB)),
    ("metrics-listener", records(listener=Known(None))),
    ("metrics-textfile", records(textfile=Known(None))),
    ("reload", WELL),
)


def test_a_node_that_is_well() -> None:
    """Every check is ok: nothing is wrong, and nothing is unknown."""
    results = examine(CHECKS.values(), WELL)
    assert [(each.check.id, each.finding) for each in results if each.finding.verdict is not Verdict.OK] == []
    assert [each.check.id for each in results] == list(CHECKS)
    assert all(each.finding.because == each.check.right for each in results)


def _name(value: object) -> str:
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("check", "observed", "verdict", "because"), CASES, ids=_name)
def test_what_is_wrong(check: str, observed: Observed, verdict: str, because: str) -> None:
    """The check finds the fault, with the value that shows it, and with a remedy."""
    found = [each for each in look(check, observed) if because in each.because]
    assert [each.verdict for each in found] == [verdict], look(check, observed)
    assert found[0].remedy or verdict == Verdict.UNKNOWN
    assert not found[0].because.endswith(".")


@pytest.mark.parametrize(("check", "observed"), FINE, ids=_name)
def test_what_is_fine(check: str, observed: Observed) -> None:
    """A case that only looks like a fault is not reported."""
    assert [each.verdict for each in look(check, observed)] == [Verdict.OK]


@pytest.mark.parametrize("knows", [Known(value=True), Known(value=False), Unknown("it did not answer")])
def test_many_users_are_proposed(knows: Reading[bool]) -> None:
    """A control daemon for several users is a remedy only where the control program is known to be able to."""
    blocked = files(servers=Known((ServersSeen("gpu0", 0, "", waiting=((7, 1001),)),)))
    (found,) = look("waiting-uids", replace(blocked, gpus=gpus(many_users=knows).gpus))
    assert ("daemon.users" in (found.remedy or "")) == (knows == Known(value=True))


def test_what_cannot_be_seen_is_never_well() -> None:
    """Without processes, NVML and mpsd's answers, each check that depends on them is unknown, or fails."""
    blind: dict[str, tuple[Observed, set[str]]] = {
        "processes": (replace(WELL, processes=Unknown("hidden")), set()),
        "surroundings": (replace(WELL, processes=Unknown("hidden")), {"capabilities", "user-namespace"}),
        "driver": (gpus(node=Unknown("no NVML")), {"control-program", "many-users"}),
        "GPUs": (gpus(node=Unknown("no NVML")), {"compute-mode", "compute-mode-left"}),
    }
    for family, (observed, by_other_means) in blind.items():
        well = {check.id for check in FAMILIES[family] if look(check.id, observed)[0].verdict is Verdict.OK}
        assert well == by_other_means


def test_every_check_has_a_case() -> None:
    """Every check has a test which shows that it finds its fault."""
    assert {check for check, _, verdict, _ in CASES if verdict in {"note", "warn", "fail"}} == CHECKS.keys()


def test_what_fix_may_do() -> None:
    """Only checks that declare a fix have anything fixed, and each of them has."""
    mended = {check: each.mend for check, observed, _, _ in CASES for each in look(check, observed) if each.mend}
    assert mended.keys() == {check.id for check in CHECKS.values() if check.mends}
    assert {each.means for each in mended.values()} == set(Means)


def test_only_own_directories_are_opened() -> None:
    """A directory above mpsd's own must be opened by its owner."""
    assert look("traverse", files(closed=Path("/run/mpsd")))[0].mend is not None
    assert look("traverse", files(closed=Path("/run")))[0].mend is None


def test_nothing_is_mended_on_a_guess() -> None:
    """When some processes are not visible, nothing counts as left over."""
    left_over = files(
        own=(pipe_directory("gpu7", "/x", "control"),),
        shared_memory=(SharedMemorySeen("cuda.shm.0.1f4.1", 0, 500, MIB),),
    )
    hidden = replace(left_over, processes=Known((MPSD, HIDDEN)))
    nested = replace(left_over, host=replace(WELL.host, first_pid_namespace=False))
    for check in ("leftovers", "shared-memory"):
        assert look(check, left_over)[0].mend is not None
        assert look(check, nested)[0].mend is None
    assert look("leftovers", hidden)[0].mend is None


def test_small_shm_is_told_with_its_size() -> None:
    """The evidence has the exact values."""
    place = SharedMemoryPlace("tmpfs", MIB, MIB, 0o1777, False, DEVICE)
    finding = look("shm", host(shared_memory=Known(place)))[0]
    assert finding.evidence == {"file_system": "tmpfs", "bytes": MIB, "free": MIB, "mode": "1777"}
    assert look("shm", host(shared_memory=Known(replace(place, bytes=GIB, free=GIB))))[0].verdict is Verdict.OK
