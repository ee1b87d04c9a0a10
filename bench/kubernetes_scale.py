"""The costs of a thousand nodes for the API server, and of the driver per node: `python -m bench.kubernetes_scale`.

Sizes and rates are those of objects that `mpsd-kubernetes` really writes. With `--kubernetes DIRECTORY`, where
`bin/kube-apiserver` and `usr/bin/etcd` are (as the tests of clusters build them), a real API server is given a thousand
nodes. One of a release before 1.34 has no ResourceSlices: ConfigMaps of the same size replace them.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from mpsd.core.dra import slices
from mpsd.core.dra.slices import Node, Steps
from mpsd.core.errors import MpsdError
from mpsd.core.kubernetes import node_state
from mpsd.core.kubernetes.devices import Gpu, Part
from mpsd.core.kubernetes.node_state import GpuState, ShareState
from mpsd.core.kubernetes.settings import DOMAIN, Settings
from mpsd.kubernetes.api_server import ApiServer, Place
from mpsd.kubernetes.node_report import Pace

_GIB: Final = 1024
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_WRITERS: Final = 16
_HARDWARE: Final = {
    "brand": "Nvidia",
    "architecture": "Hopper",
    "compute_capability": "9.0",
    "cuda_version": "12.8",
    "pci_bus_id": "0000:0f:00.0",
    "pcie_root": "pci0000:0a",
}
_STEPS: Final = Steps(1, 256, 100)


def gpus(number: int) -> list[Gpu]:
    """Return the GPUs of a node."""
    return [
        Gpu(
            f"GPU-{each:08x}-1111-4222-8333-444444444444",
            141 * _GIB,
            f"/run/mpsd/mps/gpu{each}",
            570,
            "",
            each,
            "NVIDIA H200",
            "570.133.20",
            hardware=_HARDWARE,
        )
        for each in range(number)
    ]


def states(number: int, shares: int) -> list[GpuState]:
    """Return the same GPUs with so many pods on each."""
    pods = [ShareState(f"0af54f2c-{each:04x}-4000-8000-00000000beef", 50, 4096) for each in range(shares)]
    return [GpuState(each, pods, Part(each.tenths, each.mebibytes)) for each in gpus(number)]


def annotation(number: int, shares: int) -> str:
    """Return the annotation of a node with them."""
    return node_state.annotation(node_state.described(states(number, shares)), datetime.now(tz=UTC), 750)


def document(node: int, number: int, generation: int = 1) -> dict[str, object]:
    """Return the slice of a node."""
    found = Node(f"node-{node:04}.cluster.example.com", "0af54f2c-0000-4000-8000-00000000beef", DOMAIN, "anytime")
    before = {"spec": {"pool": {"generation": generation - 1}}}
    return slices.document(found, gpus(number), _STEPS, before, taints=True)


def sizes() -> None:
    """Print the sizes of the written objects."""
    print("what a node writes, in bytes of JSON, and for 1,000 nodes:")
    for number in (1, 4, 8, 16):
        size = len(json.dumps(document(0, number), separators=(",", ":")))
        print(f"  ResourceSlice, {number:2} GPUs: {size:6}  {size * 1000 / 2**20:6.1f} MiB")
    for number, shares in ((1, 4), (8, 4), (8, 20), (16, 48)):
        size = len(annotation(number, shares))
        print(f"  annotation, {number:2} GPUs with {shares:2} pods each: {size:6}  {size * 1000 / 2**20:6.1f} MiB")
    labels = node_state.labels(DOMAIN, states(8, 4), "dra", 570)
    print(f"  labels: {sum(len(name) + len(value or '') for name, value in labels.items())} in {len(labels)}")
    took = _seconds(lambda: [document(0, 8) for _ in range(200)]) / 200
    print(f"  to make and compare a slice of 8 GPUs: {took * 1e6:.0f} us")


def rates(nodes: int, hours: int = 10) -> None:
    """Print how often all nodes write and read, from the program's own pace, and the most in one second."""
    interval = Settings().report_interval
    ends = range(hours * 3600)
    lasting, quiet = Counter[int](), Counter[int]()
    for _ in range(nodes):
        for counts in (lasting, quiet):
            pace, now = Pace(interval), 0.0
            while now < ends[-1]:
                pace.spend(now)
                counts[int(now)] += 1
                now = pace.due if counts is lasting else pace.renewal
    settled = ends[3600:]
    for name, counts in (("pods change all the time", lasting), ("nothing changes", quiet)):
        mean = sum(counts[each] for each in settled) / len(settled)
        print(
            f"  {nodes} nodes that start in the same second, {name}: {mean:.1f} writes a second after an hour, at most"
            f" {max(counts[each] for each in settled)} in one"
        )


