"""mpsd in a privileged container, and the containers of its clients."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.container.contained import Contained
from tests.container.podman import Podman
from tests.harness import remove_tree
from tests.node import Node

PRIVILEGED: Final = ("--privileged", "--pid=host", "--ipc=host")
CONTROL: Final = "/usr/bin/nvidia-cuda-mps-control"
"""The path where the container toolkit puts it."""

USER: Final = 2601
UNPRIVILEGED: Final = (f"--user={USER}", "--cap-drop=all", "--security-opt=no-new-privileges", "--read-only")


@dataclass(kw_only=True)
class Sidecar(Node):
    """A node whose mpsd runs in a container, with its directory at the same path as outside."""

    podman: Podman
    image: str
    options: Sequence[str] = PRIVILEGED

    @property
    def name(self) -> str:
        return f"sidecar-{self.root.name}"

    @property
    def command(self) -> list[str]:
        """Return the command that starts mpsd in its container."""
        options = [*self.options, f"--name={self.name}", f"--volume={self.root}:{self.root}"]
        command = ["run", "--stop-daemons-on-exit", "--root", str(self.root), "--simulate", str(self.simulate)]
        if self.control is not None:
            options.append(f"--volume={self.control}:{CONTROL}:ro")
            command += ["--control", Path(CONTROL).name]
        return self.podman.command(self.image, *command, options=options)

    def launch(self) -> None:
        """Start the container; its output is the node's log."""
        with self.stderr.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=self.podman.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def clean_up(self) -> None:
        """Remove the container, with all its processes, and its directory."""
        self.podman.remove(self.name)
        if self.process is not None:
            self.process.wait(timeout=30)
            self.process = None
        remove_tree(self.root)

    def inside(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in its container."""
        return self.podman.call("exec", self.name, *command, check=False)

    def doctor(self, options: Sequence[str], *checks: str) -> dict[str, set[str]]:
        """Run doctor in a container with these options; return the verdicts by check."""
        only = [f"--only={each}" for each in checks]
        command = self.podman.command(
            self.image, "--socket", str(self.socket), "doctor", "-o", "json", *only,
            options=[*options, "--entrypoint=mpsctl"],
        )  # fmt: skip
        found: dict[str, set[str]] = {}
        for each in json.loads(self.podman.call(*command[1:], check=False).stdout)["checks"]:
            found.setdefault(each["id"], set()).add(each["verdict"])
        return found

    @property
    def mpsd(self) -> int:
        """The pid of mpsd itself, the first child of the container's first process."""
        init = self.podman.pid(self.name)
        return int(Path(f"/proc/{init}/task/{init}/children").read_text().split()[0])

    def client_options(self, *volumes: str) -> list[str]:
        """Return the options of a container without rights; these volumes are all that it has of the node."""
        mounted = volumes or (f"{self.root}/run:{self.root}/run:ro",)
        return [*UNPRIVILEGED, f"--env=MPSD_SOCKET={self.socket}", *(f"--volume={each}" for each in mounted)]

    def client(self, *command: str, volumes: Sequence[str] = ()) -> "subprocess.CompletedProcess[str]":
        """Run mpsctl in a container without rights, to its end."""
        options = [*self.client_options(*volumes), "--entrypoint=mpsctl"]
        return self.podman.run(self.image, *command, options=options)

    def holding(self, *command: str, options: Sequence[str] = ()) -> Contained:
        """Run mpsctl, and the program that it becomes, in such a container for the time of the `with` block."""
        name = f"client-{self.root.name}"
        own = [*self.client_options(), "--interactive", f"--name={name}", "--entrypoint=mpsctl", *options]
        return Contained(self.podman, name, self.podman.command(self.image, *command, options=own))
