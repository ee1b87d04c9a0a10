"""The files for Kubernetes, Compose and systemd match their schemas, and contain everything that mpsd needs."""

import shlex
import subprocess
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest

from mpsd.core.configuration.document import parse
from mpsd.core.settings import WantedComputeMode
from tests.container import quadlet
from tests.container.manifests import CONTAINER, KUBERNETES, documents, overlay, pod
from tests.tools import needed

pytestmark = pytest.mark.thorough

SYSTEMD: Final = CONTAINER.parent / "systemd"

VERSIONS: Final = ("1.29", "1.37")
"""Versions of Kubernetes: the first with sidecar containers, and the newest in kubernetes-validate 1.37."""

NOBODY: Final = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def mpsd_in(spec: Any) -> Any:
    """Return mpsd's container in a pod."""
    return next(each for each in (*spec["containers"], *spec.get("initContainers", ())) if each["name"] == "mpsd")


def mounts(container: Any) -> dict[str, Any]:
    return {each["mountPath"]: each for each in container["volumeMounts"]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["daemonset", "sidecar"])
def test_schema(name: str, version: str) -> None:
    """Every object is valid for this Kubernetes, and has no unknown field."""
    for each in overlay(name).values():
        kubernetes_validate.validate(each, version, strict=True)


def test_schema_of_the_example() -> None:
    """The pod that uses the DaemonSet is valid too; and a wrong field would be detected."""
    (application,) = documents(KUBERNETES / "examples" / "application.yaml")
    kubernetes_validate.validate(application, VERSIONS[0], strict=True)
    application["spec"]["hostPIDs"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(application, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", ["daemonset", "sidecar"])
def test_what_mpsd_needs(name: str) -> None:
    """mpsd's pod has the host's pids, privileges, time to drain, and no access to the API server.

    Only a stop ends it.
    """
    spec, container = pod(name), mpsd_in(pod(name))
    assert spec["hostPID"]
    assert not spec["automountServiceAccountToken"]
    assert "serviceAccountName" not in spec
    assert spec["terminationGracePeriodSeconds"] >= 600
    assert container["securityContext"]["privileged"]
    assert container["args"][:2] == ["run", "--stop-daemons-on-exit"]
    assert container["readinessProbe"]["exec"]["command"] == ["mpsctl", "status"]
    assert "livenessProbe" not in container
    assert ("startupProbe" in container) == (name == "sidecar")
    assert "limits" not in container["resources"]
    images = {each["image"] for each in (*spec["containers"], *spec.get("initContainers", ()))}
    assert images == {"localhost/mpsd:latest"}
    volumes = {each["name"] for each in spec["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
    assert not (overlay(name).keys() & {"ServiceAccount", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"})


@pytest.mark.parametrize("name", ["daemonset", "device-plugin", "dra", "sidecar"])
def test_programs_are_in_the_image(name: str) -> None:
    """Probes call programs of the image, in which little but mpsd is: a probe without its program never succeeds.

    The end of a container with a probe has its last words as its message.
    """
    spec = next(
        each["spec"]["template"]["spec"]
        for path in sorted((KUBERNETES / "overlays" / name).glob("d*.yaml"))
        for each in documents(path)
    )
    probed = [each for each in (*spec["containers"], *spec.get("initContainers", ())) if "readinessProbe" in each]
    kinds = ("readinessProbe", "startupProbe", "livenessProbe")
    probes = [each[kind]["exec"]["command"][0] for each in probed for kind in kinds if kind in each]
    assert probes
    assert {each["terminationMessagePolicy"] for each in probed} == {"FallbackToLogsOnError"}
    assert {*probes} <= {"mpsctl", "sh"}


def test_daemonset() -> None:
    """The DaemonSet runs only on labelled nodes, is not evicted, and its updates end no client.

    All share one /dev/shm.
    """
    objects = overlay("daemonset")
    assert objects["DaemonSet"]["spec"]["updateStrategy"] == {"type": "OnDelete"}
    spec = pod("daemonset")
    assert spec["nodeSelector"] == {"mpsd.internal/sharing": "true"}
    assert spec["priorityClassName"] == "system-node-critical"
    assert objects["ResourceQuota"]["spec"]["scopeSelector"]["matchExpressions"][0]["values"] == [
        spec["priorityClassName"]
    ]
    assert {"operator": "Exists", "effect": "NoExecute"} in spec["tolerations"]
    assert spec["hostIPC"]
    selector = objects["DaemonSet"]["spec"]["selector"]["matchLabels"]
    assert selector.items() <= objects["DaemonSet"]["spec"]["template"]["metadata"]["labels"].items()


def test_sidecar() -> None:
    """The sidecar starts before the application and ends after it, and otherwise equals the DaemonSet's container."""
    spec, container = pod("sidecar"), mpsd_in(pod("sidecar"))
    assert spec["initContainers"][-1] == container
    assert container.pop("restartPolicy") == "Always"
    assert container.pop("startupProbe")["exec"]["command"] == ["mpsctl", "config"]
    other = mpsd_in(pod("daemonset"))
    theirs, own = (each.pop("volumeMounts") for each in (other, container))
    assert container == other
    (alone,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    template = overlay("sidecar")["Deployment"]["spec"]["template"]
    assert alone["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert alone["namespaceSelector"] == {}
    assert spec["nodeSelector"] != pod("daemonset")["nodeSelector"]
    assert [each for each in own if each["mountPath"] != "/dev/shm"] == theirs


@pytest.mark.parametrize("of", ["sidecar", "daemonset"])
def test_application(of: str) -> None:
    """An application has no rights, the runtime directory at the same path and read-only, and the servers' /dev/shm."""
    (example,) = documents(KUBERNETES / "examples" / "application.yaml")
    spec = pod("sidecar") if of == "sidecar" else example["spec"]
    (container,) = (each for each in spec["containers"] if each["name"] == "application")
    assert container["securityContext"] == NOBODY
    assert container["command"][:4] == ["mpsctl", "run", "--fraction", "0.2"]
    assert mounts(container)["/run/mpsd"]["readOnly"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in container["env"]
    volumes = {each["name"]: each for each in spec["volumes"]}
    shared = volumes[mounts(container)["/dev/shm"]["name"]]
    if of == "sidecar":
        assert mounts(mpsd_in(spec))["/dev/shm"]["name"] == shared["name"]
    else:
        assert shared["hostPath"]["path"] == "/dev/shm"
        assert spec["nodeSelector"] == pod("daemonset")["nodeSelector"]
        theirs = {each["name"]: each for each in pod("daemonset")["volumes"]}
        assert volumes["run"]["hostPath"]["path"] == theirs["run"]["hostPath"]["path"]


def test_configuration() -> None:
    """Every configuration for a container closes the GPUs to programs that miss MPS."""
    (values,) = documents(KUBERNETES / "chart" / "values.yaml")
    shipped = {
        "base": overlay("daemonset")["ConfigMap"]["data"]["mpsd.toml"],
        "metrics": (KUBERNETES / "overlays" / "metrics" / "mpsd.toml").read_text(),
        "chart": values["mpsd"]["config"],
        "compose": (CONTAINER / "compose" / "mpsd" / "mpsd.toml").read_text(),
        "quadlet": (CONTAINER / "quadlet" / "mpsd.toml").read_text(),
    }
    modes = {name: parse(text).daemon.compute_mode for name, text in shipped.items()}
    assert modes == dict.fromkeys(shipped, WantedComputeMode.EXCLUSIVE_PROCESS)


def test_compose() -> None:
    """Compose has what mpsd needs, a stop that waits, the image's health check, and an application without rights."""
    services = documents(CONTAINER / "compose" / "compose.yaml")[0]["services"]
    mpsd, application = services["mpsd"], services["application"]
    assert (mpsd["privileged"], mpsd["pid"], mpsd["ipc"], mpsd["stop_grace_period"]) == (True, "host", "host", "1h")
    assert (
        f"CMD {str(mpsd['healthcheck']['test'][1:]).replace(chr(39), chr(34))}"
        in (CONTAINER / "Containerfile").read_text()
    )
    assert "./mpsd:/etc/mpsd:ro" in [each.partition(" ")[0] for each in mpsd["volumes"]]
    assert application["depends_on"] == {"mpsd": {"condition": "service_healthy"}}
    assert application["entrypoint"][:4] == ["mpsctl", "run", "--fraction", "0.2"]
    assert (application["cap_drop"], application["ipc"]) == (["ALL"], "host")
    assert application["volumes"] == ["/run/mpsd:/run/mpsd:ro"]
    assert application["environment"] == {"NVIDIA_VISIBLE_DEVICES": "all"}


def copies_its_configuration(before: list[str], tmp_path: Path) -> None:
    """Check that a unit copies its configuration before its first start, and leaves one that exists as it is."""
    (command,) = (each for each in before if "mpsd.toml" in each)
    command = command.replace("/etc/containers/systemd", str(CONTAINER / "quadlet"))
    copied, own = tmp_path / "mpsd.toml", "# an operator's own\n"
    for expected in ((CONTAINER / "quadlet" / "mpsd.toml").read_text(), own):
        subprocess.run(shlex.split(command.replace("/etc/mpsd", str(tmp_path))), check=True)
        assert copied.read_text() == expected
        copied.write_text(own)


def test_quadlet(tmp_path: Path) -> None:
    """podman's generator makes units that systemd accepts, with the same properties, and matching timeouts."""
    made = quadlet.units(CONTAINER / "quadlet")
    units: dict[str, dict[str, list[str]]] = {}
    for name, text in made.items():
        (tmp_path / name).write_text(text)
        lines = [line.partition("=") for line in text.splitlines() if not line.startswith("#")]
        units[name] = {key: [value for other, _, value in lines if other == key] for key, _, _ in lines}
    mpsd, application = units["mpsd.service"], units["application.service"]
    (started,) = (shlex.split(each) for each in mpsd["ExecStart"])
    assert {"--privileged", "--pid=host", "--ipc=host", "--sdnotify=container"} <= set(started)
    assert started[started.index("--health-cmd") + 1] == "mpsctl status"
    (timeout,) = (int(each.partition("=")[2]) for each in started if each.startswith("--stop-timeout="))
    assert int(mpsd["TimeoutStopSec"][0]) > timeout
    (service,) = (line for line in (SYSTEMD / "mpsd.service").read_text().splitlines() if "RestartPrevent" in line)
    assert service == f"RestartPreventExitStatus={mpsd['RestartPreventExitStatus'][0]}"
    copies_its_configuration(mpsd["ExecStartPre"], tmp_path)
    (started,) = (shlex.split(each) for each in application["ExecStart"])
    assert "--entrypoint=mpsctl localhost/mpsd run --fraction 0.2 " in " ".join(started)
    assert started[started.index("--cap-drop") + 1] == "all"
    assert application["Requires"] == ["mpsd.service"]
    analyze = needed("systemd-analyze", "systemd")
    command = [analyze, "verify", "--man=no", *(str(tmp_path / name) for name in made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
