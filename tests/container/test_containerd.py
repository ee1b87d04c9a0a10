"""Leases of containers, by CDI, in containerd and Docker: their own reading of a device, and kills at any moment."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.containers import cdi
from mpsd.simulator.devices import VARIABLE
from mpsd.system.files import cdi_directory
from tests.container.contained import Contained
from tests.container.containerd import Containerd
from tests.container.docker import Docker
from tests.container.leased import (
    CLIENT,
    PYTHON,
    SLEEPS,
    claim,
    container_name,
    ended,
    is_gone,
    leasing_node,
    let_in,
    parent,
)
from tests.container.sidecar import USER
from tests.daemon.helpers import is_running
from tests.fork_server import ForkServer
from tests.harness import wait_until
from tests.kubernetes.conftest import kubernetes_fork_server
from tests.kubernetes.plugin.cluster import SLICE, StandIn
from tests.node import Node

__all__ = ["kubernetes_fork_server"]

pytestmark = [
    pytest.mark.container,
    pytest.mark.timeout(300),  # the first test fetches the programs
    pytest.mark.usefixtures("device_directory"),
]

ROOT: Final = Path(__file__).parents[2]


@pytest.fixture
def containerd(short_tmp: Path) -> Iterator[Containerd]:
    """Run a containerd; without one, the test skips, or fails where everything is required."""
    containerd = Containerd(short_tmp / "c")
    try:
        containerd.start()
        yield containerd
    finally:
        containerd.close()


@pytest.fixture
def node(short_tmp: Path, fork_server: ForkServer, containerd: Containerd) -> Iterator[Node]:
    """Start an mpsd on this machine, with simulated GPUs.

    At the end no device is left, whatever became of its containers.
    """
    with leasing_node(short_tmp, fork_server, containerd.remove_all) as node:
        yield node


def _bound(source: Path, destination: Path, how: str) -> str:
    return f"--mount=type=bind,src={source},dst={destination},options=rbind:{how}"


def command(containerd: Containerd, node: Node, files: Path, lease: str, name: str, *program: str) -> list[str]:
    """Return a command that runs Python in a container with a device: as a user, and with nothing else of mpsd's."""
    simulated = node.root / "run" / "simulated"
    options = [
        "--rm", f"--user={USER}:{USER}", f"--device={cdi.device_name(lease)}", "--env=PYTHONPATH=/site",
        f"--env={VARIABLE}={simulated}", _bound(Path("/usr"), Path("/usr"), "ro"),
        _bound(ROOT / "mpsd", Path("/site/mpsd"), "ro"), _bound(simulated, simulated, "rw"),
    ]  # fmt: skip
    return containerd.run(name, files, PYTHON, *program, options=options)


def running(containerd: Containerd, node: Node, files: Path, lease: str, *program: str) -> Contained:
    """Run a container with a device; its program takes commands."""
    name = container_name()
    return Contained(containerd, name, command(containerd, node, files, lease, name, *program))


