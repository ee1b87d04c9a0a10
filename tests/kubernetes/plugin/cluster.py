"""A node of a cluster, for tests: kubelet, the plugin, and pods whose containers are processes in control groups.

`Cluster` is the interface of the tests; `StandIn` implements it with a stand-in for kubelet. A real kubelet has pods
and events too, so the same tests can run with another `Cluster`.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import pytest

from tests.container.manifests import capabilities
from tests.control_groups import mounted
from tests.fork_server import Child, ForkServer
from tests.harness import wait_until
from tests.node import Node

SLICE: Final = "nvidia.com/gpu.mps-slice"
CORE: Final = "nvidia.com/mps-core"
MEMORY: Final = "nvidia.com/mps-memory"

Requests = Mapping[str, Mapping[str, int]]
"""By container, the requested amount of each resource."""

SLEEPS: Final = ("sleep", "inf")


class RefusedError(Exception):
    """The text of the pod's event."""


class Pod(Protocol):
    """A pod on the node."""

    uid: str

    def start(self, container: str, command: Sequence[str] = SLEEPS, *, uid: int | None = None) -> "Container":
        """Start a container of it; raises RefusedError with the text of its event."""

    def delete(self) -> None:
        """End it, with all of its containers."""


class Cluster(Protocol):
    """A node with kubelet."""

    def healthy(self, resource: str) -> int:
        """Return how many devices can be allocated."""

    def create(self, requests: Requests) -> Pod:
        """Have a pod admitted; raises RefusedError with the text of its event."""


