"""Leases of containers, by CDI: podman's own reading of a device, a real control group, and kills at any moment.

The containers have this machine's /usr, so that no image has to be built for them.
"""

import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import click
import pytest

from mpsd.core.containers import cdi
from mpsd.simulator.devices import VARIABLE
from mpsd.system.files import cdi_directory
from tests.container.contained import Contained
from tests.container.leased import (
    CLIENT,
    PYTHON,
    SLEEPS,
    claim,
    container_name,
    ended,
    is_gone,
    is_nobodys,
    leasing_node,
    let_in,
    make_files,
    parent,
    process,
)
from tests.container.podman import Podman
from tests.container.sidecar import UNPRIVILEGED, USER
from tests.daemon.caller import NOBODY
from tests.daemon.helpers import event, is_running, stopped
from tests.driven_program import DrivenProgram
from tests.fork_server import ForkServer
from tests.harness import wait_until
from tests.node import Node

pytestmark = [
    pytest.mark.container,
    pytest.mark.usefixtures("device_directory"),
]

ROOT: Final = Path(__file__).parents[2]
SHARED: Final = ("--volume=/usr:/usr:ro", f"--volume={ROOT}/mpsd:/site/mpsd:ro", "--env=PYTHONPATH=/site")


@pytest.fixture
def node(short_tmp: Path, fork_server: ForkServer, podman: Podman) -> Iterator[Node]:
    """Start an mpsd on this machine, with simulated GPUs.

    At the end no device is left, whatever became of its containers.
    """
    with leasing_node(short_tmp, fork_server, lambda: podman.call("rm", "--force", "--all", "--time=0")) as node:
        yield node


def options(node: Node, podman: Podman, *more: str) -> list[str]:
    """Return the options of a client's container beside its lease: simulated GPUs, and nothing of mpsd's."""
    simulated = node.root / "run" / "simulated"
    own = ["--network=none", f"--cgroup-parent={podman.group}", *UNPRIVILEGED, *SHARED, "--rootfs"]
    return [*own, f"--volume={simulated}:{simulated}", f"--env={VARIABLE}={simulated}", *more]


def container_run(node: Node, *arguments: str) -> list[str]:
    """Return the command `mpsctl container run podman`."""
    mpsctl = [sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket)]
    return [*mpsctl, "container", "run", "podman", "--fraction", "0.25", "--", *arguments]


def running(node: Node, podman: Podman, files: Path, *program: str) -> Contained:
    """Run a container with its own lease."""
    name = container_name()
    command = container_run(
        node, *options(node, podman, "--rm", "--interactive", f"--name={name}"), str(files), PYTHON, *program
    )
    return Contained(podman, name, command)