def fails(containerd: Containerd, node: Node, files: Path, lease: str) -> str:
    """Run a container with a device, which must fail to start, and return the message."""
    done = subprocess.run(
        command(containerd, node, files, lease, container_name(), *SLEEPS),
        env=containerd.environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    return done.stderr


def test_share(containerd: Containerd, node: Node, files: Path) -> None:
    """A container has its share under MPS, attributed and verified, survives mpsd, and ends its lease."""
    lease = claim(node)
    with running(containerd, node, files, lease, *CLIENT) as client:
        assert (client.hello["mps"], client.hello["active_thread_percentage"]) == (True, 25.0)
        pid = containerd.pid(client.name)
        found = wait_until(
            lambda: (found := node.get(f"/v1/leases/{lease}").json)["clients"] and found,
            what="the client to be attributed",
        )
        (holder,) = found["holders"]
        assert (found["clients"], found["owner"]["uid"]) == ([pid], USER)
        assert (holder["kind"], holder["cgroup"]) == ("cgroup", f"/{containerd.group}/{client.name}")
        verified = node.mpsctl("verify", lease)
        assert verified.returncode == 0, verified.stdout
        assert USER in let_in(node)
        seen = containerd.call(
            "task", "exec", "--exec-id=look", client.name, "/usr/bin/ls", str(node.root / "run")
        ).stdout
        assert seen.split() == ["mps", "simulated"]
        assert "[already_claimed]" in fails(containerd, node, files, lease)
        node.end(signal.SIGKILL)
        node.start()
        (same,) = node.leases()
        assert (same["id"], same["clients"]) == (lease, [pid])
        containerd.call("task", "kill", "--signal=SIGKILL", client.name)
        assert client.process.wait(30) == 137
    assert f"its holder, control group {holder['cgroup']}" in ended(node, lease)["because"]
    assert "has ended" in fails(containerd, node, files, lease)


def test_killed(containerd: Containerd, node: Node, files: Path) -> None:
    """Without containerd or ctr, the container keeps its lease; without its shim, both end."""
    program = "print('{\"ok\": true}', flush=True); import time; time.sleep(600)"
    for victim in ("containerd", "ctr", "shim"):
        lease = claim(node)
        with running(containerd, node, files, lease, "-c", program) as client:
            assert client.hello["ok"]
            pid = containerd.pid(client.name)
            if victim == "containerd":
                containerd.end(signal.SIGKILL)
            else:
                killed = client.pid if victim == "ctr" else parent(pid)
                os.kill(killed, signal.SIGKILL)
                wait_until(partial(is_gone, killed), what=f"{victim} to die")
            if victim != "shim":
                assert is_running(pid)
                assert [each["id"] for each in node.leases()] == [lease]
                os.kill(pid, signal.SIGKILL)
            ended(node, lease)
            if victim == "containerd":
                containerd.start()


@pytest.fixture
def image(short_tmp: Path) -> Iterator[Path]:
    """Mount this machine's files as a container has those of its image: a file system of its own, at its own path."""
    place = short_tmp / "image"
    place.mkdir()
    mounted: list[Path] = []

    def mount(kind: str, options: str, where: Path) -> None:
        subprocess.run(["mount", "-t", kind, "-o", options, "mpsd-tests", str(where)], check=True)
        mounted.append(where)

    try:
        mount("tmpfs", "mode=755", place)
        for name in ("upper", "work", "root"):
            (place / name).mkdir()
        mount("overlay", f"lowerdir=/,upperdir={place}/upper,workdir={place}/work", place / "root")
        yield place / "root"
    finally:
        for each in reversed(mounted):
            subprocess.run(["umount", "--lazy", str(each)], check=True)


@pytest.fixture
def cluster(image: Path, containerd: Containerd, node: Node, kubernetes_fork_server: ForkServer) -> Iterator[StandIn]:
    """Run a stand-in for kubelet, and mpsd-kubernetes in a container with the rights of its manifest."""
    cluster = StandIn(node, node.root.parent / "kubelet", kubernetes_fork_server, settings={"HOOK": "auto"})
    try:
        cluster.start_kubelet()
        device_directory = cdi_directory.DEFAULT
        device_directory.mkdir(exist_ok=True)
        shown = (node.root, cluster.root, device_directory, Path("/sys/fs/cgroup"))
        variables = {**cluster.variables(), "MPSD_KUBERNETES_CDI_DIR": str(device_directory)}
        options = [
            "--detach", f"--with-ns=pid:/proc/{os.getpid()}/ns/pid", f"--log-uri=file://{cluster.root}/plugin.log",
            *(f"--cap-add=CAP_{each}" for each in cluster.capabilities),
            *(f"--env={name}={value}" for name, value in variables.items()),
            *(_bound(each, each, "rw") for each in shown),
        ]  # fmt: skip
        program = (sys.executable, "-m", "mpsd.kubernetes", *cluster.options)
        subprocess.run(
            containerd.run(container_name(), image, *program, options=options), env=containerd.environment, check=True
        )
        wait_until(
            lambda: cluster.healthy(SLICE), what=f"shares; its log is {cluster.root}/plugin.log", deadline=30,
            not_yet=(OSError,),
        )  # fmt: skip
        yield cluster
    finally:
        containerd.remove_all()
        cluster.close()


def test_out_of_an_image(image: Path, containerd: Containerd, cluster: StandIn, node: Node, files: Path) -> None:
    """The hook of mpsd-kubernetes, which is in a container only, opens a lease to a container's user before it starts.

    A container whose variables name more than its share fails, and says so.
    """
    (installed,) = cluster.log("hook_installed")
    assert installed["command"][0].startswith(f"{image}/")
    pod = cluster.create({"main": {SLICE: 25}})
    created = cluster.order("start", pod=pod.uid, container="main")
    simulated = node.root / "run" / "simulated"

    def run(name: str, **own: str) -> list[str]:
        variables = {**created["variables"], VARIABLE: str(simulated), "PYTHONPATH": "/site", **own}
        options = [
            "--rm", f"--user={USER}:{USER}", *(f"--device={each}" for each in created["cdi_devices"]),
            *(f"--env={variable}={value}" for variable, value in variables.items()),
            *(_bound(Path(there), Path(inside), "ro") for inside, (there, _) in created["mounts"].items()),
            _bound(Path("/usr"), Path("/usr"), "ro"), _bound(ROOT / "mpsd", Path("/site/mpsd"), "ro"),
            _bound(simulated, simulated, "rw"),
        ]  # fmt: skip
        group = f"/{pod.group.relative_to(cluster.top.parent)}/{name}"
        return containerd.run(name, files, PYTHON, *CLIENT, options=options, group=group)

    refused = subprocess.run(
        run(container_name(), CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="90"), env=containerd.environment,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert refused.returncode != 0
    assert "remove CUDA_MPS_ACTIVE_THREAD_PERCENTAGE from the env of the container" in refused.stderr
    name = container_name()
    with Contained(containerd, name, run(name)) as client:
        assert (client.hello["mps"], client.hello["active_thread_percentage"]) == (True, 25.0)
        (lease,) = cluster.held(pod)
        assert lease["owner"]["uid"] == USER


@pytest.fixture
def docker(short_tmp: Path, containerd: Containerd, files: Path) -> Iterator[Docker]:
    """Run a Docker with an image; without one, the test skips, or fails where everything is required."""
    docker = Docker(short_tmp / "d", containerd)
    try:
        docker.take_in(files)
        yield docker
    finally:
        docker.close()


def test_docker(containerd: Containerd, docker: Docker, node: Node) -> None:
    """`container run docker` gives a container its share, attributed and verified, until it ends."""
    simulated = node.root / "run" / "simulated"
    name = container_name()
    options = [
        f"--user={USER}", "--cap-drop=all", "--read-only", "--env=PYTHONPATH=/site", f"--env={VARIABLE}={simulated}",
        "--volume=/usr:/usr:ro", f"--volume={ROOT}/mpsd:/site/mpsd:ro", f"--volume={simulated}:{simulated}",
    ]  # fmt: skip
    run = docker.run(PYTHON, *CLIENT, options=[f"--name={name}", *options])
    mpsctl = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket)]
    with Contained(docker, name, [*mpsctl, "container", "run", "docker", "--fraction", "0.25", "--", *run]) as client:
        assert (client.hello["mps"], client.hello["active_thread_percentage"]) == (True, 25.0)
        pid = docker.pid(name)
        wait_until(lambda: node.leases()[0]["clients"] == [pid], what="the client to be attributed")
        (lease,) = node.leases()
        (holder,) = lease["holders"]
        assert (holder["kind"], lease["owner"]["uid"]) == ("cgroup", USER)
        assert holder["cgroup"].startswith(f"/{containerd.group}/")
        verified = node.mpsctl("verify", lease["id"])
        assert verified.returncode == 0, verified.stdout
        device = f"--device={cdi.device_name(lease['id'])}"
        again = docker.call("run", *docker.run(PYTHON, *SLEEPS, options=[device, *options]), check=False)
        assert "[already_claimed]" in again.stderr
        docker.call("kill", name)
        assert client.process.wait(30) == 137
    ended(node, lease["id"])
