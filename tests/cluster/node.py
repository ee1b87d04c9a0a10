"""PID 1 of a cluster: it makes a private machine for the node, and keeps the programs of the cluster running.

It is started in private namespaces: mounts, network, pids, IPC and host name. Its changes are limited to these, and end
with them: /run, /var/lib, /var/log and /dev/shm are new, and the settings of the kernel that a kubelet writes are files
here, since these have no namespace.

A program that ends is started again, as on a node with systemd. A test kills one by its pid, in `pids/NAME`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

STATE: Final = Path("/run/cluster/state")
"""The directory of the cluster, as seen inside."""

PROGRAMS: Final = Path("/run/cluster/programs")

ADDRESS: Final = "10.88.7.1"
NODE: Final = "node-1"
PODS: Final = "10.88.8.0/24"
SERVICES: Final = "10.88.9.0/24"
SERVICE: Final = "10.88.9.1"
"""The service `kubernetes`: pods reach the API server by it, and no proxy is needed, since it is this address."""

CONTAINERD: Final = "/run/containerd/containerd.sock"

_SETTINGS: Final = {
    "vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}  # fmt: skip
"""Settings of the whole machine that a kubelet requires."""

_PAUSE: Final = 0.5
"""Seconds before an ended program is started again."""

_CONTAINERD: Final = """\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:latest"
  restrict_oom_score_adj = true
  disable_hugetlb_controller = true
  tolerate_missing_hugetlb_controller = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{programs}/usr/lib/cni"
    conf_dir = "{state}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""

_KUBECONFIG: Final = """\
apiVersion: v1
kind: Config
clusters: [{{name: here, cluster: {{server: "https://{service}", insecure-skip-tls-verify: true}}}}]
users: [{{name: me, user: {{token: {token}}}}}]
contexts: [{{name: here, context: {{cluster: here, user: me}}}}]
current-context: here
"""

_TOKENS: Final = f"""\
admin,admin,1,"system:masters"
kubelet,system:node:{NODE},2,"system:nodes"
manager,system:kube-controller-manager,3,"system:masters"
scheduler,system:kube-scheduler,4
"""


def _do(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def make_machine(state: Path, programs: Path) -> None:
    """Make the node's private files, its own settings of the kernel, and its network."""
    for name in ("kubelet", "containerd", "log"):  # on a disk: a kubelet checks how full it is
        (state / name).mkdir()
    (state / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    (state / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} {NODE}\n")
    opened = {name: os.open(path, os.O_PATH) for name, path in (("state", state), ("programs", programs))}
    for place in ("/run", "/var/lib", "/dev/shm"):
        _do("mount", "-t", "tmpfs", "-o", "mode=1777" if place == "/dev/shm" else "mode=755", "tmpfs", place)
    for name, descriptor in opened.items():
        inside = Path("/run/cluster", name)
        inside.mkdir(parents=True)
        _do("mount", "--bind", f"/proc/{os.getpid()}/fd/{descriptor}", str(inside))
        os.close(descriptor)
    for name in ("kubelet", "containerd"):
        Path("/var/lib", name).mkdir()
        _do("mount", "--bind", str(STATE / name), f"/var/lib/{name}")
    _do("mount", "--bind", str(STATE / "log"), "/var/log")
    for name in ("resolv.conf", "hosts"):
        _do("mount", "--bind", str(STATE / name), f"/etc/{name}")
    for name, value in _SETTINGS.items():
        file = STATE / "settings" / name.replace("/", ".")
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{value}\n")
        _do("mount", "--bind", str(file), f"/proc/sys/{name}")
    if Path("/sys/fs/cgroup/unified").is_mount():
        _do("umount", "/sys/fs/cgroup/unified")  # runc accepts only one of the two
    _do("mount", "--make-rshared", "/")
    _do("hostname", NODE)
    for line in (
        "link set lo up",
        f"address add {SERVICE}/32 dev lo",
        "link add node0 type bridge",
        f"address add {ADDRESS}/24 dev node0",
        "link set node0 up",
        f"route add default via {ADDRESS.rpartition('.')[0]}.254",
    ):
        _do("ip", *line.split())


def configure(group: str) -> None:
    """Write the configuration of the programs."""
    (STATE / "pki").mkdir()
    (STATE / "pids").mkdir()
    _do("openssl", "genrsa", "-out", str(STATE / "pki" / "accounts.key"), "2048")
    (STATE / "tokens.csv").write_text(_TOKENS)
    for line in _TOKENS.splitlines():
        token = line.split(",")[0]
        (STATE / f"{token}.kubeconfig").write_text(_KUBECONFIG.format(service=SERVICE, token=token))
    (STATE / "containerd.toml").write_text(_CONTAINERD.format(socket=CONTAINERD, programs=PROGRAMS, state=STATE))
    network = {
        "type": "bridge", "bridge": "pods0", "isDefaultGateway": True, "ipMasq": False,
        "ipam": {"type": "host-local", "dataDir": str(STATE / "addresses"), "ranges": [[{"subnet": PODS}]]},
    }  # fmt: skip
    (STATE / "cni").mkdir()
    (STATE / "cni" / "10-pods.conflist").write_text(
        json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [network]})
    )
    kubelet = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{group}",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "failSwapOn": False, "makeIPTablesUtilChains": False, "oomScoreAdj": 0, "serializeImagePulls": False,
        "clusterDNS": [SERVICE],  # no server answers there; without an entry, kubelet warns of each pod
        "nodeStatusUpdateFrequency": "1s", "nodeStatusReportFrequency": "1s", "syncFrequency": "5s",
        "imageGCHighThresholdPercent": 100, "evictionHard": {"memory.available": "100Mi"},
    }  # fmt: skip
    (STATE / "kubelet.json").write_text(json.dumps(kubelet))


