"""The machine for the tests of a real GPU: whether it has everything they need, its clients, and a node on it.

A simulated GPU can take the place of the real one: for a node that is simulated, and, with MPSD_GPU_SIMULATED=1, for
the programs of this folder. Their output says so.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from mpsd.simulator.devices import VARIABLE
from tests.driven_program import DrivenProgram
from tests.fork_server import ForkServer
from tests.node import Node

REQUIRE: Final = "MPSD_REQUIRE_GPU"
SIMULATED: Final = "MPSD_GPU_SIMULATED"
CARRIED: Final = "MPSD_GPU_CARRIED"
"""Set by tests/gpu/everything.py where the control program was carried to the machine, since its driver has none."""

LOGS: Final = "MPSD_GPU_LOGS"
"""Names the directory for the logs of control daemons, servers and mpsd, which are otherwise removed."""

CONTROL: Final = "nvidia-cuda-mps-control"
SERVER: Final = "nvidia-cuda-mps-server"

_ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = (sys.executable, "-m", "tests.gpu.client")
"""The command that starts a client, with this repository on PYTHONPATH."""

ENVIRONMENT: Final = {
    # Its value before comes after it: mpsctl, which starts the clients, needs libraries.
    "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
    "CUDA_CACHE_DISABLE": "1",  # otherwise the driver's compiled code would stay behind in the home directory
}
_NOBODY: Final = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
"""For processes that run outside MPS, whatever uses the default pipe directory."""


USERS: Final = (1001, 1002)
"""Uids of two ordinary users."""


def required() -> bool:
    """Return whether a test that needs a GPU fails where there is none, instead of being skipped."""
    return os.environ.get(REQUIRE, "") not in {"", "0"}


def simulated() -> bool:
    """Return whether the programs of this folder run on a simulated GPU."""
    return os.environ.get(SIMULATED, "") not in {"", "0"}


def origin() -> str:
    """Return a remark for every result that is not one of this machine's GPU with its driver's own control program."""
    if simulated():
        return "simulated"
    return f"control program carried along: {os.environ[CARRIED]}" if os.environ.get(CARRIED) else ""


_LONGEST: Final = 40
"""Characters of a directory below which the path of a control daemon's socket is short enough (107)."""


def private_directory(prefix: str) -> Path:
    """Make a directory with a short path, which other users may traverse: clients may be theirs."""
    usual = tempfile.gettempdir()
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=usual if len(usual) < _LONGEST else "/tmp"))
    path.chmod(0o711)
    return path


