"""Devices and containers without a container runtime: the files, the decisions of the hook, and what is left.

The tests call the hook like a runtime, for a process of their own; `tests/container/test_cdi.py` has real runtimes.
"""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.cli.render import as_here
from mpsd.core.containers import cdi
from mpsd.system.files import acl
from tests.cli.conftest import run_mpsctl
from tests.daemon.caller import needs_root
from tests.daemon.helpers import is_running
from tests.harness import wait_until
from tests.node import TOKEN, Node

SHARE: Final = ("--threads", "10", "--memory", "1GiB")

RUNTIME: Final = f"""#!{sys.executable}
import json, os, subprocess, sys
from pathlib import Path
here = Path(sys.argv[0]).parent
arguments = sys.argv[1:]
(here / "called").write_text(json.dumps(arguments))
(device,) = (each.partition("=")[2] for each in arguments if each.startswith("--device="))
(file,) = (here.parent / "cdi").glob("*" + device.partition("=")[2] + ".json")
(edits,) = (each["containerEdits"] for each in json.loads(file.read_text())["devices"])
(hook,) = edits["hooks"]
bundle = here / "bundle"
bundle.mkdir()
mounts = [{{"destination": each["containerPath"], "source": each["hostPath"]}} for each in edits["mounts"]]
process = {{"user": {{"uid": os.getuid(), "gid": os.getgid()}}, "env": edits["env"]}}
(bundle / "config.json").write_text(json.dumps({{"process": process, "mounts": mounts}}))
if "fails" in arguments:
    sys.exit(125)
state = json.dumps({{"pid": os.getpid(), "bundle": str(bundle)}})
env = dict(each.split("=", 1) for each in hook["env"])
if subprocess.run(hook["args"], executable=hook["path"], input=state, text=True, env=env).returncode:
    sys.exit(126)
os.execvp(arguments[arguments.index("IMAGE") + 1], arguments[arguments.index("IMAGE") + 1:])
"""
"""A stand-in for podman: it calls the hook of the device for itself, and becomes the container's program."""


@pytest.fixture
def directory(short_tmp: Path) -> Path:
    """Return the path of a directory for devices."""
    return short_tmp / "cdi"


@pytest.fixture
def claim(node: Node) -> Callable[..., Any]:
    """Return a function that claims a lease."""

    def claim(**options: object) -> Any:
        answer = node.request(
            "POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "holder": {"claim": {}}, **options}
        )
        assert answer.status == 201, answer.json
        return answer.json

    return claim


def device(path: Path) -> Any:
    """Return the edits of a file's only device."""
    (found,) = json.loads(path.read_text())["devices"]
    return found["containerEdits"]


def write(node: Node, directory: Path, lease: str) -> Path:
    """Write the device of a lease, and return its file."""
    done = node.mpsctl("cdi", "write", lease, "--dir", str(directory))
    assert (done.returncode, done.stdout) == (0, f"mpsd/lease={lease}\n"), done.stderr
    return directory / cdi.file_name(lease)


def state_of(node: Node, lease: str) -> Any:
    return node.get(f"/v1/leases/{lease}").json


class Hook:
    """A runtime's call of a device's hook, for a process."""

    def __init__(self, path: Path, pid: int, *, uid: int | None = None, env: Mapping[str, str] | None = None) -> None:
        """Make the container's configuration: what the device adds, then these variables."""
        edits = device(path)
        (self.hook,) = edits["hooks"]
        bundle = path.parent.parent / f"bundle-{pid}"
        bundle.mkdir(exist_ok=True)
        mounts = [{"destination": each["containerPath"], "source": each["hostPath"]} for each in edits["mounts"]]
        variables = [*edits["env"], *(f"{name}={value}" for name, value in (env or {}).items())]
        user = {"uid": os.getuid() if uid is None else uid, "gid": os.getgid() if uid is None else uid}
        content = {"process": {"user": user, "env": variables}, "mounts": mounts}
        (bundle / "config.json").write_text(json.dumps(content))
        self.state = json.dumps({"ociVersion": "1.0.2", "status": "creating", "pid": pid, "bundle": str(bundle)})

    def call(self, *, state: str | None = None) -> "subprocess.CompletedProcess[str]":
        """Call it with exactly the environment that the device sets, as from any directory."""
        variables = dict(each.split("=", 1) for each in self.hook["env"])
        return subprocess.run(
            self.hook["args"], executable=self.hook["path"], input=self.state if state is None else state, text=True,
            env=variables, cwd="/", capture_output=True, check=False, timeout=self.hook["timeout"],
        )  # fmt: skip


