"""podman with a private home: other instances of podman do not see it, and it leaves nothing behind."""

import json
import os
import resource
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.harness import remove_tree

_SECONDS: Final = 60.0

_CONFIGURATION: Final = """
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "{home}/tmp"
[network]
network_config_dir = "{home}/net"
"""
"""This machine's own limits, which not every root may raise; and no systemd, which may be absent."""

_STORAGE: Final = """
[storage]
driver = "overlay"
graphroot = "{home}/root"
runroot = "{home}/run"
"""


class Podman:
    """A podman and its containers."""

    def __init__(self, home: Path) -> None:
        """Start from a directory that is made for it."""
        self.home = home
        for name in ("tmp", "net"):
            (home / name).mkdir(parents=True)
        self.group = f"mpsd-tests-{os.getpid()}"
        """The control group of all its containers."""
        processes = Path("/proc/sys/kernel/pid_max").read_text().strip()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        (home / "containers.conf").write_text(_CONFIGURATION.format(files=files, processes=processes, home=home))
        (home / "storage.conf").write_text(_STORAGE.format(home=home))
        self.environment: Mapping[str, str] = {
            **os.environ,
            "CONTAINERS_CONF": str(home / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(home / "storage.conf"),
            "TMPDIR": str(home / "tmp"),
        }

    def call(self, *arguments: str, check: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run podman to its end."""
        done = subprocess.run(
            ["podman", *arguments], env=self.environment, capture_output=True, text=True, check=False,
            **{"timeout": _SECONDS, "stdin": subprocess.DEVNULL, **options},
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"podman {' '.join(arguments)}: {done.stderr}{done.stdout}"
        return done

    def command(self, image: str, *command: str, options: Sequence[str] = ()) -> list[str]:
        """Return a command that runs a container of this image and leaves nothing at its end."""
        own = ["--rm", "--pull=never", "--network=none", f"--cgroup-parent={self.group}"]
        return ["podman", "run", *own, *options, image, *command]

    def run(self, image: str, *command: str, options: Sequence[str] = ()) -> "subprocess.CompletedProcess[str]":
        """Run a container to its end, with any exit status."""
        return self.call(*self.command(image, *command, options=options)[1:], check=False)

    def inspect(self, name: str) -> Any:
        """Return podman's description of a container."""
        return json.loads(self.call("container", "inspect", name).stdout)[0]

    def pid(self, name: str) -> int:
        """Return the pid of a container's process 1 on this machine."""
        return int(self.inspect(name)["State"]["Pid"])

    def remove(self, name: str) -> None:
        """Remove a container at once, with all its processes, if it exists."""
        self.call("rm", "--force", "--ignore", "--time=0", name)

    def close(self) -> None:
        """Remove everything: containers, images, mounts, control groups, files."""
        self.call("rm", "--force", "--all", "--time=0")
        mounts = [line.split(" ")[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in reversed([each for each in mounts if each.startswith(f"{self.home}/")]):
            subprocess.run(["umount", "--lazy", place], check=True)
        for hierarchy in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()):
            for folder, _, _ in os.walk(hierarchy / self.group, topdown=False):
                Path(folder).rmdir()
        remove_tree(self.home)
