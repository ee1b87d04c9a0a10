"""A configuration that cannot work is refused before anything starts; the refusal names the limit and the remedy."""

import contextlib
import http.client
import os
import re
import subprocess
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from tests.daemon.caller import needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import is_running, untouched
from tests.disks import as_root, fill, mounted
from tests.harness import below, remove_tree, wait_until
from tests.node import Node

pytestmark = pytest.mark.real_daemon(535)

CONFIGURATION = 78
RETRIED = 75
"""Not in RestartPreventExitStatus= of mpsd.service."""

_PATHS = """
[paths]
runtime_dir = "{root}/run"
state_dir = "{root}/state"
log_dir = "{root}/log"
"""


def refusal(node: Node, code: str = "configuration", status: int = CONFIGURATION) -> str:
    """Start an mpsd that must be refused with this code and exit status, and starts nothing; return its output."""
    found, said = node.refuse()
    assert found == status, said
    lines = [line for line in said.splitlines() if not line.startswith("{")]
    assert len(lines) == 2, said
    assert re.fullmatch(rf"mpsd: .+ \[{code}\]", lines[0]), said
    assert re.fullmatch(r"  hint: .+", lines[1]), said
    assert not node.socket.exists()
    assert not list(node.root.glob("run/mps/*/control"))
    return "\n".join(lines)


class TestPlace:
    """The paths that mpsd writes to."""

    def test_longest_path_that_works(self, make_node: Start, short_tmp: Path) -> None:
        """The longest accepted directory works: the limit is exactly that of the control daemon."""
        # The longest path below the root is run/mps/gpu0/control_privileged; its limit is one byte less than the
        # others'.
        room = 106 - len(os.fsencode(short_tmp)) - len("//run/mps/gpu0/control_privileged")
        root = short_tmp / ("x" * room)
        root.mkdir()
        node = make_node(root=root, simulate=1).start()
        assert len(os.fsencode(node.pipe_directory("gpu0") / "control_privileged")) == 106
        assert (node.pipe_directory("gpu0") / "control_privileged").is_socket()
        longer = short_tmp / ("x" * (room + 1))
        longer.mkdir()
        assert "the maximum is 106" in refusal(make_node(root=longer, simulate=1))
        assert not (longer / "run").exists()

    def test_longest_path_of_mpsd_s_own_socket(self, make_node: Start, short_tmp: Path) -> None:
        """The path of the API's socket may be as long as the kernel allows, and not a byte longer."""
        socket = short_tmp / ("s" * (107 - len(os.fsencode(short_tmp)) - 1))
        node = make_node(simulate=1, rooted=False)
        node.config = _PATHS.format(root=node.root) + f'[api]\nsocket = "{socket}"\n'
        node.launch()
        wait_until(lambda: node.exited() is None and socket.is_socket(), what="the socket to be there")
        node.end()
        node.clean_up()
        node.config = node.config.replace(f"{socket}", f"{socket}s")
        remove_tree(node.root / "run")
        assert "the maximum is 107" in refusal(node)

    def test_directory_that_is_not_mpsd_s(self, make_node: Start) -> None:
        """A directory that another user could write to is not used; tests/system/files/test_rundir.py has all kinds."""
        node = make_node()
        run = node.root / "run"
        run.mkdir()
        run.chmod(0o777)
        assert str(run) in refusal(node)

    @needs_root
    def test_directory_closed_to_other_users(self, make_node: Start) -> None:
        """Without --root the node serves all users, so a directory that they cannot traverse is refused."""
        node = make_node(rooted=False)
        node.config = _PATHS.format(root=node.root)
        node.root.chmod(0o700)
        said = refusal(node)
        assert f"other uids may not traverse {node.root}" in said
        assert f"chmod o+x {node.root}" in said

        # The remedy in the hint works.
        node.root.chmod(0o711)
        node.start()
        assert node.get("/readyz").status == 200


@as_root
class TestLack:
    """What every user can use up, and give back."""

    @pytest.mark.parametrize(("size", "remedy"), [("4m,nr_inodes=24", "df -i"), ("128k", "free space")])
    def test_full_runtime_directory(self, make_node: Start, size: str, remedy: str) -> None:
        """Without an inode or space in the runtime directory, mpsd ends with a status that is retried."""
        node = make_node(simulate=1, config="")
        run = node.root / "run"
        run.mkdir(mode=0o755)
        with mounted(run, size, "755"):
            full = run / "full"
            full.mkdir()
            with contextlib.suppress(OSError):
                for number in count():
                    (full / str(number)).touch()
                    if "nr_inodes" not in size:
                        fill(full)
                        break
            assert remedy in refusal(node, "exhausted", RETRIED)
            remove_tree(full)
            node.start()
            node.end()
            node.clean_up()


class TestProgram:
    """The control program."""

    @pytest.mark.parametrize("kind", ["missing", "a directory", "not executable"])
    def test_no_such_program(self, make_node: Start, short_tmp: Path, kind: str) -> None:
        """A control program that cannot be executed is refused by name, with three remedies."""
        program = short_tmp / "control"
        if kind == "a directory":
            program.mkdir()
        elif kind == "not executable":
            program.write_text("#!/bin/sh\n")
        said = refusal(make_node(control=program))
        assert f"no executable control program '{program}'" in said
        assert "--control" in said
        assert "--simulate" in said

    @pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is an NVIDIA driver on this machine")
    def test_no_driver(self, make_node: Start) -> None:
        """Without NVIDIA's driver only a simulation works, and the hint names that."""
        said = refusal(make_node(simulate=None), "no_driver")
        assert "--simulate" in said


