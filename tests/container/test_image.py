"""The image, and mpsd in it: as a privileged sidecar, with clients in containers without rights."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.system.processes import proc
from tests import real
from tests.container.images import IMAGE
from tests.container.manifests import overlay, pod
from tests.container.podman import Podman
from tests.container.sidecar import CONTROL, PRIVILEGED, USER, Sidecar
from tests.daemon.helpers import event
from tests.driven_program import DrivenProgram
from tests.harness import look_at, wait_until
from tests.node import Node

pytestmark = [
    pytest.mark.real_daemon(535),
    pytest.mark.container,
    pytest.mark.timeout(300),  # the first test waits for the image, and perhaps for Debian's mirror
]

LARGEST: Final = 110_000_000
"""Bytes of the unpacked image, a quarter of them gRPC; with BASE the official image of Python has twice as many."""

PROOF: Final = "anybody-there"
"""An unknown command, which every control daemon echoes: the echo proves that the command arrived."""

HOLDS: Final = """
import json, os, sys
print(json.dumps({"ok": True, "pid": os.getpid(), "env": dict(os.environ)}), flush=True)
sys.stdin.readline()
"""


def lease_of(node: Node, pid: int) -> dict[str, Any] | None:
    """Return the lease that this process holds."""
    leases = node.leases()
    return next((each for each in leases if each["owner"]["pid"] == pid), None)


@pytest.fixture(scope="module")
def files(podman: Podman, image: str) -> Iterator[Path]:
    """Mount the image, and yield the path."""
    yield Path(podman.call("image", "mount", image).stdout.strip())
    podman.call("image", "umount", image)


class TestImage:
    def test_reproducible(self, podman: Podman, image: str, build: Callable[[str], str]) -> None:
        """Two builds from the same inputs, without a network, are the same image, to the last byte."""
        again = build(f"{IMAGE}:again")
        assert again == podman.call("image", "inspect", image, "--format={{.Id}}").stdout.strip()

    def test_what_it_says(self, podman: Podman, image: str) -> None:
        """The image's metadata name its purpose, its stop signal, and its needs of NVIDIA's container runtime."""
        config = json.loads(podman.call("image", "inspect", image).stdout)[0]["Config"]
        assert config["Labels"]["org.opencontainers.image.title"] == "mpsd"
        assert re.fullmatch(r"[0-9a-f]{40}|unknown", config["Labels"]["org.opencontainers.image.revision"])
        assert config["StopSignal"] == "SIGRTMIN+3"
        assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in config["Env"]

    def test_small(self, podman: Podman, image: str, files: Path) -> None:
        """The image has no compiler, no installer with its lists, no tests, and no file of NVIDIA's driver."""
        assert int(podman.call("image", "inspect", image, "--format={{.Size}}").stdout) < LARGEST
        there = [str(each.relative_to(files)) for each in files.rglob("*")]
        installers = (
            r"s?bin/(gcc|cc|ld|as|pip|apt|dpkg|perl)[\d.]*(-\w+)?|site-packages/(pip|setuptools)|var/lib/apt/.+"
        )
        tests, drivers = r"(mpsd|python3[\d.]*|site-packages/\w+)/tests?", r"nvidia-[\w-]+|lib(cuda|nvidia)[\w.-]*"
        unwanted = re.compile(f"(^|/)({installers}|{tests}|{drivers})$")
        assert [each for each in there if unwanted.search(each)] == []
        assert "opt/mpsd/bin/mpsd-init" in there

    def test_files(self, files: Path) -> None:
        """No file raises privileges, or is writable for all; imported modules are compiled."""
        found = {each: each.lstat() for each in files.rglob("*") if not each.is_symlink()}
        plain = {each: status.st_mode for each, status in found.items() if stat.S_ISREG(status.st_mode)}
        assert [
            each for each, mode in plain.items() if mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH)
        ] == []
        (package,) = files.glob("opt/mpsd/lib/python3*/site-packages/mpsd")
        assert len(list(package.rglob("*.pyc"))) == len(list(package.rglob("*.py"))) > 100

    def test_driver_root(self, podman: Podman, image: str, short_tmp: Path) -> None:
        """mpsd finds a driver where the GPU operator's driver container has it, and says so."""
        control = real.real_daemons()[535]
        (short_tmp / "usr" / "bin").mkdir(parents=True)
        shutil.copy(control, short_tmp / "usr" / "bin")
        (short_tmp / "usr" / "lib64").mkdir()
        (short_tmp / "usr" / "lib64" / "libnvidia-ml.so.1").touch()
        options = ["--read-only", f"--volume={short_tmp}:/run/nvidia/driver:ro"]
        checked = podman.run(image, "check", options=options)
        assert f"# program: /run/nvidia/driver/usr/bin/{control.name}\n" in checked.stdout, checked.stderr

    def test_anybody(self, podman: Podman, image: str) -> None:
        """The image runs without any rights, and writes nothing."""
        options = ["--user=2601", "--cap-drop=all", "--security-opt=no-new-privileges", "--read-only"]
        assert podman.run(image, "--version", options=[*options, "--entrypoint=mpsctl"]).stdout.startswith("mpsctl, ")
        checked = podman.run(image, "check", options=options)
        assert checked.returncode == 0, checked.stderr
        assert "# driver: there is no executable control program" in checked.stdout