class TestContainerRun:
    def test_share(self, node: Node, podman: Podman, files: Path) -> None:
        """A container has its share under MPS, sees only its own control daemon, survives mpsd, and ends its lease."""
        with running(node, podman, files, *CLIENT) as client:
            assert (client.hello["mps"], client.hello["active_thread_percentage"]) == (True, 25.0)
            pid = podman.pid(client.name)
            (lease,) = node.leases()
            (holder,) = lease["holders"]
            group = podman.inspect(client.name)["Id"]
            assert (holder["kind"], group in holder["cgroup"], lease["owner"]["uid"]) == ("cgroup", True, USER)
            wait_until(lambda: node.leases()[0]["clients"] == [pid], what="the client to be attributed")
            verified = node.mpsctl("verify", lease["id"])
            assert verified.returncode == 0, verified.stdout
            # The container sees the files of its control daemon only, and cannot change them.
            look = (
                f"import os; print(os.listdir({str(node.root / 'run')!r}), os.listdir({str(node.root / 'run/mps')!r}))"
            )
            seen = podman.call("exec", client.name, PYTHON, "-c", look).stdout
            assert sorted(seen.replace("[", "").replace("]", "").replace(",", "").split()) == [
                "'gpu0'", "'mps'", "'simulated'",
            ]  # fmt: skip
            assert USER in let_in(node)
            # Another program started in the container has no variable of the lease, unless they are passed to it.
            show = (PYTHON, "-c", "import os; print(os.environ.get('MPSD_LEASE'))")
            assert podman.call("exec", client.name, *show).stdout == "None\n"
            line = f'podman exec --env-file <(mpsctl show {lease["id"]} -o env-file) {client.name} "$@"'
            script = f'mpsctl() {{ {sys.executable} -m mpsd.cli.main --socket {node.socket} "$@"; }}; {line}'
            done = subprocess.run(
                ["bash", "-c", script, "bash", *show],
                env=podman.environment,
                capture_output=True,
                text=True,
                check=True,
            )
            assert done.stdout == f"{lease['id']}\n"
            # Another container that requests the same device fails with the reason.
            device = f"--device={cdi.device_name(lease['id'])}"
            again = podman.call("run", *options(node, podman, device), str(files), PYTHON, *SLEEPS, check=False)
            assert again.returncode == 126
            assert "[already_claimed]" in again.stderr
            node.end(signal.SIGKILL)
            node.start()
            (same,) = node.leases()
            assert (same["id"], same["clients"]) == (lease["id"], [pid])
            podman.call("kill", client.name)
            assert client.process.wait(30) == 137
        assert f"its holder, control group {holder['cgroup']}" in ended(node, lease["id"])["because"]
        assert lease["id"] not in {each.lease for _, each in cdi_directory.devices(cdi_directory.DEFAULT)}

    def test_killed(self, node: Node, podman: Podman, files: Path) -> None:
        """The lease lives exactly as long as the container, whatever is killed around it."""
        program = "print('{\"ok\": true}', flush=True); import time; time.sleep(600)"
        for victim in ("mpsctl", "podman", "conmon"):
            with running(node, podman, files, "-c", program) as client:
                assert client.hello["ok"]
                (lease,) = node.leases()
                pid = podman.pid(client.name)
                front = process("podman", "run", f"--device={cdi.device_name(lease['id'])}")
                killed = {"mpsctl": client.pid, "podman": front, "conmon": parent(pid)}[victim]
                os.kill(killed, signal.SIGKILL)
                wait_until(partial(is_gone, killed), what=f"{victim} to die")
                assert is_running(pid)
                assert [each["id"] for each in node.leases()] == [lease["id"]]
                os.kill(pid, signal.SIGKILL)
                ended(node, lease["id"])
                # podman takes two attempts to remove a container whose conmon is gone.
                podman.call("rm", "--force", "--time=0", client.name, check=False)
            assert node.mpsctl("cdi", "list").stdout == "no devices\n"


class TestDevice:
    """A device that was written for a container, and kills while its hook runs."""

    def test_hook_killed(self, node: Node, podman: Podman, files: Path) -> None:
        """A container whose hook or runtime is killed does not start, and its claim has no holder."""
        for victim in ("hook", "runtime"):
            lease = claim(node)
            name = container_name()
            own = options(node, podman, f"--device={cdi.device_name(lease)}", f"--name={name}")
            command = ["podman", "run", *own, str(files), PYTHON, *SLEEPS]
            with stopped(node.pid), subprocess.Popen(command, env=podman.environment) as run:
                hook = process("container", "hook", lease)
                os.kill(hook if victim == "hook" else parent(hook), signal.SIGKILL)
                assert run.wait(30) in {126, 127}
            assert podman.inspect(name)["State"]["Running"] is False
            wait_until(partial(is_nobodys, node, lease), what="the lease to be nobody's")
            assert USER not in let_in(node)
            podman.remove(name)

    def test_mpsd_killed(self, node: Node, podman: Podman, files: Path) -> None:
        """A hook without an answer from mpsd waits for the next mpsd, and the container starts with its lease."""
        lease = claim(node)
        name = container_name()
        own = options(node, podman, f"--device={cdi.device_name(lease)}", "--rm", "--interactive", f"--name={name}")
        os.kill(node.pid, signal.SIGSTOP)
        with Contained(podman, name, ["podman", "run", *own, str(files), PYTHON, *CLIENT]) as client:
            process("container", "hook", lease)
            node.end(signal.SIGKILL)
            node.start()
            assert client.hello["active_thread_percentage"] == 25.0
            assert [each["id"] for each in node.leases()] == [lease]
        ended(node, lease)

    def test_stop(self, node: Node, podman: Podman, files: Path) -> None:
        """`container stop` has mpsd end the lease's clients before the runtime ends the container."""
        # Not as process 1 itself, for which the kernel ignores SIGTERM.
        program = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-m', 'mpsd.simulator.client']))"
        with running(node, podman, files, "-c", program) as client:
            assert client.hello["mps"]
            (lease,) = node.leases()
            done = node.mpsctl("container", "stop", client.name, env=podman.environment)
            assert done.returncode == 0, done.stderr
            assert client.process.wait(30) is not None
        event(node, "client_forced", step="terminate_client")
        event(node, "client_ended")
        ended(node, lease["id"])
        gone = node.mpsctl("container", "stop", client.name, env=podman.environment)
        assert gone.returncode == 125


