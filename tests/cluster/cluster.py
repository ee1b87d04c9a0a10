"""A real cluster of one node: started, controlled by kubectl, and ended with everything that runs there."""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.cluster import keeper
from tests.cluster.node import CONTAINERD, NODE, PROGRAMS, STATE
from tests.harness import pids, wait_until

_TREE: Final = Path(__file__).resolve().parents[2]

_SECONDS: Final = 120.0
"""Deadline for the cluster to be ready on a busy machine (half a minute on a quiet one), and for each of its actions.
"""


CTR: Final = (f"{PROGRAMS}/usr/bin/ctr", f"--address={CONTAINERD}", "--namespace=k8s.io")

_LINES: Final = 12
_COLUMNS: Final = 400
"""Columns of each log in the error message of a wait."""


class Cluster:
    """A cluster whose only node runs containers of the given images.

    As a context manager it starts, and ends. It ends with its owner, even if that is killed.
    """

    def __init__(self, home: Path, programs: Path) -> None:
        """`home` is a directory that does not exist yet."""
        self.home = home
        self.name = f"mpsd-tests-{os.getpid()}-{home.name}"
        """The control group of its pods."""
        self._programs = programs
        self._lifeline = -1
        self._keeper = -1
        self._leader = 0

    # -- its life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Start it, and wait until its node is ready."""
        self.home.mkdir()
        reading, self._lifeline = os.pipe()
        command = [sys.executable, "-m", "tests.cluster.node", str(self.home), str(self._programs), self.name]
        with (self.home / "node.log").open("ab") as said:
            started = subprocess.run(
                ["setsid", "--fork", sys.executable, "-m", "tests.cluster.keeper", self.name, *command],
                stdin=reading, stdout=subprocess.PIPE, stderr=said, cwd=_TREE, timeout=_SECONDS, check=True,
            )  # fmt: skip
        os.close(reading)
        assert started.stdout, self.log("node")
        keeper, unshare = map(int, started.stdout.split())
        self._keeper = os.pidfd_open(keeper)

        def leader() -> int:
            return int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()[0])

        self._leader = wait_until(leader, what="PID 1 of the cluster", not_yet=(OSError, IndexError))
        wait_until(self._is_up, what=f"the cluster to be up; see {self.home}", deadline=_SECONDS)

    def _is_up(self) -> bool:
        if select.select([self._keeper], [], [], 0)[0]:
            raise RuntimeError(f"the cluster is gone: {(self.home / 'node.log').read_text()}")
        if not (self.home / "admin.kubeconfig").exists():
            return False
        node = self.try_kubectl("get", "node", NODE, "--output=json")
        if node.returncode != 0:
            return False
        ready = {each["type"]: each["status"] for each in json.loads(node.stdout)["status"].get("conditions", ())}
        account = self.try_kubectl("--namespace=default", "get", "serviceaccount", "default", "--output=json")
        return ready.get("Ready") == "True" and account.returncode == 0 and "secrets" in json.loads(account.stdout)

    def is_gone(self) -> bool:
        """Return whether nothing of it is left: no process, no control group."""
        return not Path(f"/proc/{self._leader}").exists() and not any(
            group.exists() for group in keeper.groups(self.name)
        )

    def close(self) -> None:
        """End it, and wait until nothing is left of it; do nothing if it has ended already."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._keeper >= 0:
            select.select([self._keeper], [], [], _SECONDS)
            os.close(self._keeper)
            self._keeper = -1

    # -- the node -----------------------------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command on the node, as root, to its end; on failure, the error has its output."""
        enter = ["nsenter", f"--target={self._leader}", "--mount", "--net", "--ipc", "--uts", "--pid", "--", *command]
        nothing = {} if "input" in options else {"stdin": subprocess.DEVNULL}
        done = subprocess.run(
            enter, text=True, check=False, capture_output=True,
            **{"timeout": _SECONDS, "cwd": "/", **nothing, **options},
        )  # fmt: skip
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def path(self, path: str) -> Path:
        """Return the outside path of a file of the node."""
        return Path(f"/proc/{self._leader}/root", path.lstrip("/"))

    def log(self, name: str) -> str:
        """Return the output of a program of the cluster."""
        return (self.home / "log" / f"{name}.log").read_text(errors="replace")

    def processes(self, *words: str) -> list[int]:
        """Return the outside pids of the node's own processes with all of these arguments."""
        namespace = Path(f"/proc/{self._leader}/ns/pid").readlink()
        found = []
        for pid in pids():
            with contextlib.suppress(OSError):
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if {*words} <= {*arguments} and Path(f"/proc/{pid}/ns/pid").readlink() == namespace:
                    found.append(pid)
        return found

    def kill(self, name: str) -> None:
        """Kill a program of the cluster, and wait until the next one runs."""
        note = self.home / "pids" / name
        before = note.read_text()
        self.run("kill", "-KILL", before)
        wait_until(lambda: note.read_text() != before, what=f"the next {name}")

    def load(self, archive: Path) -> None:
        """Load the images of an archive into the node."""
        with archive.open("rb") as file:
            self.run(*CTR, "images", "import", "-", stdin=file)

    def tag(self, image: str, name: str) -> None:
        """Give an image of the node another name."""
        self.run(*CTR, "images", "tag", image, name)

    # -- the cluster --------------------------------------------------------------------------------------------------

    def try_kubectl(self, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Call kubectl as an administrator, with any result."""
        program = (f"{PROGRAMS}/usr/bin/kubectl", f"--kubeconfig={STATE}/admin.kubeconfig")
        return self.run("env", "HOME=/run", *program, *arguments, check=False, **options)

    def kubectl(self, *arguments: str, **options: Any) -> str:
        """Call kubectl as an administrator, and return its output; on failure, the error has it."""
        done = self.try_kubectl(*arguments, **options)
        if done.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(arguments)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def get(self, *arguments: str) -> Any:
        """Return objects, in the form of `kubectl get`."""
        return json.loads(self.kubectl("get", "--output=json", *arguments))

    def apply(self, *objects: Any, options: Sequence[str] = ()) -> str:
        """Apply objects, by `kubectl apply`; return its output."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        return self.kubectl("apply", *options, "--filename=-", input=text)

    def phase(self, pod: str) -> str:
        return str(self.get("pod", pod)["status"].get("phase"))

    def said(self, pod: str) -> dict[str, Any]:
        """Wait for the first line of a client of MPS in a pod, with its limits."""

        def look() -> list[str]:
            return self.try_kubectl("logs", pod).stdout.splitlines()

        line = self.wait(f"{pod} to say something", look)[0]
        assert line.startswith("{"), self.kubectl("logs", pod)
        found: dict[str, Any] = json.loads(line)
        return found

    def delete(self, *pods: str) -> None:
        """Delete pods, and wait until they are gone."""
        self.kubectl("delete", "pod", "--wait=true", "--grace-period=1", *pods)

    def wait(self, what: str, condition: Callable[[], Any], deadline: float = _SECONDS) -> Any:
        """Wait until a condition holds on the cluster, and return it; on a timeout, report pods and programs."""
        try:
            return wait_until(condition, what=what, deadline=deadline)
        except AssertionError as error:
            error.add_note(self._said_last())
            raise

    def _said_last(self) -> str:
        """Return the pods, the last warnings, and the last lines of mpsd's containers and of every program."""
        warnings = self.try_kubectl("get", "events", "--all-namespaces", "--field-selector=type=Warning").stdout
        parts = [self.try_kubectl("get", "pods", "--all-namespaces").stdout, *warnings.splitlines()[-_LINES:]]
        for log in sorted([*self.home.glob("log/*.log"), *self.home.glob("log/pods/mpsd_*/*/*.log")]):
            lines = log.read_text(errors="replace").splitlines()[-_LINES:]
            parts += [f"--- {log.relative_to(self.home)}", *(line[:_COLUMNS] for line in lines)]
        return "\n".join(parts)
