"""Each check of doctor: ok on a healthy node, and its verdict on one that is not, with evidence and remedy."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.configuration.document import parse
from mpsd.core.doctor.finding import (
    ClientSeen,
    ConfigurationSeen,
    Left,
    Library,
    LoggedVersions,
    Means,
    Observed,
    ProcessSeen,
    SharedMemoryPlace,
    SocketSeen,
    Space,
    Verdict,
    examine,
)
from mpsd.core.doctor.table import CHECKS, FAMILIES
from mpsd.core.gpus import Condition
from mpsd.core.model import GpuProcess, GpuUsage, Known, Unknown
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
    alone,
    answers,
    client,
    clients,
    files,
    gpu,
    host,
    logged,
    look,
    pipe_directory,
    process,
    processes,
    report,
    service,
    settings,
    unit,
)

LOST: Final[Any] = {
    "answers": Unknown("there is no socket"),
    "lock_holder": Known(77),
    "socket": SocketSeen(Path("/run/mpsd/mpsd.sock"), None),
}
SILENT: Final = Unknown("there is no answer")
CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
MANY: Final = '[daemon]\nusers = "many"\n'
VLLM: Final = ("python", "/opt/bin/vllm", "serve", "some-model")
SGLANG: Final = ("python3.12", "-u", "-m", "sglang.launch_server", "--model-path", "some-model")
ENGINE: Final = ("VLLM::EngineCore", "", "")
SCHEDULER: Final = ("sglang::scheduler_TP0", "")
OVERWRITTEN: Final = Unknown("/proc/500/environ cannot be read: it has no variable")
SHELL: Final = ("bash", "-l")
SOCKET: Final = WELL.service.socket
LEFT: Final = Path("/var/lib/mpsd/compute-modes.json")
AVC: Final = 'audit: type=1400 avc:  denied  { connectto } for  pid=7 comm="nvidia-cuda-mps" path="/run/mpsd/mps/gpu0"'
AUDITED: Final = f"type=AVC msg=audit(1732190000.123:7): {AVC}"
PROFILE: Final = 'audit: type=1400 apparmor="DENIED" operation="open" profile="x" name="/dev/nvidia0" comm="python"'
OOM: Final = "Memory cgroup out of memory: Killed process 7 (nvidia-cuda-mps) total-vm:9kB"
XID: Final = "NVRM: Xid (PCI:0000:3b:00): {}, pid=7, name=python"


def numbered(value: str) -> Known[dict[str, str]]:
    """Return an environment that names GPUs by number."""
    return Known({"CUDA_VISIBLE_DEVICES": value})


def jax(variables: dict[str, str]) -> ClientSeen:
    """Return a process that runs JAX with these variables."""
    return client(frameworks=frozenset({"jaxlib"}), variables=Known(variables))


def titled(*arguments: tuple[str, ...]) -> ClientSeen:
    """Return a process that has written a title over its arguments and its environment, with its ancestors."""
    return client(arguments=arguments[0], ancestors=arguments[1:], variables=OVERWRITTEN)


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


def in_mode(mode: ComputeMode) -> Observed:
    """Return a node without mpsd whose GPU is in this compute mode."""
    return alone(gpu(usage=replace(USAGE, compute_mode=mode)))


def left(found: Any, **otherwise: Any) -> Observed:
    """Return a node without mpsd and with this record of compute modes."""
    seen = in_mode(otherwise.pop("mode", USAGE.compute_mode))
    return replace(seen, gpus=replace(seen.gpus, left=Left(LEFT, found, **otherwise)))


def hung(observed: Observed = WELL) -> Observed:
    """Return a node whose mpsd holds the lock and does not answer."""
    return replace(observed, service=replace(observed.service, answers=SILENT, remedy="end it"))


def gpus(**otherwise: Any) -> Observed:
    """Return a node with another driver, or another control program."""
    return replace(WELL, gpus=replace(WELL.gpus, **otherwise))


def space(free: int = GIB, free_files: int | None = None, *, read_only: bool = False) -> Observed:
    """Return a node with this free space."""
    return files(space=(Space(Path("/run/mpsd"), free, free_files, read_only),))


FOREIGN: Final = process(201, "control daemon", uid=1000)
THIRD_PROTOCOL: Final = replace(FOREIGN, arguments=(*FOREIGN.arguments, "-p", "3"))
DEFAULT: Final = process(202, "control daemon", variables=Known({}))
OTHER: Final = process(
    203, "control daemon", variables=Known({"CUDA_MPS_PIPE_DIRECTORY": "/x", "CUDA_VISIBLE_DEVICES": "GPU-aa"})
)
OTHER_NODE: Final = process(
    203, "control daemon", variables=Known({"CUDA_MPS_PIPE_DIRECTORY": "/x", "CUDA_VISIBLE_DEVICES": "GPU-bb"})
)
APART: Final = process(205, "control daemon", apart=True, shared_memory=Known(7))
LEFTOVER: Final = pipe_directory("gpu7", "/run/mpsd/mps/gpu7", "control")
HIDDEN: Final = process(204, "control daemon", uid=7, variables=Unknown("/proc/204/environ cannot be read by uid 1"))

CASES: Final[tuple[tuple[str, Observed, str, str], ...]] = (
    ("mpsd", alone(), "fail", "there is no socket"),
    ("mpsd", hung(), "fail", "there is no answer; pid 100 holds the lock of /run/mpsd, so it is another mpsd, or it"),
    ("mpsd", service(**LOST), "fail", "pid 77 holds the lock of /run/mpsd: it is running, but its socket was removed"),
    ("mpsd", hung(service(socket=replace(SOCKET, kind="file"))), "fail", "is a file"),
    ("mpsd", hung(service(socket=replace(SOCKET, closed=Path("/run")))), "fail", "uid 0 may not traverse /run"),
    ("mpsd", service(socket=replace(SOCKET, listener=(9, 1000))), "warn", "pid 9 of uid 1000"),
    ("version", answers(version="0.9"), "warn", "mpsd has version 0.9, but mpsctl has 1.0"),
    ("version", alone(), "unknown", "does not answer"),
    (
        "configuration",
        replace(WELL, configuration=ConfigurationSeen(Path("/x"), Unknown("/x is not TOML"), "mend it")),
        "fail",
        "/x is not TOML",
    ),
    ("configuration", answers(settings=Known(parse("[api]\nevents = 5\n"))), "warn", "daemon.compute_mode, api.events"),
    ("configuration", answers(settings=Unknown("other fields")), "unknown", "other fields"),
    ("node", report("fail", "GPU 0 is faulty: Xid 79", "GPU 0"), "fail", "GPU 0 is faulty: Xid 79"),
    ("node", report("warn", "gpu0 is held: by uid 0"), "warn", "gpu0 is held: by uid 0"),
    ("node", report("note", "mpsd has no CAP_KILL"), "note", "no CAP_KILL"),
    ("node", alone(), "unknown", "mpsd does not answer"),
    ("directories", files(unfit=(("/run/x belongs to uid 7", "chown"),)), "fail", "belongs to uid 7"),
    ("directories", files(apart=(Path("/run/mpsd"),)), "unknown", "a different directory for mpsd"),
    ("disk", space(0), "fail", "0B are left"),
    ("disk", space(MIB), "warn", "1MiB are left"),
    ("disk", space(free_files=3), "warn", "3 files are left"),
    ("disk", space(read_only=True), "fail", "read-only"),
    ("leftovers", alone(files(own=(LEFTOVER,))), "warn", "gpu7 has control"),
    ("leftovers", alone(replace(files(own=(LEFTOVER,)), processes=Unknown("no"))), "unknown", "not all processes"),
    ("leftovers", hung(), "unknown", "pid 100 holds mpsd's lock"),
    ("other-mpsd", processes(process(101, "mpsd", parent=1)), "warn", "pid 101 (uid 0) is another mpsd"),
    ("other-mpsd", alone(), "warn", "not the one that was queried"),
    ("orphans", processes(process(301, "server", parent=1)), "fail", "server 301 (uid 0) is an orphan"),
    ("orphans", replace(WELL, processes=Unknown("no /proc")), "unknown", "no /proc"),
    ("shm", older(processes(replace(SERVER, shared_memory=Known(7)))), "warn", "pid 300 (server) has another"),
    ("shm", processes(replace(SERVER, shared_memory=Known(7))), "unknown", "from driver 580 on"),
    ("shm", processes(replace(SERVER, shared_memory=Unknown("no"))), "unknown", "inspect pid 300"),
    ("versions", gpus(package=("nvidia-cuda-mps", "535.261.03-1")), "fail", "535.261.03-1, but the driver is 580"),
    ("versions", gpus(package=("nvidia-cuda-mps", "580.1.2-1")), "warn", "580.1.2-1"),
    ("versions", files(versions=Known((LoggedVersions("gpu0", Path("/l"), 12080),))), "fail", "for CUDA 12.8"),
    ("versions", files(versions=Known((LoggedVersions("gpu0", Path("/l"), None, "575"),))), "warn", "with driver 575"),
    ("versions", gpus(library=Library(Path("/x/libcuda.so.1"), "570.1")), "fail", "/x/libcuda.so.1 has version 570.1"),
    (
        "versions",
        replace(gpus(package=None, library=None), files=replace(WELL.files, versions=Known(()))),
        "unknown",
        "to compare",
    ),
    ("architecture", alone(gpu(mig=True)), "warn", "MIG mode is on"),
    ("architecture", alone(gpu(compute_capability=(3, 0))), "warn", "MPS needs 3.5"),
    ("architecture", gpu(compute_capability=(6, 1)), "fail", "older than Volta"),
    ("architecture", gpu(name="NVIDIA GB10", integrated=True), "warn", "NVIDIA GB10 shares the memory of its host"),
    (
        "architecture",
        gpu(integrated=True, usage=replace(USAGE, compute_mode=None)),
        "warn",
        "no compute mode, and the MPS of a Tegra has no terminate_client",
    ),
    ("compute-mode", in_mode(ComputeMode.PROHIBITED), "fail", "prohibited"),
    ("compute-mode", in_mode(ComputeMode.EXCLUSIVE_THREAD), "warn", "no longer"),
    ("compute-mode", in_mode(ComputeMode.EXCLUSIVE_PROCESS), "warn", "was not set by mpsd"),
    ("compute-mode-left", left(Known({GPU.uuid: ComputeMode.DEFAULT})), "fail", "left its compute mode at exclusive"),
    ("compute-mode-left", left(Known({"GPU-b": ComputeMode.DEFAULT})), "fail", "changed the compute mode of GPU-b"),
    ("compute-mode-left", left(Unknown("no JSON"), damaged=True), "fail", "no JSON"),
    ("compute-mode-left", left(Unknown("cannot be read")), "unknown", "cannot be read"),
    ("compute-mode-left", left(Known({}), aside=Path("/m.damaged")), "warn", "/m.damaged"),
    ("compute-mode-left", hung(), "unknown", "pid 100 holds mpsd's lock"),
    ("kernel-log", logged(AVC), "fail", "SELinux denied an access to MPS"),
    ("kernel-log", logged(AVC, 9999.0), "warn", "9999 s ago"),
    ("kernel-log", logged(AUDITED, log="audit"), "fail", "5 s ago: type=AVC"),
    ("kernel-log", logged(PROFILE), "fail", "AppArmor denied"),
    ("kernel-log", logged(XID.format(79)), "fail", "0000:3b:00 reported Xid 79"),
    ("kernel-log", logged(XID.format(79), 7200.0), "warn", "7200 s ago"),
    ("kernel-log", logged(XID.format(31)), "warn", "GPU memory page fault"),
    ("kernel-log", logged(OOM), "fail", "killed a process of MPS"),
    ("kernel-log", logged("Starting gVisor"), "fail", "gVisor"),
    ("kernel-log", host(logs={"kernel": Unknown("/dev/kmsg cannot be read")}), "unknown", "/dev/kmsg"),
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
    ("unit", alone(unit(ActiveState="inactive")), "warn", "inactive"),
    ("unit", unit(KillMode="control-group"), "fail", "KillMode=control-group"),
    ("unit", unit(PrivateTmp="yes"), "fail", "PrivateTmp=yes"),
    ("unit", unit(RuntimeDirectoryPreserve="no"), "fail", "RuntimeDirectoryPreserve=no"),
    ("unit", unit(PrivateIPC="yes"), "fail", "not share /dev/shm"),
    ("unit", unit(UnitFileState="disabled"), "warn", "not started at boot"),
    ("unit", service(units=Unknown("systemd does not run")), "unknown", "systemd does not run"),
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
    ("look-alikes", processes(replace(FOREIGN, lookalike=True)), "note", "pid 201 (uid 1000) calls itself a control"),
    ("stopped", processes(replace(DAEMON, state="T")), "fail", "pid 200 (control daemon) is stopped"),
    ("stopped", alone(processes(replace(SERVER, state="D"))), "warn", "is blocked in the kernel"),
    (
        "replaced-program",
        processes(replace(DAEMON, executable=Known("/x (deleted)"))),
        "warn",
        "/x, which was replaced",
    ),
    ("driver", gpus(node=Unknown("the kernel driver is not loaded"), remedy="modprobe"), "fail", "not loaded"),
    ("driver", gpus(node=Unknown("x"), simulated=True), "unknown", "simulated"),
    ("control-program", gpus(server=None), "fail", "no nvidia-cuda-mps-server"),
    ("control-program", gpus(program=None), "fail", "no executable program 'nvidia-cuda-mps-control'"),
    ("control-program", files(apart=(Path("/run/mpsd"),)), "unknown", "mpsd is in another container"),
    ("many-users", settings(MANY, gpus(many_users=Known(value=False))), "fail", "-multiuser-server, which /"),
    ("many-users", settings(MANY, gpus(many_users=Unknown("it ignores flags"))), "unknown", "it ignores flags"),
    ("gpu-numbers", clients(client(variables=numbered("3"))), "fail", "CUDA_VISIBLE_DEVICES=3: under MPS it sees one"),
    ("gpu-numbers", clients(client(variables=numbered("0,1"))), "warn", "outside MPS, number 0 may be another GPU"),
    (
        "connections",
        clients(client(variables=Known({CONNECTIONS: "32"}))),
        "warn",
        "it takes 12 of the 48 client places",
    ),
    (
        "connections",
        clients(client(variables=Known({CONNECTIONS: "32"}), given={CONNECTIONS: "8"})),
        "warn",
        "OUT_OF_MEMORY (2), although memory is free",
    ),
    ("connections", clients(client(variables=Unknown("/proc/500/environ"))), "unknown", "/proc/500/environ"),
    ("gpu-numbers", clients(client(variables=Unknown("/proc/500/environ"))), "unknown", "/proc/500/environ"),
    ("gpu-numbers", replace(WELL, clients=Unknown("no leases")), "unknown", "no leases"),
    (
        "framework-memory",
        clients(client(arguments=VLLM)),
        "warn",
        "runs vLLM, which takes 90% of the GPU's total memory",
    ),
    ("framework-memory", clients(client(frameworks=frozenset({"jaxlib"}))), "warn", "runs JAX, which takes 75%"),
    (
        "framework-memory",
        clients(titled(ENGINE, (*VLLM, "--gpu-memory-utilization", "0.9"), SHELL)),
        "warn",
        "takes 90% of the GPU's total memory at once by --gpu-memory-utilization (126GiB)",
    ),
    ("framework-memory", clients(titled(ENGINE, ("python", "serve.py"))), "unknown", "since it has set a title"),
    ("framework-memory", clients(titled(SCHEDULER, SGLANG)), "warn", "computes from the 140GiB of the GPU"),
    ("framework-memory", clients(client(arguments=(*VLLM, "--config", "x.yaml"))), "unknown", "file of its --config"),
    ("framework-memory", clients(client(arguments=(*VLLM, "--gpu-mem=a"))), "unknown", "cannot be read: 'a'"),
    ("framework-memory", clients(jax({"XLA_CLIENT_MEM_FRACTION": ".5"})), "warn", "50% of the GPU's total memory"),
    ("framework-memory", clients(jax({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"})), "warn", "takes 75%"),
    (
        "framework-memory",
        clients(client(frameworks=frozenset({"jaxlib"}), variables=OVERWRITTEN)),
        "unknown",
        OVERWRITTEN.reason,
    ),
    ("framework-memory", clients(client(variables=OVERWRITTEN)), "unknown", OVERWRITTEN.reason),
    (
        "framework-memory",
        replace(clients(client(arguments=VLLM)), gpus=gpus(node=Unknown("no NVML")).gpus),
        "unknown",
        "by the total memory of its GPU, and that is unknown",
    ),
    ("framework-memory", clients(replace(jax({}), gpu="GPU-other")), "unknown", "that is unknown"),
    ("persistence", gpu(condition=Condition(persistence=False)), "warn", "persistence mode is off"),
    ("ecc", gpu(condition=Condition(uncorrected=3)), "fail", "3 uncorrected ECC errors"),
    ("ecc", gpu(condition=Condition(remapping_failed=True)), "fail", "no spare row is left"),
    ("ecc", gpu(condition=Condition(retirement_pending=True)), "fail", "need a reset"),
    ("outside", gpu(usage=replace(USAGE, listed=False)), "unknown", "NVML does not list"),
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
        host(devices={Path("/dev/nvidia-uvm"): None}),
        "fail",
        "/dev/nvidia-uvm does not exist",
    ),
    ("device-nodes", host(devices={Path("/dev/nvidia0"): 0o660}), "warn", "0660"),
    ("kernel", host(kernel="4.18.0-553"), "fail", "4.18.0-553"),
    ("kernel", host(kernel="5.14.0", first_pid_namespace=False), "warn", "SO_PEERPIDFD"),
    ("kernel", host(kernel="strange"), "unknown", "strange"),
)
"""Check, node, verdict, and the reason."""

FINE: Final[tuple[tuple[str, Observed], ...]] = (
    ("foreign-daemon", processes(APART)),
    ("other-daemon", processes(replace(DAEMON, apart=True))),
    ("device-nodes", gpus(simulated=True)),
    ("other-daemon", processes(OTHER_NODE)),
    ("many-users", settings(MANY, gpus(many_users=Known(value=True)))),
    ("gpu-numbers", clients(client(variables=Known({})))),
    ("framework-memory", clients(client(arguments=(*VLLM, "--gpu-memory-utilization=0.05")))),
    ("framework-memory", clients(client(arguments=(*VLLM, "--gpu_memory_utilization", "0.05")))),
    ("framework-memory", clients(client(arguments=(*VLLM, "--kv-cache-memory-bytes", "4G")))),
    ("framework-memory", clients(titled(ENGINE, ENGINE, (*VLLM, "--gpu-memory-utilization=0.05"), SHELL))),
    ("framework-memory", clients(titled(SCHEDULER, (*SGLANG, "--mem-fraction-static", "0.9")))),
    ("framework-memory", clients(client(arguments=("tail", "-f", "vllm.log")))),
    ("framework-memory", clients(client(arguments=("python", "sglang.py")))),
    ("framework-memory", clients(client(frameworks=frozenset({"tensorflow"})))),
    ("framework-memory", clients(jax({"XLA_CLIENT_MEM_FRACTION": ".05"}))),
    ("framework-memory", clients(jax({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}))),
    ("framework-memory", clients(jax({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".05"}))),
    ("framework-memory", clients(jax({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}))),
    ("environment", host(variables={"CUDA_MPS_PIPE_DIRECTORY": f"{DIRECTORY}/"})),
    ("environment", host(variables={"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G"})),
    ("outside", gpu(usage=used(7, mps=True))),
    ("foreign-daemon", alone()),
    ("configuration", alone()),
    ("unit", unit(RuntimeDirectoryPreserve="no", RuntimeDirectory="")),
    ("unit", service(units=Known({"mpsd.socket": {"LoadState": "loaded"}}))),
    ("disk", replace(space(read_only=True), host=host(uid=1000).host)),
    ("leftovers", alone(files(own=(pipe_directory("gpu7", DIRECTORY, "control"),)))),
    ("leftovers", alone(files(own=(pipe_directory("gpu7", "/x", "control", listening=True),)))),
    ("other-mpsd", processes(process(101, "mpsd", arguments=("mpsd", "run", "--simulate", "2")))),
    ("orphans", replace(WELL, processes=Known((MPSD, SERVER)))),  # its parent is a control daemon, as mpsd says
    ("orphans", processes(replace(SERVER, parent=1))),  # mpsd reports it
    ("stopped", processes(replace(SERVER, state="T"))),  # likewise
    ("shm", processes(APART, process(101, "mpsd", shared_memory=Known(7)))),
    ("architecture", gpu(mig=True)),  # mpsd reports it
    ("architecture", gpu(compute_capability=(7, 0))),
    ("compute-mode", in_mode(ComputeMode.DEFAULT)),
    ("compute-mode", left(Known({GPU.uuid: ComputeMode.DEFAULT}))),
    ("outside", replace(report("warn", "it has a lease", "pid 7"), gpus=gpu(usage=used(7, mps=False)).gpus)),
    ("kernel-log", logged(AUDITED + " permissive=1", log="audit")),
    ("kernel-log", logged(AVC.replace("nvidia-cuda-mps", "bash").replace("mpsd", "x"))),
)


def test_a_node_that_is_well() -> None:
    """Every check is ok: nothing is wrong, and nothing is unknown."""
    results = examine(CHECKS.values(), WELL)
    assert [(each.check.id, each.finding) for each in results if each.finding.verdict is not Verdict.OK] == []
    assert [each.check.id for each in results] == list(CHECKS)
    assert all(each.finding.because == each.check.right for each in results if not each.check.unwatched)


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


@pytest.mark.parametrize(
    ("group", "first"),
    [
        ("/system.slice/mps.service", "systemctl disable --now mps.service"),
        ("/system.slice/mps@0.service/sshd.service", "systemctl disable --now mps@0.service"),
        ("/user.slice/user-7.slice/user@7.service/app.slice/mps.service", "systemctl --user disable --now mps.service"),
        ("/user.slice/user-7.slice/session-3.scope", None),
        (f"/system.slice/docker-{'0' * 64}.scope", None),
        (f"/system.slice/containerd.service/{'0' * 64}", None),
        ("/system.slice/mpsd.service", None),
        ("", None),
    ],
)
@pytest.mark.parametrize(
    ("check", "daemon"), [("foreign-daemon", FOREIGN), ("default-directory", DEFAULT), ("other-daemon", OTHER)]
)
def test_daemon_of_a_unit(check: str, daemon: ProcessSeen, group: str, first: str | None) -> None:
    """The remedy names the unit that would start the daemon again, and never one whose name its user chose."""
    (found,) = look(check, processes(replace(daemon, group=group)))
    by_hand = "echo quit | CUDA_MPS_PIPE_DIRECTORY="
    before, _, _ = (found.remedy or "").partition(by_hand)
    unit = "" if first is None else f"if {first.split()[-1]} started it, which starts it again: {first}; otherwise: "
    assert before == f"when its clients have exited: {unit}"


def test_what_cannot_be_seen_is_never_well() -> None:
    """Without processes, NVML and mpsd's answers, each check that depends on them is unknown, or fails."""
    blind: dict[str, tuple[Observed, set[str]]] = {
        "processes": (replace(WELL, processes=Unknown("hidden")), set()),
        "driver": (gpus(node=Unknown("no NVML")), {"control-program", "many-users"}),
        "GPUs": (replace(alone(), gpus=gpus(node=Unknown("no NVML")).gpus), {"compute-mode-left"}),
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


def test_nothing_is_mended_on_a_guess() -> None:
    """When some processes are not visible, nothing counts as left over."""
    left_over = alone(files(own=(LEFTOVER,)))
    hidden = replace(left_over, processes=Known((MPSD, HIDDEN)))
    nested = replace(left_over, host=replace(WELL.host, first_pid_namespace=False))
    assert [look("leftovers", each)[0].mend is not None for each in (left_over, hidden, nested)] == [True, False, False]


def test_what_mpsd_watches_is_said_once() -> None:
    """A check of what a running mpsd watches itself is for a node without one."""
    unwatched = [check for check in CHECKS.values() if check.unwatched]
    assert {each.id for each in unwatched} == {"leftovers", "compute-mode", "compute-mode-left"}
    broken = replace(left(Known({GPU.uuid: ComputeMode.DEFAULT})), service=WELL.service)
    assert {each.finding.verdict for each in examine(unwatched, broken)} == {Verdict.OK}


def test_small_shm_is_told_with_its_size() -> None:
    """The evidence has the exact values."""
    place = SharedMemoryPlace("tmpfs", MIB, MIB, 0o1777, False, DEVICE)
    finding = look("shm", host(shared_memory=Known(place)))[0]
    assert finding.evidence == {"file_system": "tmpfs", "bytes": MIB, "free": MIB, "mode": "1777"}
    assert look("shm", host(shared_memory=Known(replace(place, bytes=GIB, free=GIB))))[0].verdict is Verdict.OK
