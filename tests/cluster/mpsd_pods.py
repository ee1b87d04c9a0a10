"""mpsd on the cluster: its DaemonSet on a node with simulated GPUs, and the pods that use it."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mpsd.simulator.devices import VARIABLE
from tests.cluster.cluster import Cluster
from tests.cluster.node import NODE
from tests.cluster.rendering import kustomized, only
from tests.container.images import IMAGE
from tests.container.manifests import KUBERNETES, documents

_TREE: Final = Path(__file__).resolve().parents[2]

NAMESPACE: Final = "mpsd"
LABEL: Final = "mpsd.internal/sharing=true"

SIMULATED: Final = "/run/mpsd/simulated"

CLIENT: Final = ("python3", "-m", "mpsd.simulator.client")
"""The program of a client's container; with a silent stdin it stays."""


class Mpsd:
    """The DaemonSet of an overlay, on a node with its label."""

    def __init__(self, cluster: Cluster, overlay: str, *, gpus: int = 2, mpsd: str = "", plugin: str = "") -> None:
        """Give each node so many simulated GPUs; the texts are the configuration of mpsd, and of mpsd-kubernetes."""
        self.cluster = cluster
        self.objects = kustomized(overlay)
        self._prepare(only(self.objects, "DaemonSet"), gpus)
        files = only(self.objects, "ConfigMap")["data"]
        if mpsd:
            files["mpsd.toml"] = mpsd
        files["kubernetes.toml"] = f'{plugin}\ncgroup_root = "/{cluster.name}"\n'

    @staticmethod
    def _prepare(daemonset: Any, gpus: int) -> None:
        """Adapt it to work without GPUs, and without a registry."""
        for container in daemonset["spec"]["template"]["spec"]["containers"]:
            assert container["image"] == f"{IMAGE}:latest"
            container["imagePullPolicy"] = "Never"
            if container["name"] == "mpsd":
                container["args"] += ["--simulate", str(gpus)]

    def install(self) -> None:
        """Apply it, label the node, and wait until its pod is ready."""
        self.apply()
        self.ready()

    def apply(self) -> None:
        """Apply it, and label the node."""
        self.cluster.apply(*(each for each in self.objects if each["kind"] == "Namespace"))
        self.cluster.apply(*(each for each in self.objects if each["kind"] != "Namespace"))
        self.cluster.kubectl("label", "--overwrite", "node", NODE, LABEL)

    def ready(self) -> Any:
        return self.cluster.wait("mpsd's pod to be ready", self._find_ready)

    def _find_ready(self) -> Any:
        pods = [each for each in self.pods() if "deletionTimestamp" not in each["metadata"]]
        if len(pods) != 1:
            return None
        conditions = {each["type"]: each["status"] for each in pods[0]["status"].get("conditions", ())}
        return pods[0] if conditions.get("Ready") == "True" else None

    def pods(self) -> list[Any]:
        """Return its pods, including terminating ones."""
        found = self.cluster.get("pods", f"--namespace={NAMESPACE}", "--selector=app.kubernetes.io/name=mpsd")
        items: list[Any] = found["items"]
        return items

    @property
    def name(self) -> str:
        (pod,) = self.pods()
        return str(pod["metadata"]["name"])

    def mpsctl(self, *arguments: str, check: bool = True) -> str:
        """Call mpsctl on the node, as an administrator there: that needs no kubelet."""
        program = (sys.executable, "-m", "mpsd.cli.main", "--socket=/run/mpsd/mpsd.sock")
        return self.cluster.run(*program, *arguments, check=check, cwd=_TREE).stdout

    def execute(self, *command: str) -> str:
        """Run a command in its container, like an operator."""
        inside = (f"--namespace={NAMESPACE}", self.name, "--container=mpsd", "--")
        return self.cluster.kubectl("exec", *inside, *command)

    def ask(self, what: str) -> Any:
        """Return the list of `mpsctl WHAT`."""
        return json.loads(self.mpsctl(what, "--output=json"))[what]

    def try_ask(self, what: str) -> Any:
        """Return the same, or None if mpsd does not answer."""
        said = self.mpsctl(what, "--output=json", check=False)
        return json.loads(said)[what] if said else None

    def remove(self) -> None:
        """Remove it, with or without clients, and wait until it is gone."""
        self.cluster.kubectl("label", "node", NODE, LABEL.partition("=")[0] + "-")
        self.cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
        self.cluster.kubectl("delete", "pods", f"--namespace={NAMESPACE}", "--all", "--force", "--grace-period=0")
        there = ("get", "namespace", NAMESPACE, "--ignore-not-found", "--output=name")
        self.cluster.wait("the namespace to be gone", lambda: not self.cluster.kubectl(*there))
        self.cluster.run("rm", "-r", "/run/mpsd", "/var/lib/mpsd", "/var/log/mpsd")


def pod(name: str, resources: Mapping[str, int], *command: str, uid: int | None = None, **more: Any) -> Any:
    """Return a pod that requests a share from the cluster, like an operator's; with a uid, one without rights."""
    container: dict[str, Any] = {
        "name": "main", "image": f"{IMAGE}:latest", "imagePullPolicy": "Never",
        "command": list(command or CLIENT), "stdin": not command,
        "resources": {"limits": {name: str(number) for name, number in resources.items()}},
    }  # fmt: skip
    spec: dict[str, Any] = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False,
        "containers": [container], **more,
    }  # fmt: skip
    if uid is not None:
        container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        seccomp = {"type": "RuntimeDefault"}
        spec["securityContext"] = {"runAsNonRoot": True, "runAsUser": uid, "seccompProfile": seccomp}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def application(name: str, **more: Any) -> Any:
    """Return the example's pod that requests 20 % of a GPU from mpsd itself, with a client of MPS."""
    (pod,) = documents(KUBERNETES / "examples" / "application.yaml")
    pod["metadata"]["name"] = name
    (container,) = pod["spec"]["containers"]
    container.update(image=f"{IMAGE}:latest", imagePullPolicy="Never", args=list(CLIENT), stdin=True, **more)
    with_simulated_gpus(pod["spec"])
    return pod


def with_simulated_gpus(spec: Any) -> None:
    """Give a pod's containers the node's simulated GPUs, as a container runtime gives them device files."""
    spec.setdefault("volumes", []).append({"name": "simulated", "hostPath": {"path": SIMULATED, "type": "Directory"}})
    for container in spec["containers"]:
        container.setdefault("env", []).append({"name": VARIABLE, "value": SIMULATED})
        container.setdefault("volumeMounts", []).append({"name": "simulated", "mountPath": SIMULATED})
