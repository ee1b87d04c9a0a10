"""kubelet's interface of a container runtime, with Debian 13's containerd: it passes on the CDI device of a plugin."""

import contextlib
import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import grpc
import pytest

from mpsd.kubernetes import wire
from mpsd.simulator.devices import VARIABLE
from tests.container.containerd import Containerd
from tests.container.leased import CLIENT, PYTHON, leasing_node, make_files
from tests.container.sidecar import USER
from tests.fork_server import ForkServer
from tests.harness import wait_until
from tests.kubernetes.conftest import kubernetes_fork_server
from tests.kubernetes.plugin.cluster import SLICE, StandIn
from tests.node import Node
from tests.real.apt import architecture
from tests.tools import compiler

__all__ = ["kubernetes_fork_server"]

pytestmark = [pytest.mark.container, pytest.mark.timeout(300)]

ROOT: Final = Path(__file__).parents[2]
PAUSE: Final = "localhost/pause:latest"
ON_THE_NODE: Final = 2
"""A namespace of the node's. Source: NamespaceMode of the Container Runtime Interface."""


@pytest.fixture(scope="module")
def cri(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Return the messages of the interface."""
    made = tmp_path_factory.mktemp("cri")
    options = [f"-I{Path(__file__).parent}", f"--python_out={made}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, "cri.proto"], check=True)
    sys.path.insert(0, str(made))
    try:
        return __import__("cri_pb2")
    finally:
        sys.path.remove(str(made))


@pytest.fixture
def containerd(short_tmp: Path) -> Iterator[Containerd]:
    """Run a containerd with an image, whose program does nothing."""
    containerd = Containerd(short_tmp / "c", cri=True)
    try:
        (containerd.home / "cdi").mkdir()
        containerd.start()
        containerd.call("--namespace=k8s.io", "images", "import", "--local", str(_image(short_tmp)))
        yield containerd
    finally:
        containerd.close()


def _image(place: Path) -> Path:
    """Make an image with the directories of a machine, as `docker save` writes it."""
    files = make_files(place / "image")
    source = "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n"
    command = [compiler(), "-xc", "-static", "-o", str(files / "pause"), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(files, ".")
    config = {
        "architecture": architecture(), "os": "linux", "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"]},
    }  # fmt: skip
    manifest = [{"Config": "config.json", "RepoTags": [PAUSE], "Layers": ["layer.tar"]}]
    contents = {"layer.tar": layer.getvalue()}
    contents |= {
        f"{name}.json": json.dumps(each).encode() for name, each in (("config", config), ("manifest", manifest))
    }
    with tarfile.open(place / "image.tar", "w") as tar:
        for name, content in contents.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return place / "image.tar"


@pytest.fixture
def node(short_tmp: Path, fork_server: ForkServer, containerd: Containerd) -> Iterator[Node]:
    with leasing_node(short_tmp, fork_server, containerd.remove_all) as node:
        yield node


@pytest.fixture
def cluster(containerd: Containerd, node: Node, kubernetes_fork_server: ForkServer) -> Iterator[StandIn]:
    """Run a stand-in for kubelet, and the plugin, which writes its device where this containerd reads devices."""
    settings = {"HOOK": "auto", "CDI_DIR": str(containerd.home / "cdi")}
    cluster = StandIn(node, node.root.parent / "kubelet", kubernetes_fork_server, settings=settings)
    with contextlib.closing(cluster):
        try:
            cluster.start()
            yield cluster
        finally:
            containerd.remove_all("k8s.io")


def test_device_of_the_plugin(containerd: Containerd, cluster: StandIn, node: Node, cri: Any) -> None:
    """The runtime calls the hook before a container's program, which has its share, or does not start and says why."""
    socket, simulated = containerd.home / "socket", node.root / "run" / "simulated"

    def call(name: str, request: Any, answer: str) -> Any:
        described = wire.Call("runtime.v1.RuntimeService", name, type(request), getattr(cri, answer))
        return wire.ask(socket, described, request, deadline=60)

    def container(config: Any, sandbox: str, name: str, created: Any, **own: str) -> Any:
        variables = {**created["variables"], VARIABLE: str(simulated), "PYTHONPATH": "/site", **own}
        mounts = {inside: (there, is_read_only) for inside, (there, is_read_only) in created["mounts"].items()}
        mounts |= {
            "/usr": ("/usr", True),
            "/site/mpsd": (str(ROOT / "mpsd"), True),
            str(simulated): (str(simulated), False),
        }
        wanted = cri.ContainerConfig(
            metadata=cri.ContainerMetadata(name=name),
            image=cri.ImageSpec(image=PAUSE),
            command=[PYTHON, *CLIENT],
            envs=[cri.KeyValue(key=key, value=value) for key, value in variables.items()],
            mounts=[
                cri.Mount(container_path=inside, host_path=there, readonly=ro) for inside, (there, ro) in mounts.items()
            ],
            log_path=f"{name}.log",
            linux=cri.LinuxContainerConfig(
                security_context=cri.LinuxContainerSecurityContext(run_as_user=cri.Int64Value(value=USER))
            ),
            CDI_devices=[cri.CDIDevice(name=each) for each in created["cdi_devices"]],
        )
        request = cri.CreateContainerRequest(pod_sandbox_id=sandbox, config=wanted, sandbox_config=config)
        made = call("CreateContainer", request, "CreateContainerResponse").container_id
        call("StartContainer", cri.StartContainerRequest(container_id=made), "StartContainerResponse")
        log = Path(config.log_directory, f"{name}.log")
        line = wait_until(lambda: log.read_text().partition("\n")[0], what="its first line", not_yet=(OSError,))
        return json.loads(line.split(" ", 3)[3])

    pod = cluster.create({"main": {SLICE: 25}})
    created = cluster.order("start", pod=pod.uid, container="main")
    assert created["cdi_devices"] == ["mpsd.internal/container=lease"]
    options = cri.NamespaceOption(network=ON_THE_NODE)
    config = cri.PodSandboxConfig(
        metadata=cri.PodSandboxMetadata(name="pod", uid=pod.uid, namespace="default"),
        log_directory=str(containerd.home / "logs"),
        linux=cri.LinuxPodSandboxConfig(
            cgroup_parent=f"/{pod.group.relative_to(cluster.top.parent)}",
            security_context=cri.LinuxSandboxSecurityContext(namespace_options=options),
        ),
    )
    sandbox = call("RunPodSandbox", cri.RunPodSandboxRequest(config=config), "RunPodSandboxResponse").pod_sandbox_id
    with pytest.raises(grpc.RpcError) as refused:
        container(config, sandbox, "greedy", created, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="90")
    assert "remove CUDA_MPS_ACTIVE_THREAD_PERCENTAGE from the env of the container" in str(refused.value)
    cluster.stop_plugin()
    hello = container(config, sandbox, "main", created)
    assert (hello["mps"], hello["active_thread_percentage"]) == (True, 25.0)
    assert [each["owner"]["uid"] for each in cluster.leases()] == [USER]