class TestSidecar:
    """mpsd in a privileged container with hostPID, on NVIDIA's own control daemon."""

    def test_healthy(self, sidecar: Sidecar) -> None:
        """The health check of the image passes, and mpsd lacks nothing; it says where it found the control program."""
        status = sidecar.inside("mpsctl", "--socket", str(sidecar.socket), "status", "-o", "json")
        assert status.returncode == 0, status.stderr
        assert not [note for note in json.loads(status.stdout)["notes"] if "hostPID" in note or "CAP_" in note]
        assert event(sidecar, "node_started")["program"] == CONTROL
        control = look_at(sidecar.daemons()["gpu0"]["pid"])
        assert control is not None
        assert control.command == f"{CONTROL} -f"

    def test_client(self, sidecar: Sidecar) -> None:
        """A client with the socket and the pipe directory gets its lease and its variables, until it dies."""
        with sidecar.holding("run", "--fraction", "0.2", "--", "python3", "-c", HOLDS) as client:
            variables = client.hello["env"]
            assert client.hello["pid"] == 1
            assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "20.0"
            assert Path(variables["CUDA_MPS_PIPE_DIRECTORY"]).parent == sidecar.root / "run" / "mps"
            pid = sidecar.podman.pid(client.name)
            lease = lease_of(sidecar, pid)
            assert lease is not None
            assert (lease["owner"]["uid"], lease["id"]) == (USER, variables["MPSD_LEASE"])
            assert "hostIPC: true" in event(sidecar, "shared_memory_differs", pid=pid)["hint"]
            sidecar.podman.call("kill", client.name)
            wait_until(lambda: lease_of(sidecar, pid) is None, what="the lease to end")
        assert "has exited" in event(sidecar, "lease_ended", lease=lease["id"])["because"]

    def test_shared_memory(self, sidecar: Sidecar) -> None:
        """A client with the servers' /dev/shm causes no warning."""
        with sidecar.holding(
            "run", "--fraction", "0.2", "--", "python3", "-c", HOLDS, options=["--ipc=host"]
        ) as client:
            assert client.hello["ok"]
            pid = sidecar.podman.pid(client.name)
            assert lease_of(sidecar, pid) is not None
            assert sidecar.events("shared_memory_differs", pid=pid) == []

    def test_control_daemon(self, sidecar: Sidecar) -> None:
        """From its container, without write access, it reaches the control daemon, under the limits of its lease."""
        script = f"printf '{PROOF}\\nget_default_active_thread_percentage\\n' | nvidia-cuda-mps-control"
        options = [*sidecar.client_options(), "--entrypoint=mpsctl", f"--volume={sidecar.control}:{CONTROL}:ro"]

        def ask() -> list[str] | None:
            # mpsd itself may occupy a control daemon's only connection for front-ends.
            done = sidecar.podman.run(
                sidecar.image, "run", "--fraction", "0.2", "--", "sh", "-c", script, options=options
            )
            lines = done.stdout.splitlines()
            return lines if any(PROOF in line for line in lines) else None

        assert wait_until(ask, what="the control daemon to answer")[-1] == "20.0"

    def test_one_pipe_directory(self, sidecar: Sidecar) -> None:
        """A client with only one of the pipe directories is granted that GPU."""
        directory = sidecar.pipe_directory("gpu1")
        volumes = [f"{sidecar.socket}:{sidecar.socket}", f"{directory}:{directory}:ro"]
        show = ["sh", "-c", 'echo "$CUDA_MPS_PIPE_DIRECTORY"']
        done = sidecar.client("run", "--fraction", "0.2", "--", *show, volumes=volumes)
        assert done.stdout.strip() == str(directory), done.stderr

    def test_no_pipe_directory(self, sidecar: Sidecar) -> None:
        """A client without pipe directories is refused, with the volume that it needs; its other requests work."""
        volumes = [f"{sidecar.socket}:{sidecar.socket}"]
        done = sidecar.client("run", "--fraction", "0.2", "--", "sh", "-c", ":", volumes=volumes)
        assert done.returncode == 77
        assert f"-v {sidecar.root}/run:{sidecar.root}/run:ro (podman, Docker)" in done.stderr
        assert sidecar.client("status", volumes=volumes).returncode == 0

    def test_doctor(self, sidecar: Sidecar) -> None:
        """In a container like mpsd's all is well; in a client's, what is not visible is unknown, and nothing fails."""
        checks = ("shm", "foreign-daemon", "disk", "directories")
        like = sidecar.doctor((*PRIVILEGED, f"--volume={sidecar.root}:{sidecar.root}"), *checks)
        assert like == {each: {"ok"} for each in checks}
        unseen = sidecar.doctor(sidecar.client_options(), *checks)
        assert unseen.pop("shm") == {"unknown", "warn"}  # the container's own is small
        assert unseen == {each: {"unknown"} for each in checks[1:]}