class Rootless:
    """podman run by `nobody`, with no other uid."""

    def __init__(self, home: Path, podman: Podman) -> None:
        """Make its home, with a private root file system, and an mpsctl that it can execute."""
        self._home = home
        self.files = make_files(home / "files")
        (home / "run").mkdir(mode=0o700)
        configuration, storage = home / "containers.conf", home / "storage.conf"
        text = Path(podman.environment["CONTAINERS_CONF"]).read_text()
        configuration.write_text(text.replace(str(podman.home), str(home)))
        storage.write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{home}/root"\nrunroot = "{home}/run/c"\n')
        self.group = pwd.getpwuid(NOBODY).pw_gid
        self.environment: Mapping[str, str] = {
            "PATH": os.environ["PATH"], "HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run"),
            "CONTAINERS_CONF": str(configuration), "CONTAINERS_STORAGE_CONF": str(storage),
        }  # fmt: skip
        subprocess.run(["chown", "-R", f"{NOBODY}:{self.group}", home], check=True)
        self._python = home / "mpsctl" / "bin" / "python3"
        self._install()

    def _install(self) -> None:
        """Make an environment of Debian's Python, since the tests' own may be where no other user can execute it."""
        version = subprocess.run(
            [PYTHON, "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        top = self._python.parents[1]
        packages = top / "lib" / version / "site-packages"
        packages.mkdir(parents=True)
        self._python.parent.mkdir()
        self._python.symlink_to(PYTHON)
        (top / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
        (packages / "mpsd.pth").write_text(f"{ROOT}\n{Path(click.__file__).parents[1]}\n")

    def claim(self, node: Node) -> str:
        """Claim a lease for it, and write a device whose hook is this mpsctl; return the id of the lease."""
        answer = node.request("POST", "/v1/leases", {"fraction": 0.25, "holder": {"claim": {"uid": NOBODY}}})
        lease = str(answer.json["id"])
        program = [str(self._python), "-I", "-m", "mpsd.cli.main", "--socket", str(node.socket)]
        subprocess.run([*program, "cdi", "write", lease, "--no-shm"], check=True, capture_output=True, timeout=60)
        return lease

    def command(self, node: Node, lease: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
        """Return its command that runs Python in a container with a device."""
        simulated = node.root / "run" / "simulated"
        own = [*SHARED, "--rm", "--interactive", "--network=none", f"--device={cdi.device_name(lease)}", *options]
        own += [f"--volume={simulated}:{simulated}", f"--env={VARIABLE}={simulated}", "--rootfs", str(self.files)]
        become = ["setpriv", f"--reuid={NOBODY}", f"--regid={self.group}", "--clear-groups"]
        return ["env", f"--chdir={self._home}", *become, "podman", "run", *own, PYTHON, *arguments]

    def close(self) -> None:
        """End the processes that podman leaves in its user namespace."""
        note = self._home / "run" / "libpod" / "tmp" / "pause.pid"
        if note.exists():
            os.kill(int(note.read_text()), signal.SIGKILL)


@pytest.fixture
def rootless(short_tmp: Path, podman: Podman) -> Iterator[Rootless]:
    """Return the podman of a user without rights."""
    found = Rootless(short_tmp, podman)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.usefixtures("files")
def test_rootless(node: Node, rootless: Rootless) -> None:
    """A user's own podman reads the device that root wrote for it, and its container has the share until it ends."""
    lease = rootless.claim(node)
    done = subprocess.run(
        rootless.command(node, lease, *SLEEPS, options=["--user=5"]),
        env=rootless.environment, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert "uid 5 of the container is not mapped" in done.stderr
    with DrivenProgram(rootless.command(node, lease, *CLIENT), rootless.environment) as client:
        assert (client.hello["mps"], client.hello["active_thread_percentage"]) == (True, 25.0)
        found = wait_until(
            lambda: (found := node.get(f"/v1/leases/{lease}").json)["clients"] and found,
            what="the client to be attributed",
        )
        assert (found["owner"]["uid"], len(found["clients"])) == (NOBODY, 1)
        verified = node.mpsctl("verify", lease)
        assert verified.returncode == 0, verified.stdout
        client.end()
    assert "has exited" in ended(node, lease)["because"]