def _seconds(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


# -- one driver --------------------------------------------------------------------------------------------------------


def driver(seconds: float) -> None:
    """Print the cost of one driver for its idle node, beside one mpsd with 8 simulated GPUs."""
    with tempfile.TemporaryDirectory(prefix="mb-") as folder, contextlib.ExitStack() as ending:
        root = Path(folder)
        service = _started(
            ending, "mpsd", "run", "--stop-daemons-on-exit", "--root", str(root / "node"), "--simulate", "8",
            "--config", _config(root),
        )  # fmt: skip
        _await((root / "node/run/mpsd.sock").exists)
        plugin = _started(
            ending, "mpsd.kubernetes", "--socket", str(root / "node/run/mpsd.sock"),
            "--kubelet-dir", str(root / "kubelet"), "--dra", "--node", "node-1",
            environment={
                "MPSD_KUBERNETES_API_SERVER": f"https://127.0.0.1:{_port()}",  # no server listens there
                "MPSD_KUBERNETES_CDI_DIR": str(root / "cdi"),
            },
        )  # fmt: skip
        _await((root / "kubelet/plugins" / DOMAIN / "dra.sock").exists)
        time.sleep(5)
        before = _cpu(plugin.pid), _cpu(service.pid)
        time.sleep(seconds)
        spent = _cpu(plugin.pid) - before[0], _cpu(service.pid) - before[1]
        status = Path(f"/proc/{plugin.pid}/status").read_text(encoding="ascii")
        resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        print(f"one driver, 8 GPUs, nothing happens, the API server is away, {seconds:g} s:")
        print(f"  the driver: {spent[0] / seconds * 100:.2f} % of a processor, {resident / 1024:.0f} MiB resident")
        print(f"  mpsd beside it: {spent[1] / seconds * 100:.2f} % of a processor")


def _config(root: Path) -> str:
    path = root / "mpsd.toml"
    path.write_text("", encoding="utf-8")
    return str(path)


def _started(
    ending: contextlib.ExitStack, module: str, *arguments: str, environment: dict[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    ending.callback(process.wait)
    ending.callback(process.terminate)
    return process


def _cpu(pid: int) -> float:
    """Return the processor time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _await(found: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not found():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.1)


def _port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


# -- a real API server -------------------------------------------------------------------------------------------------

_SLICES: Final = "/api/v1/namespaces/default/configmaps"
"""The place of slices in a release before 1.34: as text, in objects of the same size."""


@contextlib.contextmanager
def _api_server(programs: Path, root: Path) -> Iterator[tuple[ApiServer, dict[str, int], int]]:
    """Yield an API server with its store, the pids of both, and its port."""
    store, peer, port = _port(), _port(), _port()
    (root / "account").mkdir()
    (root / "account/token").write_text("admin", encoding="ascii")
    (root / "tokens.csv").write_text('admin,admin,1,"system:masters"\n', encoding="ascii")
    subprocess.run(["openssl", "genrsa", "-out", str(root / "key"), "2048"], check=True, capture_output=True)
    commands = {
        "etcd": [
            programs / "usr/bin/etcd", f"--data-dir={root}/etcd", f"--listen-client-urls=http://127.0.0.1:{store}",
            f"--advertise-client-urls=http://127.0.0.1:{store}", f"--listen-peer-urls=http://127.0.0.1:{peer}",
        ],
        "kube-apiserver": [
            programs / "bin/kube-apiserver", f"--etcd-servers=http://127.0.0.1:{store}", f"--secure-port={port}",
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--cert-dir={root}",
            f"--token-auth-file={root}/tokens.csv", "--authorization-mode=Node,RBAC",
            f"--service-account-key-file={root}/key", f"--service-account-signing-key-file={root}/key",
            "--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.88.9.0/24",
        ],
    }  # fmt: skip
    with contextlib.ExitStack() as ending:
        pids = {}
        for name, command in commands.items():
            process = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            ending.callback(process.wait)
            ending.callback(process.kill)
            pids[name] = process.pid
        _await((root / "apiserver.crt").exists)
        (root / "account/ca.crt").symlink_to(root / "apiserver.crt")
        server = ApiServer(Place("127.0.0.1", port, root / "account"), threading.Event())
        _await(lambda: _answers(server))
        yield server, pids, port


def _answers(server: ApiServer) -> bool:
    with contextlib.suppress(MpsdError):
        server.document("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "first"}})
        return True
    return False


def real(programs: Path, nodes: int) -> None:
    """Print the cost of the nodes for a real API server."""
    with (
        tempfile.TemporaryDirectory(prefix="mb-") as folder,
        _api_server(programs, Path(folder)) as (server, pids, _),
    ):
        for each in range(nodes):
            server.document(
                "POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"node-{each:04}"}}
            )
        print(f"a real API server, {nodes} nodes of 8 GPUs with 4 pods each, {_WRITERS} at a time, as fast as it can:")

        def create(each: int) -> None:
            server.document("POST", _SLICES, _configmap(each, 1))

        def replace(each: int) -> None:
            path = f"{_SLICES}/slice-{each}"
            found = server.document("GET", path)
            server.document("PUT", path, {**_configmap(each, 2), "metadata": found["metadata"]})

        def patch(each: int) -> None:
            labels = node_state.labels(DOMAIN, states(8, 4), "dra", 570)
            server.patch_node(f"node-{each:04}", node_state.patch(DOMAIN, labels, annotation(8, 4)))

        def look(each: int) -> None:
            server.document("GET", f"{_SLICES}/slice-{each}")

        for name, work in (
            ("create its slice", create), ("read and replace it", replace), ("label the node", patch),
            ("look at the slice", look),
        ):  # fmt: skip
            _measure(name, work, nodes, pids)
        store = sum(path.stat().st_size for path in Path(folder, "etcd").rglob("*") if path.is_file())
        print(f"  etcd's files after that: {store / 2**20:.0f} MiB")


def _configmap(node: int, generation: int) -> dict[str, object]:
    text = json.dumps(document(node, 8, generation))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"slice-{node}"}, "data": {"slice": text}}


def _measure(name: str, work: Callable[[int], None], nodes: int, pids: dict[str, int]) -> None:
    took: list[float] = []

    def timed(each: int) -> None:
        before = time.monotonic()
        work(each)
        took.append(time.monotonic() - before)

    before, own, start = {each: _cpu(pid) for each, pid in pids.items()}, time.process_time(), time.monotonic()
    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(timed, range(nodes)))
    wall = time.monotonic() - start
    spent = {each: (_cpu(pid) - before[each]) / nodes * 1000 for each, pid in pids.items()}
    client = (time.process_time() - own) / nodes * 1000
    took.sort()
    print(
        f"  {name}: {nodes / wall:.0f}/s; each {statistics.median(took) * 1000:.0f} ms, 99 % within"
        f" {took[int(len(took) * 0.99)] * 1000:.0f} ms; processor time of each: API server"
        f" {spent['kube-apiserver']:.1f} ms, etcd {spent['etcd']:.1f} ms, the node's {client:.1f} ms"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubernetes", type=Path, metavar="DIRECTORY", help="where kube-apiserver and etcd are")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long one driver is watched")
    options = parser.parse_args()
    sizes()
    rates(options.nodes)
    driver(options.seconds)
    if options.kubernetes is not None:
        real(options.kubernetes, options.nodes)


if __name__ == "__main__":
    main()
