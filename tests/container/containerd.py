"""containerd of a newer Debian, with private directories, socket and mount namespace, which leaves nothing behind.

Its directory for the sockets of its containers is not configurable (/run/containerd): it sees a private one there.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.container.debian import programs
from tests.harness import kill, look_at, pids, remove_tree, wait_until
from tests.tools import needed

VARIABLE: Final = "MPSD_CONTAINERD"
"""Names the cache of its programs, and of Docker's."""

SUITE: Final = "forky"
"""Its containerd is 2.1. The `ctr` of Debian 13 (1.7) does not read CDI devices."""

STABLE: Final = "trixie"
"""Debian 13's containerd, 1.7, reads the CDI devices that kubelet names."""

_PROGRAMS: Final = ("usr/bin/containerd", "usr/bin/containerd-shim-runc-v2", "usr/bin/ctr")
_SECONDS: Final = 60.0
_SHARED: Final = Path("/run/containerd")

_CONFIGURATION: Final = """
version = 3
root = "{home}/root"
state = "{home}/state"
temp = "{home}/temp"
disabled_plugins = [
    "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime",
    "io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt",
]
[grpc]
address = "{home}/socket"
"""

_WITH_CRI: Final = """
version = 2
root = "{home}/root"
state = "{home}/state"
temp = "{home}/temp"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt"]
[grpc]
address = "{home}/socket"
[plugins."io.containerd.grpc.v1.cri"]
enable_cdi = true
cdi_spec_dirs = ["{home}/cdi"]
sandbox_image = "localhost/pause:latest"
restrict_oom_score_adj = true
disable_hugetlb_controller = true
tolerate_missing_hugetlb_controller = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""


class Containerd:
    """One containerd, its `ctr`, and its containers."""

    def __init__(self, home: Path, *, cri: bool = False) -> None:
        """Start from a directory that is made for it. With `cri`, it serves kubelet's interface, and is Debian 13's."""
        self.runc = needed("runc", "runc")
        self._programs = programs(VARIABLE, "containerd", *((STABLE, _PROGRAMS, STABLE) if cri else (SUITE, _PROGRAMS)))
        self.home = home
        home.mkdir()
        (home / "containerd.toml").write_text((_WITH_CRI if cri else _CONFIGURATION).format(home=home))
        self.group = f"mpsd-tests-containerd-{os.getpid()}"
        """The control group of all its containers."""
        self.environment: Mapping[str, str] = {**os.environ, "PATH": f"{self._programs}:{os.environ['PATH']}"}
        self._made = not _SHARED.exists()
        _SHARED.mkdir(mode=0o711, exist_ok=True)
        hides = f"mount -t tmpfs mpsd-tests {_SHARED} && exec sleep infinity"
        self._namespace = subprocess.Popen(["unshare", "--mount", "--propagation=private", "sh", "-c", hides])
        wait_until(self._is_hidden, what=f"another {_SHARED}", not_yet=(OSError,))
        self.process: subprocess.Popen[bytes] | None = None

    def _is_hidden(self) -> bool:
        mounts = Path(f"/proc/{self._namespace.pid}/mounts").read_text()
        return f"mpsd-tests {_SHARED} " in mounts

    def inside(self, *command: str) -> list[str]:
        """Return a command prefix that runs a program with its mounts."""
        return ["nsenter", f"--target={self._namespace.pid}", "--mount", "--wdns=/", "--", *command]

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with (self.home / "log").open("ab") as log:
            command = self.inside("containerd", f"--config={self.home}/containerd.toml")
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        wait_until(
            lambda: self.call("version", check=False).returncode == 0,
            what=f"containerd to answer; its log is {self.home}/log",
            deadline=30.0,
        )

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it; its containers keep running."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(_SECONDS)

    def _ctr(self, *arguments: str) -> list[str]:
        return self.inside("ctr", f"--address={self.home}/socket", *arguments)

    def call(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run `ctr` to its end."""
        done = subprocess.run(
            self._ctr(*arguments), env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False, timeout=_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"ctr {' '.join(arguments)}: {done.stderr}{done.stdout}"
        return done

    def run(
        self, name: str, files: Path, *command: str, options: Sequence[str] = (), group: str | None = None
    ) -> list[str]:
        """Return a command that runs a container on this root file system, in a control group of its own or this."""
        group = f"--cgroup={group or f'/{self.group}/{name}'}"
        return self._ctr("run", f"--runc-binary={self.runc}", group, "--rootfs", *options, str(files), name, *command)

    def pid(self, name: str) -> int:
        """Return the pid of a container's first process, or 0 if it has none."""
        lines = (line.split() for line in self.call("task", "list").stdout.splitlines())
        return next((int(each[1]) for each in lines if each[0] == name), 0)

    def remove(self, name: str, namespace: str = "default") -> None:
        """Remove a container at once, with all its processes, if it exists."""
        self.call(f"--namespace={namespace}", "task", "delete", "--force", name, check=False)
        self.call(f"--namespace={namespace}", "container", "delete", name, check=False)

    def remove_all(self, namespace: str = "default") -> None:
        for name in self.call(f"--namespace={namespace}", "container", "list", "--quiet").stdout.split():
            self.remove(name, namespace)

    def close(self) -> None:
        """Remove everything: containers, control groups, files."""
        if self.process is not None and self.process.poll() is None:
            self.remove_all()
            self.end()
        for found in filter(None, map(look_at, pids())):
            # A process between a container and containerd that is left.
            if f"-address {self.home}/socket" in found.command:
                kill(found)
        self._namespace.kill()
        self._namespace.wait(_SECONDS)
        for hierarchy in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()):
            for folder, _, _ in os.walk(hierarchy / self.group, topdown=False):
                Path(folder).rmdir()
        if self._made:
            with contextlib.suppress(OSError):  # another containerd has begun to use the file
                _SHARED.rmdir()
        remove_tree(self.home)