def end(process: "subprocess.Popen[str]") -> None:
    """Kill a process."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


@dataclass
class Container:
    """A container that was started."""

    name: str
    process: "subprocess.Popen[str]"
    variables: dict[str, str]
    mounts: dict[str, list[Any]]
    cdi_devices: list[str]
    annotations: dict[str, str]

    def end(self) -> None:
        end(self.process)


@dataclass
class StandInPod:
    """A pod on a stand-in's node."""

    cluster: "StandIn"
    uid: str
    group: Path
    containers: dict[str, Container] = field(default_factory=dict)
    sandbox: "subprocess.Popen[str] | None" = None
    made: int = 0

    def start(
        self,
        container: str,
        command: Sequence[str] = SLEEPS,
        *,
        uid: int | None = None,
        more: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        may_read: bool = False,
        is_hooked: bool = True,
        before: Callable[[], None] = lambda: None,
    ) -> Container:
        """Start a container: first kubelet, which makes the pod's group and sandbox, then the runtime.

        `env` are the variables of the pod's own manifest, which kubelet lets win. With `may_read`, the
        program's files need not be readable for the user, at first. `is_hooked`: whether CDI devices are passed on.
        `before` is called between kubelet and the runtime. Raises RefusedError where kubelet, a plugin or a hook
        refuses the container.
        """
        self.begin()
        created = self.cluster.order("start", pod=self.uid, container=container)
        before()
        self.made += 1
        group = self.group / f"{self.made:064x}"
        group.mkdir()
        user = () if uid is None else ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
        variables = {"PATH": os.environ["PATH"], **(more or {}), **created["variables"], **(env or {})}
        # Like a runtime: no process has the container's variables before it runs as the container's user.
        given = [f"{name}={value}" for name, value in variables.items()]
        program = ["env", *given, *user, *command] if may_read else [*user, "env", *given, *command]
        process = subprocess.Popen(
            ["sh", "-c", 'echo $$ >"$0" && read go && exec "$@"', str(group / "cgroup.procs"), *program],
            env={"PATH": os.environ["PATH"]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        wait_until(
            lambda: str(process.pid) in (group / "cgroup.procs").read_text().split(),
            what=f"{process.pid} to be in its control group",
        )
        mounts = {inside: outside for inside, (outside, _) in created["mounts"].items()}
        for device in [
            each for each in created["cdi_devices"] if is_hooked and (self.cluster.edits(each) or {}).get("hooks")
        ]:
            done = call_hook(self.cluster, device, process.pid, uid=uid or 0, variables=variables, mounts=mounts)
            if done.returncode:
                end(process)
                raise RefusedError(f"error running createRuntime hook: {done.stderr}")
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        started = Container(
            container, process, variables, created["mounts"], created["cdi_devices"], created["annotations"]
        )
        self.containers[container] = started
        return started

    def begin(self) -> None:
        """Make the pod's control group, with its sandbox, like kubelet before it creates its first container."""
        if self.sandbox is None:
            self.group.mkdir(parents=True, exist_ok=True)
            pause = self.group / f"{0:064x}"
            pause.mkdir()
            self.sandbox = subprocess.Popen(
                ["sh", "-c", 'echo $$ >"$0" && exec sleep inf', str(pause / "cgroup.procs")], text=True
            )
            pid = str(self.sandbox.pid)
            wait_until(lambda: pid in (pause / "cgroup.procs").read_text().split(), what="the sandbox to run")

    def delete(self) -> None:
        """End it, like kubelet: its processes, then its control group; the API server forgets it last."""
        for each in self.containers.values():
            each.end()
        self.containers.clear()
        if self.sandbox is not None:
            self.sandbox.kill()
            self.sandbox.wait()
            self.sandbox = None
        self.cluster.forget(self)
        self.cluster.remove(self.group)
        self.cluster.pods.pop(self.uid, None)


@dataclass
class StandIn:
    """A node with the stand-in for kubelet, and the plugin."""

    node: Node
    root: Path
    fork_server: ForkServer
    """The one of kind `kubernetes`."""
    release: str = "1.36"
    settings: Mapping[str, str] = field(default_factory=dict)
    durations: Mapping[str, float] = field(default_factory=dict)
    """Constants of the plugin that have other values in this one, by their full names."""
    capabilities: Sequence[str] = field(default_factory=partial(capabilities, "device-plugin"))
    """All capabilities of the plugin: those of its manifest."""
    kubelet: Child | None = None
    plugin: Child | None = None
    pods: dict[str, StandInPod] = field(default_factory=dict)
    top: Path = field(init=False)

    def __post_init__(self) -> None:
        """Find the control groups of pods."""
        found = mounted("name=systemd") or mounted("cgroup2")
        if found is None or not os.access(found, os.W_OK):
            pytest.skip("no control group can be made here")
        self.top = found / f"mt-{os.getpid()}-{self.root.parent.name}"

    @property
    def resources(self) -> list[str]:
        offered = {"slices": [SLICE], "memory": [MEMORY], "threads-and-memory": [CORE, MEMORY]}
        names, more = (
            offered[self.settings.get("RESOURCES", "slices")],
            self.settings.get("PROCESSES", "1").split(",")[1:],
        )
        return [*names, *(f"{name}.processes-{number}" for name in names for number in more)]

    # -- processes -----------------------------------------------------------------------------------------------------

    def start_kubelet(self) -> None:
        """Start kubelet; it empties its directory except for its checkpoint."""
        self.root.mkdir(exist_ok=True)
        (self.root / "orders.sock").unlink(missing_ok=True)
        self.kubelet = self.fork_server.start(
            [str(self.root), self.release], self.root / "kubelet.log", os.environ, program="kubelet"
        )
        wait_until(self._knows_its_pods, what="kubelet to listen", deadline=20, not_yet=(OSError,))

    def _knows_its_pods(self) -> bool:
        self.order("active", pods=[*self.pods])
        return True

    def start_plugin(self, *arguments: str) -> None:
        """Start the plugin, without waiting."""
        self.root.mkdir(exist_ok=True)
        self.plugin = self.fork_server.start(
            [*self.options, *arguments],
            self.root / "plugin.log",
            {**os.environ, **self.variables()},
            program="mpsd-kubernetes",
            durations=self.durations,
            capabilities=self.capabilities,
        )

    @property
    def options(self) -> list[str]:
        """Return the plugin's options."""
        return ["--socket", str(self.node.socket), "--kubelet-dir", str(self.root)]

    def variables(self) -> dict[str, str]:
        """Return the plugin's environment."""
        prefix = "MPSD_KUBERNETES_"
        # Most tests are about a kubelet that passes no CDI device on, such as 1.20, or a container that has none.
        own = {"CGROUP_ROOT": f"/{self.top.name}", "CDI_DIR": str(self.root / "cdi"), "HOOK": "never"}
        given = {**own, **self.settings}
        return {f"{prefix}{name}": value for name, value in given.items()}

    def start(self) -> "StandIn":
        """Start both, and wait until the node offers devices."""
        self.start_kubelet()
        self.start_plugin()
        self.await_devices()
        return self

    def await_devices(self) -> None:
        """Wait until the node offers devices."""
        wait_until(
            lambda: self.is_alive() and all(map(self.healthy, self.resources)),
            what=f"the plugin to register; its log is {self.root / 'plugin.log'}",
            deadline=20,
            not_yet=(OSError,),
        )

    def await_registrations(self, number: int) -> None:
        """Wait until the plugin has registered with kubelet so often."""
        wait_until(lambda: len(self.log("resource_registered")) >= number, what=f"{number} registrations")

    def is_alive(self) -> bool:
        """Fail if the plugin has ended."""
        assert self.plugin is not None
        assert self.plugin.poll() is None, (self.root / "plugin.log").read_text()
        return True

    def kill(self, which: str) -> None:
        """Kill kubelet or the plugin."""
        process = getattr(self, which)
        process.kill()
        process.wait(30)
        setattr(self, which, None)

    def close(self) -> None:
        """End everything."""
        for pod in list(self.pods.values()):
            with contextlib.suppress(OSError):
                pod.delete()
        for process in (self.plugin, self.kubelet):
            if process is not None:
                process.kill()
                process.wait(30)
        self.remove(self.top)

    def stop_plugin(self) -> None:
        """Stop the plugin until it is sent SIGCONT."""
        assert self.plugin is not None
        self.plugin.send_signal(signal.SIGSTOP)

    def end_plugin(self, number: int = signal.SIGTERM) -> int:
        """Have the plugin end, and return its exit status."""
        assert self.plugin is not None
        self.plugin.send_signal(number)
        status = self.plugin.wait(20)
        self.plugin = None
        return status

    # -- what kubelet says ---------------------------------------------------------------------------------------------

    def order(self, verb: str, **arguments: Any) -> Any:
        """Send the stand-in an order. Raises RefusedError, and OSError if it is killed meanwhile."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(os.fspath(self.root / "orders.sock"))
            connection.sendall(json.dumps({"verb": verb, "arguments": arguments}).encode() + b"\n")
            with connection.makefile() as file:
                line = file.readline()
        if not line:
            raise ConnectionResetError("kubelet has died")
        answer = json.loads(line)
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return answer["ok"]

    def healthy(self, resource: str) -> int:
        """Return how many devices can be allocated."""
        return sum(self.order("devices").get(resource, {}).values())

    def create(self, requests: Requests, *, init: Sequence[str] = ()) -> StandInPod:
        """Have a pod admitted; `init` are those of its containers that end before the others start."""
        uid = str(uuid.uuid4())
        pod = StandInPod(self, uid, self.group(uid))
        self.order("admit", pod=uid, name=f"pod-{len(self.pods)}", containers=requests, init=[*init])
        self.pods[uid] = pod
        pod.begin()
        return pod

    def group(self, uid: str) -> Path:
        """Return the control group of a pod."""
        return self.top / "kubepods" / "burstable" / f"pod{uid}"

    def forget(self, pod: StandInPod) -> None:
        """Inform kubelet that a pod has ended."""
        with contextlib.suppress(OSError):
            self.order("ended", pod=pod.uid)

    def remove(self, group: Path) -> None:
        """Remove a control group with those below it; killed processes take a moment to leave."""

        def gone() -> bool:
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
            return not group.exists()

        wait_until(gone, what=f"{group} to be empty")

    # -- what the container runtime does -------------------------------------------------------------------------------

    def edits(self, device: str) -> dict[str, Any] | None:
        """Return the changes of a CDI device to a container; None for the GPU itself, which no file here describes.

        Raises RefusedError for a device of mpsd's without a file.
        """
        kind, _, name = device.partition("=")
        for path in (self.root / "cdi").glob("*.json"):
            document = json.loads(path.read_text())
            for each in document["devices"] if document["kind"] == kind else []:
                if each["name"] == name:
                    found: dict[str, Any] = each["containerEdits"]
                    return found
        if kind.startswith("nvidia.com/"):
            return None
        raise RefusedError(f"unresolvable CDI devices {device}")

    # -- what mpsd and the plugin say ----------------------------------------------------------------------------------

    def leases(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.node.leases()
        return found

    def lease(self, lease: str) -> dict[str, Any]:
        """Return a lease, which may have ended."""
        found: dict[str, Any] = self.node.get(f"/v1/leases/{lease}").json
        return found

    def held(self, pod: Pod) -> list[dict[str, Any]]:
        """Return the leases that a pod holds."""
        return [each for each in self.leases() if any(uid_of(holder) == pod.uid for holder in each["holders"])]

    def await_held(self, pod: Pod, number: int = 1) -> list[dict[str, Any]]:
        """Wait until a pod holds so many leases."""
        return wait_until(
            lambda: found if len(found := self.held(pod)) == number else None,
            what=f"pod {pod.uid} to hold {number} leases; the plugin's log is {self.root / 'plugin.log'}",
        )

    def log(self, event: str) -> list[dict[str, Any]]:
        """Return the plugin's log lines about an event."""
        lines = (self.root / "plugin.log").read_text().splitlines()
        return [line for line in map(json.loads, filter(_is_whole, lines)) if line["event"] == event]


def call_hook(
    cluster: StandIn,
    device: str,
    pid: int,
    *,
    uid: int = 0,
    variables: Mapping[str, str] | None = None,
    mounts: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Call the hook of a device like a container runtime, for a process that is in its container's group already.

    `variables` and `mounts` are those of the container beside the device's own.
    """
    edits = cluster.edits(device)
    assert edits is not None
    (hook,) = edits["hooks"]
    bundle = cluster.root / f"bundle-{pid}"
    bundle.mkdir(exist_ok=True)
    own = {each["containerPath"]: each["hostPath"] for each in edits.get("mounts", ())}
    listed = [{"destination": inside, "source": there} for inside, there in {**(mounts or {}), **own}.items()]
    given = [f"{name}={value}" for name, value in (variables or {}).items()]
    process = {"user": {"uid": uid, "gid": uid}, "env": [*given, *edits.get("env", ())]}
    (bundle / "config.json").write_text(json.dumps({"process": process, "mounts": listed}))
    return subprocess.run(
        hook["args"],
        executable=hook["path"],
        input=json.dumps({"pid": pid, "bundle": str(bundle)}),
        env=dict(each.split("=", 1) for each in hook["env"]),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd="/",
    )


def _is_whole(line: str) -> bool:
    return line.startswith("{") and line.endswith("}")


def uid_of(holder: Mapping[str, Any]) -> str:
    """Return the uid of the pod whose control group is this holder."""
    name = (holder.get("cgroup") or "").rpartition("/")[2]
    return name.removeprefix("pod") if name.startswith("pod") else ""
