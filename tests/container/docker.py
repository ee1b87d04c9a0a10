"""Docker of a newer Debian, on a containerd of the tests, with the same mounts."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.container.containerd import SUITE, VARIABLE, Containerd
from tests.container.debian import programs
from tests.harness import wait_until

_SECONDS: Final = 60.0
_IMAGE: Final = "mpsd-tests"


class Docker:
    """A dockerd, its client, and its containers, all of one image."""

    def __init__(self, home: Path, containerd: Containerd) -> None:
        """Start it in a directory that is made for it, on a containerd that outlives it."""
        place = programs(VARIABLE, "docker.io", SUITE, ["usr/sbin/dockerd"])
        client = programs(VARIABLE, "docker-cli", SUITE, ["usr/bin/docker"])
        home.mkdir()
        self.environment: Mapping[str, str] = {
            **containerd.environment, "PATH": f"{client}:{os.environ['PATH']}",
            "DOCKER_HOST": f"unix://{home}/socket", "DOCKER_CONFIG": str(home),
        }  # fmt: skip
        self._group = containerd.group
        configuration = {
            "data-root": f"{home}/data", "exec-root": f"{home}/exec", "pidfile": f"{home}/pid",
            "hosts": [f"unix://{home}/socket"], "containerd": f"{containerd.home}/socket",
            "bridge": "none", "iptables": False, "ip6tables": False, "ip-forward": False, "userland-proxy": False,
            "runtimes": {"machine": {"path": containerd.runc}}, "default-runtime": "machine",
        }  # fmt: skip
        (home / "dockerd.json").write_text(json.dumps(configuration))
        with (home / "log").open("ab") as log:
            command = containerd.inside(str(place / "dockerd"), f"--config-file={home}/dockerd.json")
            self._process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        wait_until(
            lambda: self.call("version", check=False).returncode == 0,
            what=f"dockerd to answer; its log is {home}/log",
            deadline=30.0,
        )

    def call(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run its client to its end."""
        done = subprocess.run(
            ["docker", *arguments], env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False, timeout=_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"docker {' '.join(arguments)}: {done.stderr}{done.stdout}"
        return done

    def take_in(self, files: Path) -> None:
        """Make an image from a root file system."""
        archive = files.parent / f"{files.name}.tar"
        subprocess.run(["tar", "--create", f"--file={archive}", f"--directory={files}", "."], check=True)
        try:
            self.call("import", str(archive), _IMAGE)
        finally:
            archive.unlink()

    def run(self, *command: str, options: Sequence[str] = ()) -> list[str]:
        """Return the arguments of `docker run` for a container of the image."""
        own = ["--rm", "--interactive", "--network=none", f"--cgroup-parent=/{self._group}"]
        return [*own, *options, _IMAGE, *command]

    def pid(self, name: str) -> int:
        """Return the pid of a container's first process."""
        return int(self.call("inspect", "--format={{.State.Pid}}", name).stdout)

    def remove(self, name: str) -> None:
        """Remove a container at once, with all its processes, if it exists."""
        self.call("rm", "--force", name, check=False)

    def close(self) -> None:
        """Remove every container, and end it."""
        if self._process.poll() is None:
            for name in self.call("ps", "--all", "--quiet").stdout.split():
                self.remove(name)
            self._process.terminate()
        self._process.wait(_SECONDS)