class TestPod:
    """The sidecar of its manifest, as far as podman can run it."""

    @staticmethod
    def succeeds(podman: Podman, name: str, command: list[str]) -> bool:
        """Return whether a probe succeeds in a container."""
        return podman.call("exec", name, *command, check=False).returncode == 0

    def test_empty_dirs(self, podman: Podman, image: str, short_tmp: Path) -> None:
        """In directories that are open to all users, like an emptyDir, mpsd starts after the manifest's step."""
        spec = pod("sidecar")
        step, container = spec["initContainers"]
        volumes = {each["name"]: short_tmp / each["name"] for each in spec["volumes"] if "emptyDir" in each}
        for directory in volumes.values():
            directory.mkdir()
            directory.chmod(0o777)
        (short_tmp / "mpsd.toml").write_text(overlay("sidecar")["ConfigMap"]["data"]["mpsd.toml"])

        def mounted(container: Any) -> list[str]:
            named = [each for each in container["volumeMounts"] if each["name"] in volumes]
            return [f"--volume={volumes[each['name']]}:{each['mountPath']}" for each in named]

        name = f"pod-{short_tmp.name}"
        options = [*mounted(container), "--read-only", "--privileged", "--pid=host", f"--name={name}", "--detach"]
        options += [f"--volume={short_tmp}/mpsd.toml:/etc/mpsd/mpsd.toml:ro"]
        arguments = [*container["args"], "--simulate", "1"]
        refused = podman.run(image, *arguments, options=[each for each in options if each != "--detach"])
        assert refused.returncode == 78
        assert "/run/mpsd is not private to mpsd" in refused.stderr
        made = podman.run(
            image, *step["command"][1:], *step["args"],
            options=[*mounted(step), "--read-only", "--user=0", "--cap-drop=all", f"--entrypoint={step['command'][0]}"],
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        try:
            podman.call(*podman.command(image, *arguments, options=options)[1:])
            for probe in ("startupProbe", "readinessProbe"):
                succeeds = partial(self.succeeds, podman, name, container[probe]["exec"]["command"])
                wait_until(succeeds, what=f"{probe} to succeed")
        finally:
            podman.remove(name)


class TestClients:
    """Clients of MPS in containers, on simulated control daemons."""

    @pytest.mark.parametrize("namespace", ["host", "private"])
    def test_attributed(self, own_sidecar: Sidecar, namespace: str) -> None:
        """A client in a container has its pid on this machine, and counts for its container's lease."""
        sidecar = own_sidecar
        sidecar.options = (*PRIVILEGED, f"--cgroupns={namespace}")
        sidecar.start()
        simulated = f"{sidecar.root}/run/simulated"
        options = [f"--volume={simulated}:{simulated}", f"--env=MPSD_SIMULATED_GPUS={simulated}"]
        client_program = ["python3", "-m", "mpsd.simulator.client"]
        share = ["--fraction", "0.2", "--processes", "2"]
        with sidecar.holding("run", *share, "--", *client_program, options=options) as client:
            assert client.hello["ok"], client.hello
            pid = sidecar.podman.pid(client.name)
            lease = lease_of(sidecar, pid)
            assert lease is not None
            # A process that is no descendant of the container's first one, as with `kubectl exec`.
            variables = [f"--env={name}={value}" for name, value in lease["shares"][0]["env"].items()]
            command = ["podman", "exec", "--interactive", *variables, client.name, *client_program]
            with DrivenProgram(command, sidecar.podman.environment) as other:
                assert other.hello["ok"], other.hello
                seen = wait_until(
                    lambda: (found := sidecar.get("/v1/clients").json["clients"]) and len(found) == 2 and found,
                    what="both clients to be seen",
                )
                assert {(each["uid"], each["lease"]) for each in seen} == {(USER, lease["id"])}
                assert pid in {each["pid"] for each in seen}
                groups = {proc.cgroup(each["pid"]) for each in seen}
                assert len(groups) == 1
                other.end()


class TestEnd:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    def test_mpsd_dies(self, own_sidecar: Sidecar, number: signal.Signals) -> None:
        """After a kill or a hang of mpsd, the container keeps running, with the control daemons and the leases."""
        sidecar = own_sidecar
        sidecar.options = (*PRIVILEGED, '--entrypoint=["mpsd-init", "--watchdog=5", "mpsd"]')
        sidecar.start()
        before = {name: each["pid"] for name, each in sidecar.daemons().items()}
        with sidecar.holding("run", "--fraction", "0.2", "--", "python3", "-c", HOLDS) as client:
            assert client.hello["ok"]
            pid, mpsd = sidecar.podman.pid(client.name), sidecar.mpsd
            os.kill(mpsd, number)
            wait_until(
                lambda: len(sidecar.events("node_started")) >= 2 and sidecar.get("/readyz").status == 200,
                what="the next mpsd to be ready", deadline=45, not_yet=(OSError,),
            )  # fmt: skip
            assert {name: each["pid"] for name, each in sidecar.daemons().items()} == before
            assert lease_of(sidecar, pid) is not None

    def test_stopped(self, own_sidecar: Sidecar) -> None:
        """A stop ends admission, and waits for clients; no control daemon gets the signal meant for mpsd."""
        sidecar = own_sidecar
        sidecar.start()
        (before, _) = (each["pid"] for each in sidecar.daemons().values())
        with sidecar.holding("run", "--fraction", "0.2", "--gpu", "0", "--", "python3", "-c", HOLDS) as client:
            assert client.hello["ok"]
            stopping = subprocess.Popen(
                ["podman", "stop", "--time=60", sidecar.name],
                env=sidecar.podman.environment, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            with stopping:
                event(sidecar, "node_stopping")
                refused = sidecar.client("run", "--fraction", "0.2", "--", "sh", "-c", ":")
                assert "[stopping]" in refused.stderr
                assert sidecar.daemons()["gpu0"]["pid"] == before
                assert look_at(before) is not None
                assert stopping.poll() is None
                sidecar.podman.call("kill", client.name)
                assert stopping.wait(30) == 0
        assert sidecar.ended() == 0
        assert sidecar.events("daemon_death") == []
        assert look_at(before) is None