def commands() -> Mapping[str, list[str]]:
    """Return the programs of the cluster, by name."""
    pki, store, bin_ = STATE / "pki", "http://127.0.0.1:2379", PROGRAMS / "bin"

    def kubeconfig(token: str) -> str:
        return f"--kubeconfig={STATE}/{token}.kubeconfig"

    return {
        "etcd": [
            f"{PROGRAMS}/usr/bin/etcd", f"--data-dir={STATE}/etcd", "--unsafe-no-fsync",
            f"--listen-client-urls={store}", f"--advertise-client-urls={store}",
            "--listen-peer-urls=http://127.0.0.1:2380",
        ],
        "kube-apiserver": [
            f"{bin_}/kube-apiserver", f"--etcd-servers={store}", "--secure-port=443", "--bind-address=0.0.0.0",
            f"--advertise-address={ADDRESS}", f"--cert-dir={pki}", f"--token-auth-file={STATE}/tokens.csv",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
            f"--service-account-key-file={pki}/accounts.key",
            f"--service-account-signing-key-file={pki}/accounts.key",
            "--service-account-issuer=https://kubernetes.default.svc", f"--service-cluster-ip-range={SERVICES}",
            "--allow-privileged=true", "--profiling=false",
        ],
        "kube-controller-manager": [
            f"{bin_}/kube-controller-manager", kubeconfig("manager"), "--leader-elect=false", "--port=0",
            f"--service-account-private-key-file={pki}/accounts.key", f"--root-ca-file={pki}/apiserver.crt",
        ],
        "kube-scheduler": [f"{bin_}/kube-scheduler", kubeconfig("scheduler"), "--leader-elect=false", "--port=0"],
        "containerd": [f"{PROGRAMS}/usr/bin/containerd", f"--config={STATE}/containerd.toml"],
        "kubelet": [
            f"{bin_}/kubelet", kubeconfig("kubelet"), f"--config={STATE}/kubelet.json", "--container-runtime=remote", f"--container-runtime-endpoint=unix://{CONTAINERD}",
            f"--cert-dir={pki}", f"--hostname-override={NODE}", f"--node-ip={ADDRESS}",
        ],
    }  # fmt: skip


class Programs:
    """The programs, each running or about to be started again."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._due = dict.fromkeys(commands(), 0.0)
        """The next start of each program that does not run."""
        path = f"{PROGRAMS}/usr/bin:{PROGRAMS}/usr/sbin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self._environment = {"PATH": path, "HOME": "/root"}

    def start(self) -> float:
        """Start those that are due; return the seconds until the next one is."""
        now = time.monotonic()
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            with (STATE / "log" / f"{name}.log").open("ab") as log:
                pid = os.posix_spawnp(
                    commands()[name][0], commands()[name], self._environment, setsid=True, setsigmask=[],
                    file_actions=[(os.POSIX_SPAWN_DUP2, log.fileno(), 1), (os.POSIX_SPAWN_DUP2, log.fileno(), 2)],
                )  # fmt: skip
            self._names[pid] = name
            (STATE / "pids" / f"{name}.new").write_text(f"{pid}")
            (STATE / "pids" / f"{name}.new").rename(STATE / "pids" / name)
        return max(min(self._due.values(), default=now + 60) - now, 0.01)

    def reap(self) -> None:
        """Reap all ended processes: programs, and orphans of containers."""
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                name = self._names.pop(pid, None)
                if name is not None:
                    self._due[name] = time.monotonic() + _PAUSE


def main() -> None:
    """Run as PID 1, with the directory of the cluster, that of the programs, and the name of the control group."""
    state, programs, group = sys.argv[1:]
    os.chdir("/")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    make_machine(Path(state), Path(programs))
    configure(group)
    running = Programs()
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, running.start())
        running.reap()


if __name__ == "__main__":
    main()