@cache
def missing() -> str | None:
    """Return what is missing here for the tests of a real GPU, or None when everything is there."""
    if simulated():
        return None
    # In a separate process, since libcuda leaves threads and open files behind in the process that initialises it.
    probe = subprocess.run(
        [*PROGRAM, "--probe"],
        env={**os.environ, **ENVIRONMENT, **_NOBODY},
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if not probe.stdout:
        return f"libcuda.so.1 could not be tried: {probe.stderr.strip() or probe.returncode}"
    answer = json.loads(probe.stdout)
    if not answer["ok"]:
        return f"no GPU for CUDA here: {answer['error']}"
    if shutil.which(CONTROL) is None:
        return f"{CONTROL} is not in PATH"
    return None


def control() -> Path:
    found = shutil.which(CONTROL)
    assert found is not None, missing()
    return Path(found)


class Client(DrivenProgram):
    """A process that uses CUDA (see tests.gpu.client).

    Its first line has `gpu`, `cuda`, `multiprocessors`, `free`, `total` and `mps`; or the reason why it has no context.
    """

    def first(self, seconds: float) -> dict[str, Any]:
        """Return its first line, for which it has so long."""
        self._hello = self._hello or self.answer(seconds)
        return self._hello

    def busy(self, seconds: float) -> float:
        answer = self.do(f"busy {seconds}")
        assert answer["ok"], answer
        rate: float = answer["rate"]
        return rate

    def begin(self) -> None:
        """Work until `finish`."""
        started = self.do("loop")
        assert started["ok"], started

    def finish(self) -> dict[str, Any]:
        """End the work of `begin`, and return its answer, which is there already where an error has ended it."""
        self.tell("sync")
        work = self.answer()
        self.answer()
        return work


def gpus_of(node: Node) -> dict[str, str]:
    """Return the variables by which a process finds the GPUs of a node: none for real ones."""
    return {} if node.simulate is None else {VARIABLE: str(node.root / "run" / "simulated")}


def leased(
    node: Node,
    *options: str,
    threads: float,
    memory: str,
    within: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Client:
    """Start a client like a user, by `mpsctl run` with these options, with a lease on the first GPU.

    `within` is the command that has the lease and starts or becomes the client; `variables` are the client's own.
    """
    run = ("run", "--gpu", "0", "--threads", str(threads), "--memory", memory, *options, "--")
    own = [f"{name}={value}" for name, value in (variables or {}).items()]
    command = [*within, *(["env", *own] if own else []), *PROGRAM]
    return Client([*node.mpsctl_command(*run), *command], {**ENVIRONMENT, **gpus_of(node)})


def unadmitted(node: Node) -> Client:
    """Start a client that finds the first GPU's control daemon by itself, without a lease."""
    return _bare(node, {"CUDA_MPS_PIPE_DIRECTORY": str(node.pipe_directory("gpu0"))})


def outside(node: Node) -> Client:
    """Start a client that runs outside MPS, on the whole of the first GPU."""
    return _bare(node, _NOBODY)


def _bare(node: Node, way: Mapping[str, str]) -> Client:
    gpu = {"CUDA_VISIBLE_DEVICES": first_gpu(node)["uuid"]}
    return Client(PROGRAM, {**ENVIRONMENT, **gpus_of(node), **way, **gpu})


OUTSIDE: Final = "OUTSIDE MPS"
"""The remark about a client that no server lists."""


def doubt(listed: bool, inside: bool | None) -> str:  # noqa: FBT001 - the two kinds of evidence
    """Return what to say before a result: nothing for a client of MPS, and otherwise that its limits mean nothing.

    The evidence is whether get_client_list has it, and CUDA's attribute 133, which old drivers do not know.
    """
    if listed and inside is not False:
        return ""
    attribute = {None: "unknown", False: "0", True: "1"}[inside]
    return f"{OUTSIDE} (get_client_list {'has' if listed else 'lacks'} it, attribute 133 is {attribute}): "


def doubt_about(node: Node, client: Client, pid: int | None = None) -> str:
    """Return what to say before a result of a client of this node's first GPU (see `doubt`).

    `pid` is that of its process, if it is not the program that was started. A client with a context is listed.
    """
    servers = [each for each in node.ask("gpu0", "get_server_list") if each.isdecimal()]
    listed = [pid for each in servers for pid in node.ask("gpu0", f"get_client_list {each}")]
    return doubt(str(pid or client.pid) in listed, client.hello["mps"])


def child(client: Client) -> int:
    """Return the process that the started program has started."""
    children = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text(encoding="ascii").split()
    return int(children[0])


def first_gpu(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = node.get("/v1/gpus").json["gpus"][0]
    return found


@contextlib.contextmanager
def running(
    root: Path, config: str = "", *, simulate: bool | None = None, fork_server: ForkServer | None = None
) -> Iterator[Node]:
    """Start mpsd on this machine's GPUs, or on a simulated one, by default as the program runs that calls this.

    End it with its control daemons and their servers, and keep its logs.
    """
    simulate = simulated() if simulate is None else simulate
    gpus, program = (1, None) if simulate else (None, control())
    node = Node(root=root, simulate=gpus, control=program, config=config, own_session=True, fork_server=fork_server)
    try:
        yield node.start()
    finally:
        try:
            _quit(node)
        finally:
            node.clean_up()


def keep(root: Path, name: str, *patterns: str) -> None:
    """Copy the files below a directory that match these patterns to where all logs are kept, if anywhere."""
    if not (place := os.environ.get(LOGS)):
        return
    there = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=place))
    for path in (path for pattern in patterns for path in root.glob(pattern) if path.is_file()):
        copy = there / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _quit(node: Node) -> None:
    """End mpsd, and have its control daemons end their servers as NVIDIA specifies: killing one may wedge a GPU."""
    if node.process is not None and node.process.poll() is None:
        node.end()
    for directory in (node.root / "run" / "mps").glob("gpu*"):
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is ended by force
            node.front_end(directory.name, "quit -t 10\n")
    test = os.environ.get("PYTEST_CURRENT_TEST", node.root.name).rpartition("::")[2].split(" ")[0]
    keep(node.root, test, "log/*/*.log*", "mpsd.stderr")