class TestConfiguration:
    """The configuration file."""

    def test_what_is_wrong_is_named(self, make_node: Start) -> None:
        """An invalid configuration is refused with the setting and the value."""
        said = refusal(make_node(config="[limits]\nactive_thread_percentage = 150\n"))
        assert "limits.active_thread_percentage = 150" in said

    def test_no_such_file(self, make_node: Start, short_tmp: Path) -> None:
        """When the named file is missing, mpsd does not start with other settings."""
        said = refusal(make_node(arguments=["--config", str(short_tmp / "absent.toml")]))
        assert str(short_tmp / "absent.toml") in said


@dataclass
class Apart(Node):
    """An mpsd with its own file system below its directory, as in a container that shares the host's pids."""

    @property
    def socket(self) -> Path:
        """The path by which this process reaches the API socket."""
        return Path(f"/proc/{self.pid}/root{super().socket}")

    @property
    def command(self) -> list[str]:
        script = f'mount -t tmpfs -o mode=755 none {self.root}; exec "$@"'
        return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "sh", *super().command]


class TestAnother:
    """Another mpsd, or a foreign control daemon, that is already running."""

    @needs_root
    def test_same_path_elsewhere(self, make_node: Start) -> None:
        """Two instances on the same path, each in its own container, do not adopt each other's control daemons."""
        node = make_node()
        apart = Apart(root=node.root, control=node.control)
        try:
            theirs = {each["pid"] for each in apart.start().daemons().values()}
            ours = {each["pid"] for each in node.start().daemons().values()}
            assert not ours & theirs
            assert node.end() == 0
            assert {each["pid"] for each in node.start().daemons().values()} == ours
            assert {each["pid"] for each in apart.daemons().values()} == theirs
        finally:
            if node.process is not None:
                node.end()  # first, otherwise it would replace the daemons that are killed now
            apart.clean_up()

    def test_second_mpsd(self, make_node: Start) -> None:
        """A second mpsd on the same directory is refused, without any effect on the first and its control daemons."""
        first = make_node().start()
        before = first.daemons()
        second = make_node(root=first.root)
        status, said = second.refuse()
        assert status == 1
        assert "[already_running]" in said
        assert f"mpsctl --socket {first.socket} status" in said
        assert {name: untouched(daemon) for name, daemon in first.daemons().items()} == {
            name: untouched(daemon) for name, daemon in before.items()
        }
        assert first.socket.is_socket()
        assert first.get("/readyz").status == 200

    def test_two_at_once(self, make_node: Start) -> None:
        """Of two instances that start at the same moment exactly one runs, with one control daemon for each GPU."""
        one = make_node()
        two = make_node(root=one.root)
        one.launch()
        two.launch()

        def ended() -> Node | None:
            return next(
                (each for each in (one, two) if each.process is not None and each.process.poll() is not None), None
            )

        loser = wait_until(ended, what="one of them to end")
        winner = two if loser is one else one
        assert loser.ended() == 1
        assert loser.stderr.read_text().count("[already_running]") == 1
        wait_until(
            lambda: winner.get("/readyz").status == 200,
            what="the other to be ready",
            not_yet=(OSError, http.client.HTTPException),
        )
        assert winner.exited() is None
        assert sorted(each.pid for each in below(one.root)) == sorted(each["pid"] for each in winner.daemons().values())

    @pytest.mark.parametrize("how", ["-d", "-f"])
    def test_foreign_control_daemon(self, make_node: Start, how: str, control: Path) -> None:
        """A control daemon that mpsd did not start is left alone, with the commands that end it."""
        node = make_node()
        pipes = node.pipe_directory("gpu0")
        pipes.mkdir(parents=True)
        environment = {**node.by_hand("gpu0"), "CUDA_MPS_LOG_DIRECTORY": str(node.root)}
        started = subprocess.Popen(
            [str(control), how], stdin=-3, stdout=-3, stderr=-3, env=environment, start_new_session=True
        )
        if how == "-d":
            started.wait(timeout=10)
        wait_until((pipes / "control").is_socket, what="the foreign control daemon to listen")

        node.start(ready=False)
        daemon = node.wait_for_state("gpu0", "failed")
        assert "that mpsd did not start" in daemon["because"]
        named = re.match(r"pid (\d+) \(uid \d+, ", daemon["because"])
        assert named is not None
        pid = int(named[1])
        assert pid == started.pid or how == "-d"
        assert is_running(pid)
        assert daemon["pid"] is None
        node.wait_for_state("gpu1", "ready")
        assert node.get("/readyz").status == 503
        granted = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
        assert granted.json["daemon"] == "gpu1"

        # The hint contains two commands, and they work.
        quitting, _, resetting = daemon["hint"].removeprefix("when its clients have exited: ").partition("; ")
        assert resetting == "mpsctl reset gpu0"
        subprocess.run(["sh", "-c", quitting], check=True, stdout=subprocess.DEVNULL, timeout=10)
        if how == "-f":
            started.wait(timeout=10)
        wait_until(lambda: not is_running(pid), what="the foreign control daemon to be gone")
        node.request("POST", "/v1/daemons/gpu0/reset")
        assert node.wait_for_state("gpu0", "ready")["pid"] != pid