class TestWrite:
    """The contents of a device, and the leases that have one."""

    def test_device(self, node: Node, claim: Callable[..., Any], directory: Path) -> None:
        """A device has the lease's environment, no other client's, and only the lease's pipe directory."""
        lease = claim(gpu="1")
        path = write(node, directory, lease["id"])
        edits = device(path)
        neutral = {"CUDA_MPS_CLIENT_PRIORITY": "0", "CUDA_MPS_PROTOCOL_VERSION": "2"}
        assert dict(each.split("=", 1) for each in edits["env"]) == {**lease["env"], **neutral}
        mounted = [each["hostPath"] for each in edits["mounts"]]
        assert mounted == [str(node.pipe_directory("gpu1")), "/dev/shm"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert lease["env"][TOKEN] in path.read_text()

    @pytest.mark.parametrize(("option", "expected"), [("--shm", True), ("--no-shm", False)])
    def test_shared_memory(
        self, node: Node, claim: Callable[..., Any], directory: Path, option: str, expected: object
    ) -> None:
        """/dev/shm is included or not, as requested."""
        lease = claim()["id"]
        assert node.mpsctl("cdi", "write", lease, "--dir", str(directory), option).returncode == 0
        mounts = [each["hostPath"] for each in device(directory / cdi.file_name(lease))["mounts"]]
        assert ("/dev/shm" in mounts) is expected

    def test_held(self, node: Node, directory: Path) -> None:
        """A lease with a holder is for no container; an ended one is for no process."""
        lease = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"}).json["id"]
        done = node.mpsctl("cdi", "write", lease, "--dir", str(directory))
        assert done.returncode == 2
        assert "mpsctl admit --claim" in done.stderr
        node.request("DELETE", f"/v1/leases/{lease}")
        assert "has ended" in node.mpsctl("cdi", "write", lease, "--dir", str(directory)).stderr
        assert not directory.exists() or not list(directory.iterdir())

    def test_several_gpus(self, node: Node, claim: Callable[..., Any], directory: Path) -> None:
        """A container can use one GPU, so a lease on several has no device."""
        done = node.mpsctl("cdi", "write", claim(gpus=2)["id"], "--dir", str(directory))
        assert done.returncode == 2
        assert "a process can use only one of them" in done.stderr

    @needs_root
    def test_reader(self, node: Node, claim: Callable[..., Any], directory: Path) -> None:
        """The uid that a claim is for may read its device."""
        path = write(node, directory, claim(holder={"claim": {"uid": 2601}})["id"])
        assert acl.read(path) == acl.private(acl.READ | acl.WRITE, {2601}, acl.READ)


class TestList:
    def test_ended(self, node: Node, claim: Callable[..., Any], directory: Path) -> None:
        """Devices of ended and unknown leases are removed; all others stay."""
        kept, over = claim()["id"], claim()["id"]
        path, stale = write(node, directory, kept), write(node, directory, over)
        unknown = directory / cdi.file_name("lease-0000000000")
        unknown.write_text(path.read_text().replace(kept, "lease-0000000000"))
        elsewhere = directory / cdi.file_name("lease-1111111111")
        elsewhere.write_text(
            unknown.read_text().replace("lease-0000000000", "lease-1111111111").replace(str(node.socket), "/s")
        )
        foreign = directory / cdi.file_name("lease-2222222222")
        foreign.write_text('{"cdiVersion": "0.3.0", "kind": "vendor.com/gpu"}')
        node.request("DELETE", f"/v1/leases/{over}")
        done = node.mpsctl("cdi", "list", "--dir", str(directory), "-o", "json")
        assert done.returncode == 0, done.stderr
        assert f"removed {stale}" in done.stderr
        assert json.loads(done.stdout)["devices"] == [
            {"device": f"mpsd/lease={kept}", "state": "granted", "file": str(path)}
        ]
        assert {*directory.iterdir()} == {path, elsewhere, foreign}

    def test_remove(self, node: Node, claim: Callable[..., Any], directory: Path) -> None:
        """A device is removed without the lease; a missing one, or one that is not mpsctl's, is no error."""
        lease = claim()["id"]
        path = write(node, directory, lease)
        foreign = directory / cdi.file_name("lease-2222222222")
        foreign.write_text("{}")
        for each in (lease, lease, "lease-2222222222"):
            assert node.mpsctl("cdi", "remove", each, "--dir", str(directory)).returncode == 0
        assert not path.exists()
        assert foreign.exists()
        assert state_of(node, lease)["state"] == "granted"
        assert node.mpsctl("cdi", "list", "--dir", str(directory)).stdout == "no devices\n"
        assert node.mpsctl("cdi", "remove", "../x", "--dir", str(directory)).returncode == 2


class TestHook:
    def test_takes(
        self, node: Node, claim: Callable[..., Any], directory: Path, sleeper: "subprocess.Popen[bytes]"
    ) -> None:
        """The hook takes the claim for the container's process; a second container fails with the reason."""
        lease = claim()["id"]
        path = write(node, directory, lease)
        done = Hook(path, sleeper.pid).call()
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        (holder,) = state_of(node, lease)["holders"]
        assert (holder["kind"], holder["pid"]) == ("process", sleeper.pid)
        with subprocess.Popen(["sleep", "600"]) as other:
            try:
                again = Hook(path, other.pid).call()
            finally:
                other.kill()
        assert again.returncode == 75
        assert "[already_claimed]" in again.stderr
        assert [each["pid"] for each in state_of(node, lease)["holders"]] == [sleeper.pid]
        sleeper.kill()
        wait_until(lambda: state_of(node, lease)["state"] == "ended", what="the lease to end with the container")

    def test_again(
        self, node: Node, claim: Callable[..., Any], directory: Path, sleeper: "subprocess.Popen[bytes]"
    ) -> None:
        """A hook that lost its answer gets the same answer again."""
        path = write(node, directory, claim()["id"])
        assert [Hook(path, sleeper.pid).call().returncode for _ in range(2)] == [0, 0]

    def test_ended(
        self, node: Node, claim: Callable[..., Any], directory: Path, sleeper: "subprocess.Popen[bytes]"
    ) -> None:
        """The device of an ended lease fails the container, with the reason of the end."""
        lease = claim()["id"]
        path = write(node, directory, lease)
        node.request("DELETE", f"/v1/leases/{lease}")
        done = Hook(path, sleeper.pid).call()
        assert done.returncode == 1
        assert f"{lease} has ended: {as_here(f'uid {os.getuid()}')} released it" in done.stderr

    @pytest.mark.parametrize("value", ["/nobody-here", "", "/tmp"])
    def test_another_pipe_directory(
        self, node: Node, claim: Callable[..., Any], directory: Path, sleeper: "subprocess.Popen[bytes]", value: str
    ) -> None:
        """A container whose program would not find MPS fails, and takes nothing."""
        lease = claim()["id"]
        hook = Hook(write(node, directory, lease), sleeper.pid, env={"CUDA_MPS_PIPE_DIRECTORY": value})
        done = hook.call()
        assert done.returncode == 77
        assert "would run outside MPS, without limits" in done.stderr
        assert [each["kind"] for each in state_of(node, lease)["holders"]] == ["claim"]

    @pytest.mark.parametrize("state", ["", "{}", '{"pid": 0, "bundle": "/"}', '{"pid": 17, "bundle": "/nobody-here"}'])
    def test_no_state(
        self, node: Node, claim: Callable[..., Any], directory: Path, sleeper: "subprocess.Popen[bytes]", state: str
    ) -> None:
        """A caller without a container gets an explanation."""
        lease = claim()["id"]
        done = Hook(write(node, directory, lease), sleeper.pid).call(state=state)
        assert done.returncode in {1, 2}
        assert "mpsctl: " in done.stderr
        assert [each["kind"] for each in state_of(node, lease)["holders"]] == ["claim"]

    def test_gone(self, node: Node, claim: Callable[..., Any], directory: Path) -> None:
        """A container that has ended by then takes nothing."""
        lease = claim()["id"]
        with subprocess.Popen(["true"]) as process:
            process.wait()
            done = Hook(write(node, directory, lease), process.pid).call()
        assert done.returncode != 0
        assert [each["kind"] for each in state_of(node, lease)["holders"]] == ["claim"]

    @needs_root
    def test_uid(
        self, node: Node, claim: Callable[..., Any], directory: Path, sleeper: "subprocess.Popen[bytes]"
    ) -> None:
        """From then on the lease belongs to the uid of the container's program, not to the runtime's."""
        lease = claim()["id"]
        assert Hook(write(node, directory, lease), sleeper.pid, uid=2601).call().returncode == 0
        assert state_of(node, lease)["owner"]["uid"] == 2601

    @needs_root
    def test_at_once(
        self, node: Node, claim: Callable[..., Any], directory: Path, sleeper: "subprocess.Popen[bytes]"
    ) -> None:
        """Claims for any user do not exclude each other where a control daemon serves one user at a time."""
        first, second = (write(node, directory, claim(gpu="0")["id"]) for _ in range(2))
        with subprocess.Popen(["sleep", "600"]) as other:
            try:
                done = [Hook(first, sleeper.pid, uid=2601).call(), Hook(second, other.pid, uid=2601).call()]
                third = Hook(write(node, directory, claim(gpu="1")["id"]), other.pid, uid=2602).call()
            finally:
                other.kill()
        assert [each.returncode for each in (*done, third)] == [0, 0, 0], done

    @needs_root
    def test_another_user_there(
        self, node: Node, claim: Callable[..., Any], directory: Path, sleeper: "subprocess.Popen[bytes]"
    ) -> None:
        """Beside another user's container on such a control daemon, a container fails with the reason."""
        first, second = (write(node, directory, claim(gpu="0")["id"]) for _ in range(2))
        assert Hook(first, sleeper.pid, uid=2601).call().returncode == 0
        with subprocess.Popen(["sleep", "600"]) as other:
            try:
                done = Hook(second, other.pid, uid=2602).call()
            finally:
                other.kill()
        assert done.returncode == 75
        assert "[does_not_fit]" in done.stderr

    @needs_root
    def test_another_uid(
        self, node: Node, claim: Callable[..., Any], directory: Path, sleeper: "subprocess.Popen[bytes]"
    ) -> None:
        """A claim for one uid is not taken by a container of another."""
        lease = claim(holder={"claim": {"uid": 2601}})["id"]
        done = Hook(write(node, directory, lease), sleeper.pid, uid=2602).call()
        assert done.returncode == 77
        assert "claimed for uid 2601" in done.stderr
        assert [each["kind"] for each in state_of(node, lease)["holders"]] == ["claim"]

    @needs_root
    def test_not_mapped(self, node: Node, claim: Callable[..., Any], directory: Path) -> None:
        """A uid that the container's user namespace does not map belongs to no user."""
        lease = claim()["id"]
        command = ["unshare", "--user", "--map-user=0", "sh", "-c", "echo; exec sleep 600"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                done = Hook(write(node, directory, lease), process.pid, uid=5).call()
            finally:
                process.kill()
        assert done.returncode == 2
        assert "uid 5 of the container is not mapped" in done.stderr

    def test_restart(self, make_node: Callable[..., Node], directory: Path, sleeper: "subprocess.Popen[bytes]") -> None:
        """If mpsd is killed before it answers, the hook asks the next one."""
        node = make_node(simulate=1).start()
        lease = node.request("POST", "/v1/leases", {"fraction": 0.1, "holder": {"claim": {}}}).json["id"]
        hook = Hook(write(node, directory, lease), sleeper.pid)
        variables = dict(each.split("=", 1) for each in hook.hook["env"])
        os.kill(node.pid, signal.SIGSTOP)
        with subprocess.Popen(hook.hook["args"], stdin=subprocess.PIPE, env=variables, cwd="/", text=True) as waiting:
            assert waiting.stdin is not None
            waiting.stdin.write(hook.state)
            waiting.stdin.close()
            wait_until(lambda: has_socket(waiting.pid), what="the hook to call mpsd")
            node.end(signal.SIGKILL)
            node.start()
            assert waiting.wait(30) == 0
        assert [each["kind"] for each in state_of(node, lease)["holders"]] == ["process"]


def has_socket(pid: int) -> bool:
    """Return whether a process has a socket open."""
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if str(each.readlink()).startswith("socket:"):
                return True
    return False


@pytest.fixture
def in_path_runtime(short_tmp: Path) -> dict[str, str]:
    """Return an environment in which `podman` is the stand-in."""
    program = short_tmp / "bin" / "podman"
    program.parent.mkdir()
    program.write_text(RUNTIME)
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}


def run_container(
    node: Node, directory: Path, environment: Mapping[str, str], *arguments: str, share: Sequence[str] = SHARE
) -> "subprocess.CompletedProcess[str]":
    """Run `mpsctl container run podman` to its end."""
    return run_mpsctl(
        node.socket, "container", "run", "podman", *share, "--dir", str(directory), "--", *arguments, env=environment
    )


class TestRun:
    def test_run(self, node: Node, directory: Path, in_path_runtime: dict[str, str], short_tmp: Path) -> None:
        """The program has its own lease, its exit status is the command's, and no device is left."""
        script = "import os, sys; print(os.getpid()); sys.exit(7)"
        done = run_container(node, directory, in_path_runtime, "--rm", "IMAGE", sys.executable, "-c", script)
        assert done.returncode == 7, done.stderr
        called = json.loads((short_tmp / "bin" / "called").read_text())
        # podman reads only the usual directories unless an option names another.
        assert called[:2] == [f"--cdi-spec-dir={directory}", "run"]
        assert called[3:5] == ["--rm", "IMAGE"]
        assert list(directory.iterdir()) == []
        lease = called[2].rpartition("=")[2]
        wait_until(lambda: state_of(node, lease)["state"] == "ended", what="the lease to end")
        assert f"pid {int(done.stdout)}" in state_of(node, lease)["because"]

    def test_no_runtime(self, node: Node, directory: Path, short_tmp: Path) -> None:
        """If the runtime is not installed, nothing is left."""
        done = run_container(node, directory, {**os.environ, "PATH": str(short_tmp)}, "IMAGE")
        assert done.returncode == 127
        assert "podman: No such file or directory" in done.stderr
        assert (list(directory.iterdir()), node.leases()) == ([], [])

    def test_failed_start(self, node: Node, directory: Path, in_path_runtime: dict[str, str]) -> None:
        """If the runtime fails before it has a container, the lease is released at once."""
        done = run_container(node, directory, in_path_runtime, "fails", "IMAGE", "true")
        assert done.returncode == 125
        assert (list(directory.iterdir()), node.leases()) == ([], [])

    def test_no_directory(self, node: Node, directory: Path, in_path_runtime: dict[str, str]) -> None:
        """If the device cannot be written, the lease is released, and no container starts."""
        directory.mkdir()
        directory.chmod(0o777)
        done = run_container(node, directory, in_path_runtime, "IMAGE", "true")
        assert done.returncode == 78
        assert node.leases() == []

    def test_killed(self, node: Node, directory: Path, in_path_runtime: dict[str, str]) -> None:
        """When mpsctl is killed, the container keeps its lease; the next call that lists devices removes its device."""
        command = [
            sys.executable, "-m", "mpsd.cli.main", "--socket", str(node.socket), "container", "run", "podman", *SHARE,
            "--dir", str(directory), "--", "IMAGE", "sh", "-c", "echo $$; exec sleep 600",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=in_path_runtime, text=True) as mpsctl:
            assert mpsctl.stdout is not None
            pid = int(mpsctl.stdout.readline())
            mpsctl.kill()
        try:
            (lease,) = node.leases()
            assert [each["pid"] for each in lease["holders"]] == [pid]
            assert len(list(directory.iterdir())) == 1
            assert is_running(pid)
        finally:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: state_of(node, lease["id"])["state"] == "ended", what="the lease to end")
        assert node.mpsctl("cdi", "list", "--dir", str(directory)).returncode == 0
        assert list(directory.iterdir()) == []
